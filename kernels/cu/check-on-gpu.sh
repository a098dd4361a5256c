#!/bin/sh
# Checks the CUDA side on a machine that has a device: `--help`, and the head of check_on_gpu.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/check_on_gpu.py" "$@"
