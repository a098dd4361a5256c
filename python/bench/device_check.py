"""Does pserver.torch give parameters on a device the bits that it gives parameters on the host?

    python python/bench/device_check.py

Each case trains on the device and on the host, on servers of its own, with gradients that are the same numbers: small
integers, so that sums are exact in every order. Prints a line of JSON for each case; ends with 1 if one differs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=6, help="steps of each case")
    parser.add_argument("--package", help="a folder with the package, where it is not installed")
    options = parser.parse_args()
    if options.package:
        sys.path.insert(0, options.package)
        # Servers are processes of their own.
        os.environ["PYTHONPATH"] = options.package
    device, wrong = torch.device(options.device), 0
    for name, case in cases(options.blocks):
        begin = time.perf_counter()
        found = trained(case, device)
        # On the host it is the same program.
        expected = found if device.type == "cpu" else trained(case, torch.device("cpu"))
        differ = sum(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        wrong += differ
        print(json.dumps({"name": name, "seconds": time.perf_counter() - begin, "wrong": differ}), flush=True)
    sys.exit(wrong > 0)


def cases(count: int) -> Iterator[tuple[str, Callable[[Any, torch.device], list[torch.Tensor]]]]:
    bf16 = torch.bfloat16
    for overlap in (False, True):
        said = "overlap" if overlap else "no overlap"
        yield f"float32, {said}", partial(steps, count=count, overlap=overlap)
        yield f"float32, bfloat16 on the wire, {said}", partial(steps, count=count, overlap=overlap, wire=bf16)
        yield f"bfloat16, {said}", partial(steps, count=count, overlap=overlap, dtype=bf16)
    yield "float32, float16 on the wire", partial(steps, count=count, wire=torch.float16)
    yield "float32, max_norm", partial(steps, count=count, max_norm=1.0)
    yield "float32, GradScaler", partial(steps, count=count, scales=True)
    yield "weights that the program clamps", partial(steps, count=count, clamps=True)
    yield "a table", partial(table, count=count)
    yield "DiLoCo", diloco
    yield "DiLoCo in two fragments", partial(diloco, fragments=2, every=4)
    yield "a follower", followed


def trained(case: Callable[[Any, torch.device], list[torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
    import pserver

    with pserver.connect(servers=2) as client:
        return [tensor.detach().to("cpu") for tensor in case(client, device)]


def network(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.nn.ParameterList:
    """Parameters of which most are small, one is large, and one is a transposed view."""
    random = torch.Generator().manual_seed(5)
    shapes = [(3, 5), (1,), (300, 400), (), (7, 2), (64,)]
    tensors = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    tensors.append(torch.randn(30, 20, generator=random).to(device, dtype).t())
    return torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in tensors])


def loss(tensors: torch.nn.ParameterList, step: int, among: int = 2) -> torch.Tensor:
    """A sum whose gradients are small integers. Every so many steps the first parameter has none."""
    random = torch.Generator().manual_seed(step)
    factors = [torch.randint(-4, 5, tensor.shape, generator=random).to(tensor) for tensor in tensors]
    terms = [(tensor * factor).sum() for tensor, factor in zip(tensors, factors)]
    return torch.stack(terms[step % among == among - 1 :]).sum()


def steps(
    client: Any,
    device: torch.device,
    count: int,
    dtype: torch.dtype = torch.float32,
    scales: bool = False,
    clamps: bool = False,
    **settings: Any,
) -> list[torch.Tensor]:
    from pserver.torch import Optimizer

    tensors = network(device, dtype)
    optimizer = Optimizer(tensors.named_parameters(), "adam", lr=0.01, client=client, bucket_bytes=1000, **settings)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=scales)
    for step in range(count):
        scaler.scale(loss(tensors, step)).backward()
        if scales and step == 1:
            tensors[2].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if clamps:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.clamp_(-1, 1)
    scale = torch.tensor(scaler.get_scale() if scales else 0.0)
    return [*tensors, scale]


def table(client: Any, device: torch.device, count: int) -> list[torch.Tensor]:
    from pserver.torch import EmbeddingBag, Optimizer

    torch.manual_seed(7)
    rows = EmbeddingBag(1000, 16, mode="sum", padding_idx=3)
    layer = torch.nn.Linear(16, 4, bias=False)
    torch.nn.init.constant_(layer.weight, 2.0)
    model = torch.nn.ModuleDict({"rows": rows, "layer": layer}).to(device)
    optimizer = Optimizer(model.named_parameters(), "adagrad", lr=0.125, client=client)
    outputs = []
    random = torch.Generator().manual_seed(11)
    batches = [torch.randint(0, 1000, (32, 5), generator=random).to(device) for _ in range(count)]
    factors = torch.randint(-2, 3, (32, 16), generator=random).to(device, torch.float32)
    for at, ids in enumerate(batches):
        outputs.append(rows(ids).detach())
        for one in batches[at + 1 : at + 2]:
            rows.prefetch(one)
        (rows(ids) * factors).sum().backward()
        loss(torch.nn.ParameterList(layer.parameters()), at, count + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*outputs, layer.weight]


def diloco(client: Any, device: torch.device, **settings: Any) -> list[torch.Tensor]:
    from pserver.torch import DiLoCo

    tensors = network(device)
    inner = torch.optim.SGD(tensors.parameters(), lr=2**-10)
    outer = DiLoCo(tensors.named_parameters(), inner, client=client, **{"every": 2, **settings})
    for step in range(8):
        loss(tensors, step, 9).backward()
        outer.step()
    outer.finish()
    return list(tensors)


def followed(client: Any, device: torch.device) -> list[torch.Tensor]:
    from pserver.torch import Optimizer, follow

    tensors, reader = network(torch.device("cpu")), network(device)
    optimizer = Optimizer(tensors.named_parameters(), "adam", lr=0.01, client=client)
    with follow(reader, client.coordinator) as follower:
        for step in range(3):
            loss(tensors, step, 9).backward()
            optimizer.step()
            optimizer.zero_grad()
            follower.update()
        for _ in range(2):
            # A fetch that was under way may have begun before the last step.
            follower.update(wait=True)
    assert all(torch.equal(one.to("cpu"), other) for one, other in zip(reader, tensors))
    return list(reader)


if __name__ == "__main__":
    main()
