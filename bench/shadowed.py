"""Times of answers with and without copies of a shadow step, in one run: ``python -m bench.shadowed``.

One server serves two equal versions of a small ONNX model, in a step that copies half of the units. One client asks at a
fixed rate, in blocks of half a second: the sessions of a block are either all copied or none. So pairs of blocks, in
an order that is drawn for each, differ by the copies alone. Prints p50 and p99 of all blocks of a kind, their ratio
with an interval of 95 % (a bootstrap over pairs), the same ratio between blocks without copies, which tells what the run can
resolve, and processor times.

The promise is for a machine with capacity to spare. That is checked: over the blocks with copies at least one processor
was idle, and at least 99 % of their requests were copied and compared. Exit status 0: the promise holds, for the whole
interval. 1: a request failed, or the whole interval is above the promise. 2: the run cannot tell.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.rollouts_live import Server, model, until
from inferd.tenancy.principal import LOCAL

PROMISED: Final = 1.01
SHADOW: Final = 0.5  # of the units
SESSIONS: Final = 32  # of each kind, asked in turn
SKIPPED: Final = 4  # requests at the beginning of a block: copies of the block before may be under way
RESAMPLES: Final = 2000

Times = npt.NDArray[np.float64]  # seconds, a row per block


class Machine(NamedTuple):
    """Processor seconds so far."""

    idle: float  # of all processors, waiting for disks included
    stolen: float  # taken by the machine's host
    gateway: float
    workers: float


def is_copied(session: str) -> bool:
    """Whether the requests of a session are copied: the server's draw of units (``config/versions.py``). Were it
    another one, the copies would not add up."""
    digest = hashlib.blake2b(f"m\0{LOCAL.tenant}\0{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 >= 1.0 - SHADOW


def sessions() -> tuple[list[str], list[str]]:
    """Sessions that are not copied, and those that are."""
    found: tuple[list[str], list[str]] = ([], [])
    for number in itertools.count():
        name = f"session-{number}"
        found[is_copied(name)].append(name)
        if min(map(len, found)) >= SESSIONS:
            return found[0][:SESSIONS], found[1][:SESSIONS]
    raise AssertionError("numbers do not end")


class Client:
    """One connection, and requests whose bytes are made beforehand: the client's own time varies as little as may be."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.0, 0.0]}
        body = json.dumps({"inputs": [tensor]})
        self._kinds = [
            [
                f"POST /v2/models/m/infer HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
                f"x-session-id: {name}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
                for name in names
            ]
            for names in sessions()
        ]

    def ask(self, kind: int, number: int) -> bool:
        """Whether the answer is one."""
        self._socket.sendall(self._kinds[kind][number % SESSIONS])
        got = b""
        while b"\r\n\r\n" not in got:
            got += self._socket.recv(65536)
        head, _, body = got.partition(b"\r\n\r\n")
        (length,) = [int(line.partition(b":")[2]) for line in head.lower().split(b"\r\n") if b"content-length:" in line]
        while len(body) < length:
            body += self._socket.recv(65536)
        return head.startswith(b"HTTP/1.1 200")

    def block(self, kind: int, size: int, rate: float) -> tuple[list[float], int]:
        """Seconds from when each request was due until its answer, and how many failed."""
        times, failed = [], 0
        began = time.perf_counter() + 1 / rate
        for number in range(size):
            due = began + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            failed += not self.ask(kind, number)
            times.append(time.perf_counter() - due)
        return times, failed

    def close(self) -> None:
        self._socket.close()


def machine(gateway: int) -> Machine:
    with Path("/proc/stat").open() as file:
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:]]
    workers = Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split()
    return Machine(ticks[3] + ticks[4], ticks[7], own_s(gateway), sum([own_s(int(pid)) for pid in workers]))


def own_s(pid: int) -> float:
    """Processor seconds of a process' threads; those of schedstat are in nanoseconds."""
    return sum([int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]) / 1e9


def ratio(one: Times, other: Times, quantile: float, chance: np.random.Generator) -> tuple[float, float, float]:
    """A quantile of ``other`` divided by that of ``one``, and its interval of 95 %. Row i of both is a pair."""
    found = []
    for _ in range(RESAMPLES):
        rows = chance.integers(0, len(one), len(one))
        found.append(np.quantile(other[rows], quantile) / np.quantile(one[rows], quantile))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(np.quantile(other, quantile) / np.quantile(one, quantile)), float(low), float(high)


def row(what: str, plain: str, copied: str, compared: tuple[float, float, float] | None = None) -> str:
    tail = "" if compared is None else "{:.3f} ({:.3f} to {:.3f})".format(*compared)
    return f"| {what} | {plain} | {copied} | {tail} |"


def report(times: Sequence[Times], spent: Sequence[Sequence[float]], seconds: float, block: int) -> tuple[float, float]:
    """Print the table; the interval of the ratio of the p99."""
    plain, copied = times
    chance = np.random.default_rng(1)
    print("| | without copies | with copies of all | ratio (95 %) |\n| --- | --- | --- | --- |")
    print(row("requests", f"{plain.size:,}", f"{copied.size:,}"))
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found = ratio(plain, copied, quantile, chance)
        values = [f"{1000 * np.quantile(one, quantile):.3f} ms" for one in times]
        print(row(name, *values, found))
    low, high = found[1:]
    half = len(plain) // 2
    null = ratio(plain[0 : 2 * half : 2], plain[1 : 2 * half : 2], 0.99, chance)
    print(row("p99 of every other block without copies", "", "", null))
    for name, place in (("idle processors", 0), ("processors taken by the host", 1)):
        print(row(name, *[f"{one[place] / seconds:.2f}" for one in spent]))
    for name, place in (("the gateway's processor time per request", 2), ("the workers'", 3)):
        print(row(name, *[f"{1e6 * one[place] / block:.0f} us" for one in spent]))
    return low, high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="of blocks without and with copies")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a block")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    options = parser.parse_args()
    size = int(options.seconds * options.rate)
    chance = random.Random(1)
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    spent = [[0.0] * len(Machine._fields) for _ in range(2)]
    seconds, failed = [0.0, 0.0], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in (1, 2):
            model(folder / "m" / str(number) / "model.onnx", 1)
        # Nothing ends the step.
        steps = [{"shadow": 100 * SHADOW, "for_s": 360_000}, {"weight": 100}]
        server = Server(folder, "one", {"stable": 1, "new": 2, "steps": steps, "guards": {"differs": {}}})
        try:
            server.command("start", "m")
            until(lambda: server.state() == "running")
            client = Client(server.url)
            for kind in (0, 1, 0, 1):
                failed += client.block(kind, size, options.rate)[1]
            time.sleep(0.5)
            before = Counter(server.command("status", "m", "--json")["copies"])
            for number in range(options.pairs):
                for kind in chance.sample((0, 1), 2):
                    began, first = time.perf_counter(), machine(server.pid)
                    found, wrong = client.block(kind, size, options.rate)
                    last = machine(server.pid)
                    seconds[kind] += time.perf_counter() - began
                    spent[kind] = [
                        total + after - ahead for total, after, ahead in zip(spent[kind], last, first, strict=True)
                    ]
                    times[kind].append(found[SKIPPED:])
                    failed += wrong
                if (number + 1) % 20 == 0:
                    print(f"{number + 1} of {options.pairs} pairs", file=sys.stderr, flush=True)
            time.sleep(0.5)
            copies = Counter(server.command("status", "m", "--json")["copies"]) - before
            client.close()
        finally:
            server.close()
    low, high = report([np.array(one) for one in times], spent, seconds[1], size * options.pairs)
    asked, idle = size * options.pairs, spent[1][0] / seconds[1]
    dropped = {kind: count for kind, count in copies.items() if kind != "equal"}
    print(f"\n{copies['equal']:,} of {asked:,} requests were copied and compared; others: {dropped or 'none'}.")
    print(f"{failed} requests failed.")
    if failed or copies.total() > asked:
        print("did not hold: a request failed, or a request was copied that should not have been", file=sys.stderr)
        return 1
    if idle < 1.0 or copies["equal"] < 0.99 * asked:
        print(f"cannot tell: {idle:.2f} processors were idle, so there was no capacity to spare", file=sys.stderr)
        return 2
    if low > PROMISED:
        print(f"did not hold: p99 is {low:.3f} to {high:.3f} times as long with copies", file=sys.stderr)
        return 1
    if high > PROMISED:
        print(f"cannot tell: the ratio is between {low:.3f} and {high:.3f}; ask for more --pairs", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
