#!/bin/sh
# Checks the CUDA side on a machine that has a device, and writes what was found to one file:
#
#   kernels/cu/check-on-gpu.sh [--parts P,P] [--append] [--markdown FILE] [--elements N] [--step-elements N]
#       [--limit SECONDS] [REPORT]
#
#   REPORT             everything that was written; target/gpu-report.txt unless said otherwise
#   --parts P,P        some of build,suite,tables,memcheck,racecheck,digits,goals,adamw,rules; all unless said otherwise
#   --append           the report goes on behind what is there: parts may be run one by one, also on several days
#   --markdown FILE    a page for docs/reports of all that the report has: hardware, what passed, every figure with its
#                      ceiling, every goal; `--append --parts page` makes it of a report alone, without a device
#   --elements N       of the tensors that goals are judged by (1000000000; psbench takes fewer where memory is short)
#   --step-elements N  of a server's step (134217728, likewise)
#   --limit SECONDS    what takes longer has failed, and the next part begins; 540 unless said otherwise
#
# The parts: all programs are built; the suite and the job of kernels/src/cuda/tests; the tables of kernels/tests/cuda,
# whose digests are committed; memcheck, and racecheck, over the kernels that share memory, sort, and update rows;
# servers that learn the digits with two trainers, are killed once, and must end with the model of a processor; psbench
# with Adam, built in and as a user's text, and a verdict for each goal; with AdamW beside torch; with the other rules.
# Every line is in the report as soon as it is written. What cannot be run is skipped, said and counted
# (docs/TESTING.md, "Skips"). Without a device it says so, and ends well unless PSERVER_REQUIRE has `cuda`.
#
# Libraries and tools are those that the host has, in the usual places, else they come from PyPI into target/gpu-tools.
# A machine without Rust, or where nothing can be downloaded, takes what `cargo ci gpu-kit` made elsewhere, or what is
# named one by one, from the project's root or absolutely:
#
#   PSERVER_KIT=...          a folder with the four programs below, under the names in brackets, and in a file
#                            `revision` what they were made of
#   PSERVER_GPU_TESTS=...    the tests of pserver-kernels (`cargo test --release -p pserver-kernels --lib`) [suite]
#   PSERVER_GPU_TABLES=...   the tables (`cargo test --release -p pserver-kernels --test cuda`) [tables]
#   PSBENCH=...              psbench (`cargo build --release -p pserver-bench --bin psbench`) [psbench]
#   PSERVER=...              pserver (`cargo build --release -p pserver --bin pserver`) [pserver]
#   PSERVER_CUDA=...         the folder of libcuda
#   PSERVER_NVRTC=...        the folder of libnvrtc, no newer than the driver
#   PSERVER_SANITIZER=...    compute-sanitizer
#   PSERVER_TORCH=...        a Python that has torch with CUDA; python3 unless said otherwise
#
# Half an hour with a device, start and transfers included, and ten minutes a command: `cargo ci gpu-kit` before; then
# with PSERVER_KIT=target/gpu-kit and `--append` one command for each line, in this order, so that what matters most is
# known first. The limits are 24 minutes together, and each command ends within ten:
#
#   --parts goals    --limit 440 REPORT
#   --parts tables   --limit 240 REPORT
#   --parts digits   --limit 180 REPORT
#   --parts suite    --limit 240 REPORT
#   --parts memcheck --limit 300 REPORT
#
# On another day `adamw`, `rules` and `racecheck`; `--append --parts page --markdown FILE REPORT` after.
#
# PSERVER_GPU_STANDIN=1 runs it all on the simulated driver, whose environment the caller has set
# (`cargo ci gpu` does that); figures then mean nothing.
set -eu
cd "$(dirname "$0")/../.."
script=kernels/cu/check-on-gpu.sh
page= elements=1000000000 step_elements=134217728 limit=540 append= digits=
parts=build,suite,tables,memcheck,racecheck,digits,goals,adamw,rules
report=target/gpu-report.txt
while [ $# != 0 ]; do
    case "$1" in
    --markdown) page=$2 && shift ;;
    --elements) elements=$2 && shift ;;
    --step-elements) step_elements=$2 && shift ;;
    --parts) parts=$2 && shift ;;
    --limit) limit=$2 && shift ;;
    --append) append=1 ;;
    # What the script says to itself, so that a part of it can be ended when it takes too long.
    --digits) digits=$2 && shift ;;
    -*) echo "$1: expected --parts, --append, --markdown, --elements, --step-elements or --limit" >&2 && exit 2 ;;
    *) report=$1 ;;
    esac
    shift
done
tools=target/gpu-tools
standin=${PSERVER_GPU_STANDIN:-}
# On the stand-in every part begins and ends, and does little: its figures mean nothing, and all of the tables are run
# there by `cargo test`.
epochs=8 counts= some=
[ -z "$standin" ] || { epochs=4 && counts='--gradients 1,8 -n 2' && some=reductions::every_function; }
watched='rows::ids rows::rows reductions::a_norm reductions::scalars updates::a_sum updates::a_copy'
failed=0 skipped=0
work=$(mktemp -d)
servers=
# Nothing that was started outlives this.
trap 'for one in $servers; do kill -9 "$one" 2>/dev/null || true; done; rm -rf "$work"' EXIT
trap 'exit 143' TERM

say() { echo "$*" | tee -a "$report"; }

# What is not checked, and why (docs/TESTING.md, "Skips").
skip() {
    say "SKIPPED: $1: $2"
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
    begun=$(date +%s)
    # If this is killed, the report has all output until then. `tee` hides how the command ended.
    { timeout -k 10 "$limit" "$@" 2>&1 && code=0 || code=$? && echo "$code" >"$work/code"; } |
        tee "$work/section" | tee -a "$report"
    seconds=$(($(date +%s) - begun))
    case "$(cat "$work/code")" in
    0) verdict=passed ;;
    124 | 137) verdict="FAILED: it took longer than $limit s" ;;
    *) verdict=FAILED ;;
    esac
    # What a sanitizer says where it cannot work: some virtual machines do not let it at their devices.
    for words in 'Device not supported' 'terminated before first instrumented API call'; do
        if [ "$verdict" != passed ] && grep -q "$words" "$work/section"; then
            skip "$heading" "it says: $words"
            return
        fi
    done
    if [ "$verdict" != passed ]; then failed=1; fi
    say "-- $heading: $verdict, $seconds s"
}

# The figures of a part go into the report as they stand on the page.
figures() {
    if [ -s "$1" ]; then { echo '== page' && cat "$1" && echo '== end of page'; } >>"$report"; fi
}

# Prints one of the programs: what its variable names, what the kit has, or what cargo builds.
program() {
    case "$1" in
    suite) named=${PSERVER_GPU_TESTS:-} && set -- "$1" test -p pserver-kernels --lib --no-run ;;
    tables) named=${PSERVER_GPU_TABLES:-} && set -- "$1" test -p pserver-kernels --test cuda --no-run ;;
    psbench) named=${PSBENCH:-} && set -- "$1" build -p pserver-bench --bin psbench ;;
    pserver) named=${PSERVER:-} && set -- "$1" build -p pserver --bin pserver ;;
    esac
    if [ -n "$named" ]; then
        echo "$named"
    elif [ -n "${PSERVER_KIT:-}" ]; then
        echo "$PSERVER_KIT/$1"
    elif command -v cargo >/dev/null 2>&1; then
        shift
        cargo "$@" --release --message-format=json-render-diagnostics |
            sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
    fi
}

# Whether there is such a program, and it starts here; else the part that needs it is skipped.
found() {
    if ! command -v "$2" >/dev/null 2>&1; then
        skip "$1" "there is no program '$2', and cargo made none; the head of $script says how to name one"
    elif ! "$2" --help >"$work/start" 2>&1; then
        skip "$1" "$2 does not start: $(head -n 1 "$work/start")"
    else
        return 0
    fi
    return 1
}

# The first of some folders that has a file of this name.
folder_of() {
    name=$1
    shift
    for folder in "$@"; do
        for file in "$folder"/$name; do
            if [ -e "$file" ]; then echo "$folder" && return 0; fi
        done
    done
    return 1
}

# Whether the loader finds a library by itself.
loads() { PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q "$1"; }

also_in() { LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" && export LD_LIBRARY_PATH; }

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
        # A trainer ends when its input is closed; here the shell keeps it open.
        mkfifo "$folder/orders.$trainer"
        eval "exec $((trainer + 3))<>\"$folder/orders.$trainer\""
        "$pserver" quickstart-trainer --coordinator "$address" --trainer "$trainer" --trainers 2 --servers 1 \
            --mode sync --epochs "$epochs" --seed 1 \
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

# Of all that the report has: where, what became of each part, figures.
make_page() {
    printf '# CUDA kernels on a device\n\nMade by `%s`.\n\n' "$script"
    sed -n 's/^== begun /- /p' "$report" | sort -u
    if grep -q '^== begun .*stand' "$report"; then
        printf '\nOn the driver that stands in for a device: the figures below mean nothing.\n'
    fi
    printf '\n| part | verdict |\n| --- | --- |\n'
    sed -n -e '/^-- .*: \(passed\|FAILED\)/{s/^-- \(.*\): \(passed\|FAILED\)/| \1 | \2/;s/$/ |/;p;}' \
        -e '/^SKIPPED: /{s/^SKIPPED: \([^:]*\): /| \1 | skipped: /;s/$/ |/;p;}' "$report"
    sed -n '/^== page$/,/^== end of page$/p' "$report" | sed -e 's/^== page$//' -e '/^== end of page$/d'
}

if [ -n "$digits" ]; then
    pserver=$digits
    digits_are_equal
    exit
fi

mkdir -p "$(dirname "$report")"
[ -n "$append" ] && [ -e "$report" ] || : >"$report"
if [ "$parts" = page ]; then
    make_page >"${page:?--parts page is for --markdown FILE}"
    exit
fi

PATH="$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin"
if [ -z "$standin" ] && ! nvidia-smi -L >/dev/null 2>&1 && ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
    skip cuda "no CUDA device"
    exit "$failed"
fi

device=$(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader 2>/dev/null || true)
[ -z "$standin" ] || device='the driver that stands in for one'
processor=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
revision=$(cat "${PSERVER_KIT:-}/revision" 2>/dev/null || git rev-parse --short HEAD 2>/dev/null || echo unknown)
say "== begun $(date -u +%Y-%m-%d), revision $revision, device: ${device:-unknown};" \
    "$(nproc) x ${processor:-a processor}"
if command -v nvidia-smi >/dev/null 2>&1; then section hardware nvidia-smi; else
    skip nvidia-smi "it is not installed; the tests name the device"
fi

# The driver and the compiler of users' rules; the stand-in has its own.
if [ -n "${PSERVER_CUDA:-}" ]; then
    also_in "$PSERVER_CUDA"
elif [ -z "$standin" ] && ! loads 'libcuda\.so\.1'; then
    if folder=$(folder_of libcuda.so.1 /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/wsl/lib /usr/lib64 \
        /usr/lib/x86_64-linux-gnu); then also_in "$folder"; fi
fi
if [ -n "${PSERVER_NVRTC:-}" ]; then
    also_in "$PSERVER_NVRTC"
elif [ -z "$standin" ] && ! loads libnvrtc; then
    packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null || true)
    # shellcheck disable=SC2086
    # One that is newer than the driver does not do, so every kind there is may be looked at.
    older=$(folder_of libnvrtc.so.12 /usr/local/cuda/lib64 /usr/local/cuda-12*/lib64 "$packages"/nvidia/cuda_nvrtc/lib) &&
        also_in "$older"
    newer=$(folder_of libnvrtc.so.13 /usr/local/cuda/lib64 /usr/local/cuda-13*/lib64 "$packages"/nvidia/cu13/lib) &&
        also_in "$newer"
    if [ -n "$older$newer" ]; then
        say "NVRTC is in $newer${newer:+ }$older"
    elif install nvidia-cuda-nvrtc==13.0.88; then
        also_in "$(dirname "$(find "$PWD/$tools/lib" -name libnvrtc.so.13 | head -n 1)")"
    else
        skip nvrtc "the host has none, and it cannot be installed: what is not shipped cannot be compiled"
    fi
fi
PSERVER_REQUIRE="${PSERVER_REQUIRE:+$PSERVER_REQUIRE,}cuda"
export PSERVER_REQUIRE

if has_part build; then
    for one in suite tables psbench pserver; do
        program "$one" >"$work/program"
        if found "$one" "$(cat "$work/program")"; then say "$one is $(cat "$work/program")"; fi
    done
fi
if has_part suite; then
    tests=$(program suite)
    # One at a time: the suite compares what is free on the device before and after.
    if found suite "$tests"; then
        # The stand-in compiles each rule with g++, which takes seconds.
        only=cuda::tests::device${standin:+::a_job}
        section "the suite and the job" "$tests" --nocapture --test-threads=1 "$only"
    fi
fi
tables=
if has_part tables || has_part memcheck || has_part racecheck; then tables=$(program tables); fi
if has_part tables && found tables "$tables"; then
    # shellcheck disable=SC2086
    section "the tables of every kernel, and their digests" env PSERVER_LAUNCHERS=device "$tables" --nocapture $some
fi

sanitizer=
if has_part memcheck || has_part racecheck; then
    sanitizer=${PSERVER_SANITIZER:-$(command -v compute-sanitizer || true)}
    if [ -z "$sanitizer" ] && folder=$(folder_of compute-sanitizer /usr/local/cuda-1[23]*/bin); then
        sanitizer=$folder/compute-sanitizer
    fi
    # The package of 13.0 lacks programs that it starts.
    if [ -z "$sanitizer$standin" ] && install nvidia-cuda-sanitizer-api==13.5.25; then
        sanitizer=$(find "$PWD/$tools/lib" -path '*/bin/compute-sanitizer' | head -n 1)
        chmod -R +x "$(dirname "$sanitizer")/../bin" "$(dirname "$sanitizer")/../compute-sanitizer" || true
    fi
    [ -n "$sanitizer" ] || skip compute-sanitizer "it is not installed, and cannot be"
fi
if [ -n "$sanitizer" ] && found sanitizer "$tables"; then
    # A name that no test has any more would be watched in vain.
    for name in $watched; do
        if ! "$tables" --list "$name" | grep -q ': test$'; then say "there is no test $name" && failed=1; fi
    done
else
    sanitizer=
fi
for tool in memcheck racecheck; do
    if [ -n "$sanitizer" ] && has_part "$tool" && found "$tool" "$sanitizer"; then
        # shellcheck disable=SC2086
        section "compute-sanitizer, $tool" env PSERVER_LAUNCHERS=device "$sanitizer" --tool "$tool" \
            --error-exitcode 1 "$tables" --test-threads=1 ${some:-$watched}
    fi
done

if has_part digits; then
    pserver=$(program pserver)
    if found digits "$pserver"; then
        section "the digits, killed once, on a device as on the processor" sh "$script" --digits "$pserver"
    fi
fi

bench=
if has_part goals || has_part adamw || has_part rules; then bench=$(program psbench); fi
with_torch=
if [ -n "$bench" ] && { has_part goals || has_part adamw; }; then
    torch=${PSERVER_TORCH:-python3}
    if [ -n "$standin" ] || timeout 120 "$torch" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
        >/dev/null 2>&1; then
        with_torch="--torch $torch"
    else
        skip torch "there is no torch with CUDA"
    fi
fi
measured() {
    heading=$1
    shift
    # shellcheck disable=SC2086
    section "$heading" "$bench" kernels --device cuda "$@" $counts --markdown "$work/figures.md"
    figures "$work/figures.md"
    rm -f "$work/figures.md"
}
if has_part goals && found goals "$bench"; then
    # shellcheck disable=SC2086
    measured goals --rule adam,adam-text --elements "$elements" --step-elements "$step_elements" --goals $with_torch
fi
if has_part adamw && found adamw "$bench"; then
    # shellcheck disable=SC2086
    measured "AdamW beside torch" --rule adamw --elements "$elements" --step-elements "$step_elements" $with_torch
fi
if has_part rules && found rules "$bench"; then
    measured "other rules" --rule sum,sgd,momentum,adagrad,lion --elements "$((elements / 10))" \
        --step-elements "$((step_elements / 4))"
fi

if [ -n "$page" ]; then make_page >"$page" && say "the page is $page"; fi
say "the report is $report; $skipped skipped"
exit "$failed"
