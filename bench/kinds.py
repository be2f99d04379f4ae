"""The gateway's cost of one request, for every kind of request: ``python -m bench.kinds``.

The gateway relays to the upstream of ``bench.gateway`` or asks a worker with a model that costs little. It has the first
core for itself. The processor time of a kind is that of the gateway's process, without its workers, per answer.
Compare within a run, not between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.gateway.__main__ import (
    CONNECTIONS,
    GATEWAY_CORE,
    GATEWAY_PORT,
    TICKS_PER_S,
    TRAFFIC_CORE,
    UPSTREAM_PORT,
    build,
    free,
    running,
    wait_ready,
)
from bench.predictive import models

ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Kind(NamedTuple):
    """A request that is sent again and again."""

    name: str
    path: str
    body: dict[str, Any]
    headers: tuple[str, ...] = ()


def chat(model: str, **fields: Any) -> dict[str, Any]:
    """A chat request of 2 KB."""
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "word " * 380}]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0.7, **fields}


CHAT = "/v1/chat/completions"
INFER = "/v2/models/mlp/infer"
TENSOR = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}
KINDS = (
    Kind("chat", CHAT, chat("m")),
    Kind("streamed chat of one token", CHAT, chat("m", stream=True)),
    Kind("chat with a session", CHAT, chat("m"), ("X-Session-Id: s",)),
    Kind("chat with a deadline and a priority", CHAT, chat("m", timeout=20, priority=1)),
    Kind("text completion", "/v1/completions", {"model": "m", "prompt": "word " * 380, "max_tokens": 1}),
    Kind("infer, JSON", INFER, {"inputs": [TENSOR]}),
    Kind("infer, JSON, with parameters", INFER, {"inputs": [TENSOR], "parameters": {"priority": 1}}),
    Kind("infer, JSON, weighted versions", "/v2/models/weighted/infer", {"inputs": [TENSOR]}),
    Kind("embeddings", "/v1/embeddings", {"model": "encoder", "input": "word1 word2 word3"}),
)


def configuration(folder: Path) -> str:
    upstream = f"openai:http://127.0.0.1:{UPSTREAM_PORT}/v1"
    remote = {"max_in_flight": 1024, "model": "m"}
    served = {
        "m": {"source": upstream, "remote": remote},
        "mlp": {"source": str(folder / "mlp.onnx")},
        "weighted": {"source": str(folder / "versions"), "versions": {"policy": "all", "weights": {"1": 90, "2": 10}}},
        "encoder": {"source": str(folder / "encoder")},
    }
    # State of its own: keys that were made on this machine do not count here.
    state = {"data_dir": str(folder / "state")}
    return json.dumps({"server": {"port": GATEWAY_PORT}, "state": state, "models": served})


def own_cpu_s(pid: int) -> float:
    """Processor time of a process without its children, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def load(traffic: Path, folder: Path, kind: Kind, seconds: float, port: int = GATEWAY_PORT) -> dict[str, float]:
    body = folder / "body.json"
    body.write_text(json.dumps(kind.body, separators=(",", ":")))
    words = ["--port", str(port), "--body", str(body), "--path", kind.path]
    words += ["--connections", str(CONNECTIONS), "--seconds", str(seconds)]
    for header in kind.headers:
        words += ["--header", header]
    if kind.body.get("stream"):
        words.append("--stream")
    done = subprocess.run(
        ["taskset", "-c", TRAFFIC_CORE, traffic, "load", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    options = parser.parse_args()
    if shutil.which("taskset") is None:
        raise SystemExit("This needs Linux, two cores and taskset.")
    for port in (UPSTREAM_PORT, GATEWAY_PORT):
        free(port)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        traffic = build(folder)
        models.write_mlp(folder / "mlp.onnx")
        for version in ("1", "2"):
            (folder / "versions" / version).mkdir(parents=True)
            shutil.copy(folder / "mlp.onnx", folder / "versions" / version / "model.onnx")
        models.write_encoder(folder / "encoder", ENCODER)
        (folder / "inferd.yaml").write_text(configuration(folder))
        upstream = [str(traffic), "upstream", "--port", str(UPSTREAM_PORT), "--interval-us", "0"]
        stack.enter_context(running(upstream, TRAFFIC_CORE, folder / "upstream.log"))
        command = [sys.executable, "-m", "inferd", "serve", str(folder / "inferd.yaml")]
        process = stack.enter_context(running(command, GATEWAY_CORE, folder / "inferd.log"))
        wait_ready(GATEWAY_PORT, "/health/ready", process)
        print("| kind of request | requests/s | CPU us/request | p99 ms | errors |\n| --- | --- | --- | --- | --- |")
        for kind in KINDS:
            load(traffic, folder, kind, 1.0)
            before = own_cpu_s(process.pid)
            done = load(traffic, folder, kind, options.seconds)
            spent = own_cpu_s(process.pid) - before
            answers = max(1, done["answers"])
            print(
                f"| {kind.name} | {done['answers'] / done['seconds']:,.0f} | {spent / answers * 1e6:.0f} "
                f"| {done['p99_ms']:.1f} | {done['errors']} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
