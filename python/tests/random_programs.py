"""Random programs of a PyTorch user: the same program with servers on two ranks, and as DDP runs it with torch's optimizer.

A program is a list of steps, each with what the user does before it: loads, clamps, freezes, skipped steps, accumulated
batches, batches with NaN, exceptions of the program's own. A step of DDP is the mean of the ranks' gradients and a step
of torch's optimizer.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

import pserver
from pserver.torch import Optimizer

RANKS = 2
STEPS = 12
RULES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, [{"lr": 0.1}, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}]),
    "adam": (torch.optim.Adam, [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}]),
    "adamw": (torch.optim.AdamW, [{"lr": 0.01, "weight_decay": 0.1}]),
    "rmsprop": (torch.optim.RMSprop, [{"lr": 0.01, "momentum": 0.5}]),
    "adagrad": (torch.optim.Adagrad, [{"lr": 0.05}]),
}
REMEDIES = {
    "was changed after its gradient was sent": "with overlap, weights are set before the backward pass or after step()",
    "after gradients were sent with": "with overlap, the rate is set before the backward pass",
    "another gradient after servers got one": "with overlap, gradients stay as they are between backward() and step()",
    "servers have gradients of this step": "with overlap, a step that was sent is ended by step()",
}
"""The exceptions in which a program may end, by their texts, and what a user does."""


class Program(NamedTuple):
    """What all ranks do."""

    rule: str
    settings: dict[str, Any]
    how: dict[str, Any]
    """Settings of the optimizer that torch's has not."""
    steps: list[list[tuple[str, int]]]
    """Of each step the actions before it, with a number that they use."""


class Own(Exception):
    """An exception of the program's own."""


def program_of(seed: int) -> Program:
    """A random program."""
    dice = random.Random(seed)
    rule = dice.choice(sorted(RULES))
    how: dict[str, Any] = dice.choice([{}, {}, {"max_norm": 0.5}, {"overlap": True, "bucket_bytes": dice.choice([1, 200])}])
    often = ["load", "clamp", "data", "vector", "freeze", "swap", "lr", "more", "nan", "skip", "raise", "part", "part of one"]
    often += ["state", "zero", "nothing", "numpy"]
    if how.get("overlap"):
        # The documentation of overlap forbids this.
        often += ["late weights", "late rate"] if dice.random() < 0.3 else []
    counts = [dice.choice([0, 0, 1, 1, 2]) for _ in range(STEPS)]
    steps = [[(dice.choice(often), dice.randrange(1 << 30)) for _ in range(count)] for count in counts]
    # A rank may begin after another has changed weights: before the first step, which all make, a change is no factor.
    steps[0] = [one for one in steps[0] if one[0] not in {"vector", "late weights", "skip", "raise"}]
    return Program(rule, dice.choice(RULES[rule][1]), how, steps)


def model() -> torch.nn.Module:
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    network = torch.nn.Sequential(*layers).double()
    # Ranks are threads here, which have one stream of random numbers between them.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in network.parameters():
            one.normal_(0, 0.4, generator=generator)
    return network


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def loss(network: Any, number: int, part: bool) -> torch.Tensor:
    """Of the whole model, or of its last layers alone."""
    inputs = batch(number)
    if part:
        return network[2:](torch.cat([inputs, inputs[:, :2]], 1)).square().mean()
    return network(inputs).square().mean()


class Step(NamedTuple):
    """What a step has to compute."""

    batches: int = 1
    part: tuple[bool, bool] = (False, False)
    bad_rank: int | None = None
    does_step: bool = True
    raises: bool = False
    zeroes: bool = False
    late: str = ""


def act(network: Any, optimizer: Any, actions: list[tuple[str, int]], restore: list[Callable[[], None]]) -> Step:
    """Does the actions before a step, as every rank does."""
    step = Step()
    every = list(network.parameters())
    for action, number in actions:
        one = every[number % len(every)]
        if action == "load":
            generator = torch.Generator().manual_seed(number)
            state = {of: torch.randn(value.shape, generator=generator, dtype=value.dtype) / 2 for of, value in network.state_dict().items()}
            network.load_state_dict(state)
        elif action == "clamp":
            with torch.no_grad():
                for weight in every:
                    weight.clamp_(-0.3, 0.3)
        elif action == "data":
            one.data.clamp_(-0.2, 0.2)
        elif action == "numpy":
            one.detach().numpy().reshape(-1)[0] = 0.125
        elif action == "vector":
            vector = torch.nn.utils.parameters_to_vector(every)
            torch.nn.utils.vector_to_parameters(0.9 * vector, every)
        elif action == "freeze":
            one.requires_grad_(not one.requires_grad)
        elif action == "swap":
            kept = [weight.detach().clone() for weight in every]
            with torch.no_grad():
                for weight, value in zip(every, kept):
                    weight.zero_()
                    weight.copy_(value)
        elif action == "lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if number % 2 else 1.5
        elif action == "state":
            optimizer.load_state_dict(optimizer.state_dict())
        elif action == "zero":
            step = step._replace(zeroes=True)
        elif action == "more":
            step = step._replace(batches=1 + number % 3)
        elif action == "part":
            step = step._replace(part=(True, True))
        elif action == "part of one":
            step = step._replace(part=(number % 2 == 0, number % 2 == 1))
        elif action == "nan":
            step = step._replace(bad_rank=number % RANKS)
        elif action == "skip":
            step = step._replace(does_step=False)
        elif action == "raise":
            step = step._replace(raises=True)
        elif action.startswith("late"):
            step = step._replace(late=action)
    return step


def late(network: Any, optimizer: Any, step: Step) -> None:
    """What the program does between the backward pass and the step."""
    if step.late == "late weights":
        network[0].weight.data.mul_(0.5)
    elif step.late == "late rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def has_gradients(network: Any) -> bool:
    return any(weight.requires_grad for weight in network.parameters())


def is_computed(network: Any, step: Step, rank: int) -> bool:
    layers = network[2:] if step.part[rank] else network
    return any(weight.requires_grad for weight in layers.parameters())


def backward(network: Any, at: int, rank: int, step: Step, attempt: int, last: Callable[[], Any]) -> None:
    """The batches of a step. All but the last are accumulated without sending."""
    for number in range(step.batches):
        if not is_computed(network, step, rank):
            return
        value = loss(network, 1000 * at + 100 * rank + 10 * attempt + number, step.part[rank])
        if number + 1 < step.batches:
            with last():
                value.backward()
        else:
            value.backward()


def train(program: Program, rank: int, client: pserver.Client) -> list[torch.Tensor]:
    """A rank's program, with servers."""
    network = model()
    optimizer = Optimizer(network.named_parameters(), program.rule, client=client, **program.settings, **program.how)
    skips = has_overlap = bool(program.how.get("overlap"))
    for at, actions in enumerate(program.steps):
        step = act(network, optimizer, actions, [])
        # With overlap a backward pass that no step follows is one that sends nothing.
        skips = has_overlap and (not step.does_step or step.raises)
        for attempt in range(2):
            bad = attempt == 0 and step.bad_rank == rank and not skips and step.does_step and not step.raises
            try:
                if skips:
                    with optimizer.no_sync():
                        backward(network, at, rank, step, attempt, optimizer.no_sync)
                else:
                    backward(network, at, rank, step, attempt, optimizer.no_sync) if not (bad and has_overlap) else None
                if bad:
                    poison(network)
                if step.raises:
                    raise Own
                late(network, optimizer, step)
                if step.does_step:
                    optimizer.step()
                break
            except Own:
                break
            except pserver.Refused as error:
                if not bad or "NaN" not in str(error):
                    raise
                optimizer.zero_grad()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in network.parameters()]


def poison(network: Any) -> None:
    """One parameter's gradient has a NaN, as that of a batch with a NaN has."""
    for weight in network.parameters():
        if weight.requires_grad:
            weight.grad = torch.full_like(weight, float("nan")) if weight.grad is None else weight.grad
            weight.grad.view(-1)[-1] = float("nan")
            return


def train_as_ddp(program: Program) -> list[torch.Tensor]:
    """The same program of DDP's ranks, which have one model between them."""
    from contextlib import nullcontext

    network = model()
    make = RULES[program.rule][0]
    optimizer = make(network.parameters(), **program.settings)
    every = list(network.parameters())
    for at, actions in enumerate(program.steps):
        step = act(network, optimizer, actions, [])
        if step.does_step and not step.raises:
            gradients: list[list[torch.Tensor | None]] = []
            for rank in range(RANKS):
                optimizer.zero_grad()
                is_bad = step.bad_rank == rank and has_gradients(network)
                backward(network, at, rank, step, int(is_bad), nullcontext)
                gradients.append([weight.grad for weight in every])
            for weight, *some in zip(every, *gradients):
                found = [one for one in some if one is not None]
                weight.grad = sum(found) / RANKS if found else None
            if "max_norm" in program.how:
                torch.nn.utils.clip_grad_norm_(every, program.how["max_norm"])
            late(network, optimizer, step)
            optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in every]


def compare(seed: int) -> str:
    """Runs a program both ways. Returns the text of the exception in which it ended, or nothing.

    Raises:
        AssertionError: weights differ, or an exception is none of the list.
    """
    program = program_of(seed)
    with pserver.Servers(2, trainers=RANKS) as servers:
        clients = [pserver.connect(servers.address, trainer=rank, deadline=20) for rank in range(RANKS)]

        def run(rank: int) -> Any:
            try:
                return train(program, rank, clients[rank])
            except pserver.Error as error:
                # The other rank does not wait for this one.
                clients[1 - rank].cancel()
                return error

        with ThreadPoolExecutor(RANKS) as threads:
            results = list(threads.map(run, range(RANKS)))
        for client in clients:
            client.close()
    failures = [one for one in results if isinstance(one, Exception)]
    if failures:
        texts = [str(one) for one in failures]
        assert any(remedy in text for text in texts for remedy in REMEDIES), f"seed {seed}: {texts}\n{program}"
        return texts[0]
    expected = train_as_ddp(program)
    for rank in range(RANKS):
        for number, (one, other) in enumerate(zip(results[rank], expected)):
            difference = float((one - other).abs().max())
            assert difference <= 1e-6, f"seed {seed}: rank {rank}, parameter {number}: {difference}\n{program}"
    return ""
