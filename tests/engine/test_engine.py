"""Laws of the whole engine on a small real model, with transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.deltas import stats_of

from inferd import clock
from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.runner import Runner
from inferd.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from inferd.native.paged_attention import native_available
from inferd.types import (
    Chat,
    Delta,
    End,
    GenerateRequest,
    Output,
    PromptReport,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def build(tiny_model: Path) -> Build:
    def make(
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        kv_dtype: Literal["auto", "int8"] = "auto",
        **scheduler: int | bool,
    ) -> Engine:
        return create_backend(
            "tiny",
            ModelConfig(
                source=str(tiny_model),
                dtype="float32",
                device="cpu",
                threads=1,
                max_model_len=128,
                scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
                kv_cache=KVCacheConfig(block_size=block_size, num_blocks=num_blocks, dtype=kv_dtype),
            ),
            lambda phase, done, total: None,
        )

    return make


@pytest.fixture(scope="module")
def engine(build: Build) -> Engine:
    return build()


class Answer:
    """Everything that came back for one request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.report: PromptReport | None = None
        self.end: End | None = None

    def take(self, output: Output) -> None:
        assert self.end is None, "an output after the end"
        self.deltas += output.deltas
        self.report = output.prompt or self.report
        self.end = output.end

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [t for d in self.deltas if d.index == index for t in d.token_ids]

    def finish(self, index: int = 0) -> str | None:
        return next((d.finish_reason for d in reversed(self.deltas) if d.index == index and d.finish_reason), None)


def make_request(
    name: str,
    prompt: str | list[int],
    *,
    stream: bool = True,
    priority: int = 0,
    arrived_at: float = 0.0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    **sampling: object,
) -> GenerateRequest:
    options: dict[str, object] = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(token_ids=prompt),
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        explicit=tuple(options),
        stream=stream,
        priority=priority,
        arrived_at=arrived_at,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
    )


def run(engine: Engine, *requests: GenerateRequest, now: float = 1.0) -> list[Answer]:
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        engine.add(engine.prepare(request), now)
    steps = 0
    while engine.due(now) is not None:
        for output in engine.step(now)[0]:
            answers[output.request_id].take(output)
        engine.pool.check()
        steps += 1
        assert steps < 5000
    assert engine.pool.num_used == 0
    return [answers[request.id] for request in requests]


PROMPTS = ["Hello", "The quick brown fox jumps over", "a", "Zwölf Boxkämpfer jagen Viktor", "0123456789" * 4]


def oracle(folder: Path, prompt_ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities from transformers, without any cache."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, scores = list(prompt_ids), []
    with torch.inference_mode():
        for _ in range(count):
            logprobs = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(logprobs.argmax()))
            scores.append(float(logprobs.max()))
            if ids[-1] == 0:
                break
    return ids[len(prompt_ids) :], scores


def test_greedy_tokens_and_logprobs_equal_transformers(engine: Engine, tiny_model: Path) -> None:
    answers = run(engine, *[make_request(f"r{i}", p, max_tokens=12, logprobs=2) for i, p in enumerate(PROMPTS)])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, scores = oracle(tiny_model, engine.tokenize(TextPrompt(text=prompt))[0], 12)
        assert answer.tokens() == tokens
        reported = [p for d in answer.deltas for p in d.logprobs or ()]
        assert [p.logprob for p in reported] == pytest.approx(scores, abs=1e-4)
        assert all(p.rank == 1 and p.top[0].token_id == p.token_id and len(p.top) == 2 for p in reported)


def test_prompt_logprobs_equal_transformers_in_any_chunking(build: Build, tiny_model: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for chunk in (3, 512):
        engine = build(max_num_batched_tokens=chunk)
        prompt = PROMPTS[1]
        ids = engine.tokenize(TextPrompt(text=prompt))[0]
        first, second = (run(engine, make_request(name, prompt, max_tokens=0, prompt_logprobs=1))[0] for name in "ab")
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for answer in (first, second):  # the second finds its prompt in the cache, and scores it all the same
            assert answer.report is not None
            assert answer.report.logprobs is not None
            assert answer.report.logprobs[0] is None
            got = [p.logprob for p in answer.report.logprobs if p is not None]
            assert got == pytest.approx([float(expected[i, ids[i + 1]]) for i in range(len(ids) - 1)], abs=1e-4)
            assert answer.tokens() == []
            assert answer.finish() == "length"


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not native_available(torch.float32, 8),
    reason="bit-equal rows need the native kernels; torch's products depend on the batch",
)
@settings(max_examples=15)
@given(
    prompts=st.lists(st.lists(st.integers(3, 40), min_size=1, max_size=30), min_size=1, max_size=6),
    chunk=st.integers(1, 40),
    num_seqs=st.integers(1, 6),
    num_blocks=st.integers(34, 80),
    caching=st.booleans(),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_neither_batch_nor_chunks_nor_preemption_nor_cache_change_an_answer(
    build: Build,
    engine: Engine,
    prompts: list[list[int]],
    chunk: int,
    num_seqs: int,
    num_blocks: int,
    caching: bool,
    temperature: float,
) -> None:
    crowded = build(num_blocks=num_blocks, max_num_batched_tokens=chunk, max_num_seqs=num_seqs, prefix_caching=caching)
    requests = [
        make_request(f"r{i}", p, temperature=temperature, seed=i, max_tokens=20, ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    together = run(crowded, *requests)
    again = run(crowded, *requests)
    alone = [run(engine, request)[0] for request in requests]
    assert [a.tokens() for a in together] == [a.tokens() for a in alone]
    assert [a.tokens() for a in again] == [a.tokens() for a in alone]
    assert [a.text() for a in together] == [a.text() for a in alone]


def test_with_a_cache_of_bytes_an_answer_does_not_depend_on_its_company_either(build: Build) -> None:
    requests = [
        make_request(f"r{i}", p, temperature=t, seed=i, max_tokens=12, ignore_eos=True, n=n)
        for i, (p, t, n) in enumerate([(PROMPTS[4], 0.0, 1), (PROMPTS[4], 0.9, 3), (PROMPTS[0], 0.9, 1)])
    ]
    answers = []
    for shape in (
        {"max_num_batched_tokens": 7, "num_blocks": 40},
        {"max_num_batched_tokens": 64, "prefix_caching": False},
    ):
        engine = build(kv_dtype="int8", **shape)
        assert engine.info.fingerprint != build(**shape).info.fingerprint
        for _ in range(2):
            found = run(engine, *requests)
            answers.append([[a.tokens(i) for i in range(r.sampling.n)] for a, r in zip(found, requests, strict=True)])
    assert all(answer == answers[0] for answer in answers)


def test_a_cached_prompt_is_reported_and_answers_the_same(build: Build) -> None:
    engine = build()
    requests = [
        make_request("a", PROMPTS[4]),
        make_request("b", PROMPTS[4]),
        make_request("salted", PROMPTS[4], cache_salt="other"),
        make_request("several", PROMPTS[4], temperature=1.0, n=3),
    ]
    answers = [run(engine, request)[0] for request in requests]
    assert answers[0].tokens() == answers[1].tokens()
    for answer, cached in zip(answers, (0, 36, 0, 36), strict=True):
        assert answer.end is not None
        assert answer.report is not None
        assert answer.end.usage.cached_tokens == answer.report.cached_tokens == cached
        assert answer.end.usage.prompt_tokens == answer.report.num_tokens == 40


@pytest.mark.parametrize("num_seqs", [1, 2, 8])
def test_n_choices_differ_by_seed_stream_and_do_not_depend_on_slots(build: Build, num_seqs: int) -> None:
    engine = build(max_num_seqs=num_seqs)
    (answer,) = run(engine, make_request("r", "Hello", n=4, temperature=1.0, seed=3, max_tokens=10))
    texts = [answer.tokens(i) for i in range(4)]
    assert len({tuple(t) for t in texts}) > 1
    reference = run(build(max_num_seqs=8), make_request("r", "Hello", n=4, temperature=1.0, seed=3, max_tokens=10))[0]
    assert texts == [reference.tokens(i) for i in range(4)]
    assert answer.end is not None
    assert answer.end.usage.completion_tokens == sum(len(t) for t in texts)


def test_best_of_returns_the_most_likely_candidates(engine: Engine) -> None:
    common: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    (every,) = run(engine, make_request("all", "Hello", n=4, logprobs=0, **common))
    means = {i: sum(p.logprob for d in every.deltas if d.index == i for p in d.logprobs or ()) / 6 for i in range(4)}
    best = sorted(means, key=lambda i: -means[i])[:2]
    (answer,) = run(engine, make_request("best", "Hello", n=2, best_of=4, **common))
    assert [answer.tokens(0), answer.tokens(1)] == [every.tokens(i) for i in best]


def test_the_most_likely_candidates_are_so_by_token_however_long_they_are(engine: Engine) -> None:
    stops = tuple(range(0, 256, 4))
    num_that_differ = 0
    for seed in range(8):
        common: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 8, "stop_token_ids": stops}
        (every,) = run(engine, make_request("all", "Hello", n=4, logprobs=0, **common))
        found = [[p.logprob for d in every.deltas if d.index == i for p in d.logprobs or ()] for i in range(4)]
        best, best_in_sum = (
            max(range(4), key=lambda i: worth(found[i])) for worth in (lambda one: sum(one) / len(one), sum)
        )
        num_that_differ += best != best_in_sum
        (answer,) = run(engine, make_request("best", "Hello", best_of=4, **common))
        assert answer.tokens(0) == every.tokens(best)
    assert num_that_differ, "or the seeds show nothing"


def test_the_text_of_a_prompt_has_its_special_tokens_where_they_are_asked_for(engine: Engine) -> None:
    for skips, text in ((True, "Hello"), (False, "<|user|>Hello")):
        request = make_request("r", "<|user|>Hello", max_tokens=1, skip_special_tokens=skips)
        (answer,) = run(engine, msgspec.structs.replace(request, return_prompt_ids=True))
        assert answer.report is not None
        assert answer.report.text == text


def test_beam_search_equals_transformers(engine: Engine, tiny_model: Path) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for prompt in PROMPTS[:3]:
        ids = engine.tokenize(TextPrompt(text=prompt))[0]
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=3,
            num_return_sequences=2,
            do_sample=False,
            max_new_tokens=7,
            eos_token_id=0,
            pad_token_id=0,
        )
        expected = [[t for t in row[len(ids) :].tolist() if t != 0] for row in out]
        (answer,) = run(engine, make_request("b", prompt, use_beam_search=True, n=2, best_of=3, max_tokens=7))
        assert [[t for t in answer.tokens(i) if t != 0] for i in range(2)] == expected


def test_two_beam_searches_in_an_arena_for_one_both_finish(build: Build) -> None:
    engine = build(num_blocks=34, max_num_seqs=8)
    requests = [
        make_request(f"b{i}", "Hello", use_beam_search=True, n=3, max_tokens=30, arrived_at=float(i), ignore_eos=True)
        for i in range(2)
    ]
    answers = run(engine, *requests)
    assert [a.finish() for a in answers] == ["length", "length"]
    assert answers[0].tokens() == answers[1].tokens()


def test_stop_strings_end_the_answer_across_tokens(engine: Engine) -> None:
    (free,) = run(engine, make_request("free", "Hello", max_tokens=20, ignore_eos=True))
    text = free.text()
    stop = text[5:8]
    (answer,) = run(engine, make_request("stop", "Hello", max_tokens=20, ignore_eos=True, stop=(stop,)))
    assert answer.text() == text[: text.index(stop)]
    assert answer.finish() == "stop"
    assert answer.deltas[-1].stop_reason == stop
    (kept,) = run(
        engine,
        make_request("kept", "Hello", max_tokens=20, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True),
    )
    assert kept.text() == text[: text.index(stop) + len(stop)]
    assert answer.end is not None
    assert answer.end.usage.completion_tokens < 20


def test_stop_token_ids_and_min_tokens(engine: Engine) -> None:
    (free,) = run(engine, make_request("free", "Hello", max_tokens=20, ignore_eos=True))
    token = free.tokens()[4]
    first = free.tokens().index(token)
    (answer,) = run(engine, make_request("stop", "Hello", max_tokens=20, ignore_eos=True, stop_token_ids=(token,)))
    assert answer.tokens() == free.tokens()[: first + 1]
    assert answer.deltas[-1].stop_reason == token
    (later,) = run(
        engine,
        make_request("min", "Hello", max_tokens=20, ignore_eos=True, stop_token_ids=(token,), min_tokens=first + 2),
    )
    assert len(later.tokens()) >= first + 2
    assert token not in later.tokens()[: first + 1]


def test_a_stop_string_below_min_tokens_ends_nothing(engine: Engine) -> None:
    (free,) = run(engine, make_request("free", "Hello", max_tokens=20, ignore_eos=True))
    text, tokens = free.text(), free.tokens()
    early = text[2:5]
    fields: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "stop": (early,)}
    (stopped,) = run(engine, make_request("stopped", "Hello", **fields))
    count = len(stopped.tokens())
    assert (stopped.finish(), count < 20) == ("stop", True)
    (later,) = run(engine, make_request("later", "Hello", **fields, min_tokens=count + 1))
    assert len(later.tokens()) > count
    assert later.tokens() == tokens[: len(later.tokens())]
    assert later.text().startswith(text[: text.index(early) + len(early)])


def test_a_collected_answer_comes_in_one_output(engine: Engine) -> None:
    (streamed,) = run(engine, make_request("s", "Hello", max_tokens=10))
    (collected,) = run(engine, make_request("c", "Hello", max_tokens=10, stream=False))
    assert len(streamed.deltas) > 1
    assert len(collected.deltas) == 1
    assert collected.text() == streamed.text()
    assert collected.tokens() == streamed.tokens()


def test_cancelling_frees_the_blocks_at_once_and_ends_once(build: Build) -> None:
    engine = build()
    engine.add(engine.prepare(make_request("a", PROMPTS[4], max_tokens=50)), 0.0)
    engine.add(engine.prepare(make_request("b", PROMPTS[1], max_tokens=3, ignore_eos=True)), 0.0)
    engine.step(0.1)
    assert engine.pool.num_used > 0
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("nobody")
    ends = []
    while engine.due(0.2) is not None:
        ends += [(o.request_id, o.end.outcome) for o in engine.step(0.2)[0] if o.end]
    assert sorted(ends) == [("a", "cancelled"), ("b", "done")]
    assert engine.pool.num_used == 0


def test_a_deadline_ends_a_request_in_the_engine(build: Build) -> None:
    engine = build()
    engine.add(engine.prepare(make_request("a", "Hello", max_tokens=50, deadline_s=1.0, arrived_at=10.0)), 10.0)
    assert not [o for o in engine.step(10.5)[0] if o.end]
    (output,) = [o for o in engine.step(11.0)[0] if o.end]
    assert output.end is not None
    assert output.end.failure is not None
    assert output.end.failure.kind == "deadline_exceeded"
    assert engine.due(11.1) is None
    assert engine.pool.num_used == 0


def test_what_is_too_late_when_it_comes_or_while_it_waits_is_never_computed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(max_num_seqs=1)
    computed: list[str] = []
    original = Runner.prepare

    def watched(self: Runner, step: Any, wanted: Any) -> Any:
        computed.extend(part.sequence.request_id for part in step.slices)
        return original(self, step, wanted)

    monkeypatch.setattr(Runner, "prepare", watched)
    with pytest.raises(DeadlineExceeded):
        engine.add(engine.prepare(make_request("late", "Hello", deadline_s=1.0, arrived_at=10.0)), 11.0)
    engine.add(engine.prepare(make_request("first", "Hello", max_tokens=30, ignore_eos=True)), 11.0)
    engine.add(engine.prepare(make_request("waits", "Hello", deadline_s=2.0, arrived_at=10.0)), 11.0)
    engine.step(11.5)
    ends = [output for output in engine.step(12.0)[0] if output.end]
    assert [(o.request_id, o.end.outcome) for o in ends if o.end] == [("waits", "failed")]
    while engine.due(12.0) is not None:
        engine.step(12.0)
    assert set(computed) == {"first"}


def test_an_exception_in_a_step_fails_only_what_was_in_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(max_num_seqs=1)
    engine.add(engine.prepare(make_request("in", "Hello", arrived_at=1.0)), 1.0)
    engine.add(engine.prepare(make_request("out", "Hello", arrived_at=2.0)), 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "compute", lambda self, batch: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.step(3.0)
    (output,) = engine.abort_step(caught.value, 3.0)
    assert output.request_id == "in"
    assert output.end is not None
    assert output.end.outcome == "failed"
    ends: dict[str, str] = {}
    while engine.due(4.0) is not None:
        ends |= {o.request_id: o.end.outcome for o in engine.step(4.0)[0] if o.end}
    assert ends == {"out": "done"}
    assert engine.pool.num_used == 0


def test_prompts_are_kept_for_their_penalties_no_longer_than_their_requests_live(build: Build) -> None:
    engine = build()
    for name in ("one", "two"):
        engine.add(engine.prepare(make_request(name, "Hello", max_tokens=5, n=2, repetition_penalty=1.3)), 1.0)
    engine.step(1.0)
    assert len(engine._sampler._seen) == 2
    engine.cancel("one")
    while engine.due(1.0) is not None:
        engine.step(1.0)
    assert not engine._sampler._seen


@pytest.mark.parametrize("is_aborted", [True, False])
def test_what_ended_before_a_step_failed_is_told_all_the_same(
    build: Build, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    engine = build()
    engine.add(engine.prepare(make_request("late", "Hello", deadline_s=1.0, arrived_at=1.0)), 1.0)
    for name in ("left", "scored", "in"):
        count = 0 if name == "scored" else 5
        engine.add(engine.prepare(make_request(name, "Hello", max_tokens=count, arrived_at=1.0)), 1.0)
    engine.cancel("left")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_sample", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.step(3.0)
    if not is_aborted:  # as in a program that uses the engine directly and cancels everything
        engine.cancel("in")
    outputs = engine.abort_step(caught.value, 3.0) if is_aborted else engine.step(3.0)[0]
    ends = [(o.request_id, o.end.outcome) for o in outputs if o.end]
    of_the_step = ("in", "failed" if is_aborted else "cancelled")
    assert sorted(ends) == [of_the_step, ("late", "failed"), ("left", "cancelled"), ("scored", "done")]
    assert engine.due(3.0) is None
    assert engine.pool.num_used == 0


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request("r", [5000]), "prompt"),
        (make_request("r", [-1]), "prompt"),
        (make_request("r", []), "prompt"),
        (make_request("r", ""), "prompt"),
        (make_request("r", "Hi", logit_bias={9999: 1.0}), "logit_bias"),
        (make_request("r", "Hi", allowed_token_ids=()), "allowed_token_ids"),
        (make_request("r", "Hi", allowed_token_ids=(9999,)), "allowed_token_ids"),
        (make_request("r", "Hi", min_tokens=9), "min_tokens"),
        (make_request("r", "Hi", use_beam_search=True, n=100), "n"),
        (make_request("r", "Hi", logprobs=100_000), "logprobs"),
        (make_request("r", "Hi", temperature=-1.0), "temperature"),
        (make_request("r", "Hi", temperature=float("nan")), "temperature"),
        (make_request("r", "Hi", top_p=0.0), "top_p"),
        (make_request("r", "Hi", top_k=-2), "top_k"),
        (make_request("r", "Hi", max_tokens=-1), "max_tokens"),
        (make_request("r", "Hi", n=0), "n"),
        (make_request("r", "Hi", n=3, best_of=2), "best_of"),
        (make_request("r", "Hi", logit_bias={5: float("nan")}), "logit_bias"),
        (make_request("r", "Hi", stop=("",)), "stop"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(engine: Engine, request_: GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.prepare(request_)
    assert caught.value.param == param
    assert engine.due(0.0) is None


def test_too_long_prompts_and_answers_are_refused_with_the_numbers(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"128 tokens, but prompt has 200"):
        engine.prepare(make_request("r", "x" * 200))
    with pytest.raises(ContextLengthExceeded, match=r"set max_tokens to 28 or less"):
        engine.prepare(make_request("r", "x" * 100, max_tokens=29))
    prepared = engine.prepare(GenerateRequest(id="r", model="tiny", prompt=TextPrompt(text="x" * 100)))
    assert prepared.sampling.max_tokens == 28


def test_a_chat_is_rendered_and_ended_by_the_template(engine: Engine) -> None:
    ids, _ = engine.tokenize(Chat(messages=[{"role": "user", "content": "Hi"}]))
    assert engine.detokenize(ids) == "<|user|>Hi<|assistant|>"


@pytest.mark.timeout(600)
@settings(max_examples=10)
@given(data=st.data())
def test_a_storm_of_adds_and_cancels_ends_every_request_once(build: Build, data: st.DataObject) -> None:
    engine = build(num_blocks=40, max_num_seqs=3, max_num_batched_tokens=9)
    ends: dict[str, list[str]] = {}
    now = 0.0
    for _ in range(data.draw(st.integers(5, 30))):
        now += 1.0
        action = data.draw(st.sampled_from(["add", "add", "cancel", "step", "step"]))
        if action == "add":
            name = f"r{len(ends)}"
            beam = data.draw(st.booleans())
            request = make_request(
                name,
                data.draw(st.lists(st.integers(3, 9), min_size=1, max_size=40)),
                n=data.draw(st.integers(1, 3)),
                use_beam_search=beam,
                temperature=0.0 if beam else 1.0,
                seed=1,
                max_tokens=data.draw(st.integers(0, 10)),
                priority=data.draw(st.integers(-1, 1)),
                arrived_at=now,
            )
            engine.add(engine.prepare(request), now)
            ends[name] = []
        elif action == "cancel" and ends:
            engine.cancel(data.draw(st.sampled_from(sorted(ends))))
        else:
            for output in engine.step(now)[0]:
                if output.end:
                    ends[output.request_id].append(output.end.outcome)
        engine.pool.check()
    while engine.due(now) is not None:
        for output in engine.step(now)[0]:
            if output.end:
                ends[output.request_id].append(output.end.outcome)
    assert all(len(outcomes) == 1 for outcomes in ends.values()), ends
    assert engine.pool.num_used == 0


def test_a_new_engine_is_warm_and_its_books_are_clean(build: Build) -> None:
    engine = build()
    assert engine.info.load_s["warm_up"] > 0
    assert (engine.pool.num_used, engine.pool.num_cached) == (0, 0)
    assert engine.due(0.0) is None
    assert (
        engine.info.memory.kv_bytes
        == engine.info.num_blocks * engine.info.block_size * engine.info.memory.kv_bytes_per_token
    )


def test_with_one_slot_requests_are_computed_one_after_the_other(build: Build) -> None:
    engine = build(max_num_seqs=1)
    for name in "abc":
        engine.add(engine.prepare(make_request(name, "Hello", max_tokens=3, ignore_eos=True)), 0.0)
    while engine.due(0.0) is not None:
        _, stats = engine.step(0.0)
        assert stats is not None
        assert stats.step_sequences <= 1


def test_a_text_that_is_far_too_long_is_refused_without_being_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes take seconds, for which every other request would wait."""
    request = make_request("r", "Once upon a time " * 100_000)
    monkeypatch.setattr(
        "inferd.checkpoints.text.tokenizer.Tokenizer.encode", lambda *_: pytest.fail("it was tokenized")
    )
    with pytest.raises(ContextLengthExceeded, match=r"128 tokens, but prompt has at least \d{3,}"):
        engine.prepare(request)


def test_a_step_tells_where_its_time_went(engine: Engine) -> None:
    engine.add(engine.prepare(make_request("timed", "hello", max_tokens=2)), 1.0)
    began = clock.now()
    parts = stats_of(engine, 1.0).parts
    took = clock.now() - began
    assert min(parts.schedule, parts.batch, parts.forward, parts.logits, parts.sample, parts.text) > 0
    assert sum(msgspec.structs.astuple(parts)) <= took
    engine.cancel("timed")
    engine.step(1.0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 60),  # tokens of the prompt
            st.integers(0, 6),  # tokens wanted
            st.integers(0, 12),  # the step before which it comes
            st.none() | st.integers(0, 14),  # the step before which it is cancelled
            st.none() | st.integers(1, 14),  # the step before which its deadline passes
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([None, 3]),  # the step that halts everything
)
def test_what_the_ends_tell_is_what_the_steps_computed(
    small_steps: Engine, asked: list[tuple[int, int, int, int | None, int | None]], halts: int | None
) -> None:
    """Whatever ends a request: its usage has the part of its prompt that was computed, and every generated token."""
    engine, ends, num_computed = small_steps, dict[str, End](), 0
    for step in range(400):
        now = 1.0 + step
        for number, (num_prompt, num_wanted, comes, cancelled, late) in enumerate(asked):
            if comes == step:
                request = make_request(
                    str(number),
                    [7 + number] * num_prompt,
                    max_tokens=num_wanted,
                    prompt_logprobs=0 if not num_wanted else None,
                    ignore_eos=True,
                    arrived_at=now,
                    deadline_s=None if late is None or late <= comes else float(late - comes),
                )
                engine.add(engine.prepare(request), now)
            if cancelled == step:
                engine.cancel(str(number))
        if halts == step:
            outputs = engine.halt(now)
        else:
            outputs, stats = engine.step(now)
            assert stats is not None
            num_computed += stats.step_tokens - (stats.drafted_tokens - stats.accepted_tokens)
        ends |= {output.request_id: output.end for output in outputs if output.end is not None}
        if step > 14 and engine.due(now) is None:
            break
    assert len(ends) == len(asked)
    usages = [end.usage for end in ends.values()]
    # The last token of an answer is drawn, and computed only if another one follows it. Wrong guesses are not counted.
    assert sum(usage.prompt_tokens + max(usage.completion_tokens - 1, 0) for usage in usages) == num_computed
    assert not any(usage.cached_tokens for usage in usages)


@pytest.fixture(scope="module")
def small_steps(build: Build) -> Engine:
    return build(max_num_batched_tokens=8, prefix_caching=False)
