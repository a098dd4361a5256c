"""A training step of two ranks or more beside DDP over gloo, for models of the same parameters.

    python python/bench/ddp.py

All contestants are in the same processes, one for each rank, and take turns. A model's backward pass does nothing but
make its gradients; "backward alone" is that and no more. The exchange is what comes after it: the optimizer's step here,
an all-reduce of one flat tensor, which gradients are views of, and torch's fused SGD there. With `--transports hosts` each rank is on a host,
which is a network namespace, with a server.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pserver
from pserver.torch import Optimizer
from namespaces import INTERFACE, address, joined_hosts
from turns import by_turns, micros, ratio, say_where, timed

RATE = 1e-3
LAYER = [768 * 256, 768, 256 * 256, 256, 1024 * 256, 1024, 1024 * 256, 256, 256, 256, 256, 256]
"""The parameters of a ``TransformerEncoderLayer(256, 4, 1024)``, in elements."""
CASES = {
    "64 MiB": ([16 << 20], 5),
    "100 x 64 KiB": ([16 << 10] * 100, 40),
    "100 x 1 KiB": ([256] * 100, 100),
    "1000 x 256 B": ([64] * 1000, 20),
    "transformer": ([10_000 * 256, *(6 * LAYER), 256, 256], 5),
}
"""The elements of each parameter, and the steps of a block. The transformer has 75 parameters of 29 MiB."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transports", nargs="+", choices=["shm", "tcp", "hosts"], default=["shm", "tcp"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    # For the processes of the ranks.
    parser.add_argument("--rank", type=int)
    parser.add_argument("--case")
    parser.add_argument("--addresses", nargs="*")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    say_where(options.blocks)
    for transport in options.transports:
        for case in options.cases:
            if transport == "hosts":
                with joined_hosts(options.ranks) as hosts:
                    show(f"{case}, hosts with a server each", run(options, case, [], hosts))
                continue
            ranks = options.ranks
            with pserver.Servers(1, trainers=ranks) as one, pserver.Servers(1, trainers=ranks) as other:
                addresses = [f"{transport}://{servers.address}" for servers in (one, other)]
                show(f"{case}, {transport}", run(options, case, addresses, [[]] * ranks))


def run(
    options: argparse.Namespace, case: str, addresses: list[str], hosts: list[list[str]]
) -> list[dict[str, list[float]]]:
    """The seconds that each rank reports."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = ["--case", case, "--addresses", *addresses, "--port", str(store.port)]
    shared += ["--blocks", str(options.blocks), "--ranks", str(options.ranks)]
    ranks = [
        subprocess.Popen(
            [*host, sys.executable, __file__, "--rank", str(at), *shared], stdout=subprocess.PIPE, text=True
        )
        for at, host in enumerate(hosts)
    ]
    try:
        said = [one.communicate(timeout=600)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    if any(one.returncode for one in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(one.splitlines()[-1]) for one in said]


def show(title: str, ranks: list[dict[str, list[float]]]) -> None:
    """The slowest rank of each block counts."""
    seconds = {name: [max(block) for block in zip(*(one[name] for one in ranks))] for name in ranks[0]}
    print(title)
    for name, took in seconds.items():
        print(f"  {name:21} {micros(took)} us")
    for name in ["ours", "ours, overlap"]:
        print(f"  step of DDP / {name}: {ratio(seconds['DDP'], seconds[name])}")
    print(f"  step without overlap / with it: {ratio(seconds['ours'], seconds['ours, overlap'])}")
    print(f"  exchange of gloo / ours: {ratio(seconds['all-reduce and SGD'], seconds['our exchange'])}", flush=True)


class Given(torch.autograd.Function):
    """A loss whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *ctx.gradients


class Model(torch.nn.Module):
    def __init__(self, sizes: list[int], rank: int) -> None:
        super().__init__()
        # A plain list beside the module's own is quicker to go through.
        self.weights = [torch.nn.Parameter(torch.zeros(elements)) for elements in sizes]
        for at, weight in enumerate(self.weights):
            self.register_parameter(str(at), weight)
        self.gradients = [torch.full((elements,), 1.0 + rank) for elements in sizes]

    def forward(self) -> torch.Tensor:
        return Given.apply(self.gradients, *self.weights)  # type: ignore[no-any-return]


def rank(options: argparse.Namespace) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if options.addresses:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store, addresses = dist.TCPStore("127.0.0.1", options.port), options.addresses
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", INTERFACE)
            is_first = options.rank == 0
            store = dist.TCPStore(address(0), options.port, is_master=is_first, wait_for_workers=False)
            addresses = [servers_beside(options, name, store, stack) for name in ["one", "other"]]
        compare(options, store, addresses)


def servers_beside(options: argparse.Namespace, name: str, store: dist.TCPStore, stack: ExitStack) -> str:
    """The address of a job with a server on the host of each rank, of which this rank starts its own."""
    rank = options.rank
    coordinator = None if rank == 0 else store.get(name).decode()
    servers = pserver.Servers(
        options.ranks,
        trainers=options.ranks,
        host=address(rank),
        arguments=["--insecure=true"],
        index=rank,
        coordinator=coordinator,
    )
    stack.enter_context(servers)
    if rank == 0:
        store.set(name, servers.address)
    return servers.address


def compare(options: argparse.Namespace, store: dist.TCPStore, addresses: list[str]) -> None:
    sizes, rounds = CASES[options.case]
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    clients = [pserver.Client(address, trainer=options.rank) for address in addresses]
    theirs, ours, overlapped, alone, reduced = (Model(sizes, options.rank) for _ in range(5))
    parallel = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    optimizer = Optimizer(ours.parameters(), "sgd", RATE, client=clients[0])
    of_buckets = Optimizer(overlapped.parameters(), "sgd", RATE, client=clients[1], overlap=True)
    contestants = {
        "DDP": step(parallel, torch.optim.SGD(theirs.parameters(), RATE, fused=True)),
        "ours": step(ours, optimizer),
        "ours, overlap": step(overlapped, of_buckets),
        "backward alone": step(alone, None),
        "all-reduce and SGD": all_reduce(reduced, options.ranks),
        "our exchange": exchange(ours, optimizer),
    }

    def meeting(one: Callable[[], None]) -> Callable[[int], float]:
        run = timed(one)

        def together(count: int) -> float:
            dist.barrier()
            return run(count)

        return together

    seconds = by_turns({name: meeting(one) for name, one in contestants.items()}, options.blocks, rounds)
    # The mean of the gradients of all ranks, as often.
    gradient = 1 + (options.ranks - 1) / 2
    mean = torch.full((sizes[-1],), -gradient * RATE * rounds * (options.blocks + 1))
    for model, times in [(theirs, 1), (reduced, 1), (overlapped, 1), (ours, 2)]:
        torch.testing.assert_close(model.weights[-1].detach(), times * mean, rtol=1e-3, atol=0)
    print(json.dumps(seconds))
    # No rank's servers end before the others have left.
    for client in clients:
        client.leave()
    dist.barrier()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    def run() -> None:
        model().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    return run


def exchange(model: Model, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The step with gradients that are there."""

    def run() -> None:
        for weight, gradient in zip(model.weights, model.gradients):
            weight.grad = gradient
        optimizer.step()
        for weight in model.weights:
            weight.grad = None

    return run


def all_reduce(model: Model, ranks: int) -> Callable[[], None]:
    """The same by gloo."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, fused=True)
    # Their mean over the ranks is what they are then: those of the next step.
    whole = torch.cat(model.gradients)
    for weight, part in zip(model.weights, whole.split([len(gradient) for gradient in model.gradients])):
        weight.grad = part

    def run() -> None:
        dist.all_reduce(whole)
        whole.div_(ranks)
        optimizer.step()

    return run


if __name__ == "__main__":
    main()
