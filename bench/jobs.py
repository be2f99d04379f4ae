"""What a batch job costs interactive requests, and how much of the capacity they leave it takes: ``python -m bench.jobs``.

    python -m bench.jobs --seconds 60 --rounds 3 --out jobs.json
    python -m bench.jobs --seconds 10 --rounds 1 --lines 2000     (the short form, about two minutes)

Starts ``inferd serve`` and measures, with requests of one shape:

1. tokens/s of a batch job alone, at a server that had no other requests before;
2. tokens/s of a saturating client, which sends the same requests itself; the larger of both is the capacity;
3. in turn, for some rounds: an open loop of interactive requests (``--share`` of the capacity) without a job, and with one;
4. with ``--lines``: a job of so many short requests, and the memory by which the gateway grows.

The job comes first, because the scheduler keeps room for other classes for some hundred steps after their last request.
Every figure is written as JSON. Exit status 1 names what did not hold:

- interactive p95 time to first token beside the job is at most 1.2 times what it is without;
- the job takes at least 90 % of the capacity that the interactive requests leave;
- a job alone reaches at least 95 % of the saturating client;
- the gateway grows by at most 64 MiB.

The full form takes about 3 minutes for each round of 60 s, and 4 more with 100,000 lines on a fast machine. The client
shares the machine's cores with the server, so nothing else may run there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from inferd.benchmark.dataset import Query
from inferd.benchmark.load import Target, closed_loop, open_loop
from inferd.benchmark.stats import Record, percentile
from inferd.cli.running.batch import uploaded
from inferd.cli.running.control import Server, find_server
from inferd.cli.running.own_server import own_server

OUTPUT_TOKENS: Final = 32
CLIENTS: Final = 64
RAMP_S: Final = 3.0
PATH: Final = "/v1/chat/completions"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Questions:
    """Requests of one shape that share no prefix, so that nothing is found in a cache."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._next = 0

    def _messages(self) -> list[dict[str, Any]]:
        self._next += 1
        number = self._next
        return [{"role": "user", "content": f"{number} {number * 7919 % 104729} is a number. " + "Say more. " * 12}]

    def queries(self, count: int) -> list[Query]:
        return [Query(messages=self._messages(), max_tokens=OUTPUT_TOKENS) for _ in range(count)]

    def write(self, path: Path, count: int, max_tokens: int = OUTPUT_TOKENS) -> None:
        """The lines of a job."""
        with path.open("w") as file:
            for number in range(count):
                body = {
                    "model": self._model,
                    "messages": self._messages(),
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                line = {"custom_id": f"r{number}", "method": "POST", "url": PATH, "body": body}
                file.write(json.dumps(line) + "\n")


class Job:
    """A batch job of the server."""

    def __init__(self, server: Server, lines: Path) -> None:
        self._server = server
        file = uploaded(server, lines)
        body = json.dumps({"input_file_id": file.id, "endpoint": PATH, "completion_window": "24h"}).encode()
        made = server.send("/v1/batches", body, {"content-type": "application/json"})
        self.id: str = json.loads(made.body)["id"]

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = self._server.get(f"/v1/batches/{self.id}", dict)
        return found

    def tokens(self) -> int:
        return int(self.seen()["usage"]["output_tokens"])

    def has_ended(self) -> bool:
        return self.seen()["status"] in ("completed", "failed", "expired", "cancelled")

    def cancel(self) -> None:
        if not self.has_ended():
            self._server.post(f"/v1/batches/{self.id}/cancel", dict)
        while not self.has_ended():
            time.sleep(0.2)


def gateway_bytes(server: Server) -> float:
    for line in server.lines("/metrics", 30):
        name, _, value = line.decode().strip().rpartition(" ")
        if name.partition("{")[0] == "process_resident_memory_bytes":
            return float(value)
    raise SystemExit("The server does not tell its memory.")


def tokens_per_s(records: list[Record], begin: float, end: float) -> float:
    """Tokens of the answers that ended in a span of time, by its seconds."""
    return sum(one.output_tokens for one in records if begin <= one.ended_at < end) / (end - begin)


async def capacity(target: Target, questions: Questions, seconds: float) -> float:
    """Tokens/s of a saturating client."""
    records: list[Record] = []
    limit = asyncio.create_task(
        closed_loop(target, questions.queries(1_000_000 // OUTPUT_TOKENS), CLIENTS, records.append)
    )
    await asyncio.sleep(RAMP_S + seconds)
    limit.cancel()
    await asyncio.gather(limit, return_exceptions=True)
    _check(records)
    return tokens_per_s(records, RAMP_S, RAMP_S + seconds)


async def job_rate(job: Job, seconds: float) -> float:
    """Tokens/s of a job that runs."""
    began, before = time.monotonic(), await asyncio.to_thread(job.tokens)
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(job.tokens)
    if await asyncio.to_thread(job.has_ended):
        raise SystemExit("The job ended before its time; this is a defect of the benchmark's estimate.")
    return (after - before) / (time.monotonic() - began)


async def interactive(target: Target, questions: Questions, rate: float, seconds: float, seed: int) -> list[Record]:
    records = await open_loop(target, questions.queries(max(20, int(rate * seconds))), rate, lambda _: None, seed=seed)
    _check(records)
    return records


def _check(records: list[Record]) -> None:
    failed = [one.error for one in records if one.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0]}")


def p95_ttft_ms(records: list[Record]) -> float:
    return percentile(sorted(one.ttft_s for one in records if one.ttft_s is not None), 95) * 1e3


async def warmed_up(server: Server, folder: Path, questions: Questions) -> float:
    """Tokens/s of a short job, from its first answers to its end."""
    path = folder / "first.jsonl"
    questions.write(path, CLIENTS * 8)
    job = await asyncio.to_thread(Job, server, path)
    while not (first := await asyncio.to_thread(job.tokens)):
        await asyncio.sleep(0.02)
    began = time.monotonic()
    while not await asyncio.to_thread(job.has_ended):
        await asyncio.sleep(0.05)
    return (CLIENTS * 8 * OUTPUT_TOKENS - first) / (time.monotonic() - began)


async def started(server: Server, folder: Path, questions: Questions, most: int) -> Job:
    """A job that runs, and is longer than ``most`` tokens."""
    path = folder / "lines.jsonl"
    questions.write(path, most // OUTPUT_TOKENS + 256)
    job = await asyncio.to_thread(Job, server, path)
    while not await asyncio.to_thread(job.tokens):
        await asyncio.sleep(0.1)
    await asyncio.sleep(RAMP_S)
    return job


async def measure(address: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    server = find_server(None, None, address, None)
    model = "demo" if options.source == "demo" else server.get("/v1/models", dict)["data"][0]["id"]
    target = Target(url=address, model=model)
    questions, seconds = Questions(model), options.seconds
    say("warming up")
    most = int(await warmed_up(server, folder, questions) * (seconds + 2 * RAMP_S) * 3)
    say(f"a job alone for {seconds:.0f} s")
    job = await started(server, folder, questions, most)
    alone = await job_rate(job, seconds)
    await asyncio.to_thread(job.cancel)
    say(f"{alone:.0f} tokens/s; {CLIENTS} clients for as long")
    total = await capacity(target, questions, seconds)
    say(f"{total:.0f} tokens/s")
    rate = options.share * total / OUTPUT_TOKENS
    rounds = []
    for number in range(options.rounds):
        say(f"round {number + 1}: {rate:.1f} interactive requests/s without a job, then beside one")
        without = await interactive(target, questions, rate, seconds, seed=number)
        job = await started(server, folder, questions, most)
        beside, taken = await asyncio.gather(
            interactive(target, questions, rate, seconds, seed=number), job_rate(job, seconds)
        )
        await asyncio.to_thread(job.cancel)
        used = tokens_per_s(beside, 0.0, seconds)
        rounds.append(
            {
                "p95_ttft_ms": p95_ttft_ms(without),
                "p95_ttft_beside_ms": p95_ttft_ms(beside),
                "requests": len(beside),
                "interactive_tokens_per_s": used,
                "job_tokens_per_s": taken,
                "share_of_rest": taken / (max(total, alone) - used),
            }
        )
        say(json.dumps(rounds[-1]))
    found: dict[str, Any] = {
        "capacity_tokens_per_s": total,
        "job_alone_tokens_per_s": alone,
        "rate_per_s": rate,
        "rounds": rounds,
    }
    if options.lines:
        found["long"] = await long_job(server, folder, questions, options.lines)
    return found


async def long_job(server: Server, folder: Path, questions: Questions, count: int) -> dict[str, Any]:
    """A job of many short requests: its rate, and how far the gateway's memory grows."""
    path = folder / "long.jsonl"
    questions.write(path, count, max_tokens=1)
    before, most = gateway_bytes(server), 0.0
    say(f"a job of {count} lines; the gateway has {before / 2**20:.0f} MiB")
    began = time.monotonic()
    job = await asyncio.to_thread(Job, server, path)
    while not await asyncio.to_thread(job.has_ended):
        most = max(most, gateway_bytes(server))
        await asyncio.sleep(1.0)
    seen = job.seen()
    return {
        "lines": count,
        "completed": seen["request_counts"]["completed"],
        "seconds": time.monotonic() - began,
        "grown_mib": (most - before) / 2**20,
    }


def verdicts(found: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold, with the figure it was judged by: medians over the rounds."""
    ratio = statistics.median(one["p95_ttft_beside_ms"] / one["p95_ttft_ms"] for one in found["rounds"])
    share = statistics.median(one["share_of_rest"] for one in found["rounds"])
    kept = found["job_alone_tokens_per_s"] / found["capacity_tokens_per_s"]
    judged = [
        (ratio <= 1.2, f"interactive p95 TTFT beside the job is {ratio:.2f} times what it is without"),
        (share >= 0.9, f"the job takes {share:.0%} of the capacity that is left"),
        (kept >= 0.95, f"a job alone reaches {kept:.0%} of a saturating client"),
    ]
    if "long" in found:
        long = found["long"]
        judged += [
            (long["completed"] == long["lines"], f"{long['completed']} of {long['lines']} lines are answered"),
            (long["grown_mib"] <= 64, f"the gateway grows by {long['grown_mib']:.0f} MiB"),
        ]
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the model")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each load")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of loads without and with a job")
    parser.add_argument("--share", type=float, default=0.2, help="of the capacity that interactive requests use")
    parser.add_argument("--lines", type=int, default=100_000, help="of the long job; 0: none")
    parser.add_argument("--out", type=Path, default=None, help="write every figure to this file as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with own_server(options.source, settings={"INFERD_STATE__DATA_DIR": str(folder / "data")}) as address:
            found = asyncio.run(measure(address, folder, options))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    judged = verdicts(found)
    for holds, sentence in judged:
        print(f"{'holds ' if holds else 'FAILED'}  {sentence}")
    return 0 if all(holds for holds, _ in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
