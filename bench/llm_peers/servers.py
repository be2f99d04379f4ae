"""Servers under the same load through HTTP: how each is started, and what the load generator says of it.

The load generator is ``vllm bench serve`` where there is an environment with vLLM, else ``inferd bench``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.llm_peers.process import PeakMemory, PeerFailed, metric, serving, tree_rss
from bench.llm_peers.table import Run
from inferd.config import ModelConfig

LOADS = ((1, 4), (8, 24), (32, 64))  # clients, requests
QUICK_LOADS = ((1, 1), (4, 4))
PROMPT, ANSWER = 128, 64  # tokens
NAME = "m"
GGUF = {"bf16": "m-bf16.gguf", "int8": "m-q8_0.gguf", "int4": "m-q4_0.gguf"}


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie on this machine. Environments and programs that are None are not measured."""

    model: Path
    vllm: Path | None = None  # virtual environments
    openvino: Path | None = None
    llama_cpp: Path | None = None  # the folder with llama-server and its like
    gguf: Path | None = None  # the folder with the files of GGUF
    vllm_checkpoints: tuple[tuple[str, Path], ...] = ()  # by format, where vLLM needs another one
    inferd_args: tuple[str, ...] = ()
    threads: int = 1
    quick: bool = False  # as little as shows that everything works


@dataclass(frozen=True, slots=True)
class Start:
    """How a server is started, and the path that answers 200 once it is ready."""

    command: list[str]
    environment: dict[str, str]
    probe: str


def start_of(server: str, form: str, places: Places, port: int) -> Start | str:
    """Or a sentence why this one is not measured."""
    if server == "inferd":
        limits = ["--max-model-len", "4096", "--max-num-seqs", "64"]
        quantized = [] if form == "bf16" else ["--quantization", form]
        if "speculation" in ModelConfig.__struct_fields__:
            # Random weights repeat themselves, which is easily guessed; the peers do not guess here.
            quantized += ["--speculation-method", "none"]
        command = [sys.executable, "-m", "inferd", "serve", str(places.model), "--port", str(port), "--name", NAME]
        return Start([*command, *limits, *quantized, *places.inferd_args], {}, "/health/ready")
    if server == "vllm":
        model = places.model if form == "bf16" else dict(places.vllm_checkpoints).get(form)
        if places.vllm is None:
            return "vllm needs --vllm-env."
        if model is None:
            return f"vllm reads {form} weights from a checkpoint only: --vllm-checkpoint {form}=DIR."
        command = [str(places.vllm / "bin" / "vllm"), "serve", str(model), "--port", str(port)]
        limits = ["--served-model-name", NAME, "--max-model-len", "4096", "--max-num-seqs", "64"]
        cores = f"0-{places.threads - 1}"
        environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
        return Start([*command, *limits], environment, "/health")
    if server == "llama-server":
        if places.llama_cpp is None or places.gguf is None:
            return "llama-server needs --llama-cpp and --gguf."
        file = places.gguf / GGUF[form]
        if not file.exists():
            return f"{file} does not exist (bench/peers/README.md tells how it is made)."
        threads = str(places.threads)
        command = [str(places.llama_cpp / "llama-server"), "-m", str(file), "--alias", NAME, "--port", str(port)]
        sizes = ["-t", threads, "-tb", threads, "-c", "16384", "-np", "32", "-b", "2048", "-ub", "512"]
        return Start([*command, *sizes], {}, "/health")
    return f"{server} is no server that this harness knows: inferd, vllm, llama-server."


ANSWERED_AT_LEAST = 0.75  # of a load's requests: the server computed the others too, and is given their tokens


def vllm_load(environment: Path, url: str, model: Path, clients: int, requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(environment / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url),
            *("--endpoint", "/v1/completions", "--model", NAME, "--tokenizer", str(model), "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)),
            *("--num-prompts", str(requests), "--max-concurrency", str(clients), "--ignore-eos"),
            *("--seed", str(7 + clients)),  # other prompts for each load: no prefix is met again
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        done = subprocess.run(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise PeerFailed(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    answered = result["completed"] / requests
    if answered < ANSWERED_AT_LEAST:
        raise PeerFailed(f"vllm bench serve: {result['completed']} of {requests} requests were answered")
    return {
        # The generator does not count an answer that begins with a chunk without text, as llama-server's may.
        "tokens/s": result["output_throughput"] / answered,
        "TTFT p50, ms": result["p50_ttft_ms"],
        "TTFT p95, ms": result["p95_ttft_ms"],
        "TPOT p50, ms": result["p50_tpot_ms"],
    }


def own_load(url: str, clients: int, requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "inferd", "bench", "--url", url, "--model", NAME, "--concurrency", str(clients)),
            *("--requests", str(requests), "--warmup", "0", "--seed", str(7 + clients), "--output", f"{folder}/result"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerFailed(f"inferd bench failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        run = json.loads((Path(folder) / "result.json").read_text())["runs"][0]
    return {
        "tokens/s": run["output_tokens_per_s"],
        "TTFT p50, ms": run["ttft"]["p50"] * 1e3,
        "TTFT p95, ms": run["ttft"]["p95"] * 1e3,
        "TPOT p50, ms": run["tpot"]["p50"] * 1e3,
    }


def measure(server: str, form: str, start: Start, places: Places, port: int, folder: Path) -> Run:
    """One start of one server, every load, one stop."""
    url = f"http://127.0.0.1:{port}"
    with serving(start.command, start.environment, url + start.probe, folder / f"{server}-{form}.log", 600) as started:
        pid, ready_s = started
        figures = {"ready, s": ready_s, "memory when ready, GB": tree_rss(pid) / 1e9}
        memory = PeakMemory(pid)
        memory.start()
        for clients, requests in QUICK_LOADS if places.quick else LOADS:
            if places.vllm is not None:
                found = vllm_load(places.vllm, url, places.model, clients, requests)
            else:
                found = own_load(url, clients, requests)
            figures |= {f"{clients} clients: {name}": value for name, value in found.items()}
        if server == "inferd":
            spent = metric(url, "inferd_tokenize_seconds_total")
            figures["tokenizing, % of the requests' time"] = (
                100 * spent / metric(url, "inferd_request_latency_seconds_sum")
            )
        figures["memory at most, GB"] = memory.stop() / 1e9
    return Run("http", server, form, figures)
