"""Servers under the same load through HTTP: how each is started, and what the load generator says of it.

Knows commands and what is told of a server, not the load generator.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]

from bench.llm_peers.loads import NAME, Load
from bench.llm_peers.process import PeakMemory, PeerFailed, await_answer, metric, serving, tree_rss
from bench.llm_peers.table import Run
from inferd.config import ModelConfig

LOADS = ((1, 4), (8, 24), (32, 64))  # clients, requests
QUICK_LOADS = ((1, 1), (4, 4))
STOPPED_FROM_S = 30.0  # a server that was ready sooner is ended and started again
SPARE_BYTES = 9e9  # what the largest of the others needs
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
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
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


@dataclass(slots=True)
class _Running:
    """A server that was started: what ends it, and what its start said."""

    life: ExitStack
    pid: int
    url: str
    probe: str
    figures: dict[str, float]  # of the start; those of one start are told once


class Servers:
    """Measures servers one at a time. One that takes long to start is not ended between its measurements but stopped
    (SIGSTOP), where enough memory remains for the others; so it takes no processor time from them."""

    def __init__(self, places: Places, port: int, folder: Path, load: Load, loads: Sequence[tuple[int, int]]) -> None:
        """``port`` and the next ones are used. ``loads``: clients and requests."""
        self._places, self._port, self._folder = places, port, folder
        self._load, self._loads = load, loads
        self._stopped: dict[tuple[str, str], _Running] = {}
        self._was_slow: set[tuple[str, str]] = set()
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._stopped:
            self._stopped.popitem()[1].life.close()

    def measure(self, server: str, form: str, *, is_last: bool) -> Run | str:
        """Every load, or a sentence why not. ``is_last``: it will not be asked for again. Raises PeerFailed."""
        stopped = self._stopped.pop((server, form), None)
        if stopped is not None:
            with suppress(PeerFailed):  # one that did not survive it is started again
                return self._measure(stopped, server, form, is_last=is_last)
        running = self._start(server, form)
        return running if isinstance(running, str) else self._measure(running, server, form, is_last=is_last)

    def _measure(self, running: _Running, server: str, form: str, *, is_last: bool) -> Run:
        with ExitStack() as stack:
            stack.callback(running.life.close)
            os.killpg(running.pid, signal.SIGCONT)
            await_answer(running.url + running.probe, 60)
            figures, running.figures = running.figures, {}
            memory = PeakMemory(running.pid)
            memory.start()
            for clients, requests in self._loads:
                found = self._load(running.url, clients, requests)
                figures |= {f"{clients} clients: {name}": value for name, value in found.items()}
            if server == "inferd":
                spent = metric(running.url, "inferd_tokenize_seconds_total")
                whole = metric(running.url, "inferd_request_latency_seconds_sum")
                figures["tokenizing, % of the requests' time"] = 100 * spent / whole
            figures["memory at most, GB"] = memory.stop() / 1e9
            is_slow_to_start = figures.get("ready, s", 0.0) > STOPPED_FROM_S or (server, form) in self._was_slow
            if is_slow_to_start and not is_last and psutil.virtual_memory().available > SPARE_BYTES:
                self._was_slow.add((server, form))
                os.killpg(running.pid, signal.SIGSTOP)
                self._stopped[server, form] = running
                stack.pop_all()
        return Run("http", server, form, figures)

    def _start(self, server: str, form: str) -> _Running | str:
        port = self._port + self._num_started
        start = start_of(server, form, self._places, port)
        if isinstance(start, str):
            return start
        self._num_started += 1
        url = f"http://127.0.0.1:{port}"
        life = ExitStack()
        log = self._folder / f"{server}-{form}.log"
        pid, ready_s = life.enter_context(serving(start.command, start.environment, url + start.probe, log, 600))
        figures = {"ready, s": ready_s, "memory when ready, GB": tree_rss(pid) / 1e9}
        return _Running(life, pid, url, start.probe, figures)
