"""The Decisions API of the bundled models, with OpenAI's client as it is published."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Decision

GREETING: Any = {"type": "predicate", "name": "greets", "instructions": "The user greets."}
CITY: Any = {
    "type": "choice",
    "instructions": [
        {"type": "input_text", "text": "Which city?"},
        {"type": "input_json", "data": [{"hint": "by the sea"}]},
    ],
    "choices": [{"value": "Nice", "description": "By the sea"}, {"value": "Paris"}, {"value": True}, {"value": "true"}],
}
MOOD: Any = {
    "type": "score",
    "instructions": "How angry?",
    "levels": [{"label": "calm"}, {"label": "a little cross with the people of the parcel service"}],
}
INTENT: Any = {
    "type": "choice",
    "instructions": "What does the user want?",
    "choices": [{"value": "weather"}, {"value": "greeting"}, {"value": "refund"}],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = str(tmp_path_factory.mktemp("state"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": state}
    process = subprocess.Popen(
        [sys.executable, "-m", "inferd", "serve", "demo", "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    try:
        assert process.stdout is not None
        head = next(line for line in process.stdout if "is ready" in line)
        found = re.search(r"http://\S+", head)
        assert found is not None
        yield f"{found[0]}/v1"
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_every_kind_of_question_is_answered_in_the_clients_types(client: openai.OpenAI) -> None:
    answered = client.decisions.with_raw_response.create(
        model="demo", input="Hello, I live in Nice.", questions=[GREETING, CITY, MOOD], prompt_cache_key="k"
    )
    assert "x-inferd-ignored-params" not in answered.headers
    decision = answered.parse()
    assert Decision.model_validate(decision.to_dict(), strict=True) == decision
    greets, city, mood = decision.answers
    assert greets.type == "predicate"
    assert 0 <= greets.probability <= 1
    assert city.type == "choice"
    assert [one.value for one in city.probabilities] == ["Nice", "Paris", True, "true"]
    assert math.fsum(one.probability for one in city.probabilities) == pytest.approx(1)
    assert max(city.probabilities, key=lambda one: one.probability).value == city.choice
    assert mood.type == "score"
    assert mood.score == pytest.approx(mood.probabilities[1].probability)
    assert decision.usage.total_tokens == decision.usage.input_tokens > 100
    alone = client.decisions.create(model="demo", input="Hello, I live in Nice.", questions=[MOOD])
    assert alone.answers == [mood], "the other questions have no influence"


def test_every_form_of_input_is_read(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be exact."}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "input_json", "data": {"parcel": 7}},
            ],
        },
        {"role": "assistant", "phase": "commentary", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"parcel": 7}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "say", "input": "seven"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "late"}]},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "said"},
    ]
    answered = client.decisions.with_raw_response.create(
        model="demo",
        input=items,
        questions=[GREETING] * 400,
        prompt_cache_options={"ttl": "30m"},
        safety_identifier="u",
    )
    assert set(answered.headers["x-inferd-ignored-params"].split(",")) == {
        *("prompt_cache_options", "safety_identifier"),
        *("input.phase", "input.content.prompt_cache_breakpoint"),
    }
    answers = answered.parse().answers
    assert len(answers) == 400
    assert all(one == answers[0] for one in answers)


def test_a_repetition_has_the_same_bits_and_reads_the_prefix_cache(url: str) -> None:
    async def main() -> list[Decision]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            asked: Any = {"model": "demo", "input": "The parcel is late. " * 20, "questions": [GREETING, MOOD]}
            first = await client.decisions.create(**asked)
            return [first, *await asyncio.gather(*(client.decisions.create(**asked) for _ in range(6)))]

    first, *again = asyncio.run(main())
    for one in again:
        assert one.answers == first.answers
        assert one.usage.input_tokens_details.cached_tokens > 50


def test_the_bundled_classifier_answers_questions_about_its_labels(client: openai.OpenAI) -> None:
    answered = client.decisions.with_raw_response.create(model="intents", input="hello there", questions=[INTENT] * 2)
    assert answered.headers["x-inferd-ignored-params"] == "questions[].instructions"
    first, second = answered.parse().answers
    assert first == second
    assert first.type == "choice"
    assert first.choice == "greeting"
    assert first.confidence > 0.9
    classified = client.post("/../classify", cast_to=object, body={"model": "intents", "input": "hello there"})
    assert isinstance(classified, dict)
    probabilities = dict(zip(LABELS, classified["data"][0]["probs"], strict=True))
    whole = sum(probabilities[one.value] for one in first.probabilities if isinstance(one.value, str))
    for one in first.probabilities:
        assert isinstance(one.value, str)
        assert one.probability == pytest.approx(probabilities[one.value] / whole, rel=1e-5)


LABELS = (
    *("alarm", "goodbye", "greeting", "music", "opening_hours"),
    *("order_status", "password", "refund", "thanks", "weather"),
)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "intents"}, 400, "questions[0]"),
        ({"model": "digits"}, 400, "model"),
        ({"model": "nobody"}, 404, "model"),
        ({"questions": [{**CITY, "choices": [{"value": "a"}, {"value": "b" * 9000}]}]}, 400, "questions[0].choices"),
        ({"input": "word " * 3000}, 400, "questions[0]"),
    ],
)
def test_what_no_model_here_can_answer_is_refused_by_its_field(
    client: openai.OpenAI, fields: dict[str, Any], status: int, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.decisions.create(**{"model": "demo", "input": "hi", "questions": [GREETING], **fields})
    assert refused.value.status_code == status
    assert str(refused.value.param).startswith(param), refused.value
