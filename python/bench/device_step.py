"""A step of pserver.torch's optimizer with parameters on a device, beside torch's fused Adam and the link's own time.

    python python/bench/device_step.py

One trainer and one server on one host, float32, Adam. Prints a line of JSON for each figure as soon as it is there.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=5, help="timed steps of each")
    parser.add_argument("--package", help="a folder with the package, where it is not installed")
    options = parser.parse_args()
    if options.package:
        sys.path.insert(0, options.package)
        # Servers are processes of their own.
        os.environ["PYTHONPATH"] = options.package
    import pserver
    from pserver.torch import Optimizer

    device = torch.device(options.device)
    name = f"{options.elements} float32"
    tensors = buffers(options.elements, device)
    link = median(lambda: copy_both_ways(*tensors), options)
    del tensors
    say(name=f"{name}, in and out over the link at once, pinned", seconds=link)
    theirs = parameter(options.elements, device)
    fused = median(torch.optim.Adam([theirs], lr=1e-3, fused=True).step, options)
    say(name=f"{name}, torch's fused Adam", seconds=fused)
    # A server keeps a job's parameters, so each way has servers of its own.
    for where in ["cpu", *(["cuda:0"] if device.type == "cuda" else [])]:
        with pserver.connect(servers=1, arguments=["--device", where]) as client:
            ours = parameter(options.elements, device)
            seconds = median(Optimizer([ours], "adam", lr=1e-3, client=client).step, options)
            say(name=f"{name}, pserver.torch, server on {where}", seconds=seconds, ratio_to_ceiling=link / seconds,
                ratio_to_torch=fused / seconds)


def parameter(elements: int, device: torch.device) -> torch.nn.Parameter:
    tensor = torch.nn.Parameter(torch.ones(elements, device=device))
    tensor.grad = torch.full_like(tensor, 0.01)
    return tensor


def buffers(elements: int, device: torch.device) -> list[torch.Tensor]:
    pinned = device.type == "cuda"
    hosts = [torch.ones(elements, pin_memory=pinned) for _ in range(2)]
    return [*hosts, *(torch.ones(elements, device=device) for _ in range(2))]


def copy_both_ways(
    source: torch.Tensor, target: torch.Tensor, into: torch.Tensor, out_of: torch.Tensor
) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)] if into.is_cuda else [None, None]
    with torch.cuda.stream(streams[0]):
        into.copy_(source, non_blocking=True)
    with torch.cuda.stream(streams[1]):
        target.copy_(out_of, non_blocking=True)


def median(step: Callable[[], object], options: argparse.Namespace) -> float:
    """The seconds of a step, the first not counted."""
    seconds = []
    for _ in range(options.blocks + 1):
        begin = time.perf_counter()
        step()
        if options.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def say(**figure: object) -> None:
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
