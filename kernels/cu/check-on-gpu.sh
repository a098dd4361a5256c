#!/bin/sh
# Checks the CUDA side on a machine that has a device, and writes what was found to one file:
#
#   kernels/cu/check-on-gpu.sh [REPORT]      target/gpu-report.txt unless said otherwise
#
# The suite and the job of kernels/src/cuda/tests run on the device (every bit is that of the plain form, and the plain
# form's digest is committed), once more under compute-sanitizer where there is one, and psbench measures kernels and
# server steps beside copies that it times in the same run. Without a device it says so, and ends well unless
# PSERVER_REQUIRE has `cuda`.
set -eu
cd "$(dirname "$0")/../.."
report=${1:-target/gpu-report.txt}

if ! nvidia-smi -L >/dev/null 2>&1 && [ ! -e /dev/nvidia0 ]; then
    echo "SKIPPED: cuda: no CUDA device"
    case ",${PSERVER_REQUIRE:-}," in
    *,cuda,*)
        echo "cuda is required here" >&2
        exit 1
        ;;
    esac
    if [ -n "${PSERVER_SKIP_REPORT:-}" ]; then
        echo "SKIPPED: cuda: no CUDA device" >>"$PSERVER_SKIP_REPORT"
    fi
    exit 0
fi

mkdir -p "$(dirname "$report")"
: >"$report"
failed=0
# A heading, and a command whose output goes to the report and to the terminal.
section() {
    heading=$1
    shift
    printf '\n== %s\n$ %s\n' "$heading" "$*" | tee -a "$report"
    # `tee` would hide how the command ended.
    if "$@" >"$report.section" 2>&1; then verdict=passed; else
        verdict=FAILED
        failed=1
    fi
    tee -a "$report" <"$report.section"
    rm -f "$report.section"
    echo "-- $heading: $verdict" | tee -a "$report"
}

date -u +'%Y-%m-%dT%H:%M:%SZ' >>"$report"
git rev-parse HEAD >>"$report" 2>/dev/null || true
section hardware nvidia-smi
grep -m1 'model name' /proc/cpuinfo >>"$report" || true

PSERVER_REQUIRE="${PSERVER_REQUIRE:+$PSERVER_REQUIRE,}cuda"
export PSERVER_REQUIRE
section "the suite and the job on the device" \
    cargo test --release -p pserver-kernels --lib -- --nocapture cuda::tests::device

# The program that cargo has just built.
tests=$(cargo test --release -p pserver-kernels --lib --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck; do
        section "compute-sanitizer, $tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$tests" --exact cuda::tests::device::a_job_on_the_device_has_the_committed_digest
    done
else
    echo "SKIPPED: compute-sanitizer: it is not installed" | tee -a "$report"
    if [ -n "${PSERVER_SKIP_REPORT:-}" ]; then
        echo "SKIPPED: compute-sanitizer: it is not installed" >>"$PSERVER_SKIP_REPORT"
    fi
fi

section "kernels and server steps" cargo run --release -q -p pserver-bench --bin psbench -- \
    kernels --device cuda --rule sum,sgd,momentum,adam,adamw,lion --elements 100000000

if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; then
    section "torch: a sum, then its fused optimizer" \
        python3 bench/peers/torch_cuda.py --rule adam,adamw --elements 100000000
else
    echo "SKIPPED: torch: there is no torch with CUDA" | tee -a "$report"
    if [ -n "${PSERVER_SKIP_REPORT:-}" ]; then
        echo "SKIPPED: torch: there is no torch with CUDA" >>"$PSERVER_SKIP_REPORT"
    fi
fi

echo "the report is $report"
exit "$failed"
