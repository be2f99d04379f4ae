"""A call that must be made, or that has begun, has the name of a tool and arguments that satisfy its schema: for every
notation, at any temperature, with and without guessed tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from tests.checkpoints.answers.test_detect import CASES, THINKING, TURNS
from tests.engine.deltas import deltas, joined
from tests.tiers import sample

from inferd.answer_form import AnswerForm, Choices, JsonSchema, ToolUse
from inferd.config import KVCacheConfig, ModelConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.errors import InvalidRequest
from inferd.types import CallDelta, Chat, Delta, GenerateRequest, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]


def load(template: Path | None) -> Engine:
    config = ModelConfig(
        source="demo",
        dtype="float32",
        device="cpu",
        threads=1,
        chat_template=None if template is None else str(template),
        kv_cache=KVCacheConfig(block_size=16, num_blocks=256),
    )
    return create_backend("demo", config, lambda phase, done, total: None)


NAMES = ["hermes", "list", "member", "named", "section", "tagged", "bare", "pythonic tag", "pythonic", "text"]


@pytest.fixture(scope="module", params=sample(NAMES, "hermes", "bare", "pythonic"))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TURNS.replace("CALLS", CASES[NAMES.index(request.param)][0]).replace("THINK", THINKING))
    loaded = load(path)
    assert "MISMATCH" not in loaded.info.answer_format
    yield loaded
    loaded.close()


def ask(engine: Engine, form: AnswerForm, *, seed: int = 0, tools: Any = TOOLS, tokens: int = 200) -> list[Delta]:
    request = GenerateRequest(
        id="r",
        model="demo",
        prompt=Chat(messages=[{"role": "user", "content": "What's the weather in Paris?"}], tools=tools),
        sampling=SamplingParams(temperature=1.5, seed=seed, max_tokens=tokens),
        explicit=("temperature", "seed", "max_tokens"),
        form=form,
    )
    return deltas(engine, request)


def test_a_required_call_is_made_and_is_valid(engine: Engine) -> None:
    form = AnswerForm(tools=ToolUse(mode="required", is_parallel=False), splits_reasoning=False)
    for seed in range(6):
        parts = ask(engine, form, seed=seed)
        text, reasoning, calls = joined(parts)
        assert (text, reasoning) == ("", "")
        assert parts[-1].finish_reason == "stop"
        ((name, arguments),) = calls
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_a_named_tool_is_the_one_that_is_called(engine: Engine) -> None:
    form = AnswerForm(tools=ToolUse(mode="required", names=("get_weather",)), splits_reasoning=False)
    for seed in range(3):
        parts = ask(engine, form, seed=seed)
        text, _, calls = joined(parts)
        assert text == "" or parts[-1].finish_reason == "length"  # a next call that was cut off
        assert {name for name, _ in calls} == {"get_weather"}
        whole = calls if parts[-1].finish_reason == "stop" else calls[:-1]
        for _, arguments in whole:
            jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_call_or_the_constraint_is_the_answer(engine: Engine) -> None:
    form = AnswerForm(
        tools=ToolUse(is_parallel=False), constraint=Choices(texts=("yes", "no"), at="c"), splits_reasoning=False
    )
    for seed in range(6):
        text, _, calls = joined(ask(engine, form, seed=seed))
        assert (text in ("yes", "no")) != bool(calls)


def test_a_constraint_begins_where_reasoning_ends(engine: Engine) -> None:
    form = AnswerForm(constraint=Choices(texts=("yes", "no"), at="c"))
    for seed in range(3):
        parts = ask(engine, form, seed=seed, tokens=300)
        text, reasoning, _ = joined(parts)
        if parts[-1].finish_reason == "stop":
            assert text in ("yes", "no")
        else:
            assert reasoning
            assert text == ""


def test_a_call_in_free_text_is_constrained_from_its_beginning() -> None:
    engine = load(None)
    called = 0
    for seed in range(12):
        parts = ask(engine, AnswerForm(tools=ToolUse()), seed=seed, tokens=120)
        _, _, calls = joined(parts)
        for name, arguments in calls if parts[-1].finish_reason == "stop" else calls[:-1]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            called += 1
    assert called
    engine.close()


def test_a_schema_that_cannot_be_enforced_is_refused_where_the_request_insists() -> None:
    engine = load(None)
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}, "required": ["x"]}
    function: dict[str, Any] = {"name": "get_weather", "parameters": schema}

    def prepare(form: AnswerForm, *, strict: bool = False) -> None:
        tools = [{"type": "function", "function": {**function, "strict": strict}}]
        prompt = Chat(messages=[{"role": "user", "content": "hi"}], tools=tools)
        engine.prepare(GenerateRequest(id="r", model="demo", prompt=prompt, form=form))

    for form, strict in ((AnswerForm(tools=ToolUse(mode="required")), False), (AnswerForm(tools=ToolUse()), True)):
        with pytest.raises(InvalidRequest) as caught:
            prepare(form, strict=strict)
        assert caught.value.param is not None
        assert caught.value.param.startswith("tools[0].function.parameters")
    with pytest.raises(InvalidRequest) as caught:
        prepare(AnswerForm(tools=ToolUse(mode="required", places=("tools[3].input_schema",))))
    assert caught.value.param is not None
    assert caught.value.param.startswith("tools[3].input_schema")
    engine.close()


def test_beams_are_refused_where_the_request_insists_on_a_schema(demo: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "stop", "parameters": {}, "strict": True}}]
    request = GenerateRequest(
        id="r",
        model="demo",
        prompt=Chat(messages=[{"role": "user", "content": "hi"}], tools=tools),
        form=AnswerForm(tools=ToolUse()),
        sampling=SamplingParams(use_beam_search=True, n=2),
    )
    with pytest.raises(InvalidRequest) as caught:
        demo.prepare(request)
    assert caught.value.param == "use_beam_search"
    assert "tools[0].function.parameters" in caught.value.message


# What masks do not enforce: a construct of patterns, schemas that the mask engine alone refuses, and no schema at all.
UNENFORCEABLE: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": (
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}},
        "/properties/x/pattern",
    ),
    "names": ({"type": "object", "patternProperties": {"f.*": {"type": "null"}, "b.*": {}}}, "/patternProperties"),
    "reference": ({"type": "object", "properties": {"x": {"$ref": "https://example.com/x"}}}, "/properties/x/$ref"),
}


@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_schemas_that_cannot_be_enforced_bind_nothing_unless_the_request_insists(demo: Engine, name: str) -> None:
    """An auto call of the other tool is still bound; the fields of the schemas that are not are reported."""
    schema, place = UNENFORCEABLE[name]
    weather: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    odd: Any = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    prompt = Chat(messages=[{"role": "user", "content": "hi"}], tools=[weather, odd])
    for form, strict in ((AnswerForm(tools=ToolUse(mode="required")), False), (AnswerForm(tools=ToolUse()), True)):
        tools = [weather, {"type": "function", "function": {**odd["function"], "strict": strict}}]
        insisting = Chat(messages=prompt.messages, tools=tools)
        with pytest.raises(InvalidRequest) as caught:
            demo.prepare(GenerateRequest(id="r", model="demo", prompt=insisting, form=form))
        assert (caught.value.param, caught.value.code) == ("tools[1].function.parameters", "unsupported_schema")
        assert caught.value.message.startswith(f"tools[1].function.parameters: at {place}: ")
    prepared = demo.prepare(GenerateRequest(id="r", model="demo", prompt=prompt, form=AnswerForm(tools=ToolUse())))
    assert prepared.unenforced == ("tools[1].function.parameters",)
    assert prepared.grammar is not None
    assert prepared.grammar.call_validators.keys() == {"get_weather"}
    told = deltas(demo, GenerateRequest(id="s", model="demo", prompt=prompt, form=AnswerForm(tools=ToolUse())))
    for _, arguments in joined(told)[2] if told[-1].finish_reason == "stop" else ():
        assert isinstance(json.loads(arguments), dict)


def test_many_schemas_that_cannot_be_enforced_take_bounded_time(demo: Engine) -> None:
    """After the first refusal by the mask engine the next one leaves no schema that the request does not insist on."""
    schema = UNENFORCEABLE["names"][0]
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": schema}} for n in range(20)]
    compiled, usual = list[int](), demo._preparer._forms.compiler.compile

    def counted(*given: Any, **options: Any) -> Any:
        compiled.append(1)
        return usual(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo._preparer._forms.compiler, "compile", counted)
        prompt = Chat(messages=[{"role": "user", "content": "hi"}], tools=tools)
        prepared = demo.prepare(GenerateRequest(id="r", model="demo", prompt=prompt, form=AnswerForm(tools=ToolUse())))
    assert len(prepared.unenforced) == 20
    assert len(compiled) == 3


def test_a_finished_call_is_compared_with_a_schema_that_is_not_enforced(demo: Engine) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=a)a$"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": schema}}]
    prompt = Chat(messages=[{"role": "user", "content": "hi"}], tools=tools)
    prepared = demo.prepare(GenerateRequest(id="r", model="demo", prompt=prompt, form=AnswerForm(tools=ToolUse())))
    assert prepared.grammar is not None
    for arguments, num_unmatched in (('{"x": "a"}', 0), ('{"x": "b"}', 1), ("{}", 1)):
        guide = prepared.grammar.guide()
        guide.hear_call(CallDelta(0, "odd", arguments))
        assert guide.check() is None
        assert guide.num_unmatched == num_unmatched


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    engine = load(None)
    yield engine
    engine.close()


def test_a_schema_and_tools_give_a_call_or_an_instance() -> None:
    engine = load(None)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = AnswerForm(tools=ToolUse(), constraint=JsonSchema(schema=schema, at="response_format"))
    for seed in range(4):
        parts = ask(engine, form, seed=seed)
        text, _, calls = joined(parts)
        if not calls and parts[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(text), schema)
        assert bool(text) != bool(calls)
    engine.close()


MAP = {
    "type": "object",
    "propertyNames": {"pattern": "^[ab]{1,2}$"},
    "additionalProperties": {"enum": [1]},
    "minProperties": 4,
    "maxProperties": 5,
}


def test_no_name_is_repeated_in_arguments_or_behind_reasoning(engine: Engine) -> None:
    """Few names are possible, so that a name is repeated soon where nothing prevents it."""
    parameters = {"type": "object", "properties": {"of": MAP}, "required": ["of"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "count", "parameters": parameters}}]
    call = AnswerForm(tools=ToolUse(mode="required", is_parallel=False), splits_reasoning=False)
    answer = AnswerForm(constraint=JsonSchema(schema=MAP, at="response_format"))
    for seed in range(4):
        parts = ask(engine, call, seed=seed, tools=tools)
        if parts[-1].finish_reason == "stop":
            ((_, arguments),) = joined(parts)[2]
            assert 4 <= len(_unique(arguments)["of"]) <= 5
        parts = ask(engine, answer, seed=seed, tools=None)
        if parts[-1].finish_reason == "stop":
            assert 4 <= len(_unique(joined(parts)[0])) <= 5


def _unique(text: str) -> dict[str, Any]:
    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), text
        return dict(pairs)

    value: dict[str, Any] = json.loads(text, object_pairs_hook=read)
    return value
