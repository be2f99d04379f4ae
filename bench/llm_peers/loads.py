"""The same load for every server: ``vllm bench serve`` where there is an environment with vLLM, else ``inferd bench``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from bench.llm_peers.process import PeerFailed

GENERATOR = Path(__file__).with_name("generator.py")
PROMPT, ANSWER = 128, 64  # tokens
NAME = "m"  # of the model, for every server
LIMIT_S = 900.0  # a load that takes longer is broken
ANSWERED_AT_LEAST = 0.75  # of a load's requests: the server computed the others too, and is given their tokens


class Load(Protocol):
    def __call__(self, url: str, clients: int, requests: int) -> dict[str, float]:
        """Figures of so many requests by so many clients, each sending the next when it has its answer. Raises PeerFailed."""
        ...


class VllmLoad:
    """``vllm bench serve``, in a process that is started with the first load and kept: its import takes longer than some loads."""

    def __init__(self, environment: Path, model: Path, folder: Path) -> None:
        self._command = [str(environment / "bin" / "python"), str(GENERATOR)]
        self._model, self._folder = model, folder
        self._log = folder / "load.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __call__(self, url: str, clients: int, requests: int) -> dict[str, float]:
        (self._folder / "result.json").unlink(missing_ok=True)
        self._ask(
            [
                *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
                *("--model", NAME, "--tokenizer", str(self._model), "--dataset-name", "random"),
                *("--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)),
                *("--num-prompts", str(requests), "--max-concurrency", str(clients), "--ignore-eos"),
                *("--seed", str(7 + clients)),  # other prompts for each load: no prefix is met again
                *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
                *("--save-result", "--result-dir", str(self._folder), "--result-filename", "result.json"),
            ]
        )
        result = json.loads((self._folder / "result.json").read_text())
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

    def warm(self) -> None:
        """Start the process and wait until it has imported everything, before a server is there to be disturbed."""
        if self._process is not None:
            return
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                cwd=self._folder,
            )
        self._hear("ready")

    def _ask(self, arguments: list[str]) -> None:
        self.warm()
        assert self._process is not None
        _stream(self._process.stdin).write(json.dumps(arguments) + "\n")
        _stream(self._process.stdin).flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._process is not None
        patience = threading.Timer(LIMIT_S, self._process.kill)
        patience.start()
        try:
            heard = _stream(self._process.stdout).readline()
        finally:
            patience.cancel()
        if heard.strip() != word:
            self.__exit__(None, None, None)
            raise PeerFailed(f"vllm bench serve said {heard!r}, not {word!r}:\n{self._log.read_text()[-3000:]}")


def own_load(url: str, clients: int, requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "inferd", "bench", "--url", url, "--model", NAME, "--concurrency", str(clients)),
            *("--requests", str(requests), "--warmup", "0", "--seed", str(7 + clients), "--output", f"{folder}/result"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode != 0:
            raise PeerFailed(f"inferd bench failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        run = json.loads((Path(folder) / "result.json").read_text())["runs"][0]
    return {
        "tokens/s": run["output_tokens_per_s"],
        "TTFT p50, ms": run["ttft"]["p50"] * 1e3,
        "TTFT p95, ms": run["ttft"]["p95"] * 1e3,
        "TPOT p50, ms": run["tpot"]["p50"] * 1e3,
    }


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
