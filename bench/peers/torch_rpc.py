"""PyTorch's RPC: a server that sums gradients and answers everybody when the last has arrived."""

import threading

import torch
import torch.distributed.rpc as rpc

import rounds

LOCK = threading.Lock()
TRAINERS = 1
SUM = None
ARRIVED = 0
DONE = None


@rpc.functions.async_execution
def push_pull(gradient):
    """The first gradient becomes the sum; what RPC received is nobody else's."""
    global SUM, ARRIVED, DONE
    with LOCK:
        if ARRIVED == 0:
            SUM, DONE = gradient, torch.futures.Future()
        else:
            SUM += gradient
        ARRIVED += 1
        total, done, is_last = SUM, DONE, ARRIVED == TRAINERS
        if is_last:
            SUM, ARRIVED, DONE = None, 0, None
    if is_last:
        done.set_result(total)
    return done


def join(name, rank, options):
    torch.set_num_threads(1)
    ways = {"tcp": (["uv"], ["mpt_uv", "basic"]), "shm": (["shm"], ["cma", "basic"])}
    transports, channels = ways[options.transport]
    backend = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{rounds.address(options, 'server')}:{options.port}",
        _transports=transports,
        _channels=channels,
        rpc_timeout=600,
    )
    rpc.init_rpc(name, rank=rank, world_size=options.trainers + 1, rpc_backend_options=backend)


def serve(options):
    global TRAINERS
    rounds.die_with_parent()
    TRAINERS = options.trainers
    join("server", 0, options)
    rpc.shutdown()


class Trainer:
    def __init__(self, options):
        join(f"trainer{options.index}", options.index + 1, options)
        self.tensor = torch.zeros(options.bytes // 4)
        self.sum = self.tensor

    def gradient(self):
        return self.tensor.numpy()

    def settle(self):
        pass

    def round(self):
        self.sum = rpc.rpc_sync("server", push_pull, args=(self.tensor,))

    def value(self):
        return self.sum.numpy()


def environment(options, _role, _index):
    return dict.fromkeys(["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"], rounds.interface(options))


if __name__ == "__main__":
    import torch_rpc

    # What is pickled by name must have the same name everywhere.
    rounds.main("torch RPC", torch.__version__, torch_rpc.Trainer, {"server": torch_rpc.serve}, environment)
