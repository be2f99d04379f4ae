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

    def receive(self, timeout_s: float | None = None) -> list[object]:
        """What the worker says next; nothing when it says nothing for so long."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            return []
        if not data:
            sys.exit("the worker is gone")
        return [message for messages in self._frames.feed(data) for message in messages]

    def send(self, requests: list[PredictRequest]) -> None:
        self._socket.settimeout(None)
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


class Session:
    """Requests under way, and what became of those that were answered."""

    def __init__(self, driver: Driver, body: bytes) -> None:
        self.driver, self.body = driver, body
        self.under_way: dict[str, float] = {}
        self.latencies: list[float] = []
        self._batches: list[int] = []
        self._number = 0
        self._began, self._cpu = time.monotonic(), driver.cpu_s()
        self._ended, self._spent = self._began, self._cpu

    def send(self, count: int) -> None:
        now, size = time.monotonic(), len(self.body)
        made = []
        for _ in range(count):
            self._number += 1
            name = f"predict-{self._number:032x}"
            self.under_way[name] = now
            made.append(
                PredictRequest(id=name, model="model", dialect="v2", body=self.body, num_bytes=size, arrived_at=now)
            )
        self.driver.send(made)

    def receive(self, timeout_s: float | None = None) -> int:
        """Wait for answers; how many came."""
        answered = 0
        for message in self.driver.receive(timeout_s):
            if not isinstance(message, Outputs):
                continue
            if message.stats is not None:
                self._batches.append(message.stats.batch_rows)
            now = time.monotonic()
            for output in message.outputs:
                assert isinstance(output, Output)
                assert output.end is not None
                assert output.prediction is not None, output.end.failure
                self.latencies.append(now - self.under_way.pop(output.request_id))
                answered += 1
        if answered:
            self._ended, self._spent = time.monotonic(), self.driver.cpu_s()
        return answered

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer."""
        return self._ended - self._began

    def measured(self) -> Measured:
        ordered = sorted(self.latencies)
        count = len(ordered)
        return Measured(
            requests_per_s=count / self.seconds,
            p50_ms=ordered[count // 2] * 1e3,
            p99_ms=ordered[count * 99 // 100] * 1e3,
            cpu_us=(self._spent - self._cpu) / count * 1e6,
            rows_per_batch=sum(self._batches) / max(1, len(self._batches)),
        )


def closed_loop(driver: Driver, body: bytes, clients: int, seconds: float) -> Measured:
    """So many clients, each of which sends its next request when it is answered. All are answered at the end."""
    session = Session(driver, body)
    session.send(clients)
    while session.under_way:
        answered = session.receive()
        if answered and session.seconds < seconds:
            session.send(answered)
    return session.measured()


def open_loop(driver: Driver, body: bytes, rate: float, seconds: float, seed: int = 0) -> Measured:
    """Requests that come at random times, ``rate`` in a second, whether or not others were answered. Those that are not
    answered a second after the last one came (a batch that was never full) do not count."""
    session, draw = Session(driver, body), random.Random(seed)
    began = time.monotonic()
    due = began + draw.expovariate(rate)
    last = began + seconds
    while due < last:
        now = time.monotonic()
        if now >= due:
            session.send(1)
            due += draw.expovariate(rate)
        else:
            session.receive(due - now)
    while session.under_way and time.monotonic() < last + 1.0:
        session.receive(0.1)
    return session.measured()


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
