"""Answers that must fit: complete and valid within any number of tokens that the shortest answer has, and otherwise the
answers that they would have been."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints.answers.test_detect import CASES, THINKING, TURNS
from tests.engine.deltas import deltas, joined
from tests.engine.test_constrained import PERSON, PROMPT, TAGS, Answer, Build, ask, build, engines, run
from tests.engine.test_forced_calls import TOOLS, load
from tests.tiers import examples

from inferd.answer_form import AnswerForm, Choices, Constraint, Grammar, JsonSchema, Regex, ToolUse
from inferd.engine.engine import Engine
from inferd.errors import InvalidRequest
from inferd.types import Chat, Continuation, GenerateRequest, SamplingParams, TokenPrompt

__all__ = ["build", "engines"]

NESTED = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "deep": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                "tree": {"$ref": "#/$defs/tree"},
            },
            "required": ["code", "tree"],
        },
        "kind": {"enum": ["large", "small"]},
    },
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}},
            "required": ["value"],
        }
    },
}
SCHEMAS: list[Any] = [
    PERSON,
    NESTED,
    {"type": "object"},
    {"type": "string", "minLength": 5},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 1}, "minItems": 2},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"anyOf": [{"type": "null"}, {"type": "object", "required": ["a"], "properties": {"a": {"minimum": 10_000}}}]},
]
TEXTS: list[tuple[Constraint, str]] = [
    (Regex(pattern="[a-z]{3,}(-[0-9]{4})*", at="regex"), "[a-z]{3,}(-[0-9]{4})*"),
    (Choices(texts=("yes", "no", "perhaps not"), at="choice"), "yes|no|perhaps not"),
    (Grammar(text='start: item ("," item)* ";"\nitem: /[a-z]+/ | "(" item ")"', syntax="lark", at="g"), r"[a-z(),]+;"),
    (Grammar(text='root ::= [0-9]+ ("+" [0-9]+)* "="', syntax="gbnf", at="g"), r"[0-9]+(\+[0-9]+)*="),
]


def constraint_of(schema: Any) -> JsonSchema:
    return JsonSchema(schema=schema, at="json")


def fitting(request: GenerateRequest) -> GenerateRequest:
    assert request.form is not None
    return msgspec.structs.replace(request, form=msgspec.structs.replace(request.form, fit=True))


def least(engine: Engine, constraint: Constraint) -> int:
    """The tokens of the shortest answer, as the error of a shorter one says."""
    with pytest.raises(InvalidRequest) as caught:
        engine.prepare(fitting(ask("r", constraint, max_tokens=1)))
    assert caught.value.param == "max_tokens"
    assert "max_tokens is 1" in caught.value.message
    return int(caught.value.message.split(" has ")[1].split(" tokens")[0])


def check(answer: Answer, schema: Any, budget: int, index: int = 0) -> None:
    assert answer.failure is None
    assert answer.finish(index) == "stop"
    assert len(answer.tokens(index)) <= budget
    value = json.loads(answer.text(index))
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(SCHEMAS),
    st.integers(0, 60),
    st.integers(0, 99),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from(["", " ?"]),
)
def test_an_answer_is_complete_within_its_tokens(
    engines: dict[str, Engine], schema: Any, more: int, seed: int, temperature: float, space: str
) -> None:
    constraint = JsonSchema(schema=schema, at="json", whitespace=space)
    budget = least(engines["none"], constraint) + more if schema != {"type": "object"} else 2 + more
    request = fitting(ask("r", constraint, seed=seed, temperature=temperature, max_tokens=budget))
    said = []
    for engine in engines.values():
        others = [ask(f"other{i}", None, prompt=(40 + i, 41), ignore_eos=True, max_tokens=20) for i in range(2)]
        answer = run(engine, request, *others)[0]
        check(answer, schema, budget)
        said.append(answer.tokens())
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_an_answer_without_fit_while_many_are_left(
    engines: dict[str, Engine], schema: Any, temperature: float
) -> None:
    for seed in range(3):
        request = ask("r", constraint_of(schema), seed=seed, temperature=temperature, max_tokens=180)
        (plain,) = run(engines["none"], request)
        (answer,) = run(engines["auto"], fitting(request))
        check(answer, schema, 180)
        assert answer.tokens()[:110] == plain.tokens()[:110]
        if plain.finish() == "stop" and len(plain.tokens()) <= 110:
            assert answer.tokens() == plain.tokens()


@pytest.mark.parametrize(("constraint", "pattern"), TEXTS)
def test_other_constraints_fit_too(engines: dict[str, Engine], constraint: Constraint, pattern: str) -> None:
    shortest = least(engines["none"], constraint)
    for more in range(0, 24, 3):
        request = fitting(ask("r", constraint, seed=more, temperature=1.0, max_tokens=shortest + more))
        said = [run(engine, request)[0] for engine in engines.values()]
        assert said[0].tokens() == said[1].tokens() == said[2].tokens()
        assert (said[0].finish(), said[0].failure) == ("stop", None)
        assert re.fullmatch(pattern, said[0].text())


def test_each_choice_fits(engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        (answer,) = run(engine, fitting(ask("r", constraint_of(NESTED), n=3, temperature=1.0, seed=2, max_tokens=60)))
        for index in range(3):
            check(answer, NESTED, 60, index)
        assert len({answer.text(index) for index in range(3)}) > 1


def test_a_stream_that_must_fit_is_continued_at_every_token(engines: dict[str, Engine]) -> None:
    for schema in (PERSON, NESTED):
        request = fitting(ask("whole", constraint_of(schema), temperature=1.0, seed=5, max_tokens=50))
        (whole,) = run(engines["auto"], request)
        tokens = whole.tokens()
        for cut in range(len(tokens) + 1):
            resumes = Continuation(token_ids=tuple(tokens[:cut]), seed=5)
            (rest,) = run(engines["none"], msgspec.structs.replace(request, id="rest", resumes=resumes))
            assert (rest.tokens(), rest.failure) == (tokens[cut:], None)


def test_an_answer_that_this_request_does_not_lead_to_is_not_continued(engines: dict[str, Engine]) -> None:
    engine = engines["none"]
    (long,) = run(engine, ask("long", Regex(pattern="a{40}", at="r"), max_tokens=60))
    request = fitting(ask("r", Regex(pattern="a{5}|a{40}", at="r"), max_tokens=9))
    resumes = Continuation(token_ids=tuple(long.tokens()[:7]), seed=1)
    with pytest.raises(InvalidRequest) as caught:
        run(engine, msgspec.structs.replace(request, resumes=resumes))
    assert caught.value.param == "resumes"
    assert engine.pool.num_used == 0
    assert run(engine, request)[0].text() == "aaaaa"


def test_preempted_answers_fit(build: Build, engines: dict[str, Engine]) -> None:
    tight = build(num_blocks=49, max_num_seqs=8)
    requests = [
        fitting(ask(f"r{i}", constraint_of(NESTED), prompt=(40 + i, 50), temperature=1.0, seed=i, max_tokens=100))
        for i in range(8)
    ]
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
            answers[output.request_id].end = output.end
    assert preempted > 0
    for request in requests:
        check(answers[request.id], NESTED, 100)
        assert answers[request.id].tokens() == run(engines["none"], request)[0].tokens()


def test_log_probabilities_of_tokens_that_the_plan_chose_are_those_of_the_model(engines: dict[str, Engine]) -> None:
    engine = engines["auto"]
    request = fitting(ask("one", constraint_of(PERSON), temperature=1.0, seed=1, logprobs=2, max_tokens=40))
    (answer,) = run(engine, request)
    check(answer, PERSON, 40)
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
    wanted = [entry for entry in report.logprobs[len(PROMPT) :] if entry is not None]
    assert [(e.token_id, e.rank) for e in said] == [(e.token_id, e.rank) for e in wanted]
    assert [e.logprob for e in said] == pytest.approx([e.logprob for e in wanted], abs=1e-4)


def test_an_answer_with_and_without_log_probabilities_is_the_same(engines: dict[str, Engine]) -> None:
    """A request for log-probabilities draws the tokens that are certain, too."""
    for seed in range(4):
        options: dict[str, Any] = {"seed": seed, "temperature": 1.0, "max_tokens": 45}
        fast, slow = run(
            engines["auto"],
            fitting(ask("fast", constraint_of(NESTED), **options)),
            fitting(ask("slow", constraint_of(NESTED), logprobs=0, **options)),
        )
        assert fast.tokens() == slow.tokens()
        check(fast, NESTED, 45)


# -- with other fields -------------------------------------------------------------------------


def test_fit_goes_before_the_fields_that_ban_the_end(engines: dict[str, Engine]) -> None:
    form = Regex(pattern="[a-c]+", at="regex")
    for options in ({"min_tokens": 12}, {"ignore_eos": True}):
        (answer,) = run(engines["auto"], fitting(ask("r", form, max_tokens=12, temperature=1.0, **options)))
        assert (answer.finish(), len(answer.tokens()) <= 12) == ("stop", True)
        assert answer.text()
        assert len(answer.text()) == 11


def test_a_stop_string_cuts_an_answer_that_fits(engines: dict[str, Engine]) -> None:
    form = Choices(texts=("abcdef",), at="choice")
    (answer,) = run(engines["auto"], fitting(ask("r", form, stop=("cd",))))
    assert (answer.text(), answer.finish()) == ("ab", "stop")


def test_free_text_between_structures_ends_where_it_stands(engines: dict[str, Engine]) -> None:
    for seed in range(6):
        (answer,) = run(engines["auto"], fitting(ask("r", TAGS, temperature=1.0, seed=seed, max_tokens=7)))
        assert (answer.finish(), answer.failure) == ("stop", None)
        assert 4 <= len(answer.tokens()) <= 7


@pytest.mark.parametrize(
    ("constraint", "options", "param", "told"),
    [
        (None, {}, "fit", "may be any text"),
        (Choices(texts=("abcdef",), at="c"), {"max_tokens": 3}, "max_tokens", "max_tokens is 3, but the shortest"),
        (Choices(texts=("ab",), at="c"), {"allowed_token_ids": (5,)}, "fit", "allowed_token_ids"),
        (Choices(texts=("ab",), at="c"), {"bad_words": ("a",)}, "fit", "bad_words"),
        (Grammar(text='start: TEXT "<end>"\nTEXT: /.*/', syntax="lark", at="g"), {}, "fit", "not available for g"),
    ],
)
def test_an_answer_that_cannot_fit_is_refused_by_its_field(
    engines: dict[str, Engine], constraint: Constraint | None, options: dict[str, Any], param: str, told: str
) -> None:
    request = ask("r", constraint, **options)
    request = msgspec.structs.replace(request, form=AnswerForm(constraint=constraint, fit=True))
    with pytest.raises(InvalidRequest) as caught:
        engines["auto"].prepare(request)
    assert caught.value.param == param
    assert told in caught.value.message


# -- reasoning and calls -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    source = TURNS.replace("CALLS", CASES[0][0]).replace("THINK", THINKING)
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(source.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"))
    engine = load(path)
    yield engine
    engine.close()


def chat(form: AnswerForm, *, seed: int, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        id="r",
        model="demo",
        prompt=Chat(messages=[{"role": "user", "content": "What's the weather in Paris?"}], tools=TOOLS),
        sampling=SamplingParams(temperature=1.5, seed=seed, max_tokens=tokens),
        explicit=("temperature", "seed", "max_tokens"),
        form=form,
    )


@pytest.mark.parametrize("budget", [None, 0, 5, 500])
def test_reasoning_leaves_room_for_the_shortest_answer(thinking: Engine, budget: int | None) -> None:
    form = AnswerForm(constraint=constraint_of(PERSON), fit=True, reasoning_budget=budget)
    for seed in range(5):
        parts = deltas(thinking, chat(form, seed=seed, tokens=60 + seed))
        text, reasoning, _ = joined(parts)
        assert parts[-1].finish_reason == "stop"
        assert sum(len(delta.token_ids) for delta in parts) <= 60 + seed
        jsonschema.validate(json.loads(text), PERSON)
        assert bool(reasoning) <= (budget != 0)


def test_an_answer_that_may_call_or_be_any_text_cannot_fit(thinking: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        thinking.prepare(chat(AnswerForm(tools=ToolUse(), fit=True), seed=0, tokens=90))
    assert caught.value.param == "fit"
    assert "tool_choice" in caught.value.message


def test_a_call_is_complete_within_its_tokens(thinking: Engine) -> None:
    form = AnswerForm(tools=ToolUse(mode="required"), fit=True)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
    for seed in range(5):
        parts = deltas(thinking, chat(form, seed=seed, tokens=90 + seed))
        _, _, calls = joined(parts)
        assert parts[-1].finish_reason == "stop"
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
