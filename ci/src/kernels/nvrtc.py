"""Compiles CUDA C++ with the NVRTC of this virtual environment: nvrtc.py ARCHITECTURE SOURCE INTO.

Writes the artifact to INTO and the compiler's report to INTO.log. A cubin for sm_*, PTX for compute_*.
"""

import ctypes
import glob
import sys

architecture, source, into = sys.argv[1:]
found = glob.glob(sys.prefix + "/lib/python3*/site-packages/nvidia/*/lib")
folder = next(path for path in found if glob.glob(path + "/libnvrtc.so.*"))
for builtins in glob.glob(folder + "/libnvrtc-builtins.so.*"):
    ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
nvrtc = ctypes.CDLL(glob.glob(folder + "/libnvrtc.so.*")[0])


def check(result):
    if result != 0:
        raise SystemExit(f"NVRTC answers {result}")


def text(kind, program):
    size = ctypes.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
    room = ctypes.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{kind}")(program, room))
    return room.raw


is_cubin = architecture.startswith("sm_")
program = ctypes.c_void_p()
with open(source, "rb") as file:
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), file.read(), b"pserver.cu", 0, None, None))
options = [f"--gpu-architecture={architecture}".encode(), b"--fmad=false", b"--std=c++17"]
if is_cubin:
    options.append(b"--ptxas-options=-v")
result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
log = text("ProgramLog", program)
with open(into + ".log", "wb") as file:
    file.write(log.rstrip(b"\0"))
if result != 0:
    raise SystemExit(log.decode(errors="replace"))
artifact = text("CUBIN" if is_cubin else "PTX", program)
if not is_cubin:
    # Without comments and indentation, which are a tenth of it; the zero at the end stays.
    lines = (b" ".join(line.split(b"//")[0].split()) for line in artifact.split(b"\n"))
    artifact = b"\n".join(line for line in lines if line)
with open(into, "wb") as file:
    file.write(artifact)
