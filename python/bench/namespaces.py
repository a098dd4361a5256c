"""Hosts of a measurement: network namespaces of this machine that a pair of interfaces joins. Needs the rights of root.

A namespace lives as long as the process in it.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

ADDRESSES = ["10.88.0.1", "10.88.0.2"]
INTERFACE = "eth0"


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """The words before a command on each of two hosts, whose addresses are ADDRESSES."""
    with ExitStack() as stack:
        keepers = [stack.enter_context(_namespace()) for _ in ADDRESSES]
        first, second = (keeper.pid for keeper in keepers)
        _run(f"ip link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}")
        hosts = [["nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"] for keeper in keepers]
        for host, address in zip(hosts, ADDRESSES):
            # One that paces packets costs more than all that is measured.
            for line in [
                "sysctl -qw net.ipv4.tcp_congestion_control=reno",
                "ip link set lo up",
                f"ip address add {address}/24 dev {INTERFACE}",
                f"ip link set {INTERFACE} up",
            ]:
                _run(line, host)
        yield hosts


@contextmanager
def _namespace() -> "Iterator[subprocess.Popen[bytes]]":
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(["unshare", "--net", "--", "cat"], stdin=pipe, stdout=pipe)
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        # Its answer says that it is in the namespace.
        keeper.stdin.write(b"\n")
        keeper.stdin.flush()
        if not keeper.stdout.readline():
            raise SystemExit("no network namespace; expected the rights of root")
        yield keeper
    finally:
        keeper.kill()
        keeper.wait()


def _run(line: str, host: list[str] | None = None) -> None:
    subprocess.run([*(host or []), *line.split()], check=True)
