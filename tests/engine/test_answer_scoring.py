"""Scores of answers are the model's log-probabilities: as transformers computes them one by one, in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_engine import Answer, make_request, run

from inferd.answer_form import AnswerForm, Choices
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.errors import ContextLengthExceeded, InvalidRequest
from inferd.types import AnswerSet, Chat, GenerateRequest, SamplingParams, TextPrompt

Build = Callable[..., Engine]
Sets = list[tuple[str, list[str]]]
INPUT = "The parcel came late and the box was open."
SETS: Sets = [
    ("Is it late?", ["yes", "no"]),
    ("Is it early?", ["yes", "yes indeed", "no", "not at all"]),
    ("Which team?", ["billing", "bills", "technical", "techno", "", "sales"]),
    ("Is it late?", ["yes", "never"]),
    ("Is it", ["yes", "no"]),
]


@pytest.fixture(scope="module")
def build(tiny_model: Path) -> Build:
    def make(*, num_blocks: int = 512, block_size: int = 4, **scheduler: int | bool) -> Engine:
        config = ModelConfig(
            source=str(tiny_model),
            dtype="float32",
            device="cpu",
            threads=1,
            max_model_len=128,
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
            kv_cache=KVCacheConfig(block_size=block_size, num_blocks=num_blocks),
        )
        return create_backend("tiny", config, lambda phase, done, total: None)

    return make


@pytest.fixture(scope="module")
def engine(build: Build) -> Engine:
    return build()


def scoring(name: str, sets: Sets, text: str = INPUT, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=Chat(messages=[{"role": "user", "content": text}]),
        sampling=SamplingParams(max_tokens=0),
        stream=False,
        answer_sets=tuple(
            AnswerSet(
                messages=[{"role": "user", "content": question}],
                answers=tuple(answers),
                at=tuple(f"questions[{i}].choices[{j}].value" for j in range(len(answers))),
            )
            for i, (question, answers) in enumerate(sets)
        ),
        **fields,
    )


def scores(answer: Answer) -> tuple[tuple[float, ...], ...]:
    assert answer.end is not None
    assert answer.end.outcome == "done", answer.end.failure
    assert answer.report is not None
    assert answer.report.scores is not None
    return answer.report.scores


def prompt_of(question: str, text: str = INPUT) -> str:
    return f"<|user|>{text}<|user|>{question}<|assistant|>"


def enumerated(folder: Path, sets: Sets) -> list[list[float]]:
    """The log-probability of each answer and an end after it, by transformers, each from its whole text."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    with torch.inference_mode():
        for question, answers in sets:
            before = len(tokenizer.encode(prompt_of(question), add_special_tokens=False))
            row = []
            for answer in answers:
                ids = [*tokenizer.encode(prompt_of(question) + answer, add_special_tokens=False), 0]
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                row.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(before, len(ids))))
            found.append(row)
    return found


def test_scores_are_those_of_transformers_by_enumeration(engine: Engine, tiny_model: Path) -> None:
    (answer,) = run(engine, scoring("a", SETS))
    for got, want in zip(scores(answer), enumerated(tiny_model, SETS), strict=True):
        assert got == pytest.approx(want, abs=2e-4)


def test_scores_are_those_of_answers_that_are_generated_under_a_constraint(engine: Engine) -> None:
    sets = [("Which team?", ["billing", "bills", "technical"])]
    (answer,) = run(engine, scoring("a", sets))
    for text, got in zip(sets[0][1], scores(answer)[0], strict=True):
        request = msgspec.structs.replace(
            make_request(text, prompt_of("Which team?"), temperature=1.0, seed=3, logprobs=0, max_tokens=30),
            form=AnswerForm(constraint=Choices(texts=(text,), at="c")),
        )
        (generated,) = run(engine, request)
        assert generated.text() == text
        said = [one.logprob for delta in generated.deltas for one in delta.logprobs or ()]
        assert len(said) == len(text)
        whole = [*engine.tokenize(request.prompt)[0], *generated.tokens(), 0]  # type: ignore[arg-type]
        (ended,) = run(engine, make_request("e", whole, max_tokens=0, prompt_logprobs=0))
        assert ended.report is not None
        assert ended.report.logprobs is not None
        end = ended.report.logprobs[-1]
        assert end is not None
        assert got == pytest.approx(math.fsum(said) + end.logprob, abs=1e-5)


@pytest.fixture(scope="module")
def alone(build: Build) -> tuple[tuple[float, ...], ...]:
    (answer,) = run(build(), scoring("a", SETS))
    return scores(answer)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
        {"max_num_seqs": 3, "prefix_caching": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},
        {"block_size": 16},
        {"block_size": 1},
        {"num_blocks": 40},
    ],
)
def test_scores_have_the_same_bits_whatever_runs_together(
    build: Build, alone: tuple[tuple[float, ...], ...], options: dict[str, Any]
) -> None:
    engine = build(**options)
    (answer,) = run(engine, scoring("a", SETS))
    assert scores(answer) == alone
    again, other = run(engine, scoring("b", SETS), scoring("c", SETS, tenant="t"))
    assert scores(again) == scores(other) == alone


def test_scores_have_the_same_bits_in_a_batch_of_64(build: Build, alone: tuple[tuple[float, ...], ...]) -> None:
    engine = build(num_blocks=4096, max_num_seqs=64)
    several = [scoring(f"s{i}", SETS, tenant=str(i)) for i in range(32)]
    texts = [make_request(f"t{i}", f"{i} bottles", max_tokens=20, seed=i, temperature=1.0) for i in range(32)]
    answers = run(engine, *[one for pair in zip(several, texts, strict=True) for one in pair])
    assert {scores(answer) for answer in answers[::2]} == {alone}


def test_each_question_has_the_same_bits_alone(engine: Engine, alone: tuple[tuple[float, ...], ...]) -> None:
    for number, one in enumerate(SETS):
        (answer,) = run(engine, scoring("a", [one]))
        assert scores(answer)[0] == alone[number]


@pytest.mark.parametrize("max_num_seqs", [1, 4, 64])
def test_every_token_is_computed_once(build: Build, max_num_seqs: int) -> None:
    engine = build(max_num_seqs=max_num_seqs, prefix_caching=False)
    sets = [(f"Question {i}?", ["yes", "no", "yes but"]) for i in range(20)]
    engine.add(engine.prepare(scoring("a", sets)), 0.0)
    computed, outputs = 0, []
    while engine.due(0.0) is not None:
        more, stats = engine.step(0.0)
        assert stats is not None
        computed += stats.step_tokens
        outputs += more
        engine.pool.check()
    (output,) = outputs
    assert output.end is not None
    assert output.prompt is not None
    texts = {prompt_of(question) + answer for question, answers in sets for answer in answers}
    distinct = {text[:end] for text in map(as_letters, texts) for end in range(1, len(text) + 1)}
    assert computed == len(distinct) == output.end.usage.prompt_tokens == output.prompt.num_tokens
    assert output.end.usage.completion_tokens == 0
    assert engine.pool.num_used == 0


def as_letters(text: str) -> str:
    """One letter for each token."""
    return text.replace("<|user|>", "U").replace("<|assistant|>", "A")


def test_a_repetition_finds_its_prompt_in_the_prefix_cache(build: Build) -> None:
    engine = build(max_num_seqs=8)
    (first,) = run(engine, scoring("a", SETS))
    (again,) = run(engine, scoring("b", SETS))
    assert first.end is not None
    assert again.end is not None
    assert first.end.usage.cached_tokens == 0
    assert again.end.usage.cached_tokens >= len(as_letters(f"<|user|>{INPUT}")) - 4
    assert scores(first) == scores(again)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_answers_leave_no_wrong_prefixes_behind(build: Build, max_num_seqs: int) -> None:
    scored, plain = build(max_num_seqs=max_num_seqs), build(prefix_caching=False)
    run(scored, scoring("a", SETS))
    for number, (question, answers) in enumerate(SETS):
        for text in answers:
            request = make_request(f"{number}{text}", prompt_of(question) + text + "!", logprobs=0)
            (got,), (want,) = run(scored, request), run(plain, request)
            assert [delta.logprobs for delta in got.deltas] == [delta.logprobs for delta in want.deltas]
            assert got.end is not None
            assert got.end.usage.cached_tokens > 0


@given(
    sets=st.lists(
        st.tuples(
            st.text("ab ", min_size=1, max_size=6),
            st.lists(st.text("ab", max_size=5), min_size=1, max_size=6, unique=True),
        ),
        min_size=1,
        max_size=6,
    ),
    max_num_seqs=st.integers(1, 9),
    num_steps=st.integers(0, 12),
)
@settings(deadline=None, max_examples=40)
def test_any_tree_of_answers_has_the_scores_of_each_alone(
    build: Build, sets: Sets, max_num_seqs: int, num_steps: int
) -> None:
    engine = build(max_num_seqs=max_num_seqs, num_blocks=64)
    engine.add(engine.prepare(scoring("gone", sets)), 0.0)
    for _ in range(num_steps):
        if engine.due(0.0) is not None:
            engine.step(0.0)
    engine.cancel("gone")
    (answer,) = run_after(engine, scoring("a", sets))
    for (question, answers), got in zip(sets, scores(answer), strict=True):
        for text, value in zip(answers, got, strict=True):
            (one,) = run(engine, scoring("b", [(question, [text])]))
            assert scores(one) == ((value,),)
    assert engine.pool.num_used == 0


def run_after(engine: Engine, request: GenerateRequest) -> list[Answer]:
    """As ``run``, where the end of another request may come first."""
    answer = Answer()
    engine.add(engine.prepare(request), 0.0)
    while engine.due(0.0) is not None:
        for output in engine.step(0.0)[0]:
            if output.request_id == request.id:
                answer.take(output)
        engine.pool.check()
    return [answer]


def test_a_deadline_ends_it_and_frees_its_blocks(build: Build) -> None:
    engine = build(max_num_seqs=2)
    engine.add(engine.prepare(scoring("a", SETS, deadline_s=5.0)), 0.0)
    for _ in range(3):
        engine.step(1.0)
    (output,) = engine.step(6.0)[0]
    assert output.end is not None
    assert output.end.failure is not None
    assert output.end.failure.kind == "deadline_exceeded"
    assert output.end.usage.prompt_tokens > 0
    assert engine.pool.num_used == 0
    assert engine.due(6.0) is None


def test_too_long_and_equal_answers_are_named(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded) as long:
        engine.prepare(scoring("a", [("Q", ["a", "b" * 100])]))
    assert long.value.param == "questions[0].choices[1].value"
    with pytest.raises(InvalidRequest) as equal:
        engine.prepare(scoring("a", [("Q", ["a", "b"]), ("R", ["c", "d", "c"])]))
    assert equal.value.param == "questions[1].choices[2].value"


@pytest.mark.parametrize("opens", [False, True])
def test_an_answer_of_a_template_with_reasoning_follows_its_end(
    build: Build, tmp_path: Path, tiny_model: Path, opens: bool
) -> None:
    """Reasoning that the prompt opens is closed before each answer; where it opens none, nothing is added."""
    reasoning = tmp_path / "chat.jinja"
    reasoning.write_text(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        "{% endfor %}<|assistant|>" + ("{{ '<think>\\n' }}" if opens else "")
    )
    config = ModelConfig(
        source=str(tiny_model),
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=128,
        chat_template=str(reasoning),
    )
    thinking = create_backend("tiny", config, lambda phase, done, total: None)
    (answer,) = run(thinking, scoring("a", SETS))
    closed = "<think>\n\n</think>\n\n" if opens else ""
    for (question, answers), got in zip(SETS, scores(answer), strict=True):
        before = thinking.tokenize(TextPrompt(text=prompt_of(question) + closed))[0]
        for text, value in zip(answers, got, strict=True):
            ids = [*thinking.tokenize(TextPrompt(text=prompt_of(question) + closed + text))[0], 0]
            (whole,) = run(thinking, make_request("w", ids, max_tokens=0, prompt_logprobs=0))
            assert whole.report is not None
            assert whole.report.logprobs is not None
            said = [one.logprob for one in whole.report.logprobs[len(before) :] if one is not None]
            assert len(said) == len(ids) - len(before)
            assert value == pytest.approx(math.fsum(said), abs=1e-5)


def test_templates_that_want_alternating_roles_get_one_message(build: Build, tmp_path: Path, tiny_model: Path) -> None:
    strict = tmp_path / "chat.jinja"
    strict.write_text(
        "{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    )
    config = ModelConfig(
        source=str(tiny_model), dtype="float32", device="cpu", threads=1, max_model_len=128, chat_template=str(strict)
    )
    alternating = create_backend("tiny", config, lambda phase, done, total: None)
    (got,) = run(alternating, scoring("a", [("Late?", ["yes", "no"]), ("Early?", ["yes", "no"])]))
    (want,) = run(build(), scoring("a", [("x", ["yes", "no"])], text="y"))
    assert len(scores(got)) == 2
    assert scores(got)[0] != scores(want)[0]
    ids = [*alternating.tokenize(TextPrompt(text=f"<|user|>{INPUT}\n\nLate?<|assistant|>yes"))[0], 0]
    (whole,) = run(alternating, make_request("w", ids, max_tokens=0, prompt_logprobs=0))
    assert whole.report is not None
    logprobs = whole.report.logprobs
    assert logprobs is not None
    said = [one.logprob for one in logprobs[-4:] if one is not None]
    assert scores(got)[0][0] == pytest.approx(math.fsum(said), abs=1e-5)


def test_prompts_that_share_no_token_are_told_by_the_field_that_holds_them(engine: Engine) -> None:
    """A template that begins with the last message gives prompts that differ from their first token on."""
    request = scoring("r", [("aa", ["yes", "no"]), ("bb", ["yes", "no"])])
    request = msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, at="input"))
    usual = engine._preparer.template
    assert usual is not None
    source = "{{ messages[-1].content }}{% for m in messages %}{{ m.content }}{% endfor %}"
    engine._preparer.template = ChatTemplate({"default": source}, {}, "test")
    try:
        with pytest.raises(InvalidRequest) as caught:
            engine.prepare(request)
    finally:
        engine._preparer.template = usual
    assert caught.value.param == "input"
    assert "share no token" in caught.value.message
