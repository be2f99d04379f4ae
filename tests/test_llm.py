"""Offline use over a fake engine: order, errors, streams, interruption. No model, no torch."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from inferd import clock
from inferd.answer_form import Regex
from inferd.backend import FOR_EVER, Wait
from inferd.errors import InferdError, InvalidRequest
from inferd.llm import LLM
from inferd.types import (
    JSON,
    Chat,
    Delta,
    End,
    Failure,
    GenerateRequest,
    ModelInfo,
    Output,
    SamplingParams,
    StepStats,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
)

INFO = ModelInfo(
    name="echo", source="-", architecture="Echo", dtype="float32", max_model_len=64, vocab_size=256,
    num_parameters=0, num_blocks=8, block_size=16, max_num_seqs=2,
)  # fmt: skip


class EchoBackend:
    """Answers every prompt with itself, one character a step; token ids are code points."""

    def __init__(self) -> None:
        self.info = INFO
        self.left: dict[str, str] = {}
        self.seen: dict[str, GenerateRequest] = {}
        self.cancelled: set[str] = set()
        self.most_together = 0
        self.is_closed = False

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> object:
        match request.prompt:
            case TextPrompt():
                text = request.prompt.text
            case TokenPrompt():
                text = "".join(map(chr, request.prompt.token_ids))
            case Chat():
                text = str(request.prompt.messages[-1]["content"])
        if not text:
            raise InvalidRequest("prompt has no tokens. Give at least one.", param="prompt")
        self.seen[request.id] = request
        return request.id, text

    def add(self, prepared: object, now: float) -> None:
        assert isinstance(prepared, tuple)
        self.left[prepared[0]] = prepared[1][: self.seen[prepared[0]].sampling.max_tokens]
        self.most_together = max(self.most_together, len(self.left))

    def cancel(self, request_id: str) -> None:
        if request_id in self.left:
            self.cancelled.add(request_id)

    def step(self, now: float) -> tuple[list[Output], StepStats]:
        outputs = []
        # Later requests first: the order of ends is not the order of prompts.
        for request_id in reversed(list(self.left)):
            text = self.left[request_id]
            if request_id in self.cancelled:
                del self.left[request_id]
                outputs.append(Output(request_id, (), None, End("cancelled")))
            elif text.startswith("!"):
                del self.left[request_id]
                outputs.append(Output(request_id, (), None, End("failed", failure=Failure("internal", "It broke."))))
            else:
                self.left[request_id] = text[1:]
                is_last = len(text) == 1
                delta = Delta(0, text[0], (ord(text[0]),), None, "stop" if is_last else None)
                end = End("done", Usage(len(text), 1)) if is_last else None
                if is_last:
                    del self.left[request_id]
                outputs.append(Output(request_id, (delta,), None, end))
        return outputs, StepStats()

    def due(self, now: float) -> float | None:
        return now if self.left else None

    def halt(self, now: float) -> list[Output]:
        return [Output(request_id, (), None, End("cancelled")) for request_id in self.left]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def backend() -> EchoBackend:
    return EchoBackend()


@pytest.fixture
def llm(backend: EchoBackend) -> Iterator[LLM]:
    with LLM.over(backend) as made:
        yield made


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a long first prompt", "b", "cc", "another quite long one", "e"]
    completions = llm.generate(prompts)
    assert [completion.prompt for completion in completions] == prompts
    assert [completion.text for completion in completions] == prompts
    assert completions[2].outputs[0].token_ids == (99, 99)
    assert completions[2].outputs[0].finish_reason == "stop"


def test_one_prompt_and_token_ids_are_taken_as_well(llm: LLM) -> None:
    assert llm.generate("hello")[0].text == "hello"
    assert llm.generate([104, 105])[0].text == "hi"
    assert [c.text for c in llm.generate([[104, 105], [111]])] == ["hi", "o"]
    assert llm.generate([]) == []


class WithLogprobs(EchoBackend):
    """Tells the log-probability of every token but the first."""

    def step(self, now: float) -> tuple[list[Output], StepStats]:
        outputs, stats = super().step(now)
        told = []
        for output in outputs:
            deltas = []
            for delta in output.deltas:
                is_first = delta.text == self.texts[output.request_id][0]
                entries = (TokenLogprob(delta.token_ids[0], delta.text, delta.text.encode(), -0.5, 1),)
                deltas.append(msgspec.structs.replace(delta, logprobs=None if is_first else entries))
            told.append(msgspec.structs.replace(output, deltas=tuple(deltas)))
        return told, stats

    def add(self, prepared: object, now: float) -> None:
        super().add(prepared, now)
        assert isinstance(prepared, tuple)
        self.texts[prepared[0]] = prepared[1]

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}


def test_log_probabilities_are_joined_in_the_order_of_the_tokens(llm: LLM) -> None:
    assert llm.generate("abc")[0].outputs[0].logprobs is None
    with LLM.over(WithLogprobs()) as telling:
        logprobs = telling.generate("abc")[0].outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == [ord("b"), ord("c")]


def test_the_engine_is_kept_full_but_not_flooded(llm: LLM, backend: EchoBackend) -> None:
    llm.generate(["x" * (1 + i % 5) for i in range(50)])
    assert backend.most_together == 2 * INFO.max_num_seqs


def test_sampling_is_given_once_or_for_each(llm: LLM) -> None:
    assert [c.text for c in llm.generate(["abc", "def"], SamplingParams(max_tokens=2))] == ["ab", "de"]
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert [c.text for c in llm.generate(["abc", "def"], each)] == ["a", "de"]
    with pytest.raises(InvalidRequest, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], each[:1])


def test_without_sampling_the_models_defaults_apply_and_with_it_none(llm: LLM, backend: EchoBackend) -> None:
    llm.generate("a")
    llm.generate("a", SamplingParams(temperature=1.0))
    without, given = backend.seen.values()
    assert without.explicit == ()
    assert "temperature" in given.explicit


def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM, backend: EchoBackend) -> None:
    with pytest.raises(InvalidRequest, match=r"Prompt 1 of 2: prompt has no tokens"):
        llm.generate(["fine", ""])
    assert backend.left == {}


def test_a_constraint_is_asked_of_each_answer(llm: LLM, backend: EchoBackend) -> None:
    """The engine enforces it; what precedes it in a conversation is reasoning."""
    constraint = Regex(pattern="[a-z]+")
    llm.generate(["ab", "c"], constraint=constraint)
    llm.chat([{"role": "user", "content": "d"}], constraint=constraint)
    assert "".join(llm.stream("e", constraint=constraint)) == "e"
    llm.generate("f")
    forms = [
        (request.form.constraint, request.form.splits_reasoning) for request in backend.seen.values() if request.form
    ]
    assert forms == [(constraint, False), (constraint, False), (constraint, True), (constraint, False)]
    assert len(backend.seen) == 5


def test_a_constraint_of_another_type_is_refused_before_anything_runs(llm: LLM, backend: EchoBackend) -> None:
    with pytest.raises(InvalidRequest, match=r"constraint is of type dict; give one of JsonSchema, Regex"):
        llm.generate("a", constraint=cast(Any, {"type": "object"}))
    assert backend.seen == {}


def test_one_failure_leaves_the_others_unharmed(llm: LLM) -> None:
    good, bad, other = llm.generate(["good", "!", "other"])
    assert (good.text, other.text) == ("good", "other")
    assert bad.outputs == ()
    assert str(bad.error) == "It broke."


def test_chat_takes_one_conversation_or_many_and_joins_text_parts(llm: LLM, backend: EchoBackend) -> None:
    assert llm.chat([{"role": "user", "content": "hi"}])[0].text == "hi"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    many: list[list[JSON]] = [[{"role": "user", "content": parts}], [{"role": "user", "content": "c"}]]
    assert [c.text for c in llm.chat(many)] == ["ab", "c"]
    assert all(isinstance(request.prompt, Chat) for request in backend.seen.values())
    with pytest.raises(InvalidRequest, match="not text"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_stream_comes_in_pieces_and_others_run_beside_it(llm: LLM, backend: EchoBackend) -> None:
    stream = llm.stream("abc")
    assert next(stream) == "a"
    assert llm.generate("xyz")[0].text == "xyz"
    assert list(stream) == ["b", "c"]
    assert [request.stream for request in backend.seen.values()] == [True, False]


def test_a_stream_left_early_is_cancelled(llm: LLM, backend: EchoBackend) -> None:
    stream = llm.stream("abcdef")
    next(stream)
    stream.close()
    assert backend.left == {}
    assert len(backend.cancelled) == 1
    assert llm.generate("still works")[0].text == "still works"


def test_an_interrupted_batch_frees_the_engine(backend: EchoBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM.over(backend) as llm:
        steps, plain = iter(range(100)), backend.step

        def step(now: float) -> tuple[list[Output], StepStats]:
            if next(steps) == 3:
                raise KeyboardInterrupt
            return plain(now)

        monkeypatch.setattr(backend, "step", step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a long prompt", "another long prompt"])
        assert backend.left == {}
        assert llm.generate("again")[0].text == "again"


def test_a_closed_llm_says_so(backend: EchoBackend) -> None:
    llm = LLM.over(backend)
    llm.close()
    llm.close()
    assert backend.is_closed
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("a")


class Ahead(EchoBackend):
    """Has something to do ahead of time until it is told that this is all."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.is_all = threading.Event(), threading.Event()
        self.was_beside_a_request = False

    def use_idle_time(self) -> bool:
        self.was_beside_a_request |= bool(self.left)
        self.has_begun.set()
        return not self.is_all.is_set()


def _ahead_thread() -> threading.Thread:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "inferd-ahead"]
    return thread


def test_time_between_answers_is_used_and_that_of_answers_is_not() -> None:
    backend = Ahead()
    llm = LLM.over(backend)
    thread = _ahead_thread()
    for text in ("abc", "defg"):
        assert backend.has_begun.wait(10)
        assert llm.generate(text, progress=False)[0].text == text
        backend.has_begun.clear()
    pieces = llm.stream("hijk")
    assert next(pieces) == "h"
    backend.has_begun.clear()
    assert list(pieces) == ["i", "j", "k"]
    with pytest.raises(InvalidRequest):
        llm.generate("", progress=False)
    assert backend.has_begun.wait(10)
    backend.is_all.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not backend.was_beside_a_request


class Slow(EchoBackend):
    """A step takes so many seconds of a clock that stands in for the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.5) -> None:
        super().__init__()
        self.now, self.step_s = 0.0, step_s
        monkeypatch.setattr(clock, "now", lambda: self.now)

    def step(self, now: float) -> tuple[list[Output], StepStats]:
        self.now += self.step_s
        return super().step(now)


def test_progress_of_answers_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["abcdefgh", "klmnopqr", "stuv"]  # 20 tokens in 8 steps of half a second
    with LLM.over(Slow(monkeypatch)) as llm:
        llm.generate(prompts)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
        llm.generate(prompts, progress=False)
        assert capsys.readouterr() == ("", "")
        llm.generate(prompts)
    out, err = capsys.readouterr()
    assert out == ""
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", err)
    assert "Generating" in shown
    assert "3/3" in shown
    assert "5 tokens/s" in shown
    assert err.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_progress_is_counted_at_most_ten_times_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, object]] = []
    with LLM.over(Slow(monkeypatch, 0.05)) as llm:
        monkeypatch.setattr(
            "rich.progress.Progress.update", lambda bar, task, **what: shown.append((clock.now(), what["completed"]))
        )
        llm.generate("abcdefghij")
    assert [(round(now, 3), done) for now, done in shown] == [(0.15, 0), (0.3, 0), (0.45, 0), (0.5, 1)]


def test_progress_of_loading_is_told_on_stderr_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InferdError):
        LLM(str(tmp_path), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading" in err


def test_a_model_that_makes_predictions_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from inferd.errors import ModelLoadError; from inferd.llm import LLM\n"
        "try: LLM('demo-digits', progress=False)\n"
        "except ModelLoadError as error: print(error.param, error.message)\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("source demo-digits makes predictions and writes no text")
    assert "inferd serve demo-digits" in run.stdout


def test_nothing_is_done_ahead_of_time_once_it_is_closed() -> None:
    backend = Ahead()
    llm = LLM.over(backend)
    thread = _ahead_thread()
    left = llm.stream("hij")
    assert next(left) == "h"  # under way
    llm.close()
    thread.join(10)
    assert not thread.is_alive()


def test_the_package_exports_the_class_without_importing_it_early() -> None:
    import inferd

    assert inferd.LLM is LLM
    assert inferd.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="nothing"):
        inferd.nothing  # noqa: B018


FORGETFUL = """
import time, torch
from inferd.native import compiled
from inferd.llm import LLM
from tests.test_llm import EchoBackend

class Toucher(EchoBackend):
    num_touched = 0

    def use_idle_time(self):
        self.num_touched += compiled.touch_pages(torch.empty(8 << 20, dtype=torch.int32))
        return True

backend = Toucher()
llm = LLM.over(backend)
while backend.num_touched < 2:
    time.sleep(0.001)
"""


def test_a_program_that_closes_nothing_ends_well_while_pages_are_found() -> None:
    pytest.importorskip("inferd._kernels")
    run = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
