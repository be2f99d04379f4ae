"""Engines in process: one after the other, each in a process and environment of its own, on the same waves.

``llama.cpp`` is measured by its own program ``llama-batched-bench``, which does the same: equal prompts computed together,
then decoded together. The others by ``runner.py``. In every engine what is timed ends with the last token. How fast one sequence is
decoded is the median over its steps (llama.cpp: the mean); inferd's is measured by ``context.py``, beside the memory's bandwidth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.llm_peers.loads import ANSWER, LIMIT_S, PROMPT
from bench.llm_peers.process import PeerFailed
from bench.llm_peers.servers import GGUF, Places
from bench.llm_peers.table import OURS, Run

RUNNER = Path(__file__).with_name("runner.py")
LONG = 4032  # tokens of the long prompt
LONG_ANSWER = 32
SLOW_S = 100.0  # then transformers, which is slow, begins no further wave: the largest come last


@dataclass(frozen=True, slots=True)
class Job:
    """So many waves of so many prompts at once."""

    prompt: int
    answer: int
    clients: int
    waves: int


@dataclass(frozen=True, slots=True)
class Done:
    """A wave: seconds until its last token, and of a single sequence the moment of each (empty where it is not known)."""

    job: Job
    seconds: float
    moments: tuple[float, ...] = ()


def jobs(engine: str, *, long: bool, quick: bool = False) -> list[Job]:
    if engine == "transformers":
        return [Job(512, 1, 1, 1), *(Job(PROMPT, ANSWER, clients, 1) for clients in ((1,) if quick else (1, 8, 32)))]
    if quick:
        return [Job(PROMPT, ANSWER, 1, 1), Job(PROMPT, 4, 8, 1), Job(512, 1, 1, 1)]
    short = [Job(PROMPT, ANSWER, clients, waves) for clients, waves in ((1, 2), (8, 1), (32, 1))]
    return [*short, Job(512, 1, 1, 2), *([Job(LONG, LONG_ANSWER, 1, 1)] if long else [])]


def command_of(engine: str, form: str, places: Places, plan: Sequence[Job]) -> list[str] | str:
    """How the engine is run by ``runner.py``, or a sentence why it is not measured."""
    waves = [{"prompt": j.prompt, "answer": j.answer, "clients": j.clients} for j in plan for _ in range(j.waves)]
    tail = [json.dumps(waves), "--format", form, "--threads", str(places.threads)]
    if engine == "inferd":
        return [sys.executable, str(RUNNER), "inferd", str(places.model), *tail]
    if engine == "transformers":
        if form != "bf16":
            return f"transformers is measured in bf16 only, not in {form}."
        return [sys.executable, str(RUNNER), "transformers", str(places.model), *tail, "--seconds", str(SLOW_S)]
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


def figures_of(load_s: float, waves: Sequence[Done]) -> dict[str, float]:
    """Output tokens/s at each number of clients, prefill and decode."""
    figures = {"load, s": load_s}
    for clients in sorted({done.job.clients for done in waves}):
        took = [done.seconds for done in waves if done.job == Job(PROMPT, ANSWER, clients, done.job.waves)]
        if took:
            figures[f"{clients} clients: tokens/s"] = clients * ANSWER / median(took)
    steps = _steps_s(waves, PROMPT)
    if steps:
        figures["decode, tokens/s"] = 1 / median(steps)
    chunks = [done.seconds for done in waves if (done.job.prompt, done.job.answer) == (512, 1)]
    if chunks:
        figures["prefill 512, tokens/s"] = 512 / median(chunks)
    first = [done.moments[0] for done in waves if done.job.prompt == LONG and done.moments]
    if first:
        figures[f"prefill {LONG}, tokens/s"] = LONG / median(first)
    steps = _steps_s(waves, LONG)
    if steps:
        figures["decode at 4096, tokens/s"] = 1 / median(steps)
    return figures


def _steps_s(waves: Sequence[Done], prompt: int) -> list[float]:
    """Seconds between two tokens of a single sequence behind so long a prompt."""
    found = [done.moments for done in waves if done.job.prompt == prompt and done.job.clients == 1]
    return [after - before for moments in found for before, after in pairwise(moments)]


def measure(engine: str, form: str, places: Places, *, long: bool) -> Run | str:
    """One load of one engine and every wave, or a sentence why it is not measured. ``long``: with the long prompt, too."""
    plan = jobs(engine, long=long and engine != OURS, quick=places.quick)
    if engine == "llama.cpp":
        return _llama_cpp(form, places, plan)
    command = command_of(engine, form, places, plan)
    if isinstance(command, str):
        return command
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(places.threads)}
    if engine == "vllm":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": f"0-{places.threads - 1}"}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    load, *rest = _rows(command, environment)
    asked = [job for job in plan for _ in range(job.waves)][: len(rest)]
    waves = [Done(job, row["seconds"], tuple(row["moments"])) for job, row in zip(asked, rest, strict=True)]
    figures = figures_of(load["load_s"], waves)
    if engine == OURS and long:
        turns = ["--turns", "1" if places.quick else "12", "--threads", str(places.threads), "--format", form]
        context = [sys.executable, "-m", "bench.llm_peers.context", str(places.model), *turns]
        figures |= _rows(context, environment)[0]
    return Run("in process", engine, form, figures)


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
    for row in _rows([*program, "-npp", str(PROMPT), "-ntg", str(ANSWER), "-npl", ",".join(clients)], {}):
        figures[f"{int(row['pl'])} clients: tokens/s"] = row["pl"] * row["tg"] / (row["t_pp"] + row["t_tg"])
        if row["pl"] == 1:
            figures["decode, tokens/s"] = row["speed_tg"]
    (row,) = _rows([*program, "-npp", "512", "-ntg", "1", "-npl", "1"], {})
    figures["prefill 512, tokens/s"] = row["speed_pp"]
    if any(job.prompt == LONG for job in plan):
        (row,) = _rows([*program, "-npp", str(LONG), "-ntg", str(LONG_ANSWER), "-npl", "1"], {})
        figures[f"prefill {LONG}, tokens/s"] = row["speed_pp"]
        figures["decode at 4096, tokens/s"] = row["speed_tg"]
    return Run("in process", "llama.cpp", form, figures)


def _rows(command: Sequence[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """What a program printed as JSON, an object on a line."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{' '.join(command)} was not done after {LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise PeerFailed(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
