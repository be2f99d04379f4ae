"""The fake at the bottom: a backend whose tokens are known beforehand and that misbehaves on demand.

Run as a script it is a whole worker process. Words of the prompt are commands; files named in them let
a test see how far it is and let it go on.

    "hello"            tokens 0, 1, 2, ... each one letter of the alphabet, one per step
    "pace=0.01"        every step with this request takes so many seconds
    "hang" / "raise" / "die"     in the step that would make the first token
    "hang@3"           ... in the one that would make the fourth
    "die-once=PATH"    dies unless PATH exists, and makes it
    "raise-once=PATH"  raises unless PATH exists, and makes it; of several workers one raises
    "gate=PATH"        no token before PATH exists
    "end=PATH"         the token that is made when PATH exists is the last one
    "mark=PATH"        makes PATH when the request is first computed
    "grow=1000000"     takes so many bytes of memory, for good
    "invalid" / "defect"   refused, or a bug, while it is prepared
    "trial=PATH"       waits without an end while it is prepared; PATH is there until the wait is ended
    "refused"          refused by ``add``

The model's own source may have ``books=PATH``: a file to which each token is noted as it is made; ``reports=300``
reports the progress of loading so many times; ``leave-once=PATH`` ends the process and says why, unless PATH exists,
and makes it. Of the source ``ranks`` the process that started the worker counts as
its other rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import string
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from inferd.backend import FOR_EVER, TakesLong, Wait
from inferd.config import ModelConfig
from inferd.errors import InternalError, InvalidRequest, ModelLoadError, Overloaded
from inferd.types import (
    Chat,
    Delta,
    End,
    GenerateRequest,
    ModelInfo,
    Output,
    PromptReport,
    StepStats,
    TextPrompt,
    Timings,
    TokenPrompt,
    Usage,
)

MAX_NUM_SEQS = 4
SEED = 7


def letters(count: int) -> str:
    """What ``count`` tokens read like."""
    return "".join(string.ascii_lowercase[i % 26] for i in range(count))


class Prepared(msgspec.Struct):
    request: GenerateRequest
    words: dict[str, str]
    made: int = 0

    @property
    def wanted(self) -> int:
        return self.request.sampling.max_tokens or 8

    def is_due(self, word: str) -> bool:
        """A word means the first token, ``word@3`` the fourth."""
        return any(name == word or name == f"{word}@{self.made}" for name in self.words) and (
            self.made == 0 or f"{word}@{self.made}" in self.words
        )


def _wait(wait: Wait, path: Path) -> None:
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink)
        path.touch()
        with wait.stopped_by(ended.set):
            ended.wait()


class TinyBackend:
    """Computes up to MAX_NUM_SEQS requests at a time, one token each per step."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        self.info = ModelInfo(
            name=name,
            source=config.source,
            architecture="Tiny",
            dtype="none",
            max_model_len=1000,
            vocab_size=26,
            num_parameters=0,
            num_blocks=10,
            block_size=16,
            max_num_seqs=MAX_NUM_SEQS,
            rank_pids=(os.getppid(),) if config.source == "ranks" else (),
        )
        self.requests: dict[str, Prepared] = {}
        self._cancelled: list[Prepared] = []
        self._batch: list[Prepared] = []
        self._held: list[bytes] = []
        self._never = threading.Event()
        books = dict(word.partition("=")[::2] for word in config.source.split()).get("books")
        self._books = None if books is None else os.open(books, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
        text = text_of(request.prompt)
        words = dict(word.partition("=")[::2] for word in text.split())
        if "invalid" in words:
            raise InvalidRequest("The prompt is invalid.", param="prompt")
        if "defect" in words:
            raise ValueError("a defect in prepare")
        if "trial" in words:
            if wait is None:
                raise TakesLong
            _wait(wait, Path(words["trial"]))
        return Prepared(request, words, len(request.resumes.token_ids) if request.resumes is not None else 0)

    def add(self, prepared: object, now: float) -> None:
        assert isinstance(prepared, Prepared)
        if "refused" in prepared.words:
            raise Overloaded("The engine is full.")
        self.requests[prepared.request.id] = prepared

    def cancel(self, request_id: str) -> None:
        prepared = self.requests.pop(request_id, None)
        if prepared is not None:
            self._cancelled.append(prepared)

    def due(self, now: float) -> float | None:
        if self._cancelled:
            return now
        if not self.requests:
            return None
        return now if any(self._is_open(p) for p in self.requests.values()) else now + 0.01

    def _is_open(self, prepared: Prepared) -> bool:
        gate = prepared.words.get("gate")
        return gate is None or os.path.exists(gate)

    def step(self, now: float) -> tuple[list[Output], StepStats]:
        self._batch = [p for p in self.requests.values() if self._is_open(p)][:MAX_NUM_SEQS]
        began = time.monotonic()
        self._misbehave()
        cancelled, self._cancelled = self._cancelled, []
        outputs = [self._end(p, End("cancelled", self._usage(p))) for p in cancelled]
        outputs += [self._token(p, now) for p in self._batch]
        step_s = time.monotonic() - began
        return outputs, StepStats(num_running=len(self.requests), step_tokens=len(self._batch), step_s=step_s)

    def _misbehave(self) -> None:
        for prepared in self._batch:
            words = prepared.words
            if "mark" in words:
                Path(words["mark"]).touch()
            if "grow" in words:
                self._held.append(b"x" * int(words.pop("grow")))
            once = words.get("die-once")
            if once is not None and not os.path.exists(once):
                Path(once).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if "raise-once" in words:
                with contextlib.suppress(FileExistsError):
                    Path(words["raise-once"]).touch(exist_ok=False)
                    raise RuntimeError("a defect of one worker")
            if prepared.is_due("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if prepared.is_due("hang"):
                self._never.wait()
            if "pace" in words:
                self._never.wait(float(words["pace"]))
        for prepared in self._batch:
            if prepared.is_due("raise"):
                raise RuntimeError("a defect in the model")

    def _token(self, prepared: Prepared, now: float) -> Output:
        request = prepared.request
        report = PromptReport(len(prepared.words), seed=SEED) if prepared.made == 0 else None
        if self._books is not None:
            num_prompt = len(prepared.words) if prepared.made == 0 else 0
            os.write(self._books, b"%d %d\n" % (num_prompt, request.sampling.n))
        token = prepared.made % 26
        prepared.made += 1
        end = prepared.words.get("end")
        is_last = prepared.made >= prepared.wanted or (end is not None and os.path.exists(end))
        finish = "length" if is_last else None
        deltas = tuple(
            Delta(index, string.ascii_lowercase[token], (token,), None, finish)  # type: ignore[arg-type]
            for index in range(request.sampling.n)
        )
        if not is_last:
            return Output(request.id, deltas, report)
        del self.requests[request.id]
        timings = Timings(finished=now - request.arrived_at)
        return Output(request.id, deltas, report, End("done", self._usage(prepared), timings))

    def _usage(self, prepared: Prepared) -> Usage:
        """The prompt is computed in the step that makes the first token."""
        num_prompt = len(prepared.words) if prepared.made else 0
        return Usage(num_prompt, prepared.made * prepared.request.sampling.n)

    def _end(self, prepared: Prepared, end: End) -> Output:
        return Output(prepared.request.id, (), None, end)

    def abort_step(self, error: Exception, now: float) -> list[Output]:
        failure = InternalError("The step failed.").to_failure()
        batch, self._batch = self._batch, []
        for prepared in batch:
            del self.requests[prepared.request.id]
        cancelled, self._cancelled = self._cancelled, []
        ends = [self._end(p, End("failed", self._usage(p), failure=failure)) for p in batch]
        return ends + [self._end(p, End("cancelled", self._usage(p))) for p in cancelled]

    def tokenize(
        self, prompt: Chat | TextPrompt, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]:
        text = text_of(prompt)
        if text == "invalid":
            raise InvalidRequest("The prompt is invalid.", param="prompt")
        if text == "defect":
            raise ValueError("a defect in tokenize")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return [ord(letter) for letter in text], list(text) if want_strings else None

    def detokenize(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def halt(self, now: float) -> list[Output]:
        left = [*self._cancelled, *self.requests.values()]
        return [self._end(prepared, End("cancelled", self._usage(prepared))) for prepared in left]

    def close(self) -> None:
        self.requests.clear()


def text_of(prompt: Chat | TextPrompt | TokenPrompt) -> str:
    match prompt:
        case TextPrompt(text=text):
            return text
        case Chat(messages=messages):
            return " ".join(str(message["content"]) for message in messages)
        case TokenPrompt(token_ids=ids):
            return " ".join(map(str, ids))


def create(
    name: str,
    config: ModelConfig,
    progress: Callable[[str, int, int], None],
    weight_memory: object = None,
    far: str = "",
    leaving: Callable[[str], None] = lambda why: None,
) -> TinyBackend:
    """``config.source`` says how loading goes: its words are commands as well."""
    words = dict(word.partition("=")[::2] for word in config.source.split())
    if "first" in words and _is_first(words["first"]):
        return TinyBackend(name, config)
    progress("weights", 0, 1)
    for done in range(int(words.get("reports", 0))):
        progress("files", done, 1000)
        threading.Event().wait(0.001)
    if "gate" in words:
        pause = threading.Event()
        while not os.path.exists(words["gate"]):
            pause.wait(0.01)
    is_gone = "missing-if" in words and os.path.exists(words["missing-if"])
    is_not_there = "missing-unless" in words and not os.path.exists(words["missing-unless"])
    if "missing" in words or is_gone or is_not_there:
        raise ModelLoadError("The folder has no config.json.")
    if "defect" in words:
        raise ValueError("a defect in loading")
    if "die" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    if "leave-once" in words and _is_first(words["leave-once"]):
        leaving("rank 1 is stopped")
        os._exit(6)
    if "hang" in words:
        threading.Event().wait()
    progress("weights", 1, 1)
    return TinyBackend(name, config)


def _is_first(path: str) -> bool:
    """Of all workers with this path one is; the other words are for the others."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    from inferd.worker.main import main

    main(create=create)
