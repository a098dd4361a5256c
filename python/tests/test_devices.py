"""Memory of CUDA devices: over the stand-in driver where there is a compiler, and refused where there is no driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pserver

DRIVER = Path(__file__).parents[2] / "kernels/cu/standin/driver.cpp"


def test_a_device_without_a_driver_is_refused(job: Any) -> None:
    class OnDevice:
        __cuda_array_interface__ = {"data": (1 << 40, False), "shape": (3,), "typestr": "<f4", "version": 3}

    client = job()
    client.init_all({"w": memoryview(bytearray(12)).cast("f")}, "algorithm: 'add'")
    with pytest.raises(pserver.Refused, match="driver is not loaded in this process"):
        client.register(OnDevice())
    with pytest.raises(pserver.Refused, match="not registered; expected client.register"):
        client.push({"w": OnDevice()})


def test_steps_with_memory_of_a_device(job: Any, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the stand-in driver with")
    library = tmp_path / "libcuda.so"
    subprocess.run([compiler, "-fPIC", "-shared", "-o", library, DRIVER], check=True)
    (tmp_path / "libcuda.so.1").symlink_to(library.name)
    # Memory of the device is not the processor's: touching it is a segmentation fault.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PSERVER_STANDIN_GUARD": "1"}
    command = [sys.executable, Path(__file__).with_name("on_device.py"), job().coordinator]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout == "trained\n", ended.stderr
