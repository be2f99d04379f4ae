"""What a server does when more is asked of it than it can do: ``python -m bench.overload``.

    python -m bench.overload --seconds 180 --out overload

Starts ``inferd serve`` with a short queue, measures its peak with a closed loop, then offers 1, 2 and 5 times that
with an open loop (requests arrive whether or not earlier ones were answered), then less again. Then 5 times once more from
a generator in C++ (``gateway/traffic.cpp``), which leaves the cores to the server, and so times refusals truly; last, a
flood of batch work from there beside a light interactive load. Writes every figure as JSON and, where matplotlib is installed
(``pip install matplotlib``), the curves as SVG. Exit status 1 names what did not hold:

- goodput at 5 times is at least 90 % of the peak;
- refusals are answered within 100 ms at the 99th percentile, and nothing but refusals fails;
- 30 s after the load has dropped, latency is what it was (p95 at most 1.5 times);
- memory grows by at most 20 %;
- interactive p95 TTFT beside the flood is at most twice what it is alone, and batch work goes on.

Its clients wait for their answers however long that takes; ``bench.impatient`` has others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.gateway.__main__ import build
from inferd.benchmark.dataset import Query
from inferd.benchmark.load import Target, closed_loop, open_loop
from inferd.benchmark.stats import Record, percentile, spread

PORT = 9300
FACTORS = (1.0, 2.0, 5.0)
OUTPUT_TOKENS = 32
RECOVERY_S = 30.0
CONFIG = """server: {{port: {port}, access_log: false}}
models:
  m:
    source: {source}
    scheduler: {{max_num_seqs: 16}}
    queue: {{max_requests: {queue}, timeout_s: 20}}
"""


def queries(count: int) -> list[Query]:
    """Prompts that share no prefix, so that nothing is found in a cache."""
    return [
        Query(
            messages=[{"role": "user", "content": f"{n} {n * 7919 % 104729} is a number. " + "Say more. " * 12}],
            max_tokens=OUTPUT_TOKENS,
        )
        for n in range(count)
    ]


def is_refusal(record: Record) -> bool:
    return record.error is not None and record.error[:4] in ("429:", "503:")


def figures(records: Sequence[Record], seconds: float, offered: float) -> dict[str, object]:
    good = [record for record in records if record.error is None]
    refused = [record for record in records if is_refusal(record)]
    failed = [record.error for record in records if record.error is not None and not is_refusal(record)]
    in_time = [record for record in good if record.ended_at <= seconds + 1.0]
    return {
        "offered_per_s": offered,
        "goodput_per_s": len(in_time) / seconds,
        "sent": len(records),
        "answered": len(good),
        "refused": len(refused),
        "failed": len(failed),
        "failures": sorted({str(error) for error in failed})[:5],
        "refusal_p50_ms": percentile(sorted(r.e2e_s for r in refused), 50) * 1e3,
        "refusal_p99_ms": percentile(sorted(r.e2e_s for r in refused), 99) * 1e3,
        "ttft_s": json.loads(json.dumps(_quantiles([r.ttft_s for r in good if r.ttft_s is not None]))),
        "e2e_s": _quantiles([r.e2e_s for r in good]),
        "timeline": _timeline(good),
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    found = spread(values)
    return {"p50": found.p50, "p95": found.p95, "p99": found.p99, "max": found.max}


def _timeline(good: Sequence[Record], width_s: float = 5.0) -> list[tuple[float, float, int]]:
    """(second, p95 of the time to the end, answers) for each stretch of time, by when requests were sent."""
    slots: dict[int, list[float]] = {}
    for record in good:
        slots.setdefault(int(record.sent_at // width_s), []).append(record.e2e_s)
    return [(slot * width_s, percentile(sorted(values), 95), len(values)) for slot, values in sorted(slots.items())]


class Server:
    """``inferd serve`` as a process of its own, and the memory of it and its workers."""

    def __init__(self, folder: Path, source: str, queue: int) -> None:
        config = folder / "overload.yaml"
        config.write_text(CONFIG.format(port=PORT, source=source, queue=queue))
        self._log = (folder / "server.log").open("wb")
        command = [sys.executable, "-m", "inferd", "serve", str(config)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def wait_ready(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"The server did not become ready; see {self._log.name}.")

    def memory_mb(self) -> float:
        root = psutil.Process(self.process.pid)
        return float(sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])) / 2**20

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._log.close()


async def flood(traffic: Path, folder: Path, rate: float, seconds: float, *headers: str) -> dict[str, object]:
    """An open loop from outside this process: streamed requests of different prompts."""
    prompt = "@@@@@@@@ is a number. " + "Say more. " * 12
    body = {"model": "m", "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": OUTPUT_TOKENS}
    path = folder / "flood.json"
    path.write_text(json.dumps(body | {"messages": [{"role": "user", "content": prompt}]}))
    words = ["--port", str(PORT), "--body", str(path), "--rate", f"{rate:.3f}", "--seconds", f"{seconds:.3f}"]
    words += ["--connections", "256", "--stream"]
    for header in headers:
        words += ["--header", header]
    process = await asyncio.create_subprocess_exec(traffic, "load", *words, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    found: dict[str, object] = json.loads(out)
    return found | {"offered_per_s": rate, "goodput_per_s": _number(found, "answers") / _number(found, "seconds")}


async def measure(server: Server, traffic: Path, folder: Path, seconds: float) -> dict[str, object]:
    target = Target(url=f"http://127.0.0.1:{PORT}", model="m", timeout_s=120.0)
    source = queries(200_000)
    taken = 0

    def some(count: float) -> list[Query]:
        nonlocal taken
        taken += int(count)
        return source[taken - int(count) : taken]

    async def offer(rate: float, length: float, name: str, **headers: str) -> dict[str, object]:
        say(f"{name}: {rate:.1f} requests/s for {length:.0f} s")
        asked = Target(url=target.url, model="m", timeout_s=120.0, headers=headers)
        found = await open_loop(asked, some(rate * length), rate, lambda _: None, seed=taken)
        return {"name": name, **figures(found, length, rate), "memory_mb": server.memory_mb()}

    say("warming up, then the peak with 24 clients")
    await closed_loop(target, some(100), 8, lambda _: None)
    began = time.monotonic()
    ends: list[float] = []
    peak_seconds = min(seconds, 60.0)

    async def until_late() -> None:
        while time.monotonic() - began < peak_seconds:
            await closed_loop(target, some(240), 24, lambda _: ends.append(time.monotonic()))

    await until_late()
    peak = len(ends) / (ends[-1] - began)
    memory = server.memory_mb()
    say(f"peak {peak:.1f} requests/s, {memory:.0f} MB")
    runs = [await offer(peak * factor, seconds, f"{factor:g}x") for factor in FACTORS]
    after = await offer(peak * 0.7, max(2 * RECOVERY_S, seconds / 2), "0.7x after 5x")
    before = await offer(peak * 0.7, min(60.0, seconds), "0.7x")
    light = max(0.5, peak * 0.05)
    alone = await offer(light, seconds, "interactive alone", **{"x-inferd-priority": "interactive"})
    say(f"5x from the other generator: {peak * 5:.1f} requests/s for {seconds:.0f} s")
    outside = await flood(traffic, folder, peak * 5, seconds)
    batch, beside = await asyncio.gather(
        flood(traffic, folder, peak * 5, seconds, "x-inferd-priority: batch"),
        offer(light, seconds, "interactive beside batch", **{"x-inferd-priority": "interactive"}),
    )
    return {
        "peak_per_s": peak,
        "memory_mb": memory,
        "runs": runs,
        "before": before,
        "after": after,
        "alone": alone,
        "beside": beside,
        "outside": outside,
        "flood": batch,
    }


def verdicts(found: dict[str, object]) -> list[tuple[bool, str]]:
    """What must hold, with the figure it was judged by."""
    peak = _number(found, "peak_per_s")
    runs = found["runs"]
    assert isinstance(runs, list)
    five = runs[-1]
    late = [p95 for at, p95, _ in _points(found["after"]) if at >= RECOVERY_S]
    usual = _number(found["before"], "e2e_s", "p95")
    ratio = _number(found["beside"], "ttft_s", "p95") / max(1e-9, _number(found["alone"], "ttft_s", "p95"))
    grown = max(_number(run, "memory_mb") for run in runs) / _number(found, "memory_mb") - 1
    refusals = _number(found["outside"], "refusal_p99_ms")
    failed = sum(_number(run, "failed") for run in runs) + _number(found["outside"], "errors")
    recovered = percentile(sorted(late), 50) if late else float("inf")
    kept = _number(five, "goodput_per_s") / peak
    return [
        (kept >= 0.9, f"goodput at 5x is {kept:.0%} of the peak"),
        (refusals <= 100, f"refusals take {refusals:.1f} ms at p99"),
        (failed == 0, f"{failed:.0f} requests failed otherwise"),
        (recovered <= 1.5 * usual, f"{RECOVERY_S:.0f} s after 5x, p95 is {recovered:.2f} s (usually {usual:.2f} s)"),
        (grown <= 0.2, f"memory grew by {grown:.0%}"),
        (ratio <= 2.0, f"interactive p95 TTFT beside batch work is {ratio:.2f} times what it is alone"),
        (
            _number(found["flood"], "answers") > 0,
            f"{_number(found['flood'], 'goodput_per_s'):.1f} batch requests/s went on",
        ),
    ]


def _number(found: object, *path: str) -> float:
    for name in path:
        assert isinstance(found, dict)
        found = found[name]
    assert isinstance(found, int | float)
    return float(found)


def _points(run: object) -> list[tuple[float, float, int]]:
    assert isinstance(run, dict)
    points: list[tuple[float, float, int]] = run["timeline"]
    return points


def draw(found: dict[str, object], path: Path) -> None:
    """Goodput and refusals by load; the latency before, during and after; both TTFT distributions."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    runs = found["runs"]
    assert isinstance(runs, list)
    peak = _number(found, "peak_per_s")
    offered = [_number(run, "offered_per_s") for run in runs]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    left.plot([0, peak, offered[-1]], [0, peak, peak], color="0.7", linestyle="--", label="ideal")
    left.plot([0, *offered], [0, *(_number(run, "goodput_per_s") for run in runs)], marker="o", label="answered")
    left.plot(
        [0, *offered],
        [0, *(_number(run, "refused") / _number(run, "sent") * _number(run, "offered_per_s") for run in runs)],
        marker="x",
        label="refused",
    )
    left.set_xlabel("offered, requests/s")
    left.set_ylabel("requests/s")
    left.set_title("Goodput by load")
    left.legend()
    for run in (*runs, found["after"]):
        points = _points(run)
        middle.plot([at for at, _, _ in points], [p95 for _, p95, _ in points], label=run["name"])
    middle.set_xlabel("s")
    middle.set_ylabel("p95 of the whole answer, s")
    middle.set_ylim(bottom=0)
    middle.set_title("Latency of what was accepted")
    middle.legend()
    names = ("p50", "p95", "p99")
    for place, key in ((-0.2, "alone"), (0.2, "beside")):
        values = [_number(found[key], "ttft_s", name) * 1e3 for name in names]
        right.bar(
            [i + place for i in range(3)],
            values,
            width=0.4,
            label="alone" if key == "alone" else "beside 5x batch work",
        )
    right.set_xticks(range(3), names)
    right.set_ylabel("TTFT, ms")
    right.set_title("Interactive requests")
    right.legend()
    figure.tight_layout()
    figure.savefig(path)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the model")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each load")
    parser.add_argument("--queue", type=int, default=32, help="requests that may wait")
    parser.add_argument("--out", type=Path, default=Path("overload"), help="OUT.json and OUT.svg are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options.source, options.queue)
        try:
            server.wait_ready()
            found = asyncio.run(measure(server, build(Path(folder)), Path(folder), options.seconds))
        finally:
            server.stop()
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1))
    try:
        draw(found, options.out.with_suffix(".svg"))
    except ImportError:
        say("No picture: pip install matplotlib draws it.")
    print("| load | offered/s | goodput/s | refused | refusal p99 ms | TTFT p50 / p95 s | whole answer p95 s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    runs = found["runs"]
    assert isinstance(runs, list)
    for run in (*runs, found["after"], found["alone"], found["beside"]):
        ttft = f"{_number(run, 'ttft_s', 'p50'):.3f} / {_number(run, 'ttft_s', 'p95'):.3f}"
        print(
            f"| {run['name']} | {run['offered_per_s']:.1f} | {run['goodput_per_s']:.1f} | {run['refused']} | "
            f"{run['refusal_p99_ms']:.1f} | {ttft} | {_number(run, 'e2e_s', 'p95'):.2f} |"
        )
    for name, run in (("5x, generator in C++", found["outside"]), ("batch flood at 5x, C++", found["flood"])):
        print(
            f"| {name} | {_number(run, 'offered_per_s'):.1f} | {_number(run, 'goodput_per_s'):.1f} | "
            f"{_number(run, 'refusals'):.0f} | {_number(run, 'refusal_p99_ms'):.1f} | | |"
        )
    holds = verdicts(found)
    for held, sentence in holds:
        print(f"{'ok  ' if held else 'FAIL'} {sentence}")
    return 0 if all(held for held, _ in holds) else 1


if __name__ == "__main__":
    sys.exit(main())
