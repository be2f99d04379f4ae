"""The document and the server are the same thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.gateway.fakes import FakeAuditor, FakeControl, Running, post, running, sse
from tests.tiers import THOROUGH, sample

from inferd.gateway.admin.openapi import openapi_document
from inferd.gateway.routes import ROUTES
from inferd.tenancy.keys import KeySpec
from inferd.tenancy.principal import OPERATOR

DOCUMENT: dict[str, Any] = json.loads(openapi_document())
# A version's routes have the endpoints and the schemas of its model's.
schema = schemathesis.openapi.from_dict(DOCUMENT).exclude(path_regex="/versions/")


def operations() -> Iterator[schemathesis.schemas.APIOperation[Any, Any, Any, Any]]:
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        yield found.ok()


OPERATIONS = {operation.label: operation for operation in operations()}
FEW = settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    control = FakeControl()
    control.keys.add(KeySpec(tenant="team"))
    with running(control=control, principal=OPERATOR, audit=FakeAuditor()) as started:
        yield started


def test_every_route_is_described_and_nothing_else() -> None:
    served = {(route.pattern, route.method.lower()) for route in ROUTES if not route.of_console}
    described = {(path, method) for path, item in DOCUMENT["paths"].items() for method in item}
    assert served == described


def test_a_name_in_a_path_is_any_text_but_none() -> None:
    names = {
        field["name"]: field["schema"]
        for item in DOCUMENT["paths"].values()
        for operation in item.values()
        for field in operation.get("parameters", ())
        if field["in"] == "path"
    }
    assert names == {name: {"type": "string", "minLength": 1} for name in names}
    assert names.keys() == {"model", "version", "alias", "id", "response_id", "conversation_id", "item_id"}


def test_everything_described_is_served(server: Running) -> None:
    for path, item in DOCUMENT["paths"].items():
        for method in item:
            reply = server.http.request(
                method, server.url + path.replace("{model}", "tiny").replace("{id}", "key0").replace("{version}", "1")
            )
            known = reply.status_code in (200, 201, 202, 400, 426) or reply.json()["error"]["code"] in (
                "async_request_not_found",
                "no_webhook_secret",
                "request_not_found",
            )
            assert known, (method, path, reply.text)


def check(server: Running, case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(
        base_url=server.url,
        checks=[not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance],
    )


@pytest.mark.parametrize("name", sample(OPERATIONS, *list(OPERATIONS)[::4]))
def test_answers_keep_to_the_document(server: Running, name: str) -> None:
    @FEW
    @given(case=OPERATIONS[name].as_strategy())
    def some(case: schemathesis.Case[Any]) -> None:
        check(server, case)

    some()


@THOROUGH
@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_to_every_bound_of_every_field_keep_to_the_document(server: Running, name: str) -> None:
    """Schemathesis' systematic cases, valid and invalid. They are made here, and not when tests are collected."""

    @FEW
    def all_cases(case: schemathesis.Case[Any]) -> None:
        check(server, case)

    build_operation_test(
        config=schema.config,
        operation=OPERATIONS[name],
        test_func=all_cases,
        given_kwargs={},
        feedback=FeedbackSources(),
    )()


def test_events_and_answers_validate_against_their_schemas(server: Running) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    def validate(value: object, name: str) -> None:
        jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})

    hi = [{"role": "user", "content": "hi"}]
    full = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "n": 2}
    validate(
        post(server, "/v1/chat/completions", {"messages": hi, **full, "prompt_logprobs": 1}).json(), "ChatCompletion"
    )
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    for frame in sse(post(server, "/v1/chat/completions", {"messages": hi, **full, **streaming}).text)[:-1]:
        validate(frame, "ChatCompletionChunk")
    text = {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "return_token_ids": True}
    validate(post(server, "/v1/completions", text).json(), "Completion")
    for frame in sse(post(server, "/v1/completions", {**text, **streaming}).text)[:-1]:
        validate(frame, "Completion")
    validate(post(server, "/v1/completions", {"prompt": "a", "n": 0}).json(), "ErrorBody")
