"""Constrained answers against a slow twin, which tries every token of the vocabulary against all texts of a language."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.speculation.speculating import always

from inferd.answer_form import AnswerForm, Choices, Constraint, Grammar, JsonSchema, Regex, TaggedStructure, TaggedText
from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine import sampler
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.errors import InvalidRequest
from inferd.llm import LLM
from inferd.structured import guide as guides
from inferd.structured.check import Validator
from inferd.structured.guide import Guide
from inferd.types import Continuation, Delta, End, GenerateRequest, SamplingParams, TokenPrompt

EOS = 0
PROMPT = (50, 60, 70, 71)
Build = Callable[..., Engine]
Sampling = dict[str, Any]
SAMPLINGS: list[Sampling] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.3},
]


@pytest.fixture(scope="module")
def build(tiny_model: Path) -> Iterator[Build]:
    made: list[Engine] = []

    def make(method: Literal["auto", "none"] = "auto", *, num_blocks: int = 256, max_num_seqs: int = 16) -> Engine:
        engine = create_backend(
            "tiny",
            ModelConfig(
                source=str(tiny_model),
                dtype="float32",
                device="cpu",
                threads=1,
                max_model_len=192,
                scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
                kv_cache=KVCacheConfig(block_size=4, num_blocks=num_blocks),
                speculation=SpeculationConfig(method=method),
            ),
            lambda phase, done, total: None,
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engines(build: Build) -> dict[str, Engine]:
    """The ways to compute an answer that must not change it: guesses, none, and preemptions."""
    made = {"auto": build(), "none": build("none"), "tight": build(num_blocks=49, max_num_seqs=4)}
    always(made["auto"])
    always(made["tight"])
    return made


class Answer:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.end: End | None = None

    def tokens(self, index: int = 0) -> list[int]:
        return [t for d in self.deltas if d.index == index for t in d.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.index == index)

    def finish(self, index: int = 0) -> str | None:
        return next((d.finish_reason for d in self.deltas if d.index == index and d.finish_reason), None)

    @property
    def failure(self) -> str | None:
        assert self.end is not None
        return self.end.failure.kind if self.end.failure is not None else None


def ask(
    name: str,
    constraint: Constraint | None,
    prompt: tuple[int, ...] = PROMPT,
    resumes: Continuation | None = None,
    **sampling: Any,
) -> GenerateRequest:
    options = {"temperature": 0.0, "max_tokens": 40, **sampling}
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=TokenPrompt(token_ids=list(prompt)),
        sampling=SamplingParams(**options),
        explicit=tuple(options),
        form=AnswerForm(constraint=constraint) if constraint is not None else None,
        resumes=resumes,
    )


def run(engine: Engine, *requests: GenerateRequest) -> list[Answer]:
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        engine.add(engine.prepare(request), 1.0)
    while engine.due(1.0) is not None:
        for output in engine.step(1.0)[0]:
            answer = answers[output.request_id]
            assert answer.end is None, "an output after the end"
            answer.deltas += output.deltas
            answer.end = output.end
    assert engine.pool.num_used == 0
    return list(answers.values())


# -- the slow twin -----------------------------------------------------------------------------


def next_token(engine: Engine, said: list[int], allowed: list[int], seed: int, sampling: Sampling) -> int:
    """The plain engine's draw at this position, from these tokens alone."""
    (answer,) = run(
        engine,
        ask(
            "twin",
            None,
            allowed_token_ids=tuple(allowed),
            seed=seed,
            **sampling,
            ignore_eos=True,
            max_tokens=len(said) + 1,
            resumes=Continuation(token_ids=tuple(said), seed=seed),
        ),
    )
    (token,) = answer.tokens()
    return token


def drawn_token(
    engine: Engine, draw: sampler.Draw, said: list[int], allowed: list[int], seed: int, sampling: Sampling
) -> int:
    """The token of one of the draws."""
    uniform = sampler.uniform
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "uniform", lambda seed, index, position, _: uniform(seed, index, position, draw))
        return next_token(engine, said, allowed, seed, sampling)


def twin(
    engine: Engine,
    texts: list[bytes],
    *,
    seed: int,
    sampling: Sampling,
    min_tokens: int = 0,
    most: int = 40,
    is_json: bool = False,
) -> tuple[list[int], str]:
    """The tokens of an answer that is one of the texts, and why it ended. ``is_json``: each text is a string of JSON,
    inside of which no token that ends an answer is drawn."""
    size = engine.info.vocab_size
    spelled = {i: engine.detokenize([i]).encode() if i < 3 else _byte(engine, i) for i in range(size)}
    said: list[int] = []
    text = b""
    while True:
        allowed = [i for i in range(3, size) if any(t.startswith(text + spelled[i]) for t in texts)]
        if text in texts and (len(said) >= min_tokens or not allowed):
            if not allowed and said:
                return said, "stop"
            allowed.append(EOS)
        if len(said) == most:
            return said, "length"
        is_inside = is_json and text != b"" and not _ends_with_escape(text)
        token = EOS if is_inside else drawn_token(engine, "first", said, list(range(size)), seed, sampling)
        if token == EOS and text not in texts:
            token = drawn_token(engine, "unended", said, [i for i in range(size) if i != EOS], seed, sampling)
        if token not in allowed:
            token = drawn_token(engine, "masked", said, allowed, seed, sampling)
        said.append(token)
        if token == EOS:
            return said, "stop"
        text += spelled[token]


def _byte(engine: Engine, token_id: int) -> bytes:
    return engine._preparer.tokenizer.token_bytes(token_id)


def _ends_with_escape(text: bytes) -> bool:
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


languages = st.lists(st.text(alphabet='ab{"}1é ', min_size=1, max_size=9), min_size=1, max_size=6, unique=True)


@settings(max_examples=50, deadline=None)
@given(languages, st.sampled_from(SAMPLINGS), st.integers(0, 9), st.integers(0, 5))
def test_an_answer_is_that_of_the_slow_twin(
    engines: dict[str, Engine], texts: list[str], sampling: Sampling, seed: int, min_tokens: int
) -> None:
    wanted = twin(engines["none"], [t.encode() for t in texts], seed=seed, sampling=sampling, min_tokens=min_tokens)
    constraint = Choices(texts=tuple(texts), at="choice")
    given: dict[str, Any] = {"seed": seed, "min_tokens": min_tokens, **sampling}
    for engine in engines.values():
        others = [ask(f"other{i}", None, prompt=(40 + i, 41), ignore_eos=True, max_tokens=20) for i in range(2)]
        again = ask("again", constraint, **given)  # finds the prefix of the first
        answers = run(engine, ask("first", constraint, **given), *others, again)
        assert (answers[0].tokens(), answers[0].finish()) == wanted
        assert (answers[-1].tokens(), answers[-1].finish()) == wanted
        assert answers[0].text() in texts


@settings(max_examples=30, deadline=None)
@given(languages, st.sampled_from(SAMPLINGS), st.integers(0, 9))
def test_an_answer_that_is_a_text_of_json_is_that_of_the_slow_twin(
    engines: dict[str, Engine], texts: list[str], sampling: Sampling, seed: int
) -> None:
    written = [json.dumps(text, ensure_ascii=False).encode() for text in texts]
    wanted = twin(engines["none"], written, seed=seed, sampling=sampling, is_json=True)
    constraint = JsonSchema(schema={"enum": texts}, at="response_format.json_schema.schema")
    for engine in engines.values():
        answers = run(engine, *(ask(name, constraint, seed=seed, **sampling) for name in ("first", "again")))
        assert [(answer.tokens(), answer.finish()) for answer in answers] == [wanted] * 2


# -- the same answer in every way --------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = JsonSchema(schema=PERSON, at="response_format.json_schema.schema")


def test_an_answer_satisfies_its_schema_in_every_choice(engines: dict[str, Engine]) -> None:
    said = []
    for engine in engines.values():
        answers = run(
            engine,
            ask("three", SCHEMA, n=3, temperature=1.0, seed=3, max_tokens=180),
            ask("alone", SCHEMA, temperature=0.0, max_tokens=180),
        )
        for answer, count in zip(answers, (3, 1), strict=True):
            for index in range(count):
                assert answer.finish(index) == "stop"
                value = json.loads(answer.text(index))
                assert Validator(PERSON).errors(answer.text(index)) is None
                assert set(value) == {"name", "age", "tags"}
        said.append([answer.tokens(i) for answer in answers for i in range(3)])
    assert said[0] == said[1] == said[2]


def test_a_stream_is_continued_at_every_token(engines: dict[str, Engine]) -> None:
    (whole,) = run(engines["auto"], ask("whole", SCHEMA, temperature=1.0, seed=5, max_tokens=180))
    tokens = whole.tokens()
    for cut in range(len(tokens) + 1):
        rest = ask(
            "rest",
            SCHEMA,
            temperature=1.0,
            max_tokens=180,
            resumes=Continuation(token_ids=tuple(tokens[:cut]), seed=5),
        )
        (answer,) = run(engines["none"], rest)
        assert answer.tokens() == tokens[cut:]
        assert answer.failure is None


def test_preempted_answers_are_the_same(build: Build, engines: dict[str, Engine]) -> None:
    tight = build(num_blocks=49, max_num_seqs=8)
    requests = [ask(f"r{i}", SCHEMA, prompt=(40 + i, 50), temperature=1.0, seed=i, max_tokens=150) for i in range(8)]
    preempted = 0
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        tight.add(tight.prepare(request), 1.0)
    while tight.due(1.0) is not None:
        outputs, stats = tight.step(1.0)
        assert stats is not None
        preempted += stats.num_preempted
        for output in outputs:
            answers[output.request_id].deltas += output.deltas
    assert preempted > 0
    for request in requests:
        (alone,) = run(engines["none"], request)
        assert answers[request.id].tokens() == alone.tokens()


def test_log_probabilities_are_those_of_the_untouched_logits(engines: dict[str, Engine]) -> None:
    engine = engines["auto"]
    (answer,) = run(engine, ask("one", SCHEMA, logprobs=2, max_tokens=180))
    said = [entry for delta in answer.deltas for entry in delta.logprobs or ()]
    scored = GenerateRequest(
        id="scored",
        model="tiny",
        prompt=TokenPrompt(token_ids=[*PROMPT, *answer.tokens()]),
        sampling=SamplingParams(max_tokens=0, prompt_logprobs=2),
    )
    engine.add(engine.prepare(scored), 1.0)
    report = None
    while engine.due(1.0) is not None:
        for output in engine.step(1.0)[0]:
            report = output.prompt or report
    assert report is not None
    assert report.logprobs is not None
    wanted = report.logprobs[len(PROMPT) :]
    assert [(e.token_id, e.rank) for e in said] == [(e.token_id, e.rank) for e in wanted if e is not None]
    assert [e.logprob for e in said] == pytest.approx([e.logprob for e in wanted if e is not None], abs=1e-4)
    assert any(entry.rank > 1 for entry in said), "the mask excluded likelier tokens"


@pytest.mark.parametrize("length", [60, 150])
def test_certain_tokens_need_no_steps(build: Build, length: int) -> None:
    engine = build("none")
    form = Choices(texts=("x" * length,), at="choice")
    engine.add(engine.prepare(ask("r", form, max_tokens=length + 10)), 1.0)
    steps, text = 0, ""
    while engine.due(1.0) is not None:
        outputs, _ = engine.step(1.0)
        text += "".join(delta.text for output in outputs for delta in output.deltas)
        steps += 1
    assert text == "x" * length
    assert steps == (1 if length <= 64 else 2), "64 tokens at once, and the last ones are not computed"


def test_an_answer_begins_with_what_is_certain(engines: dict[str, Engine]) -> None:
    """The prompt and the certain tokens behind it are computed together, and the next token is drawn in that step."""
    engine = engines["none"]
    form = Choices(texts=("xxxx1", "xxxx2"), at="choice")
    prompt = (120, 121, 122)  # no other test has computed it
    engine.add(engine.prepare(ask("r", form, prompt=prompt)), 1.0)
    (output,), stats = engine.step(1.0)
    assert stats is not None
    assert stats.step_tokens == len(prompt) + 4
    assert output.end is not None
    assert output.end.timings.first_token is not None
    assert output.end.usage.prompt_tokens == len(prompt)
    (delta,) = output.deltas
    assert delta.text in ("xxxx1", "xxxx2")
    assert len(delta.token_ids) == output.end.usage.completion_tokens == 5


def test_an_answer_without_any_choice_ends_with_its_prompt(engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        engine.add(engine.prepare(ask("r", Choices(texts=("xyz",), at="choice"), prompt=(123, 124))), 1.0)
        (output,), stats = engine.step(1.0)
        assert stats is not None
        assert stats.step_tokens == 2 + 3
        assert [delta.text for delta in output.deltas] == ["xyz"]
        assert output.end is not None
        assert output.end.outcome == "done"
        assert output.end.timings.first_token is not None
        assert engine.due(1.0) is None
        assert engine.pool.num_used == 0


def test_certain_tokens_of_a_long_text_are_those_of_the_text(engines: dict[str, Engine]) -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(4000))
    for length in (511, 512, 513, 4000):
        form = Choices(texts=(text[:length],), at="choice")
        answers = [run(engine, ask("r", form, max_tokens=170)) for engine in engines.values()]
        assert [answer.tokens() for (answer,) in answers] == [answers[0][0].tokens()] * 3
        assert text.startswith(answers[0][0].text())
        assert len(answers[0][0].tokens()) == 170


@settings(max_examples=60, deadline=None)
@given(languages, st.integers(0, 9), st.integers(1, 12), st.integers(0, 3))
def test_certain_tokens_are_those_that_are_drawn_where_logits_are_needed(
    engines: dict[str, Engine], texts: list[str], seed: int, most: int, min_tokens: int
) -> None:
    """A request for log-probabilities computes the logits of every token."""
    constraint = Choices(texts=tuple(texts), at="choice")
    options: dict[str, Any] = {
        "seed": seed,
        "temperature": 1.3,
        "max_tokens": most,
        "min_tokens": min(min_tokens, most),
    }
    for engine in engines.values():
        fast, slow, two = run(
            engine,
            ask("fast", constraint, **options),
            ask("slow", constraint, logprobs=0, **options),
            ask("two", constraint, n=2, **options),
        )
        assert fast.failure is slow.failure is two.failure is None
        assert fast.tokens() == slow.tokens() == two.tokens(0)
        assert fast.finish() == slow.finish() == two.finish(0)


# -- kinds of constraints ----------------------------------------------------------------------

TAGS = TaggedText(
    structures=(TaggedStructure(begin="<f>", schema={"type": "integer", "maximum": 9, "minimum": 0}, end="</f>"),),
    triggers=("<f",),
    at="tags",
)


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (Regex(pattern="^a{2}(b|c)$", at="regex"), {"aab", "aac"}),
        (Regex(pattern=r"\$[0-9]\$", at="regex"), {f"${i}$" for i in range(10)}),
        (Regex(pattern="a/b", at="regex"), {"a/b"}),
        (Choices(texts=('sa"y', "né", "\n\\"), at="choice"), {'sa"y', "né", "\n\\"}),
        (Choices(texts=("<|endoftext|>",), at="choice"), {"<|endoftext|>"}),
        (Grammar(text='start: "a" B\nB: /[xy]/', syntax="lark", at="grammar"), {"ax", "ay"}),
        (Grammar(text='root ::= "a" b\nb ::= [xy]', syntax="gbnf", at="grammar"), {"ax", "ay"}),
        (JsonSchema(schema={"enum": [1, "x"]}, at="json"), {"1", '"x"'}),
        (JsonSchema(schema={"const": {"a": [1, 2]}}, at="json", whitespace=""), {'{"a":[1,2]}'}),
    ],
)
def test_an_answer_is_one_that_its_constraint_allows(
    engines: dict[str, Engine], constraint: Constraint, texts: set[str]
) -> None:
    for seed in range(6):
        (answer,) = run(engines["auto"], ask("r", constraint, temperature=2.0, seed=seed))
        assert answer.failure is None
        assert answer.finish() == "stop"
        assert answer.text() in texts


def test_a_structure_begins_where_its_trigger_occurs(engines: dict[str, Engine]) -> None:
    said = [t for t in range(3, 259) if _byte(engines["auto"], t) in (b"<", b"f")]
    resumes = Continuation(token_ids=tuple(sorted(said, key=lambda t: _byte(engines["auto"], t))), seed=1)
    (answer,) = run(engines["auto"], ask("r", TAGS, PROMPT, resumes, temperature=1.0, max_tokens=9))
    text = "<f" + answer.text()
    assert text.startswith("<f>")
    assert text[3].isdigit()
    assert text[4:].startswith("</f>"[: len(text) - 4])


# -- what cannot be done -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Regex(pattern="a(?=b)", at="structured_outputs.regex"), "look-ahead"),
        (Grammar(text="start: foo", syntax="lark", at="g"), "foo"),
        (Grammar(text='root ::= ("a"', syntax="gbnf", at="g"), "the group is not closed"),
        (JsonSchema(schema=False, at="s"), "no valid value"),
        (JsonSchema(schema={"enum": ["x" * 2_000_000]}, at="s"), "at most 1048576"),
    ],
)
def test_a_constraint_that_cannot_be_compiled_is_refused_by_its_field(
    engines: dict[str, Engine], constraint: Constraint, told: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engines["auto"].prepare(ask("r", constraint))
    assert caught.value.param == constraint.at
    assert told in caught.value.message
    assert "non-verbose" not in caught.value.message


def test_a_program_gets_constrained_answers_and_the_same_refusals() -> None:
    """Without a server: prompts, conversations and streams of an LLM."""
    config = ModelConfig(source="demo", dtype="float32", device="cpu", threads=1)
    with LLM(config=config, progress=False) as llm:
        sampling = SamplingParams(temperature=1.5, max_tokens=60)
        told = llm.generate(["a", "b"], sampling, constraint=Regex(pattern="x{2}[yz]", at="constraint"), progress=False)
        assert {one.text for one in told} <= {"xxy", "xxz"}
        schema = JsonSchema(schema={"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}, at="constraint")
        (chat,) = llm.chat([{"role": "user", "content": "hi"}], sampling, constraint=schema, progress=False)
        assert set(json.loads(chat.text)) <= {1, 2}
        grammar = Grammar(text='root ::= "n" [12]', syntax="gbnf", at="constraint")
        assert "".join(llm.stream("a", sampling, constraint=grammar)) in ("n1", "n2")
        for bad, place in (
            (Regex(pattern="a(?=b)", at="constraint"), "at line 1, column 2"),
            (Grammar(text="start: %json {}", syntax="lark", at="constraint"), "at line 1, column 8"),
            (JsonSchema(schema={"items": {"pattern": "(?=b)"}}, at="constraint"), "at /items/pattern"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                llm.generate("a", sampling, constraint=bad, progress=False)
            assert caught.value.param == "constraint"
            assert caught.value.message.startswith(f"constraint: {place}")


def test_beams_cannot_be_constrained(engines: dict[str, Engine]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engines["auto"].prepare(ask("r", SCHEMA, use_beam_search=True, n=2))
    assert caught.value.param == "use_beam_search"


def test_tokens_that_other_fields_ban_end_the_request_alone(engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        nothing, fine = run(
            engine,
            ask("nothing", SCHEMA, allowed_token_ids=(40,)),
            ask("fine", SCHEMA, max_tokens=180),
        )
        assert nothing.failure == "invalid_request"
        assert fine.finish() == "stop"


def test_the_end_is_banned_only_while_another_token_may_follow(engines: dict[str, Engine]) -> None:
    form = Regex(pattern="a{1,5}", at="regex")
    for options in ({"min_tokens": 9}, {"ignore_eos": True}):
        (answer,) = run(engines["auto"], ask("r", form, **options))
        assert (answer.text(), answer.finish()) == ("aaaaa", "stop")


def test_a_mask_that_took_too_much_work_is_told_where_no_token_could_be_drawn(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask engine then gives an empty mask. Its error is another one here, which counts as that of a limit."""
    engine = build()
    digit = next(token for token in range(engine.info.vocab_size) if _byte(engine, token) == b"7")

    def exhaust(guide: Guide, words: np.ndarray) -> None:
        guide.matcher.consume_tokens([digit])
        words[:] = 0

    monkeypatch.setattr(Guide, "narrow", exhaust)
    monkeypatch.setattr(guides, "_LIMITS", ("",))
    (answer,) = run(engine, ask("r", Regex(pattern="[a-z]{30}", at="regex")))
    assert answer.end is not None
    assert answer.end.failure is not None
    assert (answer.end.failure.param, answer.end.failure.code) == ("regex", "constraint_too_complex")


def test_a_stop_string_cuts_a_constrained_answer(engines: dict[str, Engine]) -> None:
    (answer,) = run(engines["auto"], ask("r", Choices(texts=("abcdef",), at="choice"), stop=("cd",)))
    assert (answer.text(), answer.finish()) == ("ab", "stop")


def test_an_answer_that_is_too_long_is_cut_and_claims_nothing(engines: dict[str, Engine]) -> None:
    (answer,) = run(engines["auto"], ask("r", SCHEMA, max_tokens=4))
    assert (len(answer.tokens()), answer.finish(), answer.failure) == (4, "length", None)


def test_an_answer_that_fails_the_check_is_an_error_and_never_an_answer(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build()
    monkeypatch.setattr(Validator, "errors", lambda self, text: "the value at '' does not match 'type'")
    engine.add(engine.prepare(ask("r", SCHEMA, max_tokens=180)), 1.0)
    outputs, invalid = [], 0
    while engine.due(1.0) is not None:
        some, stats = engine.step(1.0)
        assert stats is not None
        outputs += some
        invalid += stats.num_invalid
    assert invalid == 1
    end = outputs[-1].end
    assert end is not None
    assert end.failure is not None
    assert (end.outcome, end.failure.kind) == ("failed", "internal")
    assert all(delta.finish_reason is None for output in outputs for delta in output.deltas)
    assert "does not satisfy the schema" in caplog.text
    assert "name" not in caplog.text, "the schema's words stay out of the log"
