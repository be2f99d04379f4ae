"""A batching window for a predictive model: batches of 8 and of 32, that wait to be full, for a window of 20 ms, or for nobody.

The model is a perceptron of 50 MB: reading its weights is most of a batch's time, so rows computed together are nearly free.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.micro_predict import Driver, Measured, body_of, closed_loop, open_loop
from bench.predictive.models import write_wide_mlp
from inferd.config import ModelConfig

CLIENTS = 64  # that saturate the model
RATE = 75.0  # requests per second that do not
WINDOW_MS = 20.0
WAYS: dict[str, dict[str, object]] = {
    "full batch of 8": {"mode": "static", "max_batch_size": 8},
    "full batch of 32": {"mode": "static", "max_batch_size": 32},
    "8, no window": {"max_batch_size": 8, "max_delay_ms": 0.0},
    "32, no window": {"max_batch_size": 32, "max_delay_ms": 0.0},
    "32, 20 ms": {"max_batch_size": 32, "max_delay_ms": WINDOW_MS},
}


def measure(scale: Scale) -> Claim:
    rounds: dict[str, list[Measured]] = {name: [] for name in WAYS}
    steady: dict[str, Measured] = {}
    lone: dict[str, Measured] = {}
    drivers: dict[str, Driver] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide.onnx"
        write_wide_mlp(path)
        try:
            for name, batching in WAYS.items():
                settings = {"source": str(path), "threads": scale.threads, "batching": batching}
                drivers[name] = Driver(msgspec.convert(settings, ModelConfig), profile=False)
            body = body_of(drivers["32, 20 ms"].info)
            turns = scale.pick(5, 7) + 1
            for number in range(turns):
                scale.say(number, turns + len(drivers), f"{CLIENTS} clients, round {number + 1} of {turns}")
                for name, driver in drivers.items():
                    one = closed_loop(driver, body, CLIENTS, scale.pick(1, 2))
                    if number:  # the first is a warm-up, in which the batcher learns what batches cost
                        rounds[name].append(one)
            for done, (name, driver) in enumerate(drivers.items()):
                scale.say(turns + done, turns + len(drivers), f"{name}, at {RATE:g} requests/s")
                if WAYS[name].get("mode") != "static":  # which keeps a lone client waiting for ever
                    lone[name] = closed_loop(driver, body, 1, scale.pick(2, 5))
                steady[name] = open_loop(driver, body, RATE, scale.pick(5, 10))
        finally:
            for driver in drivers.values():
                driver.stop()
    busy = {name: sorted(found, key=_rate)[len(found) // 2] for name, found in rounds.items()}
    more = busy["full batch of 32"].requests_per_s / busy["full batch of 8"].requests_per_s
    kept = busy["32, 20 ms"].requests_per_s / busy["full batch of 32"].requests_per_s
    slower = steady["full batch of 32"].p99_ms - steady["full batch of 8"].p99_ms
    window = steady["32, 20 ms"].p99_ms
    added = lone["32, 20 ms"].p50_ms - lone["32, no window"].p50_ms
    return Claim(
        name="window",
        claim="Batches of 32 answer 2 to 3 times as many requests as batches of 8, but waiting for full ones costs hundreds of milliseconds at p99 when requests are few; a window of 20 ms keeps the throughput and loses the tail.",
        baseline="the same worker in batching.mode static, which computes full batches only.",
        head=[
            "batches",
            f"{CLIENTS} clients: requests/s",
            "rows per batch",
            f"{RATE:g} requests/s: p50 / p99 ms",
            "rows per batch",
            "one client: p50 / p99 ms",
        ],
        rows=[
            [
                name,
                f"{busy[name].requests_per_s:.0f}",
                f"{busy[name].rows_per_batch:.1f}",
                _latency(steady[name]),
                f"{steady[name].rows_per_batch:.1f}",
                _latency(lone[name]) if name in lone else "-",
            ]
            for name in WAYS
        ],
        picture=bars(
            list(WAYS),
            [
                (f"requests/s of {CLIENTS} clients", [busy[name].requests_per_s for name in WAYS]),
                (f"p99 at {RATE:g} requests/s, ms", [steady[name].p99_ms for name in WAYS]),
            ],
            title="Throughput and tail, by batches and what they wait for",
            y_label="requests/s, ms",
        ),
        verdicts=[
            (more >= 1.5, f"batches of 32 answer {more:.2f} times the requests of batches of 8"),
            (slower >= 100, f"waiting until they are full adds {slower:.0f} ms to p99 at {RATE:g} requests/s"),
            (kept >= 0.9, f"with a window of 20 ms instead, {kept:.0%} of the throughput is kept"),
            (window <= 100, f"and p99 at {RATE:g} requests/s is {window:.1f} ms"),
            (added < WINDOW_MS / 2, f"the window adds {added:.1f} ms to a lone client's median"),
        ],
        data={
            load: {name: msgspec.to_builtins(one) for name, one in by.items()}
            for load, by in (("busy", busy), ("steady", steady), ("lone", lone))
        },
    )


def _rate(measured: Measured) -> float:
    return measured.requests_per_s


def _latency(measured: Measured) -> str:
    return f"{measured.p50_ms:.1f} / {measured.p99_ms:.1f}"
