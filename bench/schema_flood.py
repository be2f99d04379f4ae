"""What a flood of schema bombs does to other streams, and what a new schema adds to a first token:
``python -m bench.schema_flood``.

Starts ``inferd serve`` with the bundled model, or with the checkpoint that is named. Streams without a form run all the
time. Windows of some seconds alternate, so that another program on the machine slows each kind:

- ``quiet``: nothing else is sent;
- ``bombs``: clients in closed loops send schemas and grammars that are costly to compile, none of them twice;
- ``cached``: as many requests as in the window before, evenly spaced, all with one small schema that is known.

The difference between ``bombs`` and ``cached`` is what compiling and refusing take from the streams. The clients of the
flood have a process of their own with a niceness of 10 and short slices, which writes its requests and makes its HTTP
client before the windows. The streams are read from their sockets without an HTTP library, whose work would take more
of a core than the gateway's.

``--flood`` names what is done instead of sending bombs, to see which part of the effect is whose. ``refused``: the same
bodies, about as many, go to a model that does not exist, so that nothing is compiled. ``idle``: no requests, but as
many processes as there are clients compute all the time, with the least share of the cores.

Then requests with schemas of their own, and the same requests again, are sent one by one.

Tells, as JSON: the time between two parts of a stream in each kind of window (p50, p99, in ms), and the ratios of the
p99; the processor time of the gateway and the worker for a second of each kind; what the bombs got, by status, and the
longest answer; whether a schema works directly after the flood; what a new schema adds to the first token (p50, p99, in
ms).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from bench.constrained import schema
from inferd.machine.slices import shorten_slices

Kind = Literal["quiet", "bombs", "cached"]
KINDS: Final[tuple[Kind, ...]] = ("quiet", "bombs", "cached")
_JSON = {"content-type": "application/json"}
_BODIES = 1000
_NICE = 10  # of the clients that send bombs
_USUAL_S = 0.65  # that a bomb takes on average, on a quiet machine with two cores
_PROMPT = "Once upon a time there was a small town by the sea, and"


def bombs() -> Iterator[dict[str, Any]]:
    """Fields of requests, none of which comes twice."""
    for number in count():
        mark = f"x{number}"
        alternatives = [{"properties": {f"{mark}{i}": {"const": j} for j in range(4)}} for i in range(14)]
        yield _schema({"allOf": [{"anyOf": alternatives} for _ in range(8)]})
        yield _schema({"enum": [f"{mark}-{i}" for i in range(20_000)]})
        yield _schema({"type": "object", "properties": {f"{mark}{i}": {"type": "integer"} for i in range(4_000)}})
        yield _schema({"oneOf": [{"properties": {f"{mark}{i}": {"type": "string"}}} for i in range(40)]})
        yield _schema({"type": "array", "uniqueItems": True, "maxItems": 6, "items": {"enum": [mark, *range(5)]}})
        yield _schema({"type": "string", "pattern": f"^{mark}((a|b)*c){{1,400}}(a|bb|ccc)*a.{{300}}$"})
        yield _schema({"not": {"anyOf": alternatives}})
        yield {"structured_outputs": {"regex": f"{mark}((a{{1,300}}){{1,300}}){{1,300}}"}}
        yield {"structured_outputs": {"grammar": "start: a\n" + "\n".join(f'a: "{mark}{i}" a' for i in range(3_000))}}


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}}


class Parts:
    """The times between two parts of streams, by the kind of the window."""

    def __init__(self) -> None:
        self.kind: Kind | None = None  # None: between two windows
        self.is_over = False
        self.times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}

    async def stream(self, port: int, number: int) -> None:
        """Read one stream after another until all is over."""
        body = json.dumps(
            {
                "model": "m", "prompt": f"{number} {_PROMPT}", "max_tokens": 200, "temperature": 1.0, "seed": number,
                "stream": True, "min_tokens": 200,  # tokens that end an answer have no text, which looks like a wait
            }
        ).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {_JSON['content-type']}\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while not self.is_over:
            writer.write(request)
            last, kind, tail = 0.0, self.kind, b""
            while not tail.endswith(b"\r\n0\r\n\r\n"):  # the last chunk
                data = await reader.read(1 << 16)
                now = time.perf_counter()
                if not data or (not tail and not data.startswith(b"HTTP/1.1 200")):
                    raise SystemExit(f"A stream failed: {data[:200]!r}")
                tail = (tail + data)[-7:]
                num_parts = data.count(b"data: {")
                if num_parts and last and kind is not None and kind == self.kind:
                    self.times[kind] += [now - last, *[0.0] * (num_parts - 1)]
                if num_parts:
                    last, kind = now, self.kind
        writer.close()


class Flood:
    """A process that sends requests when it is told to, and tells what became of them."""

    def __init__(self, url: str, bombers: int, kind: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.longest_s = 0.0
        self.num_last = 0  # requests of the last window of bombs
        ours, theirs = Pipe()
        self._pipe = ours
        self._process = get_context("spawn").Process(target=_flood, args=(url, bombers, kind, theirs), daemon=True)
        self._process.start()
        ours.recv()  # it is ready

    async def drop(self, seconds: float) -> None:
        """Send bombs, or what takes their place."""
        statuses, longest_s = await self._told(seconds, None)
        self.num_last = sum(statuses.values())
        self.statuses.update(statuses)
        self.longest_s = max(self.longest_s, longest_s)

    async def ask(self, seconds: float) -> None:
        """Send as many requests with a schema that is known as there were bombs in the last window."""
        statuses, _ = await self._told(seconds, self.num_last)
        assert not statuses.keys() - {200}, statuses

    async def _told(self, seconds: float, num_cached: int | None) -> tuple[Counter[int], float]:
        await asyncio.to_thread(self._pipe.send, (seconds, num_cached))
        answer: tuple[Counter[int], float] = await asyncio.to_thread(self._pipe.recv)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _fork_computing(until: float) -> int:
    """A process that computes all the time, with the least share of the cores. Returns its id."""
    child = os.fork()
    if child:
        return child
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)
    while time.perf_counter() < until:
        pass
    os._exit(0)


def _flood(url: str, bombers: int, kind: str, pipe: Connection) -> None:
    os.setsid()  # the nice value counts against other programs in this session's group (autogroup)
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # another system, or one without groups
        Path("/proc/self/autogroup").write_text(str(_NICE))
    shorten_slices()
    model = "none" if kind == "refused" else "m"
    source = (json.dumps({"model": model, "prompt": "x", "max_tokens": 4, **bomb}).encode() for bomb in bombs())
    bodies = deque(next(source) for _ in range(_BODIES if kind != "idle" else 0))
    cached = json.dumps({"model": "m", "prompt": "x", "max_tokens": 4, **_schema({"type": "boolean"})}).encode()

    async def send(client: httpx.AsyncClient, seconds: float, num_cached: int | None) -> tuple[Counter[int], float]:
        statuses: Counter[int] = Counter()
        longest_s = 0.0
        until = time.perf_counter() + seconds

        async def one(body: bytes) -> None:
            nonlocal longest_s
            began = time.perf_counter()
            response = await client.post("/v1/completions", content=body)
            statuses[response.status_code] += 1
            longest_s = max(longest_s, time.perf_counter() - began)

        async def drop() -> None:
            while time.perf_counter() < until:
                await one(bodies.popleft())
                if kind == "refused":
                    await asyncio.sleep(_USUAL_S)

        if num_cached is None:
            await asyncio.gather(*(drop() for _ in range(bombers)))
        else:
            for left in range(num_cached, 0, -1):
                await asyncio.gather(one(cached), asyncio.sleep((until - time.perf_counter()) / left))
            await asyncio.sleep(until - time.perf_counter())
        return statuses, longest_s

    runner, client = asyncio.Runner(), httpx.AsyncClient(base_url=url, timeout=120, headers=_JSON)
    pipe.send(None)
    while True:
        seconds, num_cached = pipe.recv()
        if kind == "idle" and num_cached is None:
            until = time.perf_counter() + seconds
            for child in [_fork_computing(until) for _ in range(bombers)]:
                os.waitpid(child, 0)
            pipe.send((Counter(), 0.0))
        else:
            pipe.send(runner.run(send(client, seconds, num_cached)))


async def first_token_s(client: httpx.AsyncClient, fields: dict[str, Any]) -> float:
    body = {"model": "m", "prompt": _PROMPT, "max_tokens": 2, "stream": True, **fields}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                return time.perf_counter() - began
    raise SystemExit("A stream ended without a part.")


async def measure(port: int, server: int, given: argparse.Namespace) -> dict[str, Any]:
    """``server``: the id of its process."""
    url = f"http://127.0.0.1:{port}"
    parts, flood = Parts(), Flood(url, given.bombers, given.flood)
    worked: dict[Kind, Counter[str]] = {kind: Counter() for kind in KINDS}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await first_token_s(client, _schema({"type": "boolean"}))  # the vocabulary is read
        streams = [asyncio.create_task(parts.stream(port, i)) for i in range(given.streams)]
        for _ in range(given.windows):
            for kind in KINDS:
                parts.kind = kind
                sent = asyncio.create_task(
                    {"quiet": asyncio.sleep, "bombs": flood.drop, "cached": flood.ask}[kind](given.seconds)
                )
                before = _processor_s(server)
                await asyncio.sleep(given.seconds)
                after, parts.kind = _processor_s(server), None  # answers that are late belong to no window
                worked[kind].update(
                    {name: (after[name] - before[name]) / given.seconds for name in after if name in before}
                )
                await sent
        parts.is_over = True
        flood.close()
        await asyncio.gather(*streams)
        recovered_s = await first_token_s(client, _schema({"type": "null"}))
        added = []
        for number in range(given.schemas):
            fields = _schema(dict(schema(number + 1).schema))  # type: ignore[arg-type]
            new, known = [await first_token_s(client, fields) for _ in range(2)]
            added.append((new - known) * 1000)
    added.sort()
    times = {kind: sorted(parts.times[kind]) for kind in KINDS}
    p99 = {kind: _ms(times[kind], 0.99) for kind in KINDS}
    return {
        "streams": given.streams,
        "flood": given.flood,
        "bombers": given.bombers,
        "between_parts_ms": {
            kind: {"count": len(times[kind]), "p50": _ms(times[kind], 0.5), "p99": p99[kind]} for kind in KINDS
        },
        "p99_bombs_to_quiet": round(p99["bombs"] / p99["quiet"], 3),
        "p99_cached_to_quiet": round(p99["cached"] / p99["quiet"], 3),
        "p99_bombs_to_cached": round(p99["bombs"] / p99["cached"], 3),
        "processor_time": {
            kind: {name: round(total / given.windows, 3) for name, total in sorted(worked[kind].items())}
            for kind in KINDS
        },
        "bombs": dict(flood.statuses),
        "longest_answer_to_a_bomb_s": round(flood.longest_s, 3),
        "first_token_after_the_flood_ms": round(recovered_s * 1000, 2),
        "new_schema_adds_ms": {
            "p50": round(statistics.median(added), 2), "p99": round(added[len(added) * 99 // 100], 2)
        },
    }  # fmt: skip


def _processor_s(server: int) -> dict[str, float]:
    """The processor time so far of the gateway and of its workers, where the system tells it."""
    children = Path(f"/proc/{server}/task/{server}/children")
    if not children.exists():
        return {}
    found = Counter({"gateway": _of_process_s(server)})
    for child in children.read_text().split():
        found["worker"] += _of_process_s(int(child))
    return found


def _of_process_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _ms(times: list[float], share: float) -> float:
    return round(times[int(len(times) * share)] * 1000, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="a folder with a checkpoint, or the bundled model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--bombers", type=int, default=4)
    parser.add_argument("--flood", choices=["bombs", "refused", "idle"], default="bombs")
    parser.add_argument("--windows", type=int, default=5, help="of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--schemas", type=int, default=100)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "inferd.yaml"
        config.write_text(
            f"server: {{port: {port}, access_log: false}}\nstate: {{data_dir: {folder}/data}}\n"
            f"models: {{m: {{source: {given.source}, device: cpu}}}}\n"
        )
        server = subprocess.Popen([sys.executable, "-m", "inferd", "serve", str(config)], env=os.environ)
        try:
            _await_ready(f"http://127.0.0.1:{port}")
            print(json.dumps(asyncio.run(measure(port, server.pid, given))))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)


def _await_ready(url: str) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("The server did not become ready.")


if __name__ == "__main__":
    main()
