"""Engines in process: one after the other, each in a process and environment of its own, on the same waves.

``llama.cpp`` is measured by its own program ``llama-batched-bench``, which does the same: equal prompts computed together,
then decoded together. The others by ``runner.py``. In every engine what is timed ends with the last token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.llm_peers.process import PeerFailed
from bench.llm_peers.servers import ANSWER, GGUF, PROMPT, Places
from bench.llm_peers.table import Run
from bench.report import Figure

RUNNER = Path(__file__).with_name("runner.py")
LONG = 4032  # tokens of the long prompt
LONG_ANSWER = 32


@dataclass(frozen=True, slots=True)
class Job:
    """So many waves of so many prompts at once."""

    prompt: int
    answer: int
    clients: int
    waves: int


def jobs(*, long: bool, quick: bool = False) -> list[Job]:
    if quick:
        return [Job(PROMPT, ANSWER, 1, 1), Job(PROMPT, 1, 1, 1), Job(512, 1, 1, 1)]
    short = [Job(PROMPT, ANSWER, clients, waves) for clients, waves in ((1, 3), (8, 2), (32, 1))]
    probes = [Job(PROMPT, 1, 1, 3), Job(512, 1, 1, 3)]
    return short + probes + ([Job(LONG, 1, 1, 1), Job(LONG, LONG_ANSWER, 1, 1)] if long else [])


def command_of(engine: str, form: str, places: Places, plan: Sequence[Job]) -> list[str] | str:
    """How the engine is run by ``runner.py``, or a sentence why it is not measured."""
    waves = [{"prompt": j.prompt, "answer": j.answer, "clients": j.clients} for j in plan for _ in range(j.waves)]
    tail = [json.dumps(waves), "--format", form, "--threads", str(places.threads)]
    if engine == "inferd":
        return [sys.executable, str(RUNNER), "inferd", str(places.model), *tail]
    if engine == "transformers":
        if form != "bf16":
            return f"transformers is measured in bf16 only, not in {form}."
        return [sys.executable, str(RUNNER), "transformers", str(places.model), *tail]
    if engine == "openvino":
        if places.openvino is None or places.gguf is None:
            return "openvino needs --openvino-env and --gguf."
        # It reads no bf16 files; from f16 it computes in bf16 where the processor can.
        file = places.gguf / ("m-f16.gguf" if form == "bf16" else GGUF[form])
        if not file.exists():
            return f"{file} does not exist (bench/peers/README.md tells how it is made)."
        return [str(places.openvino / "bin" / "python"), str(RUNNER), "openvino", str(file), *tail]
    if engine == "vllm":
        if places.vllm is None:
            return "vllm needs --vllm-env."
        model = places.model if form == "bf16" else dict(places.vllm_checkpoints).get(form)
        if model is None:
            return f"vllm reads {form} weights from a checkpoint only: --vllm-checkpoint {form}=DIR."
        return [str(places.vllm / "bin" / "python"), str(RUNNER), "vllm", str(model), *tail]
    return f"{engine} is no engine that this harness knows: inferd, openvino, llama.cpp, transformers, vllm."


def figures_of(load_s: float, waves: Sequence[tuple[Job, float]]) -> dict[str, float]:
    """Figures from (what was asked, seconds): output tokens/s at each number of clients, prefill, decode."""

    def seconds(prompt: int, answer: int, clients: int = 1) -> float | None:
        found = [s for job, s in waves if (job.prompt, job.answer, job.clients) == (prompt, answer, clients)]
        return Figure(tuple(found)).median if found else None

    figures = {"load, s": load_s}
    for clients in sorted({job.clients for job, _ in waves}):
        took = seconds(PROMPT, ANSWER, clients)
        if took is not None:
            figures[f"{clients} clients: tokens/s"] = clients * ANSWER / took
    first, whole = seconds(PROMPT, 1), seconds(PROMPT, ANSWER)
    if first is not None and whole is not None:
        figures["decode, tokens/s"] = (ANSWER - 1) / (whole - first)
    chunk = seconds(512, 1)
    if chunk is not None:
        figures["prefill 512, tokens/s"] = 512 / chunk
    first, whole = seconds(LONG, 1), seconds(LONG, LONG_ANSWER)
    if first is not None and whole is not None:
        figures[f"prefill {LONG}, tokens/s"] = LONG / first
        figures["decode at 4096, tokens/s"] = (LONG_ANSWER - 1) / (whole - first)
    return figures


def measure(engine: str, form: str, places: Places, *, long: bool) -> Run | str:
    """One load of one engine and every wave, or a sentence why it is not measured."""
    plan = jobs(long=long, quick=places.quick)
    if engine == "llama.cpp":
        return _llama_cpp(form, places, plan)
    command = command_of(engine, form, places, plan)
    if isinstance(command, str):
        return command
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(places.threads)}
    if engine == "vllm":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": f"0-{places.threads - 1}"}
    lines = [json.loads(line) for line in _output(command, environment).splitlines() if line.startswith("{")]
    asked = [job for job in plan for _ in range(job.waves)]
    waves = [(job, float(line["seconds"])) for job, line in zip(asked, lines[1:], strict=True)]
    return Run("in process", engine, form, figures_of(lines[0]["load_s"], waves))


def _llama_cpp(form: str, places: Places, plan: Sequence[Job]) -> Run | str:
    if places.llama_cpp is None or places.gguf is None:
        return "llama.cpp needs --llama-cpp and --gguf."
    file = places.gguf / GGUF[form]
    if not file.exists():
        return f"{file} does not exist (bench/peers/README.md tells how it is made)."
    threads = str(places.threads)
    figures = {}
    program = [str(places.llama_cpp / "llama-batched-bench"), "-m", str(file), "-t", threads, "-tb", threads]
    program += ["-c", "8192", "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
    clients = [str(job.clients) for job in plan if (job.prompt, job.answer) == (PROMPT, ANSWER)]
    rows = _rows([*program, "-npp", str(PROMPT), "-ntg", str(ANSWER), "-npl", ",".join(clients)])
    for row in rows:
        figures[f"{int(row['pl'])} clients: tokens/s"] = row["pl"] * row["tg"] / (row["t_pp"] + row["t_tg"])
        if row["pl"] == 1:
            figures["decode, tokens/s"] = row["speed_tg"]
    (row,) = _rows([*program, "-npp", "512", "-ntg", "1", "-npl", "1"])
    figures["prefill 512, tokens/s"] = row["speed_pp"]
    if any(job.prompt == LONG for job in plan):
        (row,) = _rows([*program, "-npp", str(LONG), "-ntg", str(LONG_ANSWER), "-npl", "1"])
        figures[f"prefill {LONG}, tokens/s"] = row["speed_pp"]
        figures["decode at 4096, tokens/s"] = row["speed_tg"]
    return Run("in process", "llama.cpp", form, figures)


def _rows(command: Sequence[str]) -> list[dict[str, float]]:
    return [json.loads(line) for line in _output(command, {}).splitlines() if line.startswith("{")]


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerFailed(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout
