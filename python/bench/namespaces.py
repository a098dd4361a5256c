"""Hosts of a measurement: network namespaces of this machine that a bridge joins. Needs the rights of root.

A namespace lives as long as the process in it.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

INTERFACE = "eth0"


def address(host: int) -> str:
    """The address of a host, which are counted from zero."""
    return f"10.88.0.{1 + host}"


@contextmanager
def joined_hosts(count: int) -> Iterator[list[list[str]]]:
    """The words before a command on each host."""
    with ExitStack() as stack:
        bridge, *keepers = (stack.enter_context(_namespace()) for _ in range(1 + count))
        _run(["ip link add bridge0 type bridge", "ip link set bridge0 up"], bridge)
        for at, keeper in enumerate(keepers):
            pair = f"ip link add {INTERFACE} netns {keeper.pid} type veth peer name port{at} netns {bridge.pid}"
            subprocess.run(pair.split(), check=True)
            _run([f"ip link set port{at} master bridge0 up"], bridge)
            # Congestion control that paces packets costs more than all that is measured.
            lines = [
                "sysctl -qw net.ipv4.tcp_congestion_control=reno",
                "ip link set lo up",
                f"ip address add {address(at)}/24 dev {INTERFACE}",
                f"ip link set {INTERFACE} up",
            ]
            _run(lines, keeper)
        yield [_within(keeper) for keeper in keepers]


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


def _within(keeper: "subprocess.Popen[bytes]") -> list[str]:
    return ["nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"]


def _run(lines: list[str], keeper: "subprocess.Popen[bytes]") -> None:
    for line in lines:
        subprocess.run([*_within(keeper), *line.split()], check=True)
