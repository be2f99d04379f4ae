"""Hosts on one machine: network namespaces joined to it by a link. Needs root and ip (Linux).

A plain link is a veth pair. A link with delay or loss is a pair of TUN devices, between which another process forwards
packets; kernels without netem have it too.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x1001  # IFF_TUN | IFF_NO_PI
_MAX_PACKET: Final = 65_536
_MAX_QUEUED: Final = 10_000


class Host(NamedTuple):
    """A namespace. ``here`` is this machine's address on the link, ``link`` this machine's end of it."""

    name: str
    here: str
    link: str

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Take the link down, as when a cable is pulled."""
        _run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self.link, "up")


def can_make_hosts() -> bool:
    """Whether this process may make namespaces and has the tools."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and Path("/dev/net/tun").exists()


@contextmanager
def host(number: int, *, delay_ms: float = 0.0, loss_percent: float = 0.0) -> Iterator[Host]:
    """A host of which the link has this delay and loss in each direction. ``number`` is below 200, and used once at a
    time."""
    made = Host(f"inferd-{os.getpid()}-{number}", f"10.213.{number}.1", f"if{os.getpid() % 100_000}n{number}")
    there = f"{made.link}p"
    forwarder = None
    _run("ip", "netns", "add", made.name)
    try:
        if delay_ms or loss_percent:
            forwarder = subprocess.Popen(
                [sys.executable, __file__, made.link, there, str(delay_ms / 1000.0), str(loss_percent / 100.0)],
                stdout=subprocess.PIPE,
            )
            assert forwarder.stdout is not None
            assert forwarder.stdout.readline() == b"ready\n"
            _run("ip", "link", "set", there, "netns", made.name)
        else:
            _run("ip", "link", "add", made.link, "type", "veth", "peer", "name", there, "netns", made.name)
        _run("ip", "addr", "add", f"{made.here}/24", "dev", made.link)
        _run("ip", "link", "set", made.link, "up")
        _run("ip", "-n", made.name, "addr", "add", f"10.213.{number}.2/24", "dev", there)
        for device in (there, "lo"):
            _run("ip", "-n", made.name, "link", "set", device, "up")
        yield made
    finally:
        if forwarder is not None:
            forwarder.kill()
            forwarder.communicate()
        subprocess.run(["ip", "netns", "del", made.name], check=False)
        subprocess.run(["ip", "link", "del", made.link], check=False, stderr=subprocess.DEVNULL)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return descriptor


def _forward(one: str, other: str, delay_s: float, loss: float) -> None:
    """Pass packets between two devices, each after the delay or never."""
    ends = (_tun(one), _tun(other))
    print("ready", flush=True)
    drawn, queued, order = random.Random(7), list[tuple[float, int, int, bytes]](), 0
    while True:
        wait_s = max(0.0, queued[0][0] - time.monotonic()) if queued else None
        readable, _, _ = select.select(ends, (), (), wait_s)
        now = time.monotonic()
        for end in readable:
            try:
                packet = os.read(end, _MAX_PACKET)
            except OSError:  # the device is down
                time.sleep(0.001)
                continue
            if drawn.random() >= loss and len(queued) < _MAX_QUEUED:
                order += 1
                heapq.heappush(queued, (now + delay_s, order, ends[1] if end == ends[0] else ends[0], packet))
        while queued and queued[0][0] <= now:
            _, _, to, packet = heapq.heappop(queued)
            with suppress(OSError):  # the device is down
                os.write(to, packet)


if __name__ == "__main__":
    _forward(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
