#!/bin/sh
# Checks the CUDA side on a machine that has a device, and writes what was found to one file:
#
#   kernels/cu/check-on-gpu.sh [--markdown FILE] [--elements N] [--step-elements N] [--parts P,P] [REPORT]
#
#   REPORT             everything that was written; target/gpu-report.txt unless said otherwise
#   --markdown FILE    a page for docs/reports: hardware, what passed, every figure with its ceiling, every goal
#   --elements N       of the tensors that goals are judged by (1000000000; psbench takes fewer where memory is short)
#   --step-elements N  of a server's step (134217728, likewise)
#   --parts P,P        some of suite,tables,sanitizer,digits,goals,rules; all unless said otherwise
#
# The parts: the suite and the job of kernels/src/cuda/tests; the tables of kernels/tests/cuda, whose digests are
# committed; memcheck and racecheck over the kernels that share memory, sort, and update rows; servers that learn the
# digits with two trainers, are killed once, and must end with the model of a processor; psbench with a verdict for each
# goal; psbench with the other rules. What cannot be run is skipped, said and counted (docs/TESTING.md, "Skips").
# Without a device it says so, and ends well unless PSERVER_REQUIRE has `cuda`.
#
# Compilers and tools come from PyPI, into target/gpu-tools. A machine without Rust or without PyPI takes what was built
# or unpacked elsewhere, named from the project's root or absolutely:
#
#   PSERVER_GPU_TESTS=...    the tests of pserver-kernels (`cargo test --release -p pserver-kernels --lib --no-run`)
#   PSERVER_GPU_TABLES=...   the tables (`cargo test --release -p pserver-kernels --test cuda --no-run`)
#   PSBENCH=...              psbench (`cargo build --release -p pserver-bench --bin psbench`)
#   PSERVER=...              pserver (`cargo build --release -p pserver --bin pserver`)
#   PSERVER_NVRTC=...        the folder of libnvrtc, 13.0 or older than the driver
#   PSERVER_SANITIZER=...    compute-sanitizer
#   PSERVER_TORCH=...        a Python that has torch with CUDA; python3 unless said otherwise
#
# PSERVER_GPU_STANDIN=1 runs it all on the driver that stands in for a device, whose environment the caller has set
# (`cargo ci gpu` does that); figures then mean nothing.
set -eu
cd "$(dirname "$0")/../.."
page= elements=1000000000 step_elements=134217728 parts=suite,tables,sanitizer,digits,goals,rules
report=target/gpu-report.txt
while [ $# != 0 ]; do
    case "$1" in
    --markdown) page=$2 && shift ;;
    --elements) elements=$2 && shift ;;
    --step-elements) step_elements=$2 && shift ;;
    --parts) parts=$2 && shift ;;
    -*) echo "$1: expected --markdown, --elements, --step-elements or --parts" >&2 && exit 2 ;;
    *) report=$1 ;;
    esac
    shift
done
tools=target/gpu-tools
standin=${PSERVER_GPU_STANDIN:-}
failed=0 skipped=0
mkdir -p "$(dirname "$report")"
: >"$report"
: >"$report.verdicts"
work=$(mktemp -d)
servers=
# Nothing that was started outlives this.
trap 'for one in $servers; do kill -9 "$one" 2>/dev/null || true; done; rm -rf "$work"' EXIT

say() { echo "$*" | tee -a "$report"; }

# What is not checked, and why (docs/TESTING.md, "Skips").
skip() {
    say "SKIPPED: $1: $2"
    echo "| $1 | skipped: $2 |" >>"$report.verdicts"
    skipped=$((skipped + 1))
    case ",$(printf %s "${PSERVER_REQUIRE:-}" | tr -d ' \t')," in
    *,"$1",*) echo "$1 is required here" >&2 && failed=1 ;;
    esac
    if [ -n "${PSERVER_SKIP_REPORT:-}" ]; then echo "SKIPPED: $1: $2" >>"$PSERVER_SKIP_REPORT"; fi
}

has_part() { case ",$parts," in *,"$1",*) return 0 ;; *) return 1 ;; esac }

# A heading, and a command whose output goes to the report and to the terminal.
section() {
    heading=$1
    shift
    printf '\n== %s\n$ %s\n' "$heading" "$*" | tee -a "$report"
    # `tee` would hide how the command ended.
    if "$@" >"$work/section" 2>&1; then verdict=passed; else verdict=FAILED; fi
    tee -a "$report" <"$work/section"
    # What a sanitizer says where it cannot work: some virtual machines do not let it at their devices.
    for words in 'Device not supported' 'terminated before first instrumented API call'; do
        if [ "$verdict" = FAILED ] && grep -q "$words" "$work/section"; then
            skip "$heading" "it says: $words"
            return
        fi
    done
    if [ "$verdict" = FAILED ]; then failed=1; fi
    say "-- $heading: $verdict"
    echo "| $heading | $verdict |" >>"$report.verdicts"
}

# Prints the program that a variable names, or that cargo builds; nothing where neither is to be had.
program() {
    if [ -n "$1" ]; then
        echo "$1"
    elif command -v cargo >/dev/null 2>&1; then
        shift
        cargo "$@" --release --message-format=json-render-diagnostics |
            sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
    fi
}

# Whether there is such a program; else the part that needs it is skipped.
found() {
    if command -v "$2" >/dev/null 2>&1; then return 0; fi
    skip "$1" "there is no program '$2' and no cargo; $3 names one"
    return 1
}

# Installs a package of PyPI, once; fails where it cannot be had.
install() {
    if [ -e "$tools/$1" ]; then return 0; fi
    command -v python3 >/dev/null 2>&1 || return 1
    [ -x "$tools/bin/python" ] || python3 -m venv "$tools" >/dev/null 2>&1 || return 1
    "$tools/bin/pip" install --quiet --retries 1 --timeout 15 "$1" >/dev/null 2>&1 || return 1
    : >"$tools/$1"
}

# Trains the digits with two trainers: a device, a folder, and whether the server is killed on the way.
digits() {
    folder=$2
    mkdir -p "$folder"
    serve "$1" "$folder" tcp://127.0.0.1:0 || return 1
    address=$(sed -n 's/^ready //p' "$folder/ready")
    for trainer in 0 1; do
        # A trainer ends when nobody can write to its input any more; here the shell can.
        mkfifo "$folder/orders.$trainer"
        eval "exec $((trainer + 3))<>\"$folder/orders.$trainer\""
        "$pserver" quickstart-trainer --coordinator "$address" --trainer "$trainer" --trainers 2 --servers 1 \
            --mode sync --epochs 8 --seed 1 \
            --optimizer 'optimizer: Adam adam { } lr_policy: Const const_lr { learning_rate: 0.002 }' \
            <"$folder/orders.$trainer" >"$folder/trainer.$trainer" 2>"$folder/words.$trainer" &
        eval "trainer_$trainer=$!"
        servers="$servers $!"
    done
    echo finish >&3
    if [ "$3" = killed ]; then
        until [ "$(grep -c epoch "$folder/trainer.0")" -ge 2 ]; do
            kill -0 "$trainer_0" || return 1
            sleep 0.02
        done
        kill -9 "$server" || return 1
        wait "$server" 2>/dev/null || true
        kill -0 "$trainer_0" && kill -0 "$trainer_1" && echo "the server was killed" || return 1
        serve "$1" "$folder" "$address" || return 1
    fi
    for trainer in "$trainer_0" "$trainer_1"; do
        wait "$trainer" || { cat "$folder"/words.* "$folder/server.log" && return 1; }
    done
    exec 3>&- 4>&-
    kill -TERM "$server" && wait "$server" || return 1
    tail -n 1 "$folder/trainer.0"
    sed -n 's/.*device: /device: /p' "$folder"/server.log | sort -u
}

# Starts a server, and waits until it is ready.
serve() {
    : >"$2/ready"
    "$pserver" serve --bind "$3" --trainers 2 --merge mean --device "$1" --device-least 1 \
        --checkpoint-dir "$2/checkpoints" --checkpoint-interval-seconds 1 --model-dir "$2/models" \
        >"$2/ready" 2>>"$2/server.log" &
    server=$!
    servers="$servers $server"
    for _ in $(seq 600); do
        if grep -q '^ready ' "$2/ready"; then return 0; fi
        kill -0 "$server" 2>/dev/null || break
        sleep 0.05
    done
    cat "$2/server.log"
    return 1
}

# A device that is killed has the model of a processor that is not.
digits_are_equal() {
    digits cpu "$work/cpu" whole && digits cuda:0 "$work/cuda" killed || return 1
    for device in cpu cuda; do
        sha256sum <"$work/$device/models/digits.safetensors" >"$work/$device.sum" || return 1
    done
    echo "cpu  $(cat "$work/cpu.sum")" && echo "cuda $(cat "$work/cuda.sum")"
    cmp "$work/cpu.sum" "$work/cuda.sum"
}

if [ -z "$standin" ] && ! nvidia-smi -L >/dev/null 2>&1 && ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
    skip cuda "no CUDA device"
    exit "$failed"
fi

date -u +'%Y-%m-%dT%H:%M:%SZ' >>"$report"
git rev-parse HEAD >>"$report" 2>/dev/null || true
if command -v nvidia-smi >/dev/null 2>&1; then section hardware nvidia-smi; else
    skip nvidia-smi "it is not installed; the tests name the device"
fi
grep -m1 'model name' /proc/cpuinfo >>"$report" || true

# What compiles a user's rule; the stand-in has its own.
if [ -n "${PSERVER_NVRTC:-}" ]; then
    LD_LIBRARY_PATH="$PSERVER_NVRTC${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
elif [ -z "$standin" ] && install nvidia-cuda-nvrtc==13.0.88; then
    nvrtc=$(find "$PWD/$tools/lib" -name 'libnvrtc.so.13' | head -n 1)
    LD_LIBRARY_PATH="$(dirname "$nvrtc")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
elif [ -z "$standin" ] && ! ldconfig -p 2>/dev/null | grep -q libnvrtc; then
    skip nvrtc "it cannot be installed, and the host has none: what is not shipped cannot be compiled"
fi
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"
PSERVER_REQUIRE="${PSERVER_REQUIRE:+$PSERVER_REQUIRE,}cuda"
export PSERVER_REQUIRE

tables=
if has_part tables || has_part sanitizer; then
    tables=$(program "${PSERVER_GPU_TABLES:-}" test -p pserver-kernels --test cuda --no-run)
fi
if has_part suite; then
    tests=$(program "${PSERVER_GPU_TESTS:-}" test -p pserver-kernels --lib --no-run)
    # One at a time: the suite compares what is free on the device before and after.
    if found suite "$tests" PSERVER_GPU_TESTS; then
        # The stand-in compiles each rule with g++, which takes seconds.
        only=cuda::tests::device${standin:+::a_job}
        section "the suite and the job" "$tests" --nocapture --test-threads=1 "$only"
    fi
fi
if has_part tables && found tables "$tables" PSERVER_GPU_TABLES; then
    section "the tables of every kernel, and their digests" env PSERVER_LAUNCHERS=device "$tables" --nocapture
fi

if has_part sanitizer; then
    sanitizer=${PSERVER_SANITIZER:-$(command -v compute-sanitizer || true)}
    # The package of 13.0 lacks programs that it starts.
    if [ -z "$sanitizer$standin" ] && install nvidia-cuda-sanitizer-api==13.5.25; then
        sanitizer=$(find "$PWD/$tools/lib" -path '*/bin/compute-sanitizer' | head -n 1)
        chmod -R +x "$(dirname "$sanitizer")/../bin" "$(dirname "$sanitizer")/../compute-sanitizer" || true
    fi
    if [ -z "$sanitizer" ]; then
        skip compute-sanitizer "it is not installed, and cannot be"
    elif found compute-sanitizer "$sanitizer" PSERVER_SANITIZER && found sanitizer "$tables" PSERVER_GPU_TABLES; then
        for tool in memcheck racecheck; do
            section "compute-sanitizer, $tool" env PSERVER_LAUNCHERS=device "$sanitizer" --tool "$tool" \
                --error-exitcode 1 "$tables" --test-threads=1 rows::ids rows::rows reductions::a_norm \
                reductions::scalars updates::a_sum updates::a_copy updates::a_table
        done
    fi
fi

if has_part digits; then
    pserver=$(program "${PSERVER:-}" build -p pserver --bin pserver)
    if found digits "$pserver" PSERVER; then
        section "the digits, killed once, on a device as on the processor" digits_are_equal
    fi
fi

if has_part goals || has_part rules; then
    bench=$(program "${PSBENCH:-}" build -p pserver-bench --bin psbench)
    if found psbench "$bench" PSBENCH; then
        torch=${PSERVER_TORCH:-python3}
        with_torch="--torch $torch"
        if [ -z "$standin" ] && ! "$torch" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
            >/dev/null 2>&1; then
            skip torch "there is no torch with CUDA" && with_torch=
        fi
        if has_part goals; then
            # shellcheck disable=SC2086
            section "goals" "$bench" kernels --device cuda --rule adam,adamw,adam-text --elements "$elements" \
                --step-elements "$step_elements" --goals $with_torch --markdown "$work/1.md"
        fi
        if has_part rules; then
            section "other rules" "$bench" kernels --device cuda --rule sum,sgd,momentum,adagrad,lion \
                --elements "$((elements / 10))" --step-elements "$((step_elements / 4))" --markdown "$work/2.md"
        fi
    fi
fi

if [ -n "$page" ]; then
    {
        printf '# CUDA kernels on a device\n\nMade by `kernels/cu/check-on-gpu.sh`, %s, at revision %s.\n\n' \
            "$(date -u +%Y-%m-%d)" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
        nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader 2>/dev/null |
            sed 's/^/Device: /;s/$/./' || true
        [ -z "$standin" ] || printf 'On the driver that stands in for a device: the figures below mean nothing.\n'
        printf '\n| part | verdict |\n| --- | --- |\n'
        cat "$report.verdicts"
        for figures in "$work"/[0-9].md; do
            if [ -e "$figures" ]; then printf '\n' && cat "$figures"; fi
        done
    } >"$page"
    say "the page is $page"
fi
rm -f "$report.verdicts"
say "the report is $report; $skipped skipped"
exit "$failed"
