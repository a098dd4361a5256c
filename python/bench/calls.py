"""What a call through Python costs beside the same call through C: `push_pull` of one small, one large and many tensors.

    python python/bench/calls.py --library target/release

Both contestants are in this process, each with a server of its own, and take turns.
"""

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy
import torch

import pserver
from turns import by_turns, micros, ratio, say_where, spread, timed

HERE = Path(__file__).parent
SGD = "optimizer: SGD const_lr { learning_rate: 0.01 }"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", type=Path, default=Path("target/release"), help="the folder of libpaddle_pserver.so")
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    options = parser.parse_args()
    say_where(options.blocks)
    with tempfile.TemporaryDirectory() as folder:
        library = built(options.library.resolve(), Path(folder))
        for transport in options.transports:
            for tensors, bytes_each, rounds in [(1, 4 << 10, 2000), (1, 64 << 20, 5), (1000, 1 << 10, 40)]:
                with contestants(library, transport, tensors, bytes_each) as all_of_them:
                    seconds = by_turns(all_of_them, options.blocks, rounds)
                print(f"{transport}, {tensors} x {bytes_each} bytes, us:")
                print(f"  C      {micros(seconds['C'])}")
                for name in ["numpy", "torch"]:
                    took = seconds[name]
                    more = spread([1e6 * (one - other) / tensors for one, other in zip(took, seconds["C"])], 2)
                    print(f"  {name}  {micros(took)}, beside C {ratio(took, seconds['C'])}, a tensor {more} more", flush=True)


def built(folder: Path, out: Path) -> Path:
    """Compiles the C contestant."""
    made = out / "calls.so"
    include = HERE.parents[1] / "capi/include"
    where = ["-L", folder, f"-Wl,-rpath,{folder}", "-lpaddle_pserver"]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-I", include, HERE / "calls.c", "-o", made, *where], check=True)
    return made


@contextmanager
def contestants(library: Path, transport: str, tensors: int, bytes_each: int) -> Iterator[dict]:
    names = [f"p{at}" for at in range(tensors)]
    with ExitStack() as open_things:
        servers = [open_things.enter_context(pserver.Servers(1)) for _ in range(2)]
        addresses = [f"{transport}://{one.address}" for one in servers]
        calls = ctypes.CDLL(str(library))
        calls.calls_run.restype = ctypes.c_double
        # Ones, so that the system gives every page; the same memory for all contestants.
        gradients = {name: numpy.ones(bytes_each // 4, numpy.float32) for name in names}
        values = {name: numpy.ones(bytes_each // 4, numpy.float32) for name in names}
        places = [
            (ctypes.c_void_p * tensors)(*(one.ctypes.data for one in arrays.values())) for arrays in (gradients, values)
        ]
        where = f"coordinator={addresses[0]}"
        if calls.calls_begin(where.encode(), SGD.encode(), tensors, bytes_each, *places) != 0:
            raise SystemExit("the C contestant failed")
        open_things.callback(calls.calls_end)
        client = open_things.enter_context(pserver.Client(addresses[1]))
        client.init_all(values, SGD)
        tensors_in = {name: torch.from_numpy(value) for name, value in gradients.items()}
        tensors_out = {name: torch.from_numpy(value) for name, value in values.items()}
        yield {
            "C": calls.calls_run,
            "numpy": timed(lambda: client.push_pull(gradients, values)),
            "torch": timed(lambda: client.push_pull(tensors_in, tensors_out)),
        }


if __name__ == "__main__":
    main()
