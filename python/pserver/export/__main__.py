"""The command line of the export."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from . import ExportError, program_of


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: a file of `torch.export.save` to a program and its values."""
    parser = argparse.ArgumentParser(prog="python -m pserver.export", description=main.__doc__)
    parser.add_argument("model", help="the file, which ends in .pt2")
    parser.add_argument("-o", "--output", required=True, help="the file for the program's text")
    parser.add_argument("--values", required=True, help="the file for the parameters, which ends in .safetensors")
    parser.add_argument("--data-names", type=lambda text: text.split(","), help="names of the inputs, with commas")
    parser.add_argument("--output-names", type=lambda text: text.split(","), help="names of the outputs, with commas")
    parser.add_argument("--seed", type=int, default=0, help="the seed of dropout's masks")
    args = parser.parse_args(arguments)
    try:
        exported = torch.export.load(args.model)
        program = program_of(exported, data_names=args.data_names, output_names=args.output_names, seed=args.seed)
        program.write(args.output, args.values)
    except (ExportError, OSError) as error:
        print(f"{args.model}: {error}", file=sys.stderr)
        return 1
    for name, facts in program.data.items():
        print(f"data {name}: {facts}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
