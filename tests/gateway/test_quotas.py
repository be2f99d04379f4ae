"""What a request is admitted on, what it is charged, and how it is told to come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.fakes import FakeDoor, FakePermit, FakeRouter, Running, info, post, running

from inferd.config import Config, ServerConfig
from inferd.errors import (
    DeadlineExceeded,
    IdempotencyConflict,
    InferdError,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    UpstreamFailed,
)
from inferd.gateway.admission import SDK_GRACE_S, cost_of
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Principal
from inferd.types import Delta, End, Failure, GenerateRequest, Output, PromptReport, Usage

HI = [{"role": "user", "content": "hi"}]
KEY = "sk-team"
TEAM = Principal(key_id="k1", tenant="team", weight=3.0, region="eu", priority=-1, default_priority=0)
AUTH = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor({KEY: TEAM})


@pytest.fixture
def server(door: FakeDoor) -> Iterator[Running]:
    with running(door=door) as started:
        yield started


def permit_of(door: FakeDoor) -> FakePermit:
    (permit,) = door.permits
    assert permit.over.wait(10), "never settled"
    return permit


# -- charging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_settled_once_with_what_it_used(server: Running, door: FakeDoor, stream: bool) -> None:
    reply = post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 8, "n": 2, "stream": stream}, **AUTH)
    assert reply.status_code == 200
    assert reply.headers["x-ratelimit-remaining-requests"] == "9"
    permit = permit_of(door)
    assert permit.settled == [(Usage(3, 6, 1), "done")]
    assert (permit.principal, permit.model, permit.known) == (TEAM, "tiny", 3)


def test_several_prompts_are_one_request_whose_costs_add_up(server: Running, door: FakeDoor) -> None:
    assert post(server, "/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 5}, **AUTH).status_code == 200
    permit = permit_of(door)
    assert permit.reserved == (3, 10)
    assert permit.known == 3
    assert permit.settled == [(Usage(3, 6, 2), "done")]


def test_what_is_refused_before_it_costs_anything_takes_nothing_of_the_quota(server: Running, door: FakeDoor) -> None:
    for body in ({"prompt": "x", "n": 0}, {"prompt": "x", "model": "none"}, {"prompt": "x", "timeout": -1}, {}):
        assert post(server, "/v1/completions", body, **AUTH).status_code in (400, 404)
    assert post(server, "/v1/completions", {"prompt": "x"}, authorization="Bearer wrong").status_code == 401
    assert not door.permits


def test_a_request_that_the_router_refuses_is_settled_with_nothing(server: Running, door: FakeDoor) -> None:
    server.router.refusal = Overloaded("Full.", retry_after_s=2.2)
    reply = post(server, "/v1/completions", {"prompt": "x"}, **AUTH)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")
    assert reply.headers["x-ratelimit-limit-requests"] == "10"
    assert permit_of(door).settled == [(None, "refused")]


def begun(request: GenerateRequest) -> list[Output]:
    """A stream that has said something and is not over."""
    return [Output(request.id, (Delta(0, "a", (1,)),), PromptReport(4))]


def test_an_aborted_stream_is_charged_for_what_was_generated(server: Running, door: FakeDoor) -> None:
    server.router.script = begun
    with server.http.stream(
        "POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True}, headers=AUTH
    ) as reply:
        assert server.router.submitted.acquire(timeout=10)
        server.router.streams[-1].usage = Usage(4, 3)
        assert next(reply.iter_raw())
    assert permit_of(door).settled == [(Usage(4, 3), "cancelled")]


def test_a_part_that_fails_does_not_make_the_other_parts_free(server: Running, door: FakeDoor) -> None:
    def script(request: GenerateRequest) -> list[Output | InferdError | None]:
        stream = server.router.streams[-1]
        if request.id.endswith("-0"):
            failure = Failure("worker_died", "It died.")
            return [Output(request.id, (), PromptReport(2), End("failed", Usage(2, 1), failure=failure))]
        stream.usage = Usage(2, 7)
        return []

    server.router.script = script
    assert post(server, "/v1/completions", {"prompt": ["a", "b"]}, **AUTH).status_code == 503
    assert permit_of(door).settled == [(Usage(4, 8), "failed")]
    assert server.served().usage == Usage(4, 8)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HI}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": "abc"}),
        ("/api/chat", {"model": "tiny", "messages": []}),
    ],
)
def test_a_call_that_computes_no_answer_is_a_request_without_tokens(
    server: Running, door: FakeDoor, path: str, body: dict[str, Any]
) -> None:
    reply = post(server, path, body, **AUTH)
    assert (reply.status_code, reply.headers["x-ratelimit-limit-requests"]) == (200, "10"), reply.text
    permit = permit_of(door)
    assert (permit.reserved, permit.settled) == ((0, 0), [(None, "done")])


# -- bounds --------------------------------------------------------------------------------------


def test_the_reserve_is_a_bound_of_prompt_and_answer(server: Running, door: FakeDoor) -> None:
    def reserved(path: str, **body: Any) -> tuple[int, int]:
        door.permits.clear()
        assert post(server, path, body, **AUTH).status_code == 200
        return door.permits[0].reserved

    assert reserved("/v1/completions", prompt="grüß") == (6, 16)
    assert reserved("/v1/completions", prompt=[1] * 5, max_tokens=7, n=3) == (5, 21)
    assert reserved("/v1/completions", prompt=["ab", "c"], max_tokens=7, n=2, best_of=4) == (3, 56)
    assert reserved("/v1/completions", prompt="x" * 500, max_tokens=2**31 - 1) == (128, 128)
    prompt, answer = reserved("/v1/chat/completions", messages=HI)
    assert len('{"role": "user", "content": "hi"}') < prompt <= 128
    assert answer == 128


@given(
    prompt_bytes=st.integers(0, 10**7),
    prompt_tokens=st.integers(0, 10**5),
    num_prompts=st.integers(1, 256),
    width=st.integers(1, 128),
    max_tokens=st.none() | st.integers(0, 2**31 - 1),
    context=st.none() | st.integers(1, 10**6),
)
def test_a_likely_cost_is_within_the_possible_one(
    prompt_bytes: int, prompt_tokens: int, num_prompts: int, width: int, max_tokens: int | None, context: int | None
) -> None:
    model = FakeRouter("m").statuses[0]
    model.info = None if context is None else msgspec.structs.replace(info("m"), max_model_len=context)
    cost = cost_of(
        model,
        prompt_bytes=prompt_bytes,
        prompt_tokens=prompt_tokens,
        num_prompts=num_prompts,
        width=width,
        max_tokens=max_tokens,
    )
    assert 0 <= cost.expected <= cost.max_prompt + cost.max_answer
    if context is not None:
        assert cost.max_prompt <= num_prompts * context
        assert cost.max_answer <= num_prompts * width * context


# -- terms ---------------------------------------------------------------------------------------


def test_a_request_carries_its_tenants_terms(server: Running) -> None:
    headers = {"x-session-id": "s-1", "x-inferd-tenant": "other", "x-inferd-weight": "99", **AUTH}
    assert post(server, "/v1/completions", {"prompt": "abcdefgh", "max_tokens": 10}, **headers).status_code == 200
    request = server.router.last
    assert (request.tenant, request.weight, request.region, request.session) == ("team", 3.0, "eu", "s-1")
    assert (request.num_tokens, request.num_bytes) == (13, len('{"prompt": "abcdefgh", "max_tokens": 10}'))


@pytest.mark.parametrize(
    ("header", "body", "rank"),
    [
        (None, None, 0), ("batch", None, 1), ("interactive", None, -1), ("critical", None, -1), ("Batch", None, 1),
        (None, 5, 5), (None, -1, -1), (None, -100, -1), (None, -(2**31), -1), ("batch", -1, 1),
    ],
)  # fmt: skip
def test_a_priority_is_no_better_than_the_keys_best(
    server: Running, header: str | None, body: int | None, rank: int
) -> None:
    headers = {**AUTH, **({"x-inferd-priority": header.encode()} if header else {})}
    asked = {"prompt": "x", **({"priority": body} if body is not None else {})}
    reply = server.http.post(server.url + "/v1/completions", json=asked, headers=headers)  # type: ignore[arg-type]
    assert reply.status_code == 200
    assert server.router.last.priority == rank


@pytest.mark.parametrize(
    ("headers", "body", "deadline_s"),
    [
        ({}, None, None),
        ({}, 7, 7.0),
        ({"x-inferd-timeout": "2.5"}, 7, 2.5),
        ({"x-inferd-timeout": "9", "x-request-timeout": "1"}, 7, 1.0),
        ({"x-request-timeout": "3"}, None, 3.0),
        ({"x-stainless-timeout": "60"}, None, 60.0 + SDK_GRACE_S),
        ({"x-stainless-read-timeout": "600.0", "x-stainless-timeout": "60"}, None, 60.0 + SDK_GRACE_S),
        ({"x-stainless-read-timeout": "600", "x-inferd-timeout": "2.5"}, 7, 2.5),
        ({"x-stainless-read-timeout": "2.5"}, 7, 2.5 + SDK_GRACE_S),
        ({"x-stainless-read-timeout": "NOT_GIVEN"}, None, None),
        ({"x-stainless-read-timeout": "nan"}, 7, 7.0),
        ({"x-stainless-read-timeout": "0", "x-stainless-timeout": "-1"}, None, None),
        ({"x-stainless-read-timeout": "inf"}, None, None),
    ],
)
def test_the_least_of_several_deadlines_counts(
    server: Running, headers: dict[str, str], body: float | None, deadline_s: float | None
) -> None:
    asked = {"prompt": "x", **({"timeout": body} if body is not None else {})}
    assert post(server, "/v1/completions", asked, **headers, **AUTH).status_code == 200
    assert server.router.last.deadline_s == deadline_s


def test_openais_client_tells_how_long_it_waits(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        client.completions.create(model="tiny", prompt="x")
        assert server.router.last.deadline_s == 600 + SDK_GRACE_S
        client.completions.create(model="tiny", prompt="x", timeout=7)
        assert server.router.last.deadline_s == 7 + SDK_GRACE_S
        client.completions.create(model="tiny", prompt="x", timeout=None)
        assert server.router.last.deadline_s is None
        with client.completions.create(model="tiny", prompt="x", timeout=7, stream=True):
            assert (server.router.last.deadline_s, server.router.last.first_byte_s) == (None, 7 + SDK_GRACE_S)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-inferd-priority": "urgent"},
        {"x-inferd-priority": "-1"},
        {"x-request-timeout": "soon"},
        {"x-session-id": "x" * 257},
        {"idempotency-key": "x" * 256},
    ],
)
def test_a_header_that_means_nothing_is_refused_by_name(headers: dict[str, str]) -> None:
    with running(idempotency=IdempotencyStore(60)) as server:
        reply = post(server, "/v1/completions", {"prompt": "x"}, **headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(headers)))


# -- 429 is the client's quota, 503 our capacity -------------------------------------------------


def refused(status: int, error: InferdError) -> type[openai.APIStatusError]:
    """The class that OpenAI's client raises for an error of ours."""
    door = FakeDoor({KEY: TEAM})
    if isinstance(error, QuotaExceeded):
        door.refusal = error
    with running(door=door) as server:
        server.router.refusal = error
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        client.close()
    assert raised.value.status_code == status
    assert raised.value.response.headers.get("x-request-id")
    return type(raised.value)


def test_openais_client_raises_the_right_class() -> None:
    assert refused(429, QuotaExceeded("Used up.", retry_after_s=5)) is openai.RateLimitError
    assert refused(503, Overloaded("Full.")) is openai.InternalServerError
    assert refused(408, DeadlineExceeded("Late.")) is openai.APIStatusError
    assert refused(409, IdempotencyConflict("Busy.")) is openai.ConflictError
    assert refused(422, IdempotencyConflict("Other.", code="idempotency_key_reused")) is openai.UnprocessableEntityError
    assert refused(502, UpstreamFailed("Garbage.")) is openai.InternalServerError
    assert refused(504, UpstreamFailed("Silence.", code="upstream_first_byte_timeout")) is openai.InternalServerError
    assert refused(400, InvalidRequest("No.")) is openai.BadRequestError
    with running(door=FakeDoor({KEY: TEAM})) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        client.close()


@pytest.mark.parametrize(("retry_after_s", "said"), [(0.01, "1"), (1.0, "1"), (1.2, "2"), (None, "1"), (1e12, "86400")])
def test_a_used_up_quota_says_when_to_come_back(
    server: Running, door: FakeDoor, retry_after_s: float | None, said: str
) -> None:
    door.refusal = QuotaExceeded("Used up.", retry_after_s=retry_after_s)
    door.refusal.headers = ((b"x-ratelimit-remaining-requests", b"0"),)
    reply = post(server, "/v1/completions", {"prompt": "x"}, **AUTH)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, said)
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert not server.router.streams


def test_openais_client_does_not_try_again_what_came_too_late(server: Running) -> None:
    server.router.refusal = DeadlineExceeded("Late.")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=2)
    with pytest.raises(openai.APIStatusError):
        client.completions.create(model="tiny", prompt="hi")
    client.close()
    assert server.served().status == 408
    assert len(server.events) == 1


def test_limits_of_a_configuration_count_from_the_next_request_on(server: Running) -> None:
    assert post(server, "/v1/completions", {"prompt": "x" * 200}, **AUTH).status_code == 200
    server.app.configure(Config(models={}, server=ServerConfig(max_body_bytes=100)))
    assert post(server, "/v1/completions", {"prompt": "x" * 200}, **AUTH).status_code == 413
