"""What a node costs, and how soon its loss is noticed: ``python -m bench.nodes``. Needs root and network namespaces.

    python -m bench.nodes --rounds 5 --losses 5

One server serves the bundled model twice, here and on a node in a network namespace of its own (a veth pair, no added
delay), with one compute thread each. Rounds of both alternate; a round is tokens per second of eight streams. Then
nodes are killed and cut off while streams run with ``resume_streams``: the time until the server has said so in its log,
and the longest time without a piece of a stream. Prints Markdown. The bars are 0.98, 1 s and 1.5 s; exit status 1
names what did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx

from bench.namespaces import Host, can_make_hosts, host
from bench.report import markdown

STREAMS: Final = 8
TOKENS: Final = 200
LONG_TOKENS: Final = 1900  # of a stream that loses its node
LOST_STREAMS: Final = 8  # half of them on the node
LONG_S: Final = 120.0
INFERD: Final = (sys.executable, "-m", "inferd")


class Server:
    """A server with a port for nodes, and its log."""

    def __init__(self, folder: Path) -> None:
        common = {"source": "demo", "threads": 1}
        models = {
            "here": {**common, "placement": {"nodes": "local"}},
            "there": {**common, "placement": {"nodes": "only"}},
            "both": {**common, "replicas": 2, "resume_streams": True, "load": "on_demand"},
        }
        settings = {"server": {"port": 0, "log_format": "json"}, "nodes": {"listen": "0.0.0.0:0"}, "models": models}
        (folder / "inferd.yaml").write_text(json.dumps(settings))
        self.folder = folder
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "INFERD_STATE__DATA_DIR": str(folder / "state")}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            words = [*INFERD, "serve", str(folder / "inferd.yaml")]
            self.process = subprocess.Popen(words, env=self.env, stdout=log, stderr=log)
        self.url = str(_until(lambda: self.status().get("address"), "the server answers"))

    def inferd(self, *words: str) -> str:
        done = subprocess.run([*INFERD, *words], env=self.env, capture_output=True, text=True, check=False)
        return done.stdout

    def status(self) -> dict[str, object]:
        found = self.inferd("status", "--json")
        return dict(json.loads(found)) if found.startswith("{") else {}

    def places(self, model: str) -> list[str]:
        """Where the ready replicas of a model are."""
        models = self.status().get("models", [])
        assert isinstance(models, list)
        replicas = [one for found in models if found["name"] == model for one in found["replicas"]]
        return sorted(one["node"] for one in replicas if one["state"] == "ready")

    def node(self, name: str, on: Host) -> subprocess.Popen[bytes]:
        """A node on a host, when it has joined."""
        made = json.loads(self.inferd("node", "token", "--json"))
        address = f"{on.here}:{made['address'].rpartition(':')[2]}"
        words = [*on.prefix, *INFERD, "node", "--join", address, "--name", name]
        env = {**self.env, "INFERD_NODE_TOKEN": made["token"]}
        process = subprocess.Popen([*words, "--cache", str(self.folder / name)], env=env, stderr=subprocess.DEVNULL)
        self.nodes.append(process)
        _until(lambda: f"node     {name} ready" in self.inferd("status"), f"{name} has joined")
        return process

    def gone_at(self, name: str) -> float | None:
        """When the log said that a node is gone, in seconds since the epoch; None: it has not."""
        for line in reversed(self.log.read_text().splitlines()):
            if '"event":"node"' in line and f'"node":"{name}"' in line:
                found = json.loads(line)
                return datetime.fromisoformat(found["ts"]).timestamp() if found["state"] == "gone" else None
        return None


def _until(condition: Callable[[], object], what: str, seconds: float = LONG_S) -> object:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.1)
    return found


async def _stream(client: httpx.AsyncClient, model: str, tokens: int, arrivals: list[float]) -> None:
    """One stream; the times at which its pieces came, in seconds since the epoch.

    No token that ends an answer is drawn: such tokens have no text, so a row of them would look like a wait.
    """
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "min_tokens": tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                assert '"error"' not in line, line
                arrivals.append(time.time())


async def _streams(url: str, model: str, tokens: int, count: int = STREAMS) -> list[list[float]]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=LONG_S, limits=limits) as client:
        arrivals: list[list[float]] = [[] for _ in range(count)]
        await asyncio.gather(*(_stream(client, model, tokens, one) for one in arrivals))
        return arrivals


def speed(server: Server, model: str) -> float:
    """Tokens per second of all streams."""
    begun = time.monotonic()
    asyncio.run(_streams(server.url, model, TOKENS))
    return STREAMS * TOKENS / (time.monotonic() - begun)


async def _loss(server: Server, end: Callable[[], object]) -> tuple[float, list[list[float]]]:
    """Streams of which some lose their node; when it was lost, and the times of all pieces."""
    task = asyncio.create_task(_streams(server.url, "both", LONG_TOKENS, LOST_STREAMS))
    await asyncio.sleep(0.5)
    at = time.time()
    await asyncio.to_thread(end)
    return at, await task


def measure_loss(server: Server, name: str, end: Callable[[], object]) -> tuple[float, float]:
    """Seconds from the loss of a node until the log says so, and the longest wait of a stream for its next piece."""
    at, arrivals = asyncio.run(_loss(server, end))
    gone_at = _until(lambda: server.gone_at(name), f"{name} is gone")
    assert isinstance(gone_at, float)
    assert all(times and times[-1] > at for times in arrivals), "the streams were over before the loss"
    waits = [now - max(before, at) for times in arrivals for before, now in pairwise(times) if now > at]
    return gone_at - at, max(waits)


@contextmanager
def serving() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            yield server
        finally:
            for node in server.nodes:
                node.kill()
                node.wait()
            server.process.terminate()
            server.process.wait(60)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.nodes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--losses", type=int, default=3, help="of each kind")
    options = parser.parse_args(argv)
    if not can_make_hosts():
        print("network namespaces need root, ip and /dev/net/tun", file=sys.stderr)
        return 2
    failed = []
    with serving() as server, host(10) as far:
        node = server.node("far", far)
        _until(lambda: server.places("there") == ["far"], "the replica is on the node")
        speeds: dict[str, list[float]] = {"here": [], "there": []}
        for model in speeds:
            speed(server, model)  # warm
        for _ in range(options.rounds):
            for model, found in speeds.items():
                found.append(speed(server, model))
        ratios = [there / here for here, there in zip(speeds["here"], speeds["there"], strict=True)]
        rows = [(model, f"{statistics.median(found):.0f}", f"{min(found):.0f}") for model, found in speeds.items()]
        print(markdown(("replica", "tokens/s, median", "lowest"), rows))
        print(f"\nratio of neighbouring rounds, median {statistics.median(ratios):.3f}\n")
        if statistics.median(ratios) < 0.98:
            failed.append("a replica on a node makes less than 0.98 of the tokens")
        losses: dict[str, list[tuple[float, float]]] = {"killed": [], "cut off": []}
        for kind, found_losses in losses.items():
            for _ in range(options.losses):
                httpx.post(f"{server.url}/v1/completions", json={"model": "both", "prompt": "a"}, timeout=LONG_S)
                server.inferd("models", "restart", "both")
                _until(lambda: server.places("both") == ["", "far"], "one replica is on the node")
                found_losses.append(measure_loss(server, "far", node.kill if kind == "killed" else far.cut))
                if kind == "killed":
                    node.wait()
                    node = server.node("far", far)
                else:
                    far.mend()
                    _until(lambda: "node     far ready" in server.inferd("status"), "it has joined again")
        rows = [
            (kind, *(f"{statistics.median(part):.2f} / {max(part):.2f} s" for part in zip(*found, strict=True)))
            for kind, found in losses.items()
        ]
        print(markdown(("node", "noticed, median / most", "longest wait of a stream, median / most"), rows))
        every = [one for found in losses.values() for one in found]
        if max(noticed for noticed, _ in every) > 1.0:
            failed.append("a loss was noticed after more than 1 s")
        if max(elsewhere for _, elsewhere in every) > 1.5:
            failed.append("streams went on after more than 1.5 s")
    for sentence in failed:
        print(f"failed: {sentence}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
