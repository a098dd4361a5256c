"""Ports on which a test's processes listen."""

import os
import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to connections."""
    ports = []
    for port in range(10_000 + os.getpid() % 20_000, 32_000):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) != 0:
                ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("every port is taken")
