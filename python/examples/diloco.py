"""DiLoCo under torchrun: each rank trains alone for ten steps; then servers make an outer step of the mean difference.

    torchrun --nproc-per-node 2 python/examples/diloco.py

Rank 0 then does the same with torch alone, for both ranks in one process, and prints how far the weights are apart.
"""

import torch
from digits import BATCH, HELD_OUT, accuracy, digits, network
from torch.nn.functional import cross_entropy

import pserver
from pserver.torch import DiLoCo

EVERY, ROUNDS, RATE = 10, 20, 0.7


def inner_step(model: torch.nn.Module, step: int, rank: int, ranks: int) -> None:
    """Gradients of a batch of this rank's own share of the digits."""
    images, labels = digits()
    share = torch.arange(rank, len(images) - HELD_OUT, ranks)
    rows = share[torch.randint(0, len(share), (BATCH,), generator=torch.Generator().manual_seed(step))]
    cross_entropy(model(images[rows]), labels[rows]).backward()


def inner_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def with_servers() -> tuple[int, int, torch.nn.Module]:
    """Returns the rank, the number of ranks, and the model."""
    model = network()
    with pserver.connect(servers=2) as client:
        diloco = DiLoCo(model.parameters(), inner_optimizer(model), every=EVERY, lr=RATE)
        for step in range(EVERY * ROUNDS):
            inner_step(model, step, client.trainer, client.trainers)
            diloco.step()
        return client.trainer, client.trainers, model


def with_torch_alone(ranks: int) -> torch.nn.Module:
    whole, models = network(), [network() for _ in range(ranks)]
    inner = [inner_optimizer(model) for model in models]
    outer = torch.optim.SGD(whole.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    for first in range(0, EVERY * ROUNDS, EVERY):
        for step in range(first, first + EVERY):
            for rank, model in enumerate(models):
                inner_step(model, step, rank, ranks)
                inner[rank].step()
                inner[rank].zero_grad()
        with torch.no_grad():
            for weight, *copies in zip(whole.parameters(), *(model.parameters() for model in models)):
                weight.grad = weight - torch.stack(copies).mean(0)
            outer.step()
            for model in models:
                model.load_state_dict(whole.state_dict())
    return whole


if __name__ == "__main__":
    rank, ranks, model = with_servers()
    if rank == 0:
        alone = with_torch_alone(ranks)
        apart = max(
            float((a - b).abs().max()) for a, b in zip(model.state_dict().values(), alone.state_dict().values())
        )
        print(f"accuracy {accuracy(model):.3f} and {accuracy(alone):.3f} apart {apart:.1e}")
