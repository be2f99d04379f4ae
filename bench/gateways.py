"""Prefix cache hits behind several gateways, in simulated time: ``python -m bench.gateways TRACE...``.

    python -m bench.gateways mooncake/conversation_trace.jsonl aibrix-sharegpt/8min_up_and_down.jsonl

Gateways share remote servers, and a balancer gives each request to a gateway at random. The choice of a server is the
gateway's own code (``inferd.router.choosing``), and so are the hints between gateways. A server is a prefix cache of
least recently used blocks, and the time that an answer takes by tokens. Each trace is replayed with one gateway, and
with several: without rendezvous hashing and hints, with rendezvous hashing alone, and with both. Reported are the
blocks that a server found in its cache, and the load of the busiest server relative to the mean. Exit status 1 where
gateways with hints reach less than 95 % of the hits of one gateway.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from bench.report import markdown
from inferd.router.choosing.affinity import PrefixIndex, continuation_of, indexed_bytes, prefixes
from inferd.router.choosing.policy import choose

BLOCK_TOKENS = 512  # of a Mooncake block
BYTES_PER_TOKEN = 4
SHARE_OF_ONE = 0.95


class Asked(NamedTuple):
    """A request: when it comes (seconds), its text, the blocks of its prompt, and the tokens of its answer."""

    at: float
    text: bytes
    blocks: Sequence[object]
    answer: int


class Setup(NamedTuple):
    """What is compared."""

    name: str
    num_gateways: int
    has_rendezvous: bool
    has_hints: bool


@dataclass(slots=True)
class Server:
    """A remote server: its prefix cache, and the requests that it works on for all gateways."""

    capacity: int
    cached: OrderedDict[object, None] = field(default_factory=OrderedDict)
    running: int = 0

    def ask(self, blocks: Sequence[object]) -> int:
        """The blocks that it finds; all are cached afterwards."""
        found = 0
        for block in blocks:
            if block not in self.cached:
                break
            found += 1
        for block in reversed(blocks):
            self.cached[block] = None
            self.cached.move_to_end(block)
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)
        return found


@dataclass(slots=True)
class Seen:
    """A server as one gateway sees it (``policy.Candidate``)."""

    index: int
    load: int = 0
    weight: float = 1.0
    region: str = ""
    is_fallback: bool = False
    can_take: bool = True

    @property
    def identity(self) -> str:
        return f"http://server-{self.index}/v1"


class Found(NamedTuple):
    hits: int
    blocks: int
    balance: float  # the busiest server's requests relative to the mean, mean over arrivals


def play(requests: Sequence[Asked], setup: Setup, options: argparse.Namespace) -> Found:
    """Every request of a trace to its end."""
    random = Random(options.seed)
    servers = [Server(options.capacity) for _ in range(options.servers)]
    views = [[Seen(index) for index in range(options.servers)] for _ in range(setup.num_gateways)]
    indexes = [PrefixIndex(20_000) for _ in views]
    news: list[list[tuple[int, list[int]]]] = [[] for _ in views]
    ends: list[tuple[float, int, int]] = []
    exchanged_at = requests[0].at
    hits = total = 0
    balance = 0.0
    for request in requests:
        while ends and ends[0][0] <= request.at:
            _, gateway, server = heapq.heappop(ends)
            views[gateway][server].load -= 1
            servers[server].running -= 1
        while setup.has_hints and request.at >= exchanged_at + options.exchange_s:
            exchanged_at += options.exchange_s
            for teller, told in enumerate(news):
                for hearer, index in enumerate(indexes):
                    if hearer != teller:
                        for server, keys in told:
                            index.note(keys, server)
                told.clear()
        gateway = random.randrange(setup.num_gateways)
        keys = prefixes("", request.text)
        seen = indexes[gateway].best(keys)
        continuation = continuation_of(keys, max(seen.values(), default=0)) if keys and setup.has_rendezvous else None
        chosen = choose(
            views[gateway],
            random=random,
            prefer=seen,
            prompt_bytes=indexed_bytes(keys),
            continuation=continuation,
            slack=options.slack,
        )
        assert chosen is not None
        if keys:
            indexes[gateway].note(keys, chosen.index)
            news[gateway].append((chosen.index, keys))
        asked = servers[chosen.index]
        found = asked.ask(request.blocks)
        hits += found
        total += len(request.blocks)
        tokens = (len(request.blocks) - found) * options.block_tokens
        took = options.fixed_s + tokens * options.prefill_s + request.answer * options.decode_s
        chosen.load += 1
        asked.running += 1
        heapq.heappush(ends, (request.at + took, gateway, chosen.index))
        running = [each.running for each in servers]
        balance += max(running) * len(running) / sum(running)
    return Found(hits, total, balance / len(requests))


def read(path: Path) -> tuple[list[Asked], int]:
    """The requests of a trace in order of arrival, and the tokens of its blocks."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if rows and "hash_ids" in rows[0]:
        return sorted(_mooncake(rows), key=lambda asked: asked.at), BLOCK_TOKENS
    if rows and "requests" in rows[0]:
        return sorted(_sharegpt(rows), key=lambda asked: asked.at), 16
    raise SystemExit(f"{path} is neither a Mooncake trace (hash_ids) nor AIBrix's ShareGPT (requests).")


def _mooncake(rows: Sequence[dict[str, list[int]]]) -> Iterator[Asked]:
    for row in rows:
        ids, size = row["hash_ids"], BLOCK_TOKENS * BYTES_PER_TOKEN
        text = b"".join(b"%08d" % number * (size // 8) for number in ids[:16])
        yield Asked(row["timestamp"] / 1000.0, text, ids, row["output_length"])  # type: ignore[operator,arg-type]


def _sharegpt(rows: Sequence[dict[str, list[dict[str, str]]]]) -> Iterator[Asked]:
    for row in rows:
        for request in row["requests"]:
            text, size = request["prompt"].encode(), 16 * BYTES_PER_TOKEN
            blocks = [hash(text[:end]) for end in range(size, len(text) + 1, size)]
            yield Asked(row["timestamp"] / 1000.0, text, blocks, int(request["Output Length"]))  # type: ignore[operator]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateways", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=4000, help="blocks in the cache of a server")
    parser.add_argument("--exchange-s", type=float, default=1.0, help="seconds between two exchanges of hints")
    parser.add_argument("--slack", type=float, default=1.5)
    parser.add_argument("--fixed-s", type=float, default=0.05, help="seconds of every request")
    parser.add_argument("--prefill-s", type=float, default=0.0001, help="seconds per token that is not cached")
    parser.add_argument("--decode-s", type=float, default=0.02, help="seconds per token of the answer")
    parser.add_argument("--speed", type=float, default=4.0, help="how much faster requests come than in the trace")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    setups = [
        Setup("one gateway without rendezvous", 1, False, False),
        Setup("one gateway", 1, True, False),
        Setup(f"{options.gateways} gateways that share nothing", options.gateways, False, False),
        Setup(f"{options.gateways} gateways, rendezvous alone", options.gateways, True, False),
        Setup(f"{options.gateways} gateways, hints alone", options.gateways, False, True),
        Setup(f"{options.gateways} gateways, rendezvous and hints", options.gateways, True, True),
    ]
    has_held = True
    for path in options.traces:
        requests, options.block_tokens = read(path)
        requests = [asked._replace(at=asked.at / options.speed) for asked in requests]
        found = [play(requests, setup, options) for setup in setups]
        one = max(found[:2], key=lambda each: each.hits)
        rows = [
            [setup.name, f"{each.hits / each.blocks:.1%}", f"{each.hits / one.hits:.1%}", f"{each.balance:.2f}"]
            for setup, each in zip(setups, found, strict=True)
        ]
        print(f"\n{path.name}: {len(requests)} requests\n")
        print(markdown(["", "blocks found", "of one gateway", "busiest server / mean"], rows))
        has_held = has_held and found[-1].hits >= SHARE_OF_ONE * one.hits
    return 0 if has_held else 1


if __name__ == "__main__":
    sys.exit(main())
