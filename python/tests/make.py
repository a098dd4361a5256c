"""Writes the kept results of the models in `models.py`, which `cli/tests/training/import_torch.rs` and `test_export.py`
compare.

    sh bench/peers/install.sh torch target/kits && cargo ci python
    target/python-wheel/environment/bin/python python/tests/make.py

writes `data/NAME.program` (the exported text), `NAME.values.safetensors` (the first values of its parameters),
`NAME.data.safetensors` (all rows), `NAME.expected.safetensors` (what torch computes from the first values) and
`NAME.trained.safetensors` (the parameters after its training), and `data/trainings.json` with the trainings.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from models import BATCH, CASES, EPOCHS, Case
from pserver.export import write_safetensors

DATA = Path(__file__).parent / "data"


def make(name: str, case: Case) -> dict[str, object]:
    """Writes the files of a model; gives what describes its training."""
    model = case.built()
    program = case.program(model)
    program.write(DATA / f"{name}.program", DATA / f"{name}.values.safetensors")
    write_safetensors(DATA / f"{name}.data.safetensors", case.data())
    with torch.no_grad():
        loss, output = case.computed(model)
    write_safetensors(DATA / f"{name}.expected.safetensors", dict(zip(case.output_names, (loss, output))))
    last = case.trained(model)
    trained = {each: model.state_dict()[each] for each in program.values}
    write_safetensors(DATA / f"{name}.trained.safetensors", trained)
    return {"name": name, "optimizer": case.optimizer_text, "batch": BATCH, "epochs": EPOCHS, "loss": last}


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    trainings = [make(name, case) for name, case in CASES.items()]
    (DATA / "trainings.json").write_text(json.dumps(trainings, indent=1) + "\n")
