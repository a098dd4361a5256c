"""PyTorch's DistributedDataParallel over gloo: the backward pass of a dot product, whose gradient all ranks average.

The pass computes the gradient by one multiplication of all its elements, which ours is not charged with.
"""

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel

import rounds
from torch_gloo import environment, join


class Product(torch.nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements))

    def forward(self, factors):
        return torch.dot(self.weight, factors)


class Trainer:
    def __init__(self, options):
        join(options)
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


if __name__ == "__main__":
    rounds.main("DDP over gloo", torch.__version__, Trainer, environment=environment)
