"""What a predictive worker costs per request, without a gateway: a process driven over a socket pair.

    python bench/micro_predict.py model.onnx                   64 clients, each sends its next request when it is answered
    python bench/micro_predict.py model.onnx --clients 1       a lone client's latency
    python bench/micro_predict.py module:Class --profile       cProfile of the worker's loop

Requests are KServe v2 JSON with as many random numbers as the model's first input takes. Reports requests per second,
latencies as the driver sees them, and the worker's own processor time per request (from /proc).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time

import msgspec

from inferd.config import ModelConfig
from inferd.types import ModelInfo, Output, PredictRequest
from inferd.worker.channel import Frames
from inferd.worker.messages import (
    Load,
    LoadFailed,
    Outputs,
    Ready,
    Stop,
    Submit,
    encode_frame,
    from_worker_decoder,
)

PROFILED = """
import cProfile, pstats, sys, os
from inferd.worker import main as entry
from inferd.worker.direct import DirectLoop
run = DirectLoop.run
def profiled(loop):
    profile = cProfile.Profile()
    try:
        profile.runcall(run, loop)
    finally:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)
DirectLoop.run = profiled
entry.main()
"""


class Driver:
    """The other end of a worker's channel, in one blocking thread."""

    def __init__(self, config: ModelConfig, *, profile: bool) -> None:
        self._socket, theirs = socket.socketpair()
        self._frames = Frames(from_worker_decoder)
        start = ["-c", PROFILED] if profile else ["-m", "inferd.worker"]
        self._process = subprocess.Popen(
            [sys.executable, *start, "--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", "model/0"],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        began = time.perf_counter()
        self._socket.sendall(encode_frame([Load("model", config)]))
        self.info = self._await_ready()
        self.ready_s = time.perf_counter() - began

    def _await_ready(self) -> ModelInfo:
        while True:
            for message in self.receive():
                if isinstance(message, Ready):
                    return message.info
                if isinstance(message, LoadFailed):
                    sys.exit(message.failure.message)

    def receive(self) -> list[object]:
        data = self._socket.recv(1 << 20)
        if not data:
            sys.exit("the worker is gone")
        return [message for messages in self._frames.feed(data) for message in messages]

    def send(self, requests: list[PredictRequest]) -> None:
        self._socket.sendall(encode_frame([Submit(request) for request in requests]))

    def cpu_s(self) -> float:
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        with open(f"/proc/{self._process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self._socket.sendall(encode_frame([Stop()]))
        self._process.wait(10)


def body_of(info: ModelInfo) -> bytes:
    """One row of random numbers for every input."""
    rng = random.Random(0)
    inputs = []
    for spec in info.inputs:
        shape = [1 if size < 0 else size for size in spec.shape]
        count = 1
        for size in shape:
            count *= size
        data = [rng.randrange(2) if "INT" in spec.datatype else rng.random() for _ in range(count)]
        inputs.append({"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": data})
    return json.dumps({"inputs": inputs}).encode()


class Measured(msgspec.Struct, frozen=True):
    """What a closed loop saw."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  # of the worker's processor, per request
    rows_per_batch: float


def closed_loop(driver: Driver, body: bytes, clients: int, seconds: float) -> Measured:
    """So many clients, each of which sends its next request when it is answered. All are answered at the end."""
    number = 0
    sent: dict[str, float] = {}
    latencies: list[float] = []
    batches: list[int] = []

    def requests(count: int) -> list[PredictRequest]:
        nonlocal number
        made = []
        now = time.monotonic()
        for _ in range(count):
            number += 1
            name = f"predict-{number:032x}"
            sent[name] = now
            made.append(
                PredictRequest(id=name, model="model", dialect="v2", body=body, num_bytes=len(body), arrived_at=now)
            )
        return made

    driver.send(requests(clients))
    began, cpu = time.monotonic(), driver.cpu_s()
    ended, spent = began, cpu
    while sent:
        answered = 0
        for message in driver.receive():
            if not isinstance(message, Outputs):
                continue
            if message.stats is not None:
                batches.append(message.stats.batch_rows)
            now = time.monotonic()
            for output in message.outputs:
                assert isinstance(output, Output)
                assert output.end is not None
                assert output.prediction is not None, output.end.failure
                latencies.append(now - sent.pop(output.request_id))
                answered += 1
        if answered:
            ended, spent = time.monotonic(), driver.cpu_s()
            if ended - began < seconds:
                driver.send(requests(answered))
    latencies.sort()
    count = len(latencies)
    return Measured(
        requests_per_s=count / (ended - began),
        p50_ms=latencies[count // 2] * 1e3,
        p99_ms=latencies[count * 99 // 100] * 1e3,
        cpu_us=(spent - cpu) / count * 1e6,
        rows_per_batch=sum(batches) / max(1, len(batches)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--max-batch-size", type=int)
    parser.add_argument("--max-delay-ms", type=float, default=2.0)
    parser.add_argument("--mode", choices=("dynamic", "static", "off"), default="dynamic")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    batching = {"mode": options.mode, "max_delay_ms": options.max_delay_ms, "max_batch_size": options.max_batch_size}
    config = msgspec.convert({"source": options.source, "allow_code": True, "batching": batching}, ModelConfig)
    driver = Driver(config, profile=options.profile)
    found = closed_loop(driver, body_of(driver.info), options.clients, options.seconds)
    rss = driver.rss_bytes()
    driver.stop()
    print(
        f"{options.clients} clients: {found.requests_per_s:,.0f} requests/s, p50 {found.p50_ms:.3f} ms, "
        f"p99 {found.p99_ms:.3f} ms; worker {found.cpu_us:.1f} us of processor per request, "
        f"{found.rows_per_batch:.1f} rows per batch; ready in {driver.ready_s:.2f} s, {rss / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
