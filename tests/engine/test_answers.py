"""Calls and reasoning leave the engine as parts of their own, streamed or not, whole or continued elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.engine.deltas import deltas, joined

from inferd.answer_form import AnswerForm, ToolUse
from inferd.config import DriftConfig, KVCacheConfig, ModelConfig
from inferd.engine.answer_facts import AnswerFacts
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.types import CallDelta, CallsFact, Chat, Continuation, Delta, Facts, GenerateRequest, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "What's the weather in Paris?"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = ModelConfig(
        source="demo",
        dtype="float32",
        device="cpu",
        threads=1,
        kv_cache=KVCacheConfig(block_size=16, num_blocks=128),
        drift=DriftConfig(enabled=True),
    )
    loaded = create_backend("demo", config, lambda phase, done, total: None)
    yield loaded
    loaded.close()


def asked(
    *, form: AnswerForm | None, stream: bool = True, resumes: Continuation | None = None, stop: tuple[str, ...] = ()
) -> GenerateRequest:
    return GenerateRequest(
        id="r",
        model="demo",
        prompt=Chat(messages=[QUESTION], tools=[WEATHER]),
        sampling=SamplingParams(temperature=0.0, max_tokens=60, stop=stop),
        explicit=("temperature", "max_tokens"),
        stream=stream,
        form=form,
        resumes=resumes,
    )


FORM = AnswerForm(tools=ToolUse())


def test_a_call_is_streamed_as_it_is_returned_whole(engine: Engine) -> None:
    whole = deltas(engine, asked(form=FORM, stream=False))
    streamed = deltas(engine, asked(form=FORM))
    assert joined(whole) == joined(streamed) == ("", "", [("get_weather", '{"city": "Paris"}')])
    assert len([delta for delta in streamed if delta.calls]) > 2  # arguments are not held back to their end
    assert streamed[-1].finish_reason == "stop"


def test_without_a_form_the_text_is_the_models(engine: Engine) -> None:
    text, _, calls = joined(deltas(engine, asked(form=None)))
    assert text == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert calls == []
    assert joined(deltas(engine, asked(form=AnswerForm())))[0] == text


def test_an_answer_continued_elsewhere_has_the_same_parts(engine: Engine) -> None:
    whole = deltas(engine, asked(form=FORM))
    for cut in range(1, len(whole)):
        before = whole[:cut]
        sent = Continuation(token_ids=tuple(t for delta in before for t in delta.token_ids), seed=0)
        after = deltas(engine, asked(form=FORM, resumes=sent))
        assert joined([*before, *after]) == joined(whole)


def test_a_stop_string_cuts_the_generated_text(engine: Engine) -> None:
    parts = deltas(engine, asked(form=FORM, stop=("Par",)))
    assert joined(parts) == ("", "", [("get_weather", '{"city": "')])
    assert parts[-1].stop_reason == "Par"


def facts_of(engine: Engine, request: GenerateRequest) -> Facts | None:
    engine.add(engine.prepare(request), 1.0)
    while True:
        for output in engine.step(1.0)[0]:
            if output.end is not None:
                assert output.end.outcome == "done"
                return output.end.facts


def test_the_end_of_a_watched_model_says_how_the_calls_are(engine: Engine) -> None:
    replace = msgspec.structs.replace
    asks: list[tuple[GenerateRequest, CallsFact]] = [
        (asked(form=FORM), "valid"),
        (asked(form=FORM, stream=False), "valid"),
        (asked(form=None), ""),
        (replace(asked(form=FORM), prompt=Chat(messages=[QUESTION]), form=AnswerForm(tools=None)), ""),
    ]
    for request, calls in asks:
        assert facts_of(engine, request) == Facts(rows=0, is_refusal=False, calls=calls)
    ids = [token for delta in deltas(engine, asked(form=FORM)) for token in delta.token_ids]
    short = replace(asked(form=FORM), sampling=SamplingParams(temperature=0.0, max_tokens=len(ids) - 6))
    for cut in (short, asked(form=FORM, stop=("Par",))):
        assert facts_of(engine, cut) == Facts(rows=0, is_refusal=False, calls="cut")
    continued = asked(form=FORM, resumes=Continuation(token_ids=tuple(ids[:12]), seed=0))
    assert facts_of(engine, continued) == Facts(rows=0), "its beginning was not heard"


def test_an_answer_is_read_for_its_drift() -> None:
    facts = AnswerFacts(has_tools=True)
    facts.hear([Delta(0, "I'm sorry, "), Delta(1, "Paris")])
    facts.hear([Delta(0, "but I can't help with that." + "x" * 1000)])
    assert facts.facts(None) == Facts(rows=0, is_refusal=True, calls="none")
    called = AnswerFacts(has_tools=True)
    called.hear([Delta(0, calls=(CallDelta(0, "f", "{"), CallDelta(0, None, "}"))), Delta(0, "", finish_reason="stop")])
    found = {number: called.facts(number).calls for number in (None, 0, 2)}
    assert found == {None: "unchecked", 0: "valid", 2: "unmatched"}
