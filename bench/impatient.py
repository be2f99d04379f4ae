"""Whether an overload ends with the load, where clients give up after a while and try again.

    python -m bench.impatient --out build/impatient            # three kinds of clients, three minutes
    python -m bench.impatient --draw AFTER.json BEFORE.json --out build/impatient

Starts ``inferd serve`` with the default queue before a server with a fixed capacity: 8 requests at a time, each of
0.4 s, so 20 per second however fast the machine is. Clients come in an open loop: at 0.8 of the capacity, then at 1, 2 and
5 times, then at 0.8 again. Each leaves after its patience (5, 10 or 30 s), and tries again twice, as OpenAI's clients do:
after ``Retry-After`` where it was refused, else after half a second and a whole one. They do not tell how long they wait.

Goodput is answers within the client's patience. Exit status 1 where it was below 90 % of the capacity in the second half
of the storm, or below 95 % of the offered load from ten seconds after the storm on. Figures of a machine that other programs
keep busy are theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.chart import Line, lines

AT_A_TIME: Final = 8
SERVICE_S: Final = 0.4
CAPACITY: Final = AT_A_TIME / SERVICE_S
PATIENCE_S: Final = (5.0, 10.0, 30.0)
PHASES: Final = ((0.8, 20.0), (1.0, 20.0), (2.0, 30.0), (5.0, 40.0), (0.8, 50.0))
"""Times the capacity, and seconds."""
SETTLED_S: Final = 10.0  # after the storm
MAX_RETRIES: Final = 2
SLOT_S: Final = 5.0

CONFIG = """server: {{port: {port}, access_log: false}}
models:
  m:
    source: openai:http://127.0.0.1:{upstream}/v1
    remote: {{max_in_flight: {at_a_time}}}
"""
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
ANSWER = (
    b'{"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [{"index": 0, "message": '
    b'{"role": "assistant", "content": "hello"}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}'
)


class Found(msgspec.Struct, kw_only=True):
    """One kind of clients. Times of the ends of attempts, in seconds from the beginning."""

    patience_s: float
    answered: list[float]
    refused: list[float]
    gave_up: list[float]
    failed: list[float]

    def goodput(self, begin: float, end: float) -> float:
        """Answers per second."""
        return sum(begin <= at < end for at in self.answered) / (end - begin)


# -- the server behind ---------------------------------------------------------------------------


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            await reader.readexactly(length)
            if length:
                await asyncio.sleep(SERVICE_S)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(ANSWER), ANSWER)
            )
            await writer.drain()
    writer.close()


async def _serve_for_ever() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def _upstream() -> Iterator[int]:
    """In a process of its own: the clients' work must not slow it down."""
    command = [sys.executable, "-m", "bench.impatient", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


# -- clients -------------------------------------------------------------------------------------


class Crowd:
    """Clients of one patience."""

    def __init__(self, port: int, patience_s: float) -> None:
        self._port = port
        self._random = random.Random(round(patience_s))
        self._clients: set[asyncio.Task[None]] = set()
        self._began_at = time.monotonic()
        self.found = Found(patience_s=patience_s, answered=[], refused=[], gave_up=[], failed=[])

    async def run(self) -> Found:
        for factor, seconds in PHASES:
            until = time.monotonic() + seconds
            due = time.monotonic()
            while (due := due + self._random.expovariate(factor * CAPACITY)) < until:
                await asyncio.sleep(due - time.monotonic())
                client = asyncio.create_task(self._client())
                self._clients.add(client)
                client.add_done_callback(self._clients.discard)
            await asyncio.sleep(until - time.monotonic())
        for client in tuple(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        return self.found

    async def _client(self) -> None:
        for attempt in range(1 + MAX_RETRIES):
            pause_s = 0.5 * 2**attempt
            try:
                async with asyncio.timeout(self.found.patience_s):
                    status, retry_after_s = await self._ask()
            except TimeoutError:
                ends = self.found.gave_up
            except (OSError, ValueError, asyncio.IncompleteReadError):
                ends = self.found.failed
            else:
                ends = {200: self.found.answered, 503: self.found.refused}.get(status, self.found.failed)
                pause_s = retry_after_s or pause_s
            ends.append(time.monotonic() - self._began_at)
            if ends is self.found.answered:
                return
            await asyncio.sleep(pause_s * self._random.uniform(1.0, 1.25))

    async def _ask(self) -> tuple[int, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            after = next((line[13:] for line in head if line.startswith(b"retry-after: ")), b"0")
            return int(head[0].split(b" ")[1]), float(after)
        finally:
            writer.close()


# -- the whole -----------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@contextlib.contextmanager
def _inferd(folder: Path, upstream: int) -> Iterator[int]:
    port = _free_port()
    config = folder / f"{port}.yaml"
    config.write_text(CONFIG.format(port=port, upstream=upstream, at_a_time=AT_A_TIME))
    with (folder / f"{port}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "inferd", "serve", str(config)], stdout=log, stderr=log)
        try:
            _wait_ready(process, port)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("The server did not become ready.")


async def measure(folder: Path) -> list[Found]:
    """All kinds of clients side by side, each with servers of its own: what they cost is sleep."""
    with contextlib.ExitStack() as servers:
        port = servers.enter_context(_upstream())
        ports = [await asyncio.to_thread(servers.enter_context, _inferd(folder, port)) for _ in PATIENCE_S]
        found = await asyncio.gather(
            *(Crowd(at, patience).run() for at, patience in zip(ports, PATIENCE_S, strict=True))
        )
        await asyncio.to_thread(servers.close)
    return list(found)


def verdicts(found: Sequence[Found]) -> list[tuple[bool, str]]:
    """What must hold, with the figure it was judged by."""
    over_at = sum(seconds for _, seconds in PHASES[:-1])
    storm_s, last = PHASES[-2][1], PHASES[-1]
    offered = last[0] * CAPACITY
    judged = []
    for kind in found:
        within = kind.goodput(over_at - storm_s / 2, over_at) / CAPACITY
        after = kind.goodput(over_at + SETTLED_S, over_at + last[1]) / offered
        who = f"clients that wait {kind.patience_s:g} s"
        judged.append((within >= 0.9, f"{who}: in the storm goodput is {within:.0%} of the capacity"))
        judged.append((after >= 0.95, f"{who}: {SETTLED_S:g} s after it, {after:.0%} of the offered load"))
    return judged


def draw(after: Sequence[Found], before: Sequence[Found], title: str) -> str:
    """Goodput over time as a part of the capacity, by clients' patience."""
    until = sum(seconds for _, seconds in PHASES)
    starts = [SLOT_S * slot for slot in range(int(until / SLOT_S))]

    def curve(kind: Found, word: str, *, dashed: bool) -> Line:
        shares = [kind.goodput(at, at + SLOT_S) / CAPACITY for at in starts]
        return Line(f"{kind.patience_s:g} s{word}", [at + SLOT_S / 2 for at in starts], shares, dashed=dashed)

    curves = [curve(kind, "", dashed=False) for kind in after]
    curves += [curve(kind, ", bound by length alone", dashed=True) for kind in before]
    return lines(curves, title=title, x_label="seconds", y_label="goodput / capacity")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=Path, nargs="+", help="draw these results instead: now, and before")
    parser.add_argument("--out", type=Path, default=Path("impatient"), help="OUT.json and OUT.svg are written")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve_for_ever())
    if options.draw:
        results = [msgspec.json.decode(path.read_bytes(), type=list[Found]) for path in options.draw]
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = [asyncio.run(measure(Path(folder)))]
        options.out.with_suffix(".json").write_text(json.dumps(msgspec.to_builtins(results[0])))
    title = "Goodput of impatient clients: 0.8, 1, 2, 5 and 0.8 times the capacity"
    options.out.with_suffix(".svg").write_text(draw(results[0], results[1] if len(results) > 1 else (), title))
    holds = verdicts(results[0])
    for held, sentence in holds:
        print(f"{'ok  ' if held else 'FAIL'} {sentence}")
    return 0 if all(held for held, _ in holds) else 1


if __name__ == "__main__":
    sys.exit(main())
