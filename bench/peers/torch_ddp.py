"""PyTorch's DistributedDataParallel over gloo: the backward pass of a dot product, whose gradient all ranks average.

The pass computes the gradient by one multiplication of all its elements, which ours is not charged with.
"""

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rounds


class Product(torch.nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements))

    def forward(self, factors):
        return torch.dot(self.weight, factors)


class Trainer:
    def __init__(self, options):
        torch.set_num_threads(1)
        place = f"tcp://{rounds.address(options, 'trainer')}:{options.port}"
        dist.init_process_group("gloo", init_method=place, rank=options.index, world_size=options.trainers)
        self.ranks = options.trainers
        self.factors = torch.zeros(options.bytes // 4)
        self.model = DistributedDataParallel(Product(options.bytes // 4), gradient_as_bucket_view=True)

    def gradient(self):
        return self.factors.numpy()

    def settle(self):
        self.model.zero_grad(set_to_none=False)
        self.loss = self.model(self.factors)

    def round(self):
        self.loss.backward()

    def value(self):
        # The mean of small whole numbers.
        return numpy.rint(self.model.module.weight.grad.numpy() * numpy.float32(self.ranks))


def environment(options, _role, _index):
    return {"GLOO_SOCKET_IFNAME": rounds.interface(options)}


if __name__ == "__main__":
    rounds.main("DDP over gloo", torch.__version__, Trainer, environment=environment)
