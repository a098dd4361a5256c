"""Exported programs run by the program `pserver`, against torch."""

from __future__ import annotations

import inspect
import json
import struct
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from needs import need_torch

need_torch()
import torch  # noqa: E402
from models import CASES, Case  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pserver.export import ExportError, TorchProgram, export_program, program_of, write_safetensors  # noqa: E402
from pserver.export.__main__ import main  # noqa: E402

PROGRAM = [sys.executable, "-P", "-m", "pserver"]
DATA = Path(__file__).parent / "data"
# The largest difference between sums in float32 that are computed in different orders.
TOLERANCE = 1e-5
TYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    heads = json.loads(content[8 : 8 + length])
    heads.pop("__metadata__", None)
    tensors = {}
    for name, head in heads.items():
        begin, end = (8 + length + place for place in head["data_offsets"])
        flat = torch.frombuffer(bytearray(content[begin:end]), dtype=TYPES[head["dtype"]])
        tensors[name] = flat.reshape(head["shape"])
    return tensors


class ExportTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_pserver(self, *arguments: str) -> str:
        done = subprocess.run([*PROGRAM, *arguments], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def check_close(self, what: str, found: Tensor, expected: Tensor) -> None:
        self.assertEqual(found.shape, expected.shape, what)
        difference = ((found - expected).abs() / expected.abs().clamp(min=1)).max().item()
        self.assertLessEqual(difference, TOLERANCE, what)

    def predict(self, program: TorchProgram, data: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
        program.write(self.folder / "net.program", self.folder / "values.safetensors")
        write_safetensors(self.folder / "data.safetensors", data)
        files = ("--model", "values.safetensors", "--data", "data.safetensors", "-o", "found.safetensors")
        self.run_pserver("predict", "net.program", *files, "--fetch", ",".join(names))
        return read_safetensors(self.folder / "found.safetensors")

    def check_forward(self, model: nn.Module, *inputs: Tensor, **options: Any) -> TorchProgram:
        """The model computes what torch computes, also for another number of rows."""
        program = export_program(model, inputs, **options)
        for rows in (slice(None), slice(1)):
            data = {name: each[rows] for name, each in zip(program.data, inputs)}
            expected = model(*(each[rows] for each in inputs))
            named = expected if isinstance(expected, dict) else {program.outputs[0]: expected}
            found = self.predict(program, data, list(named))
            for name, value in named.items():
                with self.subTest(f"{name} of {rows}"):
                    self.check_close(name, found[name], value.detach().float())
        return program

    def check_refused(self, model: nn.Module, inputs: tuple[Tensor, ...], line: str, expected: str) -> None:
        """The refusal names the model's only line with this text."""
        lines, first = inspect.getsourcelines(type(model))
        number = first + next(place for place, each in enumerate(lines) if line in each)
        with self.assertRaises(ExportError) as refused:
            export_program(model, inputs)
        said = str(refused.exception)
        self.assertIn(f"{__file__}:{number}: ", said)
        self.assertIn(expected, said)


class Models(ExportTest):
    def check_case(self, name: str, case: Case) -> None:
        kept = {each: read_safetensors(DATA / f"{name}.{each}.safetensors") for each in ("expected", "trained")}
        model = case.built()
        program = case.program(model)
        self.assertEqual(program.text, (DATA / f"{name}.program").read_text(), "make.py writes it anew")
        for output, value in zip(case.output_names, case.computed(model)):
            self.check_close(f"{name}, {output}", kept["expected"][output], value.detach())
        case.trained(model)
        self.assertEqual(kept["trained"].keys(), program.values.keys())
        for each, value in kept["trained"].items():
            self.check_close(f"{name}, {each}", value, model.state_dict()[each])

    def test_kept_models(self) -> None:
        """Exports and torch's results are those that `cli/tests/training/import_torch.rs` compares `pserver` with."""
        for name, case in CASES.items():
            with self.subTest(name):
                self.check_case(name, case)


class Scaled(nn.Module):
    """Computations of one input and a parameter."""

    def __init__(self, computations: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.computations = computations
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: compute(x, self.weight) for name, compute in self.computations.items()}


class Forms(ExportTest):
    """What a single op or a form of the interface becomes."""

    def test_ops(self) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
        computations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "relu6": lambda x, w: F.relu6(x * 4 + w),
            "hardswish": lambda x, w: F.hardswish(x * 2 + w),
            "mish": lambda x, w: F.mish(x + w),
            "masked_fill": lambda x, w: (x * w).masked_fill(x < 0, -3.0),
            "ones of the batch": lambda x, w: torch.cat([torch.ones(x.shape[0], 2), x * w], dim=1),
            "like": lambda x, w: torch.full_like(x, 2.5) * w + torch.zeros_like(x),
            "matrix of parameters": lambda x, w: x @ torch.outer(w, w),
            "the batch in between": lambda x, w: ((x[None] * w).expand(2, -1, 3) @ torch.outer(w, w)).sum(0),
            "vectors": lambda x, w: x @ w,
            "einsum": lambda x, w: torch.einsum("bi,bj->bij", x, x * w),
            "roll": lambda x, w: (x * w).roll(1, dims=1),
            "unbind": lambda x, w: torch.add(*(x * w).unbind(1)[:2], alpha=2),
            "double": lambda x, w: (x.double() * w.double()).float(),
            "integers": lambda x, w: w * ((x > 0).long() * 3 - 1).clamp(max=1),
            "repeat": lambda x, w: (x * w).unsqueeze(1).repeat(1, 2, 3) + w.repeat(x.shape[0], 1, 3),
            "row of a batch norm": lambda x, w: F.batch_norm(x, torch.ones(3), torch.ones(3) * 2, w, w),
            "cosine": lambda x, w: F.cosine_similarity(x, w[None, :].expand_as(x), dim=1),
            "glu": lambda x, w: F.glu(torch.cat([x, x * w], dim=1)),
            "diagonal blocks": lambda x, w: torch.bmm(x[:, :, None], (x * w)[:, None, :]),
            "prelu": lambda x, w: F.prelu(x, w),
            "variance": lambda x, w: (x * w).var(dim=1),
        }
        self.check_forward(Scaled(computations), x)

    def test_computed_ids(self) -> None:
        """Integers are computed exactly."""

        class Fields(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(12, 3)

            def forward(self, fields: Tensor) -> Tensor:
                return self.table(fields + torch.arange(3) * 4).flatten(1)

        self.check_forward(Fields(), torch.arange(12).reshape(4, 3) % 4)

    def test_names(self) -> None:
        """Outputs are called as in a dictionary; odd names are quoted; what has no effect is left out."""

        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleDict({"a b": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
                self.register_parameter("view", nn.Parameter(torch.ones(2)))

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                scores = self.layers["a b"](x.view(-1, 3)) * self.view
                return {"scores": scores, "copy": scores, "x of it": x}

        program = export_program(Named(), (torch.randn(4, 3),))
        self.assertEqual(program.outputs, ["scores", "copy", "x of it"])
        self.assertEqual(list(program.values), ["view", "layers.a b.weight", "layers.a b.bias"])
        self.assertIn("# parameter layers.unused.weight has no effect on the outputs and is left out\n", program.text)
        self.assertIn('initialise "layers.a b.weight" = given(name="layers.a b.weight")\n', program.text)
        x = torch.randn(2, 3)
        found = self.predict(program, {"x": x}, program.outputs)
        self.check_close("copy", found["copy"], found["scores"])
        self.check_close("x", found["x of it"], x)

    def test_parameters(self) -> None:
        """Shared parameters are one; one without gradient is a constant."""

        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
                self.second.weight = self.first.weight
                self.second.bias.requires_grad_(False)

            def forward(self, x: Tensor) -> Tensor:
                return self.second(torch.relu(self.first(x)))

        program = self.check_forward(Shared(), torch.randn(4, 3))
        self.assertEqual(list(program.values), ["first.weight", "first.bias"])

    def test_dropout(self) -> None:
        """Dropout has a seed each; predictions are those in evaluation."""
        model = nn.Sequential(nn.Dropout(0.25), nn.Linear(3, 3), nn.Dropout(0.5))
        program = export_program(model, (torch.randn(4, 3),), seed=5)
        self.assertIn("rate=0.25, seed=5)", program.text)
        self.assertIn("rate=0.5, seed=6)", program.text)
        x = torch.randn(4, 3)
        found = self.predict(program, {"input": x}, program.outputs)
        self.check_close("dropout", found[program.outputs[0]], model.eval()(x).detach())
        self.assertNotIn("dropout", export_program(model, (x,)).text)
        program = export_program(model.train(), (x,), loss=F.mse_loss, targets=(torch.zeros(4, 3),))
        self.predict(program, {"input": x, "target": torch.zeros(4, 3)}, ["loss"])
        sizes = ("--batch", "2", "--epochs", "3", "--optimizer", "const_lr { learning_rate: 0.1 }", "--trainers", "2")
        self.run_pserver("train", "net.program", "--data", "data.safetensors", "--values", "values.safetensors", *sizes)

    def check_batch_norms(self, trainers: int) -> None:
        """A model is trained as by torch, with the mean of the trainers' gradients and of their averages."""
        torch.manual_seed(3)
        layers = (nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5))
        unkept = nn.BatchNorm1d(5, affine=False, track_running_stats=False)
        model = nn.Sequential(*layers, nn.BatchNorm1d(5, momentum=0.3), unkept)
        x, label = torch.randn(24, 2, 4, 4) * 3 + 1, torch.randint(0, 5, (24,))
        data = {"input": x, "target": label}
        program = export_program(model, (x,), loss=F.cross_entropy, targets=(label,))
        program.write(self.folder / "net.program", self.folder / "values.safetensors")
        write_safetensors(self.folder / "data.safetensors", data)
        files = ("--data", "data.safetensors", "--values", "values.safetensors", "--save", "trained.safetensors")
        sizes = ("--batch", "8", "--epochs", "4", "--trainers", str(trainers), "--servers", "2")
        self.run_pserver("train", "net.program", *files, *sizes, "--optimizer", "const_lr { learning_rate: 0.1 }")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averages = [each for each in model.buffers() if each.is_floating_point()]
        for rows in [*torch.arange(24).split(8)] * 4:
            before, sums = [each.clone() for each in averages], [torch.zeros_like(each) for each in averages]
            optimizer.zero_grad()
            for part in rows.chunk(trainers):
                (F.cross_entropy(model(x[part]), label[part]) / trainers).backward()
                for each, began, total in zip(averages, before, sums):
                    total += each / trainers
                    each.copy_(began)
            for each, total in zip(averages, sums):
                each.copy_(total)
            optimizer.step()
        trained = read_safetensors(self.folder / "trained.safetensors")
        state = {name: each for name, each in model.state_dict().items() if "num_batches" not in name}
        self.assertEqual(trained.keys(), state.keys())
        for name, value in trained.items():
            self.check_close(f"{trainers} trainers, {name}", value, state[name])
        # The last layer has no averages: it takes the rows of a prediction together.
        output = program.outputs[-1]
        found = self.predict(replace(program, values=trained), data, [output])[output]
        self.check_close("predicted", found, model.eval()(x).detach())

    def test_batch_norm(self) -> None:
        for trainers in (1, 2):
            self.check_batch_norms(trainers)

    def test_batch_norm_of_a_fixed_batch(self) -> None:
        """The average is of a sample's variance."""
        program = export_program(nn.BatchNorm1d(3), (torch.randn(5, 3),), dynamic_batch=False)
        self.assertIn("fill(value=5.0)", program.text)

    def test_batch_norms_need_an_optimizer_for_the_others(self) -> None:
        x = torch.randn(4, 3)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        program = export_program(model, (x,), loss=F.mse_loss, targets=(x,))
        program.write(self.folder / "net.program", self.folder / "values.safetensors")
        write_safetensors(self.folder / "data.safetensors", {"input": x, "target": x})
        files = ("--data", "data.safetensors", "--values", "values.safetensors", "--batch", "4", "--epochs", "1")
        done = subprocess.run(
            [*PROGRAM, "train", "net.program", *files], cwd=self.folder, capture_output=True, text=True
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no op of the role optimize that writes \"0.weight\", on which the loss depends", done.stderr)

    def test_fixed_batch(self) -> None:
        program = export_program(nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_batch=False, data_names=["pixels"])
        self.assertEqual(program.data, {"pixels": "float32[4, 3]"})

    def test_command_line(self) -> None:
        model = nn.Linear(3, 2)
        batch = torch.export.Dim("batch")
        exported = torch.export.export(model, (torch.randn(4, 3),), dynamic_shapes=({0: batch},))
        file = str(self.folder / "net.pt2")
        torch.export.save(exported, file)
        text, values = (str(self.folder / name) for name in ("net.program", "values.safetensors"))
        self.assertEqual(main([file, "-o", text, "--values", values, "--data-names", "x"]), 0)
        self.assertEqual(Path(text).read_text(), program_of(exported, data_names=["x"]).text)
        self.check_close("weight", read_safetensors(Path(values))["weight"], model.weight.detach())


class Refusals(ExportTest):
    """What has no counterpart is refused by the model's line."""

    def test_ops(self) -> None:
        class Unknown(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = x + 1
                return torch.cumsum(y, dim=1)

        class InModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Conv2d(1, 1, 3, dilation=2)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x)

        class Random(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + torch.rand(3)

        class Stopped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x).detach() + self.layer(x)

        class WithoutGradient(Stopped):
            def forward(self, x: Tensor) -> Tensor:
                y = self.layer(x)
                with torch.no_grad():
                    z = y.exp()
                return y + z

        class Merged(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.reshape(-1)

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                self.count.add_(x.sum(0))
                return x + self.count

        class Padded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words = nn.Embedding(5, 3)
                self.words.padding_idx = 1

            def forward(self, x: Tensor) -> Tensor:
                return self.words(x)

        class Large(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("large", torch.rand(2000, generator=torch.Generator().manual_seed(1)))

            def forward(self, x: Tensor) -> Tensor:
                return x[:, :1] + self.large

        class OverBatch(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.softmax(x, dim=0)

        class Ignoring(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.cross_entropy(x, x.long()[:, 0], ignore_index=1)

        x = torch.randn(4, 3)
        check = self.check_refused
        check(Unknown(), (x,), "cumsum", "aten.cumsum.default ('cumsum'): found an op that is not mapped; expected one "
                                         "of docs/PROGRAMS.md, From PyTorch")
        check(InModule(), (torch.randn(4, 1, 8, 8),), "self.layer(x)", "found dilation=[2, 2]; expected it not given")
        check(Random(), (x,), "torch.rand", "aten.rand.default ('rand'): found an op that is not mapped")
        check(Stopped(), (x,), ".detach()", "found a gradient that stops here; expected none")
        check(WithoutGradient(), (x,), "y.exp()", "found torch.no_grad() over a value that depends on a parameter")
        check(Merged(), (x,), "reshape(-1)", "found the shape [3*s")
        check(Counting(), (x,), "add_", "found a new value of 'count', which the model keeps between runs")
        check(Padded(), (torch.zeros(4, 2, dtype=torch.long),), "self.words(x)", "found padding_idx=1 and a row with")
        check(Large(), (x,), "self.large\n", "found a constant [2000]")
        check(OverBatch(), (x,), "softmax", "found dimension 0 of [batch, 3]; expected a fixed one")
        check(Ignoring(), (x.clamp(0, 1),), "cross_entropy", "found ignore_index=1; expected no class")

    def test_arguments(self) -> None:
        model, x = nn.Linear(3, 2), torch.randn(4, 3)
        for expected, inputs, options in (
            ("found an example with 1 row or none", (x[:1],), {}),
            ("found 2 names of data; expected 1", (x,), {"data_names": ["a", "b"]}),
            ("found the names ['a', 'a'] of data; expected 2 different ones", (x, x),
             {"data_names": ["a", "a"], "loss": None}),
            ("found the names ['a', 'b'] of outputs; expected 1 different ones", (x,), {"output_names": ["a", "b"]}),
            ("found data 'weight' and a parameter of this name", (x,), {"data_names": ["weight"]}),
            ("found an output 'weight' and data or a parameter of this name", (x,), {"output_names": ["weight"]}),
        ):
            with self.subTest(expected), self.assertRaises(ExportError) as refused:
                export_program(nn.Bilinear(3, 3, 2) if len(inputs) == 2 else model, inputs, **options)
            self.assertIn(expected, str(refused.exception))
