"""Message batches as Anthropic's client uses them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.messages import MessageBatch
from tests.gateway.fakes import words
from tests.gateway.jobs.serving_jobs import Serving, serving_jobs

from inferd.tenancy.idempotency import IdempotencyStore

MAX_FILE = 60_000


@pytest.fixture(scope="module")
def shared_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("jobs")
    with serving_jobs(
        folder, max_file_bytes=MAX_FILE, max_lines=100, app={"idempotency": IdempotencyStore(60)}
    ) as started:
        yield started


@pytest.fixture
def serving(shared_serving: Serving) -> Serving:
    shared_serving.server.reset()
    return shared_serving


def client_of(serving: Serving, key: str = "sk-a") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=serving.server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def client(serving: Serving) -> Iterator[anthropic.Anthropic]:
    with client_of(serving) as made:
        yield made


def asked(name: str, **params: Any) -> Any:
    given = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": f"hi {name}"}], **params}
    return {"custom_id": name, "params": given}


def ended(client: anthropic.Anthropic, batch: MessageBatch) -> MessageBatch:
    deadline = time.monotonic() + 120
    while (found := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_every_request_is_answered_with_its_message(serving: Serving, client: anthropic.Anthropic) -> None:
    made = client.messages.batches.create(requests=[asked(f"r{number}") for number in range(30)])
    assert (made.type, made.results_url, made.ended_at) == ("message_batch", None, None)
    assert made.request_counts.processing + made.request_counts.succeeded == 30
    assert made.expires_at - made.created_at == timedelta(days=1)
    found = ended(client, made)
    counts = found.request_counts
    assert (counts.succeeded, counts.processing, counts.errored, counts.canceled, counts.expired) == (30, 0, 0, 0, 0)
    assert found.ended_at is not None
    results = list(client.messages.batches.results(made.id))
    assert [one.custom_id for one in results] == [f"r{number}" for number in range(30)]
    for one in results:
        assert one.result.type == "succeeded"
        assert "".join(block.text for block in one.result.message.content if block.type == "text") == "Hello world!"
    requests = [stream.request for stream in serving.server.router.streams]
    assert {request.priority for request in requests} == {1}, "the queue's last class"
    with serving.client() as other:
        shown = other.batches.retrieve(made.id)
    assert (shown.endpoint, shown.status, shown.model) == ("/v1/messages", "completed", "tiny")
    assert shown.usage is not None
    assert shown.usage.output_tokens > 0


def test_errors_of_requests_are_results(client: anthropic.Anthropic) -> None:
    requests = [
        asked("good"),
        asked("warm", temperature=9),
        asked("streamed", stream=True),
        asked("unknown", model="other"),
        {"custom_id": "empty", "params": {}},
    ]
    found = ended(client, client.messages.batches.create(requests=requests))
    assert (found.request_counts.succeeded, found.request_counts.errored) == (1, 4)
    results = {one.custom_id: one.result for one in client.messages.batches.results(found.id)}
    kinds = {}
    for name, result in results.items():
        kinds[name] = result.error.error.type if result.type == "errored" else result.type
    assert kinds == {
        "good": "succeeded",
        "warm": "invalid_request_error",
        "streamed": "invalid_request_error",
        "unknown": "not_found_error",
        "empty": "invalid_request_error",
    }
    assert results["streamed"].type == "errored"
    assert "stream" in results["streamed"].error.error.message


def test_a_claude_model_is_the_only_model(client: anthropic.Anthropic) -> None:
    requests = [asked("a", model="claude-of-tomorrow"), asked("b")]
    found = ended(client, client.messages.batches.create(requests=requests))
    assert found.request_counts.succeeded == 2, "requests of one batch may name several models"


def test_a_cancelled_batch_says_what_it_did_not_answer(serving: Serving, client: anthropic.Anthropic) -> None:
    serving.server.router.script = None
    made = client.messages.batches.create(requests=[asked(f"r{number}") for number in range(40)])
    assert serving.server.router.submitted.acquire(timeout=60)
    early = httpx.get(f"{serving.server.url}/v1/messages/batches/{made.id}/results", headers={"x-api-key": "sk-a"})
    assert (early.status_code, early.json()["error"]["details"]["error_code"]) == (400, "batch_not_ended")
    with pytest.raises(anthropic.BadRequestError, match="can be deleted when it has ended"):
        client.messages.batches.delete(made.id)
    cancelled = client.messages.batches.cancel(made.id)
    assert (cancelled.processing_status, cancelled.cancel_initiated_at is not None) == ("canceling", True)
    found = ended(client, made)
    assert (found.request_counts.canceled, found.request_counts.errored) == (40, 0)
    results = list(client.messages.batches.results(made.id))
    assert [(one.custom_id, one.result.type) for one in results] == [(f"r{n}", "canceled") for n in range(40)]
    assert client.messages.batches.cancel(made.id) == found, "a batch that has ended stays as it is"


def test_a_deleted_batch_is_gone_with_its_files(serving: Serving, client: anthropic.Anthropic) -> None:
    before = sorted(path.name for path in (serving.folder / "files").iterdir())
    made = ended(client, client.messages.batches.create(requests=[asked("a")]))
    assert len(list((serving.folder / "files").iterdir())) == len(before) + 2
    deleted = client.messages.batches.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    assert sorted(path.name for path in (serving.folder / "files").iterdir()) == before
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(made.id)


def test_lists_are_read_page_by_page_in_both_directions(serving: Serving) -> None:
    with client_of(serving, "sk-b") as client, serving.client("sk-b") as other:
        made = [client.messages.batches.create(requests=[asked("a")]).id for _ in range(5)]
        file = other.files.create(file=("a", b"{}"), purpose="batch")
        other.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        newest = made[::-1]
        assert [one.id for one in client.messages.batches.list(limit=2)] == newest, "without other dialects' batches"
        page = client.messages.batches.list(limit=2, before_id=newest[4])
        assert ([one.id for one in page.data], page.has_more) == (newest[2:4], True)
        page = client.messages.batches.list(limit=2, before_id=newest[1])
        assert ([one.id for one in page.data], page.has_more) == (newest[:1], False)
        page = client.messages.batches.list(limit=2, after_id=newest[3])
        assert ([one.id for one in page.data], page.has_more) == (newest[4:], False)
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            client.messages.batches.list(limit=0)
        with pytest.raises(anthropic.BadRequestError, match="no such entry"):
            client.messages.batches.list(after_id="msgbatch_x")
        assert len(list(other.batches.list())) == 6, "operators see all of them"


def test_another_tenants_batches_do_not_exist(serving: Serving, client: anthropic.Anthropic) -> None:
    made = ended(client, client.messages.batches.create(requests=[asked("a")]))
    with client_of(serving, "sk-b") as other:
        batches = other.messages.batches
        for ask in (batches.retrieve, batches.cancel, batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                ask(made.id)
    answer = httpx.get(f"{serving.server.url}/v1/messages/batches/{made.id}/results", headers={"x-api-key": "sk-b"})
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests is empty"),
        ({"requests": {"a": 1}}, "requests"),
        ({"requests": [asked("a"), asked("a")]}, r"requests\[1\].custom_id is .a."),
        ({"requests": [asked("a"), asked("a b")]}, r"requests\[1\].*custom_id"),
        ({"requests": [asked("a"), {"custom_id": "b"}]}, r"requests\[1\].*params"),
        ({"requests": [{"custom_id": "b", "params": []}]}, r"requests\[0\].*params must be an object"),
        ({"requests": [asked(str(number)) for number in range(101)]}, r"jobs\.max_lines"),
        (b'{"requests": [', "JSON"),
        (b'{"requests": [{}x]}', "requests"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b"", "empty"),
    ],
)
def test_a_wrong_body_is_refused_by_name_and_not_kept(serving: Serving, body: Any, message: str) -> None:
    before = len(list((serving.folder / "files").iterdir()))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"x-api-key": "sk-a", "content-type": "application/json"}
    answer = serving.server.http.post(f"{serving.server.url}/v1/messages/batches", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error["error"]["message"])
    assert len(list((serving.folder / "files").iterdir())) == before
    assert list((serving.folder / "uploads").iterdir()) == []


def test_a_body_that_is_too_large_is_refused(client: anthropic.Anthropic) -> None:
    requests = [asked(str(number), system="x" * 2000) for number in range(90)]
    with pytest.raises(anthropic.APIStatusError, match=r"jobs\.max_file_bytes") as refused:
        client.messages.batches.create(requests=requests)
    assert refused.value.status_code == 413


def test_unknown_fields_are_named(serving: Serving) -> None:
    body = {"requests": [asked("a")], "of_tomorrow": 1}
    answer = serving.server.http.post(
        f"{serving.server.url}/v1/messages/batches", json=body, headers={"x-api-key": "sk-a"}
    )
    assert (answer.status_code, answer.headers["x-inferd-ignored-params"]) == (200, "of_tomorrow")


def test_the_same_key_makes_one_batch(serving: Serving, client: anthropic.Anthropic) -> None:
    headers = {"idempotency-key": "night"}
    made = client.messages.batches.create(requests=[asked("a")], extra_headers=headers)
    again = client.messages.batches.create(requests=[asked("a")], extra_headers=headers)
    assert again == made
    with pytest.raises(anthropic.UnprocessableEntityError):
        client.messages.batches.create(requests=[asked("b")], extra_headers=headers)
    assert list((serving.folder / "uploads").iterdir()) == []


def test_a_failing_key_ends_a_batch_with_errors(serving: Serving, client: anthropic.Anthropic) -> None:
    serving.server.router.script = None
    made = client.messages.batches.create(requests=[asked("a"), asked("b")])
    assert serving.server.router.submitted.acquire(timeout=60)
    valid = serving.door.keys["sk-a"]
    serving.door.keys["sk-a"] = valid.__class__(key_id="another", tenant="team-a")
    try:
        found = ended(client, made)
    finally:
        serving.door.keys["sk-a"] = valid
        serving.server.router.script = words("Hello")
    assert (found.request_counts.errored, found.request_counts.canceled) == (2, 0)
