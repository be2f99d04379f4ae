"""Measure predictive servers under the same load: ``python -m bench.predictive``.

    python -m bench.predictive                                      inferd alone
    python -m bench.predictive --peers triton,fastapi,litserve --peer-env DIR
                                                                    and servers of another environment
    python -m bench.predictive --only mlp                           one model

Server and load generator share the machine, as in the tables that others publish. HTTP load comes from
``bench/gateway/traffic.cpp``, gRPC load from ``h2load`` (nghttp2); each of 64 connections sends its next request when
it is answered. Every figure of a run comes from the same minutes on the same machine: compare within a run.
``limit`` is onnxruntime called in a loop in one process, without any server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gateway.__main__ import build, free, memory_mb, wait_ready
from bench.predictive import models
from bench.predictive.peers import PEERS, Peer

HTTP_PORT, GRPC_PORT = 9400, 9401
CLIENTS = 64


@dataclass
class Figures:
    """One server's results; None: it was not measured."""

    name: str
    start_s: float | None = None
    memory_mb: float | None = None
    mlp_per_s: float | None = None
    mlp_p99_ms: float | None = None
    mlp_alone_p50_ms: float | None = None
    grpc_per_s: float | None = None
    resnet_per_s: float | None = None
    embeddings_per_s: float | None = None
    errors: int = 0
    runs: list[dict[str, Any]] = field(default_factory=list)


COLUMNS = (
    ("mlp_per_s", "MLP requests/s", "{:,.0f}"),
    ("mlp_p99_ms", "p99 ms", "{:.1f}"),
    ("mlp_alone_p50_ms", "p50 ms, 1 client", "{:.2f}"),
    ("grpc_per_s", "gRPC requests/s", "{:,.0f}"),
    ("resnet_per_s", "ResNet-18 requests/s", "{:.0f}"),
    ("embeddings_per_s", "MiniLM requests/s", "{:.0f}"),
    ("start_s", "start s", "{:.2f}"),
    ("memory_mb", "memory MB", "{:.0f}"),
    ("errors", "errors", "{:d}"),
)


@contextlib.contextmanager
def running(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, env={**os.environ, **(env or {})}
        )
        try:
            yield process
        finally:
            for send in (process.terminate, process.kill):
                with contextlib.suppress(ProcessLookupError):
                    send()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


class Bench:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.traffic = build(folder)
        self.mlp, self.resnet, self.minilm = folder / "mlp.onnx", folder / "resnet18.onnx", folder / "minilm"

    def write(self, only: set[str]) -> None:
        models.write_mlp(self.mlp)
        models.infer_body(self.folder / "mlp.json", [1, 64])
        if "grpc" in only:
            models.grpc_body(self.folder / "mlp.grpc", [1, 64], "mlp")
        if "resnet" in only:
            models.write_resnet18(self.resnet)
            self.head_bytes = models.binary_body(self.folder / "resnet.bin", [1, 3, 224, 224])
        if "minilm" in only:
            models.write_encoder(self.minilm, models.MINILM)
            models.embedding_body(self.folder / "minilm.json")

    def load(self, body: str, path: str, clients: int, seconds: float, *headers: str) -> dict[str, Any]:
        words = ["--port", str(HTTP_PORT), "--body", str(self.folder / body), "--path", path]
        words += ["--connections", str(clients), "--seconds", str(seconds)]
        for header in headers:
            words += ["--header", header]
        done = subprocess.run([self.traffic, "load", *words], check=True, stdout=subprocess.PIPE, text=True)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def grpc(self, seconds: float) -> float:
        """Requests per second over HTTP/2, as many streams as clients on eight connections."""
        words = [
            "h2load",
            "-p",
            "h2c",
            "-c",
            "8",
            "-m",
            str(CLIENTS // 8),
            "-D",
            str(int(seconds)),
        ]
        words += ["--warm-up-time=1", "-d", str(self.folder / "mlp.grpc"), "-H", "content-type: application/grpc"]
        words += ["-H", "te: trailers", f"http://127.0.0.1:{GRPC_PORT}/inference.GRPCInferenceService/ModelInfer"]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = re.search(r"finished in [^,]+, ([\d.]+) req/s", done)
        data = re.search(r"\((\d+)\) data", done)
        if found is None or data is None or int(data[1]) == 0:  # errors are headers alone
            raise SystemExit(f"h2load answered nothing to be understood: {done[:400]}")
        return float(found[1])

    def inferd(self, only: set[str]) -> Figures:
        figures = Figures("inferd")
        env = {"INFERD_STATE__DATA_DIR": str(self.folder / "state"), "INFERD_SERVER__ACCESS_LOG": "true"}

        def serve(source: Path, name: str, *flags: str) -> list[str]:
            command = [sys.executable, "-m", "inferd", "serve", str(source), "--name", name, "--port", str(HTTP_PORT)]
            return [*command, *flags]

        began = time.monotonic()
        with running(serve(self.mlp, "mlp"), self.folder / "inferd.log", env) as process:
            wait_ready(HTTP_PORT, "/v2/models/mlp/ready", process)
            figures.start_s = time.monotonic() - began
            self._mlp(figures, "/v2/models/mlp/infer")
            figures.memory_mb = memory_mb(process.pid)
        if "grpc" in only:
            flags = ["--grpc-port", str(GRPC_PORT)]
            with running(serve(self.mlp, "mlp", *flags), self.folder / "inferd-grpc.log", env) as process:
                wait_ready(HTTP_PORT, "/v2/models/mlp/ready", process)
                figures.grpc_per_s = self.grpc(self.seconds)
        if "resnet" in only:
            with running(serve(self.resnet, "resnet"), self.folder / "inferd-resnet.log", env) as process:
                wait_ready(HTTP_PORT, "/v2/models/resnet/ready", process)
                figures.resnet_per_s = self._resnet(figures, "/v2/models/resnet/infer")
        if "minilm" in only:
            with running(serve(self.minilm, "minilm"), self.folder / "inferd-minilm.log", env) as process:
                wait_ready(HTTP_PORT, "/v2/models/minilm/ready", process)
                self.load("minilm.json", "/v1/embeddings", CLIENTS, 1.0)
                many = self.load("minilm.json", "/v1/embeddings", CLIENTS, self.seconds)
                figures.embeddings_per_s = many["answers"] / many["seconds"]
                figures.errors += many["errors"]
        return figures

    def peer(self, peer: Peer, python: str, only: set[str]) -> Figures:
        figures = Figures(peer.name)
        files = peer.write(self.folder / peer.name, self.mlp)
        began = time.monotonic()
        command = peer.command(python, files, HTTP_PORT, GRPC_PORT)
        with running(command, self.folder / f"{peer.name}.log") as process:
            wait_ready(HTTP_PORT, peer.ready_path, process)
            figures.start_s = time.monotonic() - began
            self._mlp(figures, peer.path)
            figures.memory_mb = memory_mb(process.pid)
            if "grpc" in only and peer.has_grpc:
                figures.grpc_per_s = self.grpc(self.seconds)
        if "resnet" in only and peer.is_kserve:
            files = peer.write(self.folder / f"{peer.name}-resnet", self.resnet)
            with running(peer.command(python, files, HTTP_PORT, GRPC_PORT), self.folder / "peer-resnet.log") as process:
                wait_ready(HTTP_PORT, peer.ready_path, process)
                figures.resnet_per_s = self._resnet(figures, peer.path.replace("mlp", "resnet18"))
        return figures

    def _mlp(self, figures: Figures, path: str) -> None:
        self.load("mlp.json", path, CLIENTS, 1.0)
        alone = self.load("mlp.json", path, 1, min(self.seconds, 3.0))
        many = self.load("mlp.json", path, CLIENTS, self.seconds)
        figures.mlp_alone_p50_ms = alone["p50_ms"]
        figures.mlp_per_s = many["answers"] / many["seconds"]
        figures.mlp_p99_ms = many["p99_ms"]
        figures.errors += alone["errors"] + many["errors"]
        figures.runs += [alone, many]

    def _resnet(self, figures: Figures, path: str) -> float:
        headers = (f"inference-header-content-length: {self.head_bytes}", "content-type: application/octet-stream")
        self.load("resnet.bin", path, 8, 1.0, *headers)
        many = self.load("resnet.bin", path, 8, self.seconds, *headers)
        figures.errors += many["errors"]
        figures.runs.append(many)
        rate: float = many["answers"] / many["seconds"]
        return rate

    def limit(self, only: set[str]) -> Figures:
        """onnxruntime alone."""
        import numpy as np
        import onnxruntime as ort

        def rate(path: Path, shape: list[int], seconds: float) -> float:
            session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            x = np.random.default_rng(0).random(shape).astype(np.float32)
            session.run(None, {"x": x})
            began, count = time.monotonic(), 0
            while time.monotonic() - began < seconds:
                session.run(None, {"x": x})
                count += 1
            return count / (time.monotonic() - began)

        figures = Figures("limit in process")
        figures.mlp_per_s = rate(self.mlp, [1, 64], 2.0)
        if "resnet" in only:
            figures.resnet_per_s = rate(self.resnet, [1, 3, 224, 224], self.seconds)
        return figures


def table(results: list[Figures]) -> str:
    lines = ["| server | " + " | ".join(title for _, title, _ in COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for figures in results:
        cells = []
        for name, _, form in COLUMNS:
            value = getattr(figures, name)
            cells.append("" if value is None else form.format(value))
        lines.append(f"| {figures.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def medians(runs: list[Figures]) -> Figures:
    merged = Figures(runs[0].name, runs=[run for figures in runs for run in figures.runs])
    for name, _, _ in COLUMNS:
        values = [value for figures in runs if (value := getattr(figures, name)) is not None]
        if name == "errors":
            merged.errors = sum(values)
        elif values:
            setattr(merged, name, statistics.median(values))
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="comma-separated: " + ", ".join(PEERS))
    parser.add_argument("--peer-env", type=Path, help="virtual environment that has the peers")
    parser.add_argument("--only", default="mlp,grpc,resnet,minilm", help="comma-separated models")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each measurement")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all servers; medians are shown")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--keep", type=Path, help="keep models and logs in this folder")
    options = parser.parse_args()
    only = set(options.only.split(","))
    if "grpc" in only and shutil.which("h2load") is None:
        only.discard("grpc")
        print("h2load (package nghttp2-client) is not installed: gRPC is left out", file=sys.stderr)
    python = str(options.peer_env / "bin" / "python") if options.peer_env is not None else sys.executable
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for port in (HTTP_PORT, GRPC_PORT):
            free(port)
        bench = Bench(folder, options.seconds)
        bench.write(only)
        steps: list[Callable[[], Figures]] = [lambda: bench.inferd(only)]
        for name in filter(None, options.peers.split(",")):
            steps.append(lambda peer=PEERS[name]: bench.peer(peer, python, only))  # type: ignore[misc]
        steps.append(lambda: bench.limit(only))
        rounds: list[list[Figures]] = [[] for _ in steps]
        for _ in range(options.repeat):
            for place, step in enumerate(steps):
                figures = step()
                rounds[place].append(figures)
                print(table([figures]).splitlines()[-1], file=sys.stderr, flush=True)
        results = [medians(runs) for runs in rounds]
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(figures) for figures in results], indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
