"""Rounds as `psbench peers` asks for them, the same for every peer that is written in Python.

A script starts its own processes on this machine. It says who it is in its first line of JSON, then answers each line
`run ROUNDS` of standard input with one line of JSON, with `server_cpu_seconds` in it where there are processes besides
the trainers. It ends when standard input does.

What is sent, and what must come back, is what the other subcommands send: small whole numbers with a prime period, which
every second round takes back. Every element of every round is compared, outside of what is timed.
"""

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np

PERIOD = 1021
# Bytes between the counters of two trainers: two cache lines.
STRIDE = 128


class Pattern:
    """The gradients of one trainer, and the sums of all."""

    def __init__(self, trainer, trainers, elements):
        hashes = np.arange(PERIOD, dtype=np.uint64) * 0x9E3779B1 % 2**32 >> 29
        period = (hashes + 1).astype(np.float32)
        self.tile = np.resize(period, elements + PERIOD)
        self.trainer, self.trainers, self.elements = trainer, trainers, elements
        self.sum = np.zeros(elements, np.float32)

    def gradient(self, trainer, number):
        start = (number // 2 * 17 + trainer * 101) % PERIOD
        return self.tile[start : start + self.elements]

    def fill(self, number, into):
        np.multiply(self.gradient(self.trainer, number), sign(number), out=into)

    def wrong(self, number, value):
        """How many elements of a value of a round are not the sum; all of them when it has another length."""
        if value.shape != self.sum.shape:
            return self.elements
        self.sum[:] = self.gradient(0, number)
        for trainer in range(1, self.trainers):
            self.sum += self.gradient(trainer, number)
        self.sum *= np.float32(sign(number))
        return 0 if np.array_equal(value, self.sum) else int(np.count_nonzero(value != self.sum))


class Barrier:
    """Where trainers meet: each counts in a word of its own, and looks at the others'."""

    def __init__(self, handle, trainer, trainers):
        memory = mmap.mmap(handle, trainers * STRIDE)
        self.words = memoryview(memory).cast("q")
        self.own = trainer * STRIDE // 8
        self.others = [other * STRIDE // 8 for other in range(trainers) if other != trainer]

    def wait(self):
        self.words[self.own] += 1
        goal = self.words[self.own]
        for other in self.others:
            while self.words[other] < goal:
                os.sched_yield()


def sign(number):
    return 1.0 if number % 2 == 0 else -1.0


def main(peer, version, trainer, roles=None, environment=None):
    """Runs a peer.

    `trainer(options)` makes one trainer's end, which has `gradient()` and `value()` (arrays of f32), `settle()` (what
    must be done before the time counts) and `round()`. `roles` are the other processes, by name, each a function of
    the options. `environment(options, role, index)` is what a process finds in its environment.
    """
    options = arguments(version)
    if options.role == "":
        lead(peer, version, options, list(roles or {}), environment or (lambda *_: {}))
    elif options.role == "trainer":
        train(trainer, options)
    else:
        roles[options.role](options)


def arguments(version):
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--transport", choices=["tcp", "shm"], default="tcp")
    # Network namespaces, NAMESPACE@ADDRESS with commas between: trainers are on all but the last, the others on that.
    parser.add_argument("--hosts", default="")
    # Above 1 they are on the hosts of the trainers.
    parser.add_argument("--servers", type=int, default=1)
    # What follows is for the processes of this script.
    parser.add_argument("--role", default="")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--barrier", type=int, default=-1)
    return parser.parse_args()


def lead(peer, version, options, roles, environment):
    """Starts everybody, hands on what the parent asks, and puts together what the trainers say."""
    options.port = free_port()
    barrier = os.memfd_create("barrier")
    os.ftruncate(barrier, options.trainers * STRIDE)

    def start(role, index, pipe):
        command = within(options, role, index)
        command += [sys.executable, sys.argv[0], "--role", role, "--index", str(index), "--barrier", str(barrier)]
        for name in ["bytes", "trainers", "transport", "port", "hosts", "servers"]:
            command += [f"--{name}", str(getattr(options, name))]
        around = dict(os.environ, OMP_NUM_THREADS="1", **environment(options, role, index))
        # Standard output is the parent's; what a library prints goes where errors go.
        take, give = (subprocess.PIPE, subprocess.PIPE) if pipe else (subprocess.DEVNULL, sys.stderr)
        return subprocess.Popen(command, env=around, pass_fds=[barrier], stdin=take, stdout=give, text=True)

    counts = {role: options.servers if role == "server" else 1 for role in roles}
    others = [start(role, index, False) for role, count in counts.items() for index in range(count)]
    trainers = [start("trainer", index, True) for index in range(options.trainers)]
    try:
        for one in trainers:
            expect(one)
        say({"peer": peer, "version": version})
        for line in sys.stdin:
            before = processor_seconds(others)
            for one in trainers:
                one.stdin.write(line)
                one.stdin.flush()
            answers = [json.loads(expect(one)) for one in trainers]
            used = {"server_cpu_seconds": processor_seconds(others) - before} if others else {}
            seconds = [max(round) for round in zip(*(one["seconds"] for one in answers))]
            say({"peer": peer, "version": version, "bytes": options.bytes, "trainers": options.trainers,
                 "seconds": seconds, "wrong": sum(one["wrong"] for one in answers), **used})
    finally:
        for one in trainers + others:
            one.kill()
            one.wait()


def train(trainer, options):
    """A trainer's process."""
    die_with_parent()
    # Libraries print to standard output, which is the leader's.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end = trainer(options)
    pattern = Pattern(options.index, options.trainers, options.bytes // 4)
    barrier = Barrier(options.barrier, options.index, options.trainers)
    number = 0
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        word, rounds = line.split()
        if word != "run":
            raise SystemExit(f'the parent said "{line.strip()}"; expected "run ROUNDS"')
        seconds, wrong = [], 0
        for _ in range(int(rounds)):
            pattern.fill(number, end.gradient())
            end.settle()
            barrier.wait()
            start = time.perf_counter()
            end.round()
            seconds.append(time.perf_counter() - start)
            wrong += pattern.wrong(number, end.value())
            number += 1
        print(json.dumps({"seconds": seconds, "wrong": wrong}), file=out, flush=True)


def processor_seconds(processes):
    """What processors have worked for these processes so far, with all threads that they have or had."""
    # The clock of a process that the system keeps. It is exact for threads that wait or yield; what a thread has worked
    # since the last tick of its processor (1 to 4 ms) is missing. The figures of /proc/PID/stat are in steps of 10 ms.
    sched = 2
    return sum(time.clock_gettime(~one.pid << 3 | sched) for one in processes)


def host(options, role, index):
    """Namespace and address of a process; no namespace where there is one host."""
    if not options.hosts:
        return None, "127.0.0.1"
    hosts = [one.split("@") for one in options.hosts.split(",")]
    if role == "server" and options.servers > 1:
        return hosts[index]
    return hosts[index * (len(hosts) - 1) // options.trainers if role == "trainer" else -1]


def within(options, role, index):
    """The words before a command that runs on the host of a process."""
    namespace, _ = host(options, role, index)
    return ["nsenter", f"--net={namespace}", "--"] if namespace else []


def address(options, role, index=0):
    return host(options, role, index)[1]


def interface(options):
    return "eth0" if options.hosts else "lo"


def ps_lite(options, role, index):
    """What a process of ps-lite finds in its environment."""
    return {
        "DMLC_ROLE": "worker" if role == "trainer" else role,
        "DMLC_PS_ROOT_URI": address(options, "scheduler"),
        "DMLC_PS_ROOT_PORT": str(options.port),
        "DMLC_NODE_HOST": address(options, role, index),
        "DMLC_INTERFACE": interface(options),
        "DMLC_NUM_SERVER": str(options.servers),
        "DMLC_NUM_WORKER": str(options.trainers),
    }


def expect(process):
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a trainer ended with {process.wait()}")
    return line


def say(fact):
    print(json.dumps(fact), flush=True)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(address, port):
    """Waits until somebody listens."""
    for _ in range(600):
        with socket.socket() as one:
            if one.connect_ex((address, port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"nobody listens at {address}:{port} after a minute")


def die_with_parent():
    """So that nobody stays behind when the leader is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
