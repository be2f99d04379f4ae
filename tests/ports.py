"""Ports for servers that cannot be given a socket, nor say which port they took."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()


def free_port(count: int = 1) -> int:
    """The first of so many free ports in a row.

    They lie below those that the system gives to outgoing connections: one of these, of any program, would take the port
    before the server does.
    """
    lowest = int(_EPHEMERAL.read_text(encoding="ascii").split()[0]) if _EPHEMERAL.exists() else 32_768
    for _ in range(1000):
        port = _random.randrange(10_000, lowest - count)
        try:
            with ExitStack() as probes:
                for each in range(port, port + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", each))
        except OSError:
            continue
        return port
    raise AssertionError("no free port was found")
