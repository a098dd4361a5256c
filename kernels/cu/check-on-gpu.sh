#!/bin/sh
# Checks the CUDA side on a machine that has a device, and writes what was found to one file:
#
#   kernels/cu/check-on-gpu.sh [REPORT]      target/gpu-report.txt unless said otherwise
#
# The suite and the job of kernels/src/cuda/tests run on the device (every bit is that of the plain form, and the plain
# form's digest is committed), once more under compute-sanitizer where there is one, and psbench measures kernels and
# server steps beside copies that it times in the same run. Without a device it says so, and ends well unless
# PSERVER_REQUIRE has `cuda`.
#
# A machine without Rust runs programs that were built elsewhere, named from the project's root or absolutely:
#
#   PSERVER_GPU_TESTS=...   the tests of pserver-kernels (`cargo test --release -p pserver-kernels --lib --no-run`)
#   PSBENCH=...             psbench (`cargo build --release -p pserver-bench --bin psbench`)
set -eu
cd "$(dirname "$0")/../.."
report=${1:-target/gpu-report.txt}
failed=0
mkdir -p "$(dirname "$report")"
: >"$report"

# What is not checked, and why (docs/TESTING.md, "Skips").
skip() {
    echo "SKIPPED: $1: $2" | tee -a "$report"
    case ",$(printf %s "${PSERVER_REQUIRE:-}" | tr -d ' \t')," in
    *,"$1",*)
        echo "$1 is required here" >&2
        failed=1
        ;;
    esac
    if [ -n "${PSERVER_SKIP_REPORT:-}" ]; then echo "SKIPPED: $1: $2" >>"$PSERVER_SKIP_REPORT"; fi
}

# A heading, and a command whose output goes to the report and to the terminal.
section() {
    heading=$1
    shift
    printf '\n== %s\n$ %s\n' "$heading" "$*" | tee -a "$report"
    # `tee` would hide how the command ended.
    if "$@" >"$report.section" 2>&1; then verdict=passed; else verdict=FAILED; fi
    tee -a "$report" <"$report.section"
    # Some virtual machines do not let it at their devices.
    if [ "$verdict $1" = "FAILED compute-sanitizer" ] && grep -q 'Device not supported' "$report.section"; then
        skip compute-sanitizer "it says that the device is not supported"
        verdict=SKIPPED
    fi
    if [ "$verdict" = FAILED ]; then failed=1; fi
    rm -f "$report.section"
    echo "-- $heading: $verdict" | tee -a "$report"
}

if ! nvidia-smi -L >/dev/null 2>&1 && ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
    skip cuda "no CUDA device"
    exit "$failed"
fi

date -u +'%Y-%m-%dT%H:%M:%SZ' >>"$report"
git rev-parse HEAD >>"$report" 2>/dev/null || true
if command -v nvidia-smi >/dev/null 2>&1; then section hardware nvidia-smi; else
    skip nvidia-smi "it is not installed; the tests name the device"
fi
grep -m1 'model name' /proc/cpuinfo >>"$report" || true

tests=${PSERVER_GPU_TESTS:-}
if [ -z "$tests" ]; then
    # The program that cargo has just built.
    tests=$(cargo test --release -p pserver-kernels --lib --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
fi
bench=${PSBENCH:-}
if [ -z "$bench" ]; then
    cargo build --release -q -p pserver-bench --bin psbench
    bench=${CARGO_TARGET_DIR:-target}/release/psbench
fi
for program in "$tests" "$bench"; do
    if ! command -v "$program" >/dev/null 2>&1; then
        echo "no program: '$program'; expected one that cargo built, or PSERVER_GPU_TESTS and PSBENCH" >&2
        exit 1
    fi
done

PSERVER_REQUIRE="${PSERVER_REQUIRE:+$PSERVER_REQUIRE,}cuda"
export PSERVER_REQUIRE
# One at a time: the suite compares what is free on the device before and after.
section "the suite and the job on the device" "$tests" --nocapture --test-threads=1 cuda::tests::device

if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck; do
        section "compute-sanitizer, $tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$tests" --exact cuda::tests::device::a_job_on_the_device_has_the_committed_digest
    done
else
    skip compute-sanitizer "it is not installed"
fi

section "kernels and server steps" "$bench" \
    kernels --device cuda --rule sum,sgd,momentum,adam,adamw,lion --elements 100000000

if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; then
    section "torch: a sum, then its fused optimizer" \
        python3 bench/peers/torch_cuda.py --rule adam,adamw --elements 100000000
else
    skip torch "there is no torch with CUDA"
fi

echo "the report is $report"
exit "$failed"
