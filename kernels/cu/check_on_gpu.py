"""Checks the CUDA side on a machine that has a device, part by part, and keeps a ledger of what was proven there.

    kernels/cu/check-on-gpu.sh --next SECONDS OUT   the parts that are stale, in the order of the table, for so long
    kernels/cu/check-on-gpu.sh --parts P,P OUT      these parts
    kernels/cu/check-on-gpu.sh --stale              says which parts are stale, and why
    kernels/cu/check-on-gpu.sh --merge OUT          takes what a run left in OUT into the ledger, and writes its page

The ledger is docs/reports/cuda.jsonl: a line for each part with its verdict, and one for each figure. A part is stale
when it has no line, when its last run did not pass, or when the sources that it proves have changed. docs/reports/cuda.md
is made of the ledger. A part that ran out of time is "cut", and keeps the figures that it had.

A run takes the kit of `cargo ci gpu-kit` (target/gpu-kit/kit.tar.gz, or PSERVER_KIT, also as a folder), so that a
machine needs no Rust and no network. It needs the driver and Python; parts are skipped, which is said and counted, where
these are missing: NVRTC (PSERVER_NVRTC is its folder), compute-sanitizer (PSERVER_SANITIZER), torch with CUDA
(PSERVER_TORCH is a Python that has it). Every line of output is in OUT/report.txt as soon as it is written. Nothing is
set on the device, and nothing else should run on it.

PSERVER_GPU_STANDIN=1 runs everything in small on the simulated driver, whose environment the caller has set
(`cargo ci gpu` does); figures then mean nothing.
"""

import argparse
import dataclasses
import datetime
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
STANDIN = bool(os.environ.get("PSERVER_GPU_STANDIN"))
PASSED, FAILED, CUT, SKIPPED = "passed", "FAILED", "cut", "skipped"
LEAST_SECONDS = 15
"""A part does not begin with less time than this."""
NOT_READY_SECONDS = 20
"""Seconds until a machine that is not ready (error 802 of the driver) is asked again."""
# The second has the grids of launches, the third the way of measuring.
KERNELS = ("kernels/gen", "kernels/src/cuda/safe/module.rs", "kernels/src/cuda/probe.rs")
DRIVER = ("kernels/src/cuda",)
SERVER = ("kernels/src/cuda", "core/src/server", "node/src/device.rs", "node/src/device_speed.rs")
PYTHON = ("python/pserver", "python/src", "python/bench/device_step.py", "python/bench/device_check.py")
NO_CUBIN = "does not take the cubin"
NOT_PINNED = "cannot be pinned"
ADAM = 'optimizer: Adam adam { } lr_policy: Const const_lr { learning_rate: 0.002 }'


class Skip(Exception):
    """A part cannot run here, for the reason in the text."""


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    limit: int
    """Seconds."""
    sources: tuple[str, ...]
    """Folders and files that it proves: a change of them makes its line stale."""
    expected: str
    """What its author expected; another result is a finding."""
    commands: Callable[["Machine"], list[list[str]]]
    needs: tuple[str, ...] = ()
    """Patterns that the output must have."""
    refuses: tuple[str, ...] = ()
    """Patterns that the output must not have."""
    environment: tuple[tuple[str, str], ...] = ()
    is_of_card: bool = False
    """Each kind of card has a line of its own."""


class Machine:
    """What this machine has, and a folder of the kit."""

    def __init__(self, kit: pathlib.Path, work: pathlib.Path) -> None:
        self.kit, self.work = kit, work
        self.python = sys.executable
        self.elements = 20_000 if STANDIN else 1_000_000_000
        self.step_elements = 5_000 if STANDIN else 1 << 25

    def program(self, name: str) -> str:
        path = self.kit / name
        if not path.exists():
            raise Skip(f"the kit has no {name}")
        return str(path)

    def bench(self, *arguments: str) -> list[str]:
        return [self.program("psbench"), "--lines", str(self.work / "lines"), *arguments]

    def kernels(self, rules: str, gradients: str, measure: str, *more: str) -> list[str]:
        elements = self.elements if measure == "kernel" else self.step_elements
        sizes = ["--elements", str(elements), "--step-elements", str(self.step_elements)]
        few = ["-n", "2"] if STANDIN else []
        return self.bench("kernels", "--device", "cuda", "--rule", rules, "--gradients", gradients, "--measure",
                          measure, *sizes, *few, *more)

    def torch(self) -> str:
        torch = os.environ.get("PSERVER_TORCH", self.python)
        asked = "import torch, sys; sys.exit(not torch.cuda.is_available())"
        if not STANDIN and subprocess.run([torch, "-c", asked], capture_output=True, check=False).returncode != 0:
            raise Skip("there is no torch with CUDA; PSERVER_TORCH may name a Python that has it")
        return torch

    def sanitizer(self, tool: str, *tests: str) -> list[str]:
        found = os.environ.get("PSERVER_SANITIZER") or shutil.which("compute-sanitizer")
        found = found or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None)
        if not found:
            raise Skip("compute-sanitizer is not installed; PSERVER_SANITIZER may name it")
        # Asking a module for a kernel that it has not is no error of ours.
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        return [found, "--tool", tool, "--error-exitcode", "1", *quiet, self.program("tables"), "--test-threads=1",
                *tests]

    def package(self) -> str:
        """A folder with the Python package."""
        folder = self.work / "package"
        if not folder.exists():
            shutil.copytree(ROOT / "python/pserver", folder / "pserver", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(self.program("_pserver.abi3.so"), folder / "pserver")
        return str(folder)


def tables(machine: Machine, *tests: str) -> list[str]:
    # On the stand-in `cargo test` runs all of them.
    some = ["every_entry_once"] if STANDIN else list(tests)
    return [machine.program("tables"), "--nocapture", *some]


def suite(machine: Machine) -> list[str]:
    # The suite compares what is free on the device before and after, so its tests run one at a time. The stand-in
    # compiles each rule with g++, which takes seconds.
    only = "cuda::tests::device" + ("::a_job" if STANDIN else "")
    return [machine.program("suite"), "--nocapture", "--test-threads=1", only]


def digits(machine: Machine) -> list[str]:
    return [machine.python, __file__, "--digits", machine.program("pserver"), str(machine.work)]


def end_to_end(machine: Machine) -> list[list[str]]:
    size, seconds = ("64KiB", "0.2") if STANDIN else ("256MiB", "8")
    job = ["pushpull", "--size", size, "--trainers", "4", "--transport", "shm", "--rule", "adam"]
    least = ["--serve", "device-least=1"] if STANDIN else []
    return [machine.bench(*job, "--dtype", dtype, "-D", seconds, "--serve", f"device={device}", "--beside", "device=cpu",
                          *least) for device in ("cuda:0", "auto") for dtype in ("bf16", "f32")]


def torch_bits(machine: Machine) -> list[str]:
    device = "cpu" if STANDIN else "cuda"
    return [machine.torch(), str(ROOT / "python/bench/device_check.py"), "--package", machine.package(), "--device",
            device]


def torch_step(machine: Machine) -> list[str]:
    elements = "1000" if STANDIN else "100000000"
    device = "cpu" if STANDIN else "cuda"
    return [machine.torch(), str(ROOT / "python/bench/device_step.py"), "--package", machine.package(), "--elements",
            elements, "--device", device]


DEVICE_ALONE = (("PSERVER_LAUNCHERS", "device"),)
SHIPPED_ALONE = (("PSERVER_LAUNCHERS", "shipped"),)
# The shared memory of blocks, where threads could race.
RACES = ("rows::ids", "reductions::a_norm", "reductions::scalars")
PARTS = (
    Part("probe", 40, ("kernels/cu/probe.py",), "8 s; every question has an answer",
         lambda machine: [[machine.python, str(ROOT / "kernels/cu/probe.py")]], needs=(r'"device": "',),
         is_of_card=True),
    Part("driver", 60, ("kernels/cu/driver_answers.py",), "20 s; every answer is the one that the simulated driver gives",
         lambda machine: [[machine.python, str(ROOT / "kernels/cu/driver_answers.py")]],
         needs=(r"answers: (\d+) of \1 as expected",)),
    Part("bits-cubin", 90, KERNELS, "32 s; 196 of 196 digests, every table", lambda machine: [tables(machine)],
         needs=("cubin kernels", "[1-9][0-9]* passed; 0 failed"), refuses=("PTX kernels",), environment=DEVICE_ALONE),
    Part("kernels", 60, KERNELS, "1.0 of the device's copy",
         lambda machine: [machine.kernels("adam", "1,4,8", "kernel"),
                          machine.kernels("sum,sgd,momentum,lion,adamw", "8", "kernel")], refuses=(NO_CUBIN,)),
    Part("step", 60, DRIVER,
         "0.85 of the link both ways, since updates are submitted together; 0.87, of one gradient 0.62, before they were",
         lambda machine: [machine.kernels("adam", "1,4,8", "server-step", "--goals")], refuses=(NOT_PINNED, NO_CUBIN)),
    Part("digits", 60, SERVER, "a killed server has the processor's model; a restart takes 0.3 s",
         lambda machine: [digits(machine)], needs=("the models are equal",), refuses=(NOT_PINNED, NO_CUBIN)),
    Part("torch-peer", 90, (*KERNELS, "bench/peers/torch_cuda.py"),
         "1.16 of torch's fused Adam, 3.2 of its sum and Adam, 1.0 of torch.compile",
         lambda machine: [machine.kernels("adam,adam-text", "1,4,8", "kernel", "--goals", "--torch", machine.torch())],
         refuses=("left out",)),
    Part("suite", 60, DRIVER, "4 s; the accelerator keeps its promises", lambda machine: [suite(machine)],
         needs=("[1-9][0-9]* passed; 0 failed",)),
    Part("bits-ptx", 60, KERNELS, "196 of 196 digests; the driver compiles for 4 s",
         lambda machine: [tables(machine, "any_number_of_gradients", "every_entry_once")],
         needs=("PTX kernels", "[1-9][0-9]* passed; 0 failed"), refuses=("cubin kernels",),
         environment=(*DEVICE_ALONE, ("PSERVER_IMAGE", "ptx"))),
    Part("memcheck", 120, KERNELS, "2 s; 0 errors over all entries, also of initcheck",
         lambda machine: [machine.sanitizer(tool, "every_entry_once") for tool in ("memcheck", "initcheck")],
         needs=("[1-9][0-9]* passed; 0 failed",), environment=SHIPPED_ALONE),
    Part("racecheck", 90, KERNELS, "11 s; 0 hazards, also of synccheck",
         lambda machine: [machine.sanitizer(tool, *RACES) for tool in ("racecheck", "synccheck")],
         needs=("[1-9][0-9]* passed; 0 failed",), environment=SHIPPED_ALONE),
    Part("torch-bits", 90, PYTHON, "30 s; parameters on the device have the bits of those on the host",
         lambda machine: [torch_bits(machine)]),
    Part("torch-step", 60, PYTHON, "0.04 of the link with a server on the processor, 0.1 on the device; 0.02 before memory was pinned",
         lambda machine: [torch_step(machine)]),
    Part("end-to-end", 90, SERVER, "1.0 to 1.2 of 16 cores with bf16 gradients, 0.74 to 0.8 with f32; auto takes one of both for all",
         lambda machine: end_to_end(machine), refuses=(NOT_PINNED,)),
)


class Ledger:
    """Lines of parts and figures, as they stand in a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, part: Part, card: str | None) -> dict | None:
        """The last line with a verdict on a part; of a part that every kind of card has to itself, that of this one."""
        for line in reversed(self.lines):
            if line["part"] == part.name and "verdict" in line and card_fits(part, line, card):
                return line
        return None

    def why_stale(self, part: Part, card: str | None) -> str | None:
        line = self.of(part, card)
        if line is None:
            return "it never ran"
        if line["sources"] != digest(part.sources):
            return f"its sources changed after {line['date']}"
        return None if line["verdict"] == PASSED else f"it {line['verdict']} on {line['date']}"

    def stale(self, card: str | None) -> list[Part]:
        """Those that failed as the sources are now come last: another run tells little."""
        found = [part for part in PARTS if self.why_stale(part, card)]
        return sorted(found, key=lambda part: (self.why_stale(part, card) or "").startswith(f"it {FAILED}"))


def card_fits(part: Part, line: dict, card: str | None) -> bool:
    return not part.is_of_card or card is None or line["device"] == card


def digest(sources: tuple[str, ...]) -> str:
    """Of files as they are in this folder, without what a build or a run leaves."""
    found = hashlib.sha256()
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix not in (".pyc", ".so"):
                found.update(f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def all_sources() -> str:
    """The digest of everything that a kit is made of, for a kit that belongs to other sources."""
    return digest(tuple(sorted({source for part in PARTS for source in part.sources})))


class Run:
    """One visit to a device: parts, one after another, and the files that it leaves."""

    def __init__(self, out: pathlib.Path, seconds: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.report = (out / "report.txt").open("a")
        self.ledger = (out / "cuda.jsonl").open("a")
        self.end = time.monotonic() + seconds
        self.failed = self.skipped = 0

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.report.write(text + "\n")
        self.report.flush()

    def note(self, line: dict) -> None:
        self.ledger.write(json.dumps(line) + "\n")
        self.ledger.flush()

    def left(self) -> float:
        return self.end - time.monotonic()

    def skip(self, what: str, why: str) -> None:
        """What is not checked, and why (docs/TESTING.md, "Skips")."""
        text = f"SKIPPED: {what}: {why}"
        self.say(text)
        self.skipped += 1
        if what in re.split(r"[,\s]+", os.environ.get("PSERVER_REQUIRE", "")):
            self.failed += 1
        if report := os.environ.get("PSERVER_SKIP_REPORT"):
            with open(report, "a") as file:
                file.write(text + "\n")

    def part(self, part: Part, machine: Machine, facts: dict) -> None:
        limit = min(part.limit, self.left())
        self.say(f"\n== {part.name}, at most {limit:.0f} s; expected: {part.expected}")
        begun = time.monotonic()
        try:
            verdict, why = self.judged(part, machine, facts["device"], limit)
        except Skip as skip:
            self.skip(part.name, str(skip))
            verdict, why = SKIPPED, str(skip)
        self.failed += verdict == FAILED
        seconds = round(time.monotonic() - begun, 1)
        self.note({"part": part.name, "verdict": verdict, "why": why, "seconds": seconds,
                   "sources": digest(part.sources), **facts})
        self.say(f"-- {part.name}: {verdict}{why and ': ' + why}, {seconds} s")

    def judged(self, part: Part, machine: Machine, device: str, limit: float) -> tuple[str, str]:
        end = time.monotonic() + limit
        environment = os.environ | dict(part.environment)
        for command in part.commands(machine):
            code, text = self.command(part, command, environment, end - time.monotonic())
            if code != 0 and "SYSTEM_NOT_READY" in text and NOT_READY_SECONDS * 2 < end - time.monotonic():
                time.sleep(NOT_READY_SECONDS)
                code, text = self.command(part, command, environment, end - time.monotonic())
            self.figures(part, machine, device, text)
            # A sanitizer says so where it cannot work: some virtual machines do not let it at their devices.
            for words in ("Device not supported", "terminated before first instrumented API call"):
                if code != 0 and words in text:
                    raise Skip(f"it says: {words}")
            if code is None:
                return CUT, f"it took longer than {limit:.0f} s"
            for pattern in part.refuses:
                if found := re.search(pattern, text):
                    return FAILED, f"the output says \"{found[0]}\""
            if code != 0:
                return FAILED, f"it ended with {code}"
            for pattern in part.needs:
                if not re.search(pattern, text):
                    return FAILED, f"the output has nothing like \"{pattern}\""
        return PASSED, ""

    def command(self, part: Part, command: list[str], environment: dict, seconds: float) -> tuple[int | None, str]:
        """The status, none when the time was over, and all output."""
        self.say(f"$ {' '.join(command)}")
        # Skips within a part are the part's: its verdict counts.
        environment = {name: value for name, value in environment.items() if name != "PSERVER_SKIP_REPORT"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env=environment, cwd=ROOT, start_new_session=True, text=True, errors="replace")
        is_cut = threading.Event()

        def cut() -> None:
            is_cut.set()
            for number, pause in ((signal.SIGTERM, 5), (signal.SIGKILL, 0)):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    return
                try:
                    process.wait(pause)
                except subprocess.TimeoutExpired:
                    pass

        timer = threading.Timer(max(seconds, 0.1), cut)
        timer.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            self.say(line.rstrip("\n"))
        code = process.wait()
        timer.cancel()
        return (None if is_cut.is_set() else code), "".join(lines)

    def figures(self, part: Part, machine: Machine, device: str, text: str) -> None:
        """Lines of JSON that a part printed, and those of psbench; a later one of the same name replaces the earlier."""
        found = [line for line in text.splitlines() if line.startswith("{")]
        lines = machine.work / "lines"
        if lines.exists():
            found += lines.read_text().splitlines()
            lines.unlink()
        figures = {}
        for index, line in enumerate(found):
            try:
                figure = json.loads(line)
            except ValueError:
                continue
            if not isinstance(figure, dict):
                continue
            short = {key: value for key, value in figure.items() if value is not None and key != "block_latency_us"}
            figures[short.get("name", index)] = short
        for figure in figures.values():
            self.note({"part": part.name, "device": device, "figure": figure})


def unpacked(work: pathlib.Path) -> pathlib.Path:
    """The kit's folder; compiled rules lie where programs look for them, and are this user's alone."""
    kit = pathlib.Path(os.environ.get("PSERVER_KIT", ROOT / "target/gpu-kit/kit.tar.gz"))
    if not kit.exists():
        raise SystemExit(f"{kit} does not exist: `cargo ci gpu-kit` makes it where Rust is")
    if not kit.is_dir():
        with tarfile.open(kit) as archive:
            archive.extractall(work / "kit", filter="data")
        kit = work / "kit"
        for path in [kit, *kit.rglob("*")]:
            os.chown(path, os.getuid(), os.getgid())
    sources = (kit / "sources").read_text().strip()
    if sources != all_sources():
        raise SystemExit(f"the kit was made of other sources than those of {ROOT}: `cargo ci gpu-kit` makes it anew")
    rules = kit / "rules"
    if rules.exists():
        rules.chmod(0o700)
        cache = work / "cache"
        (cache / "pserver").mkdir(parents=True)
        (cache / "pserver/rules").symlink_to(rules)
        os.environ["XDG_CACHE_HOME"] = str(cache)
    return kit


def find_libraries(run: Run) -> None:
    """Puts the driver and the compiler of rules where the loader looks; the stand-in has its own."""
    loads = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False,
                           env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/sbin:/usr/sbin"}).stdout
    packages = os.path.join(sys.prefix, "lib/python*/*-packages/nvidia")
    places = {
        "libcuda.so.1": ("PSERVER_CUDA", ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/usr/lib64"]),
        "libnvrtc.so*": ("PSERVER_NVRTC", ["/usr/local/cuda/lib64", "/usr/local/cuda-1[23]*/lib64",
                                           f"{packages}/cu13/lib", f"{packages}/cuda_nvrtc/lib"]),
    }
    for name, (variable, folders) in places.items():
        found = [os.environ[variable]] if variable in os.environ else []
        if not found and name.rstrip("*") not in loads:
            found = [os.path.dirname(file) for folder in folders for file in glob.glob(f"{folder}/{name}")]
        if found:
            os.environ["LD_LIBRARY_PATH"] = ":".join([found[0], *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        elif name.rstrip("*") not in loads:
            run.skip(name.rstrip("*"), "this machine has none: what needs it fails or is left out")


def visit(parts: list[str] | None, seconds: float, out: pathlib.Path, ledger: Ledger) -> int:
    run = Run(out, seconds)
    devices = glob.glob("/dev/nvidia[0-9]*")
    if not STANDIN and not devices and not shutil.which("nvidia-smi"):
        run.skip("cuda", "no CUDA device")
        return int(run.failed != 0)
    # A device that nobody has open is initialised anew by each process, which takes seconds.
    held = [os.open(device, os.O_RDONLY) for device in devices[:1] if os.access(device, os.R_OK)]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        kit = unpacked(work)
        machine = Machine(kit, work)
        if not STANDIN:
            find_libraries(run)
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        answer = "the stand-in driver, none"
        if not STANDIN:
            answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout or "unknown, unknown"
        name, driver = [field.strip() for field in answer.splitlines()[0].split(",")]
        facts = {"date": f"{datetime.date.today()}", "device": name, "driver": driver, "cores": os.cpu_count(),
                 "revision": (kit / "revision").read_text().strip()}
        chosen = ledger.stale(name) if parts is None else [part for part in PARTS if part.name in parts]
        run.say(f"== {facts}; parts: {' '.join(part.name for part in chosen) or 'none is stale'}")
        os.environ["PSERVER_REQUIRE"] = ",".join(filter(None, [os.environ.get("PSERVER_REQUIRE"), "cuda"]))
        if not STANDIN and any(part.name.startswith("torch") for part in chosen):
            # The first import of torch reads gigabytes: meanwhile other parts run.
            torch = os.environ.get("PSERVER_TORCH", machine.python)
            subprocess.Popen([torch, "-c", "import torch"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in chosen:
            if run.left() < LEAST_SECONDS:
                run.say(f"-- {part.name}: not begun, {run.left():.0f} s are left")
                continue
            run.part(part, machine, facts)
        for file in held:
            os.close(file)
    run.say(f"{run.failed} failed, {run.skipped} skipped; {out} has the report and the ledger's lines")
    return int(run.failed != 0)


def merge(out: pathlib.Path, folder: pathlib.Path) -> None:
    """Lines of parts that ran replace the earlier ones; the page is made of all."""
    path = folder / "cuda.jsonl"
    known, new = Ledger(path).lines, Ledger(out / "cuda.jsonl").lines
    by_name = {part.name: part for part in PARTS}

    def is_replaced(line: dict) -> bool:
        part = by_name.get(line["part"])
        return part is None or any(line["part"] == one["part"] and card_fits(part, line, one["device"]) for one in new)

    kept = [line for line in known if not is_replaced(line)]
    order = [part.name for part in PARTS]
    lines = sorted(kept + new, key=lambda line: order.index(line["part"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "cuda.md").write_text("\n".join(page(Ledger(path))) + "\n")


def page(ledger: Ledger) -> Iterator[str]:
    yield from ("# CUDA on a device", "", "Which parts of the CUDA side has a device run, and with which figures?",
                "`kernels/cu/check-on-gpu.sh --merge` makes this page of `cuda.jsonl`. [CUDA](../CUDA.md#tests) describes "
                "the parts.", "", "| part | verdict | expected | s | device | driver | revision | date |",
                "|-|-|-|-|-|-|-|-|")
    for part in PARTS:
        lines = [line for line in ledger.lines if line["part"] == part.name and "verdict" in line]
        for line in lines or [None]:
            found = [f"{line['verdict']}{line['why'] and ': ' + line['why']}", part.expected, str(line["seconds"]),
                     line["device"], line["driver"], line["revision"], line["date"]] if line else ["not yet"]
            yield "| " + " | ".join([part.name, *(cell.replace("|", "/") for cell in found)]) + " |"
    for part in PARTS:
        figures = [line["figure"] for line in ledger.lines if line["part"] == part.name and "figure" in line]
        named = [figure for figure in figures if "name" in figure]
        if figures:
            yield from ("", f"## {part.name}", "")
        if named:
            columns = [column for column in COLUMNS if any(column[0] in figure for figure in named)]
            yield "| " + " | ".join(["what", *(head for _, head, _ in columns)]) + " |"
            yield "|" + "-|" * (1 + len(columns))
            for figure in named:
                cells = [cell(figure.get(field), unit) for field, _, unit in columns]
                yield "| " + " | ".join([str(figure["name"]), *cells]) + " |"
        for figure in figures:
            if "name" not in figure:
                text = ", ".join(f"{key} {value}" for key, value in figure.items()).replace("|", "/")
                yield from textwrap.wrap(text, 118, initial_indent="- ", subsequent_indent="  ")


# A field of psbench's results, its heading, and what it is divided by.
COLUMNS = (
    ("elements", "elements", 1), ("seconds", "s", 1), ("latency_us_p50", "us", 1), ("bytes_per_second", "GB/s", 1e9),
    ("ceiling_bytes_per_second", "ceiling GB/s", 1e9), ("ratio_to_ceiling", "ratio", 1), ("ratio_low", "low", 1),
    ("ratio_high", "high", 1), ("ratio_to_torch", "torch", 1), ("ratio_to_torch_compiled", "torch.compile", 1),
    ("ratio_to_built_in", "built-in", 1), ("goal", "goal", 1), ("found", "found", 1), ("verdict", "verdict", 1),
    ("wrong", "wrong", 1),
)


def cell(value: object, unit: float) -> str:
    if isinstance(value, float) or unit != 1 and isinstance(value, int):
        return f"{value / unit:.3g}" if abs(value / unit) < 1000 else f"{value / unit:.0f}"
    return "" if value is None else str(value).replace("|", "/")


class Digits:
    """Servers and trainers of the digits: a device that is killed has the model of a processor that is not."""

    def __init__(self, pserver: str, folder: pathlib.Path, device: str) -> None:
        self.pserver, self.folder, self.device = pserver, folder, device
        folder.mkdir(parents=True)
        self.epochs = "4" if STANDIN else "8"

    def serve(self, bind: str) -> str:
        """Starts the server, and returns its address when it is ready."""
        log = (self.folder / "server.log").open("a")
        self.server = subprocess.Popen(
            [self.pserver, "serve", "--bind", bind, "--trainers", "2", "--merge", "mean", "--device", self.device,
             "--device-least", "1", "--checkpoint-dir", str(self.folder / "checkpoints"),
             "--checkpoint-interval-seconds", "1", "--model-dir", str(self.folder / "models")],
            stdout=subprocess.PIPE, stderr=log, text=True)
        words = self.server.stdout.readline().split()
        if words[:1] != ["ready"]:
            raise SystemExit(f"the server is not ready:\n{(self.folder / 'server.log').read_text()}")
        return words[1]

    def trainer(self, address: str, rank: int) -> subprocess.Popen:
        # A trainer ends when its input is closed.
        return subprocess.Popen(
            [self.pserver, "quickstart-trainer", "--coordinator", address, "--trainer", str(rank), "--trainers", "2",
             "--servers", "1", "--mode", "sync", "--epochs", self.epochs, "--seed", "1", "--optimizer", ADAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self.folder / f"words.{rank}").open("w"), text=True)

    def train(self, is_killed: bool) -> bytes:
        """The bytes of the trained model."""
        address = self.serve("tcp://127.0.0.1:0")
        trainers = [self.trainer(address, rank) for rank in range(2)]
        trainers[0].stdin.write("finish\n")
        trainers[0].stdin.flush()
        epochs = 0
        last = ""
        for line in trainers[0].stdout:
            last, epochs = line, epochs + ("epoch" in line)
            if is_killed and epochs == 2 and "epoch" in line:
                self.server.kill()
                killed = time.monotonic()
                self.server.wait()
                self.serve(address)
                seconds = time.monotonic() - killed
                print(json.dumps({"name": "kill -9 of a server to its being ready again", "seconds": seconds}))
        for rank, trainer in enumerate(trainers):
            if trainer.wait() != 0:
                log = (self.folder / "server.log").read_text()
                raise SystemExit(f"trainer {rank}: {(self.folder / f'words.{rank}').read_text()}\n{log}")
        if is_killed and epochs < 2:
            raise SystemExit(f"{epochs} epochs: the server was never killed")
        self.server.terminate()
        if self.server.wait() != 0:
            raise SystemExit(f"the server ended with {self.server.returncode}")
        log = (self.folder / "server.log").read_text()
        for line in sorted({line.split("device: ")[1] for line in log.splitlines() if "device: " in line}):
            print(f"device: {line}")
        for line in log.splitlines():
            if "WARN" in line:
                print(line)
        print(f"accuracy {json.loads(last)['accuracy']}")
        return (self.folder / "models/digits.safetensors").read_bytes()


def check_digits(pserver: str, work: pathlib.Path) -> None:
    models = [Digits(pserver, work / "digits" / device.replace(":", "-"), device).train(is_killed)
              for device, is_killed in (("cpu", False), ("cuda:0", True))]
    sums = [hashlib.sha256(model).hexdigest() for model in models]
    print(f"cpu  {sums[0]}\ncuda {sums[1]}")
    if sums[0] != sums[1]:
        raise SystemExit("the models differ")
    print("the models are equal")


def main() -> int:
    parser = argparse.ArgumentParser(prog="check-on-gpu.sh", description=__doc__.split("\n\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--next", type=float, metavar="SECONDS")
    what.add_argument("--parts", metavar="P,P")
    what.add_argument("--stale", action="store_true")
    what.add_argument("--merge", action="store_true")
    # Said by the script to itself, and by what makes a kit.
    what.add_argument("--digits", nargs=2, help=argparse.SUPPRESS)
    what.add_argument("--sources", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ledger", type=pathlib.Path, default=ROOT / "docs/reports", metavar="FOLDER")
    parser.add_argument("out", nargs="?", type=pathlib.Path, metavar="OUT")
    options = parser.parse_args()
    if options.digits:
        check_digits(options.digits[0], pathlib.Path(options.digits[1]))
        return 0
    if options.sources:
        print(all_sources())
        return 0
    ledger = Ledger(options.ledger / "cuda.jsonl")
    if options.stale:
        for part in PARTS:
            print(f"{part.name}: {ledger.why_stale(part, None) or 'not stale'}")
        return 0
    if options.out is None:
        parser.error("OUT is missing: a folder for what the run leaves")
    if options.merge:
        merge(options.out, options.ledger)
        return 0
    parts = options.parts and options.parts.split(",")
    unknown = set(parts or ()) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; expected some of "
                     f"{', '.join(part.name for part in PARTS)}")
    return visit(parts, options.next or sum(part.limit for part in PARTS), options.out.absolute(), ledger)


if __name__ == "__main__":
    sys.exit(main())
