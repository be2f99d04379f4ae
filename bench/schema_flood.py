"""What a flood of schema bombs does to other streams, and what a new schema adds to a first token:
``python -m bench.schema_flood``.

Starts ``inferd serve`` with the bundled model, or with the checkpoint that is named. Streams without a form run all the
time. In every second window of some seconds, clients in closed loops send schemas and grammars that are costly to
compile, none of them twice. They have a process of their own, which writes its requests before. Windows alternate, so
that another program on the machine slows both kinds. Then requests with schemas of their own, and the same requests
again, are sent one by one.

``--flood`` names what is done instead of sending bombs, to see which part of the effect is whose. ``refused``: the same
bodies, about as many, go to a model that does not exist, so that nothing is compiled. ``idle``: no requests, but as
many processes as there are clients compute all the time, with the least share of the cores.

Tells, as JSON: the time between two parts of a stream with and without bombs (p50, p99, in ms); what the bombs got, by
status, and the longest answer; whether a schema works directly after the flood; what a new schema adds to the first
token (p50, p99, in ms).
"""

from __future__ import annotations

import argparse
import asyncio
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
from typing import Any

import httpx

from bench.constrained import schema

_JSON = {"content-type": "application/json"}
_BODIES = 1000
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
    """The times between two parts of streams, by whether bombs were sent meanwhile."""

    def __init__(self) -> None:
        self.is_flooded = False
        self.is_over = False
        self.times: dict[bool, list[float]] = {False: [], True: []}

    async def stream(self, client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "m", "prompt": f"{number} {_PROMPT}", "max_tokens": 200, "temperature": 1.0, "seed": number,
            "stream": True, "min_tokens": 200,  # tokens that end an answer have no text: a row of them looks like a wait
        }  # fmt: skip
        while not self.is_over:
            last, was_flooded = 0.0, self.is_flooded
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    now = time.perf_counter()
                    if last and was_flooded == self.is_flooded:
                        self.times[was_flooded].append(now - last)
                    last, was_flooded = now, self.is_flooded
                    if self.is_over:
                        return


class Flood:
    """A process that sends bombs when it is told to, or what ``kind`` says, and tells what became of them."""

    def __init__(self, url: str, bombers: int, kind: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.longest_s = 0.0
        ours, theirs = Pipe()
        self._pipe = ours
        self._process = get_context("spawn").Process(target=_flood, args=(url, bombers, kind, theirs), daemon=True)
        self._process.start()
        ours.recv()  # it is ready

    async def drop(self, seconds: float) -> None:
        await asyncio.to_thread(self._pipe.send, seconds)
        statuses, longest_s = await asyncio.to_thread(self._pipe.recv)
        self.statuses.update(statuses)
        self.longest_s = max(self.longest_s, longest_s)

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
    if kind == "idle":
        pipe.send(None)
        while True:
            until = time.perf_counter() + pipe.recv()
            for child in [_fork_computing(until) for _ in range(bombers)]:
                os.waitpid(child, 0)
            pipe.send((Counter(), 0.0))
    model = "m" if kind == "bombs" else "none"
    source = (json.dumps({"model": model, "prompt": "x", "max_tokens": 4, **bomb}).encode() for bomb in bombs())
    bodies = deque(next(source) for _ in range(_BODIES))
    pipe.send(None)

    async def send(seconds: float) -> tuple[Counter[int], float]:
        statuses: Counter[int] = Counter()
        longest_s = 0.0
        until = time.perf_counter() + seconds

        async def one(client: httpx.AsyncClient) -> None:
            nonlocal longest_s
            while (began := time.perf_counter()) < until:
                response = await client.post("/v1/completions", content=bodies.popleft())
                statuses[response.status_code] += 1
                longest_s = max(longest_s, time.perf_counter() - began)
                if kind == "refused":
                    await asyncio.sleep(_USUAL_S)

        async with httpx.AsyncClient(base_url=url, timeout=120, headers=_JSON) as client:
            await asyncio.gather(*(one(client) for _ in range(bombers)))
        return statuses, longest_s

    while True:
        pipe.send(asyncio.run(send(pipe.recv())))


async def first_token_s(client: httpx.AsyncClient, fields: dict[str, Any]) -> float:
    body = {"model": "m", "prompt": _PROMPT, "max_tokens": 2, "stream": True, **fields}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                return time.perf_counter() - began
    raise SystemExit("A stream ended without a part.")


async def measure(url: str, given: argparse.Namespace) -> dict[str, Any]:
    parts, flood = Parts(), Flood(url, given.bombers, given.flood)
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await first_token_s(client, _schema({"type": "integer"}))  # the vocabulary is read
        streams = [asyncio.create_task(parts.stream(client, i)) for i in range(given.streams)]
        for window in range(2 * given.windows):
            parts.is_flooded = window % 2 == 1
            if parts.is_flooded:
                await flood.drop(given.seconds)
            else:
                await asyncio.sleep(given.seconds)
        parts.is_over = True
        flood.close()
        await asyncio.gather(*streams)
        recovered_s = await first_token_s(client, _schema({"type": "boolean"}))
        added = []
        for number in range(given.schemas):
            fields = _schema(dict(schema(number + 1).schema))  # type: ignore[arg-type]
            new, known = [await first_token_s(client, fields) for _ in range(2)]
            added.append((new - known) * 1000)
    added.sort()
    quiet, flooded = (sorted(parts.times[kind]) for kind in (False, True))
    return {
        "streams": given.streams,
        "flood": given.flood,
        "bombers": given.bombers,
        "between_parts_ms": {
            name: {"count": len(times), "p50": _ms(times, 0.5), "p99": _ms(times, 0.99)}
            for name, times in (("quiet", quiet), ("flooded", flooded))
        },
        "p99_ratio": round(_ms(flooded, 0.99) / _ms(quiet, 0.99), 3),
        "bombs": dict(flood.statuses),
        "longest_answer_to_a_bomb_s": round(flood.longest_s, 3),
        "first_token_after_the_flood_ms": round(recovered_s * 1000, 2),
        "new_schema_adds_ms": {
            "p50": round(statistics.median(added), 2), "p99": round(added[len(added) * 99 // 100], 2)
        },
    }  # fmt: skip


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
            url = f"http://127.0.0.1:{port}"
            _await_ready(url)
            print(json.dumps(asyncio.run(measure(url, given))))
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
