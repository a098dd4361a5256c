"""PyTorch's fused optimizers on one thread: `run STEPS` as rounds.py has it, with elements instead of bytes.

All gradients of a step are the same array, so its plain form in binary64 on one period says what each element must be.
"""

import argparse
import sys
import time

import numpy as np
import torch

import rounds

# Some roundings of binary32 in each step, of values about 1.
TOLERANCE = 2e-5

RULES = {
    "sgd": lambda tensors, how: torch.optim.SGD(tensors, lr=1e-3, **how),
    "momentum": lambda tensors, how: torch.optim.SGD(tensors, lr=1e-3, momentum=0.9, **how),
    "adagrad": lambda tensors, how: torch.optim.Adagrad(tensors, lr=1e-3, eps=1e-6, **how),
    "adam": lambda tensors, how: torch.optim.Adam(tensors, lr=1e-3, **how),
    "adamw": lambda tensors, how: torch.optim.AdamW(tensors, lr=1e-3, weight_decay=0.01, **how),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=list(RULES), required=True)
    parser.add_argument("--elements", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    period = 1 + np.arange(rounds.PERIOD) * 7 % 1000 * 1e-3
    whole, whole_rule = prepare(np.resize(period.astype(np.float32), options.elements), options.rule, fused=True)
    plain, plain_rule = prepare(period.astype(np.float32).astype(np.float64), options.rule, foreach=False)
    peer, version = f"torch fused {options.rule}", torch.__version__
    rounds.say({"peer": peer, "version": version})
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line.split()[1])):
            start = time.perf_counter()
            whole_rule.step()
            seconds.append(time.perf_counter() - start)
            plain_rule.step()
        rounds.say({"peer": peer, "version": version, "bytes": options.elements, "trainers": 1, "seconds": seconds,
                    "wrong": wrong(whole.detach().numpy(), plain.detach().numpy())})


def prepare(values, rule, **how):
    tensor = torch.from_numpy(values.copy()).requires_grad_()
    tensor.grad = torch.from_numpy(values)
    return tensor, RULES[rule]([tensor], how)


def wrong(found, plain):
    """Elements that are not what the plain form says, piece by piece to keep memory small."""
    piece = rounds.PERIOD * 1000
    count = 0
    for start in range(0, found.size, piece):
        part = found[start : start + piece]
        distance = np.abs(part - np.resize(plain, part.size))
        count += int(np.count_nonzero(~(distance <= TOLERANCE)))
    return count


if __name__ == "__main__":
    main()
