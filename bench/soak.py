"""A long run under mixed load and faults, with the books checked all the while: ``make soak``.

    python -m bench.soak --minutes 30

Clients stream, collect, leave in the middle, send nonsense and ask for too much; every few seconds the
worker is killed. At the end: no blocks in use, no queue, file descriptors, threads and children back at
their baseline, golden greedy answers as at the start, and memory of the gateway that has stopped growing.
Exit status 1 names what did not hold. ``--leak`` breaks the run on purpose (streams that nobody closes), to
show that the check can fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

CHAT = "/v1/chat/completions"
GOLDEN = ["What is inferd?", "Name three fruits.", "What is 4 + 3?"]
MAX_BYTES_PER_1000 = 1024 * 1024  # growth of the gateway's memory that is forgiven


@dataclass
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)

    def surprise(self, what: str) -> None:
        self.surprises.append(what)


class Server:
    """``inferd serve demo`` as a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.log = Path(f"soak-{port}.log").open("wb")  # noqa: SIM115 - as long as the process
        command = [sys.executable, "-m", "inferd", "serve", "demo", "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    async def ready(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                status, _ = await call(self.port, "GET", "/health/ready")
            except OSError:
                status = 0
            if status == 200:
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"the server was not ready within {seconds} s; its log is {self.log.name}")

    def worker(self) -> int | None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def counts(self) -> dict[str, int]:
        base = Path(f"/proc/{self.process.pid}")
        status = (base / "status").read_text()
        return {
            "file descriptors": len(list((base / "fd").iterdir())),
            "threads": int(status.split("Threads:")[1].split()[0]),
            "children": len((base / f"task/{self.process.pid}/children").read_text().split()),
        }

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


async def call(
    port: int, method: str, path: str, body: object = None, *, leave_after: int | None = None
) -> tuple[int, bytes]:
    """One request on its own connection; ``leave_after`` bytes of answer the client is gone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        await writer.drain()
        data = b""
        while chunk := await reader.read(65536):
            data += chunk
            if leave_after is not None and len(data) >= leave_after:
                writer.transport.abort()
                return 499, data
        return int(data.split(b" ", 2)[1]) if data else 0, data
    finally:
        writer.close()


def chat(text: str, **options: object) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 40,
        "temperature": 0,
        **options,
    }


async def golden(port: int) -> list[str]:
    answers = []
    for text in GOLDEN:
        status, data = await call(port, "POST", CHAT, chat(text, seed=1))
        assert status == 200, data
        answers.append(json.loads(data.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"])
    return answers


async def client(port: int, rng: random.Random, stop: asyncio.Event, tally: Tally, held: list[object] | None) -> None:
    while not stop.is_set():
        kind = rng.choice(["stream", "stream", "collect", "leave", "choices", "nonsense", "too long", "unknown"])
        text = f"Tell me a story about a {rng.choice(['dragon', 'fox', 'robot'])} number {rng.randrange(10**6)}."
        try:
            if kind == "stream":
                status, data = await call(port, "POST", CHAT, chat(text, stream=True))
                if status == 200 and b"data: [DONE]" not in data and b'"error"' not in data:
                    tally.surprise("a stream ended without [DONE] and without an error")
            elif kind == "collect":
                status, _ = await call(port, "POST", CHAT, chat(text, temperature=1.0))
            elif kind == "leave":
                status, _ = await call(
                    port, "POST", CHAT, chat(text, stream=True, max_tokens=200, ignore_eos=True), leave_after=600
                )
            elif kind == "choices":
                status, _ = await call(
                    port,
                    "POST",
                    CHAT,
                    chat(text, n=3, temperature=1.0, stream=True),
                    leave_after=rng.choice([None, 900]),
                )
            elif kind == "nonsense":
                status, _ = await call(port, "POST", CHAT, b'{"model": "demo", "messages": [')
                if status != 400:
                    tally.surprise(f"broken JSON was answered with {status}")
            elif kind == "too long":
                status, _ = await call(port, "POST", CHAT, chat("word " * 20000))
                if status not in (400, 503):
                    tally.surprise(f"a prompt that is too long was answered with {status}")
            else:
                status, _ = await call(port, "POST", CHAT, chat(text, model="nobody"))
                if status != 404:
                    tally.surprise(f"an unknown model was answered with {status}")
            if held is not None:
                held.append(await asyncio.open_connection("127.0.0.1", port))
        except OSError as error:
            tally.surprise(f"the connection failed: {error}")
            status = 0
        tally.outcomes[f"{kind} {status}"] += 1
        if status in (0, 500) or (status >= 500 and status not in (503,)):
            tally.surprise(f"{kind} was answered with {status}")


async def killer(server: Server, rng: random.Random, stop: asyncio.Event, tally: Tally, every_s: float) -> None:
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), timeout=rng.uniform(0.5, 1.5) * every_s)
        except TimeoutError:
            worker = server.worker()
            if worker is not None:
                os.kill(worker, signal.SIGKILL)
                tally.outcomes["worker killed"] += 1


async def metric(port: int, name: str) -> float:
    _, data = await call(port, "GET", "/metrics")
    for line in data.decode().splitlines():
        if line.startswith(name + "{") or line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    raise SystemExit(f"/metrics has no {name}")


async def soak(options: argparse.Namespace) -> list[str]:
    rng = random.Random(options.seed)
    server = Server(options.port)
    problems: list[str] = []
    tally = Tally()
    try:
        await server.ready()
        before_answers = await golden(server.port)
        await asyncio.sleep(1.0)
        before = server.counts()
        held: list[object] | None = [] if options.leak else None
        stop = asyncio.Event()
        clients = [
            asyncio.create_task(client(server.port, random.Random(rng.random()), stop, tally, held))
            for _ in range(options.clients)
        ]
        kills = asyncio.create_task(killer(server, rng, stop, tally, options.kill_every))
        samples: list[tuple[int, int]] = []
        deadline = time.monotonic() + options.minutes * 60
        while time.monotonic() < deadline:
            await asyncio.sleep(min(5.0, options.minutes * 6))
            samples.append((sum(tally.outcomes.values()), server.rss_bytes()))
            print(
                f"\r{max(0, deadline - time.monotonic()):5.0f} s left, {samples[-1][0]} requests, gateway {samples[-1][1] >> 20} MiB",
                end="",
                flush=True,
            )
        stop.set()
        await asyncio.gather(*clients, kills)
        print()
        await server.ready()
        await asyncio.sleep(2.0)
        for name in ("inferd_kv_usage_ratio", "inferd_running", "inferd_waiting"):
            value = await metric(server.port, name)
            if value != 0:
                problems.append(f"{name} is {value} when idle")
        after = server.counts()
        problems += [
            f"{what}: {before[what]} before, {after[what]} after" for what in before if after[what] > before[what] + 2
        ]
        if await golden(server.port) != before_answers:
            problems.append("greedy answers differ from those at the start")
        half = samples[len(samples) // 2 :]
        if len(half) > 1 and half[-1][0] - half[0][0] >= 1000:  # over fewer, warm caches are most of the growth
            slope = (half[-1][1] - half[0][1]) / (half[-1][0] - half[0][0]) * 1000
            print(f"the gateway's memory grew by {slope / 1024:.0f} KiB per 1,000 requests in the second half")
            if slope > MAX_BYTES_PER_1000:
                problems.append(f"the gateway's memory grows by {slope / 1024:.0f} KiB per 1,000 requests")
    finally:
        code = server.stop()
    if code != 0:
        problems.append(f"the server ended with exit status {code}")
    for outcome, count in sorted(tally.outcomes.items()):
        print(f"  {outcome:<18}{count:>8}")
    return problems + sorted(set(tally.surprises))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--kill-every", type=float, default=20.0, metavar="SECONDS", help="about how often the worker is killed"
    )
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", action="store_true", help="hold connections open on purpose: the run must fail")
    problems = asyncio.run(soak(parser.parse_args()))
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("everything held")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
