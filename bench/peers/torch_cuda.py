"""PyTorch on a device: the sum of some gradients, then its fused optimizer. A JSON line for each case.

The parameter and the states are binary32; gradients are binary32 or bfloat16, and are added in binary32, as servers do.
One gradient of binary32 is handed to the optimizer as it is. Then Adam as one expression through torch.compile, for one
gradient of binary32 and several of bfloat16. What needs more memory than there is, is left out.
Times are the device's own, medians; the ceiling is its copy of one tensor to another in the same run.
"""

import argparse
import json
import statistics

import torch

RULES = {
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=1e-3, fused=True),
    "adamw": lambda tensors: torch.optim.AdamW(tensors, lr=1e-3, weight_decay=0.01, fused=True),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", default="adam,adamw")
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--gradients", default="1,4,8,16")
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device")
    ceiling = copy_rate(options)
    cases = [(rule, count, is_compiled) for is_compiled in (False, True) for rule in options.rule.split(",")
             for count in map(int, options.gradients.split(","))]
    # Compiled cases last, and few: each takes seconds to compile.
    for rule, count, is_compiled in cases:
        for name, dtype in TYPES.items():
            if is_compiled and (rule != "adam" or (count == 1) != (dtype == torch.float32)):
                continue
            told = {"rule": rule, "gradients": count, "gradient_type": name, "elements": options.elements,
                    "is_compiled": is_compiled}
            try:
                seconds = (compiled_case(count, dtype, options) if is_compiled
                           else case(RULES[rule], count, dtype, options))
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                print(json.dumps({**told, "left_out": "the device has too little memory"}), flush=True)
                continue
            except Exception as why:  # A compiler that is missing is no reason to lose the rest.
                print(json.dumps({**told, "left_out": f"{type(why).__name__}: {why}"[:300]}), flush=True)
                continue
            # One fused pass has to move the parameter and two states there and back, and each gradient once.
            moved = options.elements * (24 + count * dtype.itemsize)
            print(json.dumps({
                **told, "version": torch.__version__, "elements_per_second": options.elements / seconds,
                "bytes_per_second": moved / seconds, "ceiling_bytes_per_second": ceiling,
                "ratio_to_ceiling": moved / seconds / ceiling,
            }), flush=True)


def case(rule, count, dtype, options):
    parameter = torch.ones(options.elements, device="cuda", requires_grad=True)
    gradients = [torch.ones(options.elements, device="cuda", dtype=dtype) for _ in range(count)]
    is_sum_needed = count > 1 or dtype != torch.float32
    parameter.grad = torch.zeros_like(parameter) if is_sum_needed else gradients[0]
    optimizer = rule([parameter])

    def step():
        if is_sum_needed:
            parameter.grad.copy_(gradients[0])
        for gradient in gradients[1:]:
            parameter.grad.add_(gradient)
        optimizer.step()

    return timed(step, options.iterations)


@torch.compile(fullgraph=True)
def fused(parameter, mean, square, gradients, rate, root):
    """Sum and Adam as one expression; the step's corrections of the bias come as tensors, so that nothing is compiled
    anew."""
    gradient = gradients[0].float()
    for other in gradients[1:]:
        gradient = gradient + other.float()
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).add_(gradient * gradient * 0.001)
    parameter.sub_(rate * mean / (square.sqrt() * root + 1e-8))


def compiled_case(count, dtype, options):
    tensors = [torch.zeros(options.elements, device="cuda") for _ in range(3)]
    gradients = [torch.ones(options.elements, device="cuda", dtype=dtype) for _ in range(count)]
    rate, root = (torch.tensor(value, device="cuda") for value in (1e-2, 31.0))
    return timed(lambda: fused(*tensors, gradients, rate, root), options.iterations)


def copy_rate(options):
    source = torch.ones(options.elements, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * options.elements / timed(lambda: target.copy_(source), options.iterations)


def timed(work, iterations):
    """The median of the device's seconds, the first few not counted."""
    seconds = []
    for _ in range(3 + iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds[3:])


if __name__ == "__main__":
    main()
