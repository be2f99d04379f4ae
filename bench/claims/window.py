"""A batching window for a predictive model: batches of 8 and 32, with a window of 20 ms and without, by number of clients.

The model is a perceptron of 50 MB: reading its weights is most of a batch's time, so rows computed together are nearly free.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.micro_predict import Driver, Measured, body_of, closed_loop
from bench.predictive.models import write_wide_mlp
from inferd.config import ModelConfig

CLIENTS = (1, 8, 64)
WINDOW_MS = 20.0


def measure(scale: Scale) -> Claim:
    ways = [
        ("batch 8, no window", {"mode": "dynamic", "max_batch_size": 8, "max_delay_ms": 0.0}),
        ("batch 8, 20 ms", {"mode": "dynamic", "max_batch_size": 8, "max_delay_ms": WINDOW_MS}),
        ("batch 32, no window", {"mode": "dynamic", "max_batch_size": 32, "max_delay_ms": 0.0}),
        ("batch 32, 20 ms", {"mode": "dynamic", "max_batch_size": 32, "max_delay_ms": WINDOW_MS}),
        ("one by one", {"mode": "off"}),
    ]
    found: dict[str, dict[int, Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide.onnx"
        write_wide_mlp(path)
        for name, batching in ways:
            settings = {"source": str(path), "threads": scale.threads, "batching": batching}
            driver = Driver(msgspec.convert(settings, ModelConfig), profile=False)
            body = body_of(driver.info)
            try:
                closed_loop(driver, body, 8, 0.3)
                found[name] = {n: closed_loop(driver, body, n, scale.pick(2, 10)) for n in CLIENTS}
            finally:
                driver.stop()
    busiest = {name: found[name][CLIENTS[-1]].requests_per_s for name, _ in ways}
    window, none = found["batch 32, 20 ms"], found["batch 32, no window"]
    more = busiest["batch 32, no window"] / busiest["one by one"]
    wider = busiest["batch 32, no window"] / busiest["batch 8, no window"]
    lone = window[1].p99_ms / none[1].p99_ms
    return Claim(
        name="window",
        claim="Larger batches raise the throughput of a loaded model. A window adds at most its length to latency, and nothing to a lone client's: the batcher waits only where waiting pays.",
        baseline="the same worker with batching off (one by one), and without a window (max_delay_ms 0).",
        head=["batching", *(f"{n} clients: requests/s, p50 / p99 ms" for n in CLIENTS)],
        rows=[
            [name, *(f"{m.requests_per_s:.0f}, {m.p50_ms:.1f} / {m.p99_ms:.1f}" for m in found[name].values())]
            for name, _ in ways
        ],
        picture=bars(
            [name for name, _ in ways],
            [(f"{n} clients", [found[name][n].requests_per_s for name, _ in ways]) for n in CLIENTS],
            title="Requests per second by batch size and window",
            y_label="requests/s",
        ),
        verdicts=[
            (
                more > 1.5,
                f"batches of 32 answer {more:.1f} times the requests of one by one, {wider:.2f} times those of 8",
            ),
            (lone < 1.5, f"a window of 20 ms makes a lone client's p99 {lone:.2f} times what it is without"),
            (
                all(window[n].p99_ms <= none[n].p99_ms + WINDOW_MS * 1.5 for n in CLIENTS),
                f"p99 at 64 clients: {window[64].p99_ms:.1f} ms with the window, {none[64].p99_ms:.1f} without",
            ),
        ],
        data={name: {str(n): msgspec.to_builtins(m) for n, m in by.items()} for name, by in found.items()},
    )
