"""The Decisions API over real sockets: answers from scores, usage, refusals, classifiers, and openai-python."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import msgspec
import openai
import pytest
from tests.gateway.fakes import Running, info, post

from inferd.types import Chat, Delta, End, GenerateRequest, Output, Prediction, PredictRequest, PromptReport, Usage
from inferd.types import TensorSpec as Spec

JSON = dict[str, Any]
TRUE: JSON = {"type": "predicate", "instructions": "The parcel is late.", "name": "late"}
TEAM: JSON = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "Payments"}, {"value": "technical"}],
}
LEVEL: JSON = {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "cross"}]}


def scores(request: GenerateRequest) -> list[Output]:
    """The first answer of each set is three times as likely as each other one."""
    found = tuple((math.log(3.0), *[0.0] * (len(one.answers) - 1)) for one in request.answer_sets)
    report = PromptReport(50, 20, scores=found)
    return [Output(request.id, (Delta(0, finish_reason="length"),), report, End("done", Usage(50, 0, 20)))]


def ask(server: Running, *questions: JSON, **fields: Any) -> httpx.Response:
    server.router.script = scores
    body = {"model": "tiny", "input": "It came late.", "questions": list(questions)}
    return post(server, "/v1/decisions", body | fields)


def test_the_client_of_openai_gets_each_kind_of_answer(server: Running) -> None:
    server.router.script = scores
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.decisions.create(
            model="tiny",
            input="It came late.",
            questions=[TRUE, TEAM, LEVEL],  # type: ignore[list-item]
        )
    first, second, third = answer.answers
    assert first.type == "predicate"
    assert first.name == "late"
    assert first.probability == pytest.approx(0.75)
    assert second.type == "choice"
    assert (second.name, second.choice) == (None, "billing")
    assert second.confidence == pytest.approx(0.75)
    assert [one.value for one in second.probabilities] == ["billing", "technical"]
    assert third.type == "score"
    assert [third.score, third.confidence] == pytest.approx([0.25, 0.75])
    assert [(one.label, one.value) for one in third.probabilities] == [("calm", 0), ("cross", 1)]
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (50, 0, 50)
    assert usage.input_tokens_details.cached_tokens == 20


def test_one_request_has_the_input_once_and_the_answers_of_each_question(server: Running) -> None:
    assert ask(server, *[TEAM] * 400, prompt_cache_key="k").status_code == 200
    (stream,) = server.router.streams
    request = stream.request
    assert isinstance(request.prompt, Chat)
    assert request.prompt.messages == [{"role": "user", "content": "It came late."}]
    assert request.cache_salt == "k"
    assert len(request.answer_sets) == 400
    assert request.answer_sets[7].answers == ("billing", "technical")
    assert request.answer_sets[7].at[1] == "questions[7].choices[1].value"
    assert "- billing: Payments\n- technical" in request.answer_sets[7].messages[0]["content"]


def test_a_boolean_and_a_string_with_its_text_are_distinct(server: Running) -> None:
    question = {**TEAM, "choices": [{"value": True}, {"value": "true"}]}
    reply = ask(server, question).json()
    assert server.router.last.answer_sets[0].answers == ("true", '"true"')
    assert [one["value"] for one in reply["answers"][0]["probabilities"]] == [True, "true"]
    assert reply["answers"][0]["choice"] is True


def test_unknown_top_level_fields_are_dropped_and_listed(server: Running) -> None:
    reply = ask(server, TRUE, wonder=1, prompt_cache_options={"ttl": "30m"}, safety_identifier="u")
    assert reply.status_code == 200
    listed = reply.headers["x-inferd-ignored-params"].split(",")
    assert sorted(listed) == ["prompt_cache_options", "safety_identifier", "wonder"]


def test_items_with_calls_and_json_are_a_conversation(server: Running) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "late"},
    ]
    assert ask(server, TRUE, input=items).status_code == 200
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.messages[0]["content"] == '{"a":1}'


WITH_IMAGE = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://x/y.png"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [TRUE] * 401}, "questions"),
        ({"questions": [TRUE, {**TRUE, "type": "ode"}]}, "questions[1].type"),
        ({"questions": [{**TRUE, "instructions": " "}]}, "questions[0].instructions"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{**TRUE, "choices": TEAM["choices"]}]}, "questions[0].choices"),
        ({"questions": [TRUE, {**TEAM, "choices": [{"value": "a"}]}]}, "questions[1].choices"),
        ({"questions": [TRUE, {**TEAM, "choices": [{"value": str(i)} for i in range(256)]}]}, "questions[1].choices"),
        ({"questions": [{**TEAM, "choices": [{"value": "a"}, {"value": "a"}]}]}, "questions[0].choices[1].value"),
        (
            {"questions": [TRUE, TRUE, TRUE, {**TEAM, "choices": [{"value": "a"}, {"value": 1}]}]},
            "questions[3].choices[1].value",
        ),
        ({"questions": [{**LEVEL, "levels": [{"label": "a"}, {}]}]}, "questions[0].levels[1].label"),
        ({"questions": [{**TRUE, "instructions": WITH_IMAGE}]}, "questions[0].instructions[1].type"),
        ({"input": [{"role": "user", "content": WITH_IMAGE}]}, "input[0].content[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_json"}]}]}, "input[0].content[0].data"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "additional_tools", "role": "developer"}]},
            "input[1].type",
        ),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(server: Running, fields: JSON, param: str) -> None:
    reply = ask(server, TRUE, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not server.router.streams


def classifier(server: Running, *labels: str) -> None:
    outputs = (Spec("probabilities", "FP32", (-1, len(labels)), labels=labels),)
    (status,) = server.router.statuses
    status.info = msgspec.structs.replace(info("tiny"), kind="predict", tasks=("classify",), outputs=outputs)
    probabilities = [0.5, *[0.25] * (len(labels) - 1)]
    body = {
        "id": "x",
        "created": 1,
        "model": "tiny",
        "data": [{"index": 0, "label": labels[0], "probs": probabilities, "num_classes": len(labels)}],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    server.router.prediction = Prediction(json.dumps(body).encode())


def test_a_classifier_answers_questions_about_its_labels(server: Running) -> None:
    classifier(server, "billing", "technical", "sales")
    reply = ask(server, TEAM)
    assert reply.status_code == 200, reply.text
    (answer,) = reply.json()["answers"]
    assert answer["choice"] == "billing"
    assert answer["confidence"] == pytest.approx(2 / 3)
    assert reply.json()["usage"]["input_tokens"] == 9
    assert "questions[].instructions" in reply.headers["x-inferd-ignored-params"]
    request = server.router.streams[-1].given
    assert isinstance(request, PredictRequest)
    assert request.dialect == "classify"
    assert json.loads(request.body)["input"] == "It came late."


def test_a_classifier_with_true_and_false_answers_a_predicate(server: Running) -> None:
    classifier(server, "Yes", "other", "No")
    assert ask(server, TRUE).json()["answers"][0]["probability"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("question", "param"), [(TRUE, "questions[0]"), (LEVEL, "questions[0].levels[0].label")])
def test_a_classifier_refuses_answers_that_are_no_labels(server: Running, question: JSON, param: str) -> None:
    classifier(server, "billing", "technical")
    reply = ask(server, question)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert '"billing", "technical"' in reply.json()["error"]["message"]
    assert not server.router.streams
