"""PyTorch's all-reduce with gloo: every rank is a trainer, and there is no server."""

import torch
import torch.distributed as dist

import rounds


def join(options):
    """The process group of all trainers."""
    torch.set_num_threads(1)
    place = f"tcp://{rounds.address(options, 'trainer')}:{options.port}"
    dist.init_process_group("gloo", init_method=place, rank=options.index, world_size=options.trainers)


class Trainer:
    def __init__(self, options):
        join(options)
        self.tensor = torch.zeros(options.bytes // 4)

    def gradient(self):
        return self.tensor.numpy()

    def settle(self):
        pass

    def round(self):
        dist.all_reduce(self.tensor)

    def value(self):
        return self.tensor.numpy()


def environment(options, _role, _index):
    return {"GLOO_SOCKET_IFNAME": rounds.interface(options)}


if __name__ == "__main__":
    rounds.main("gloo all-reduce", torch.__version__, Trainer, environment=environment)
