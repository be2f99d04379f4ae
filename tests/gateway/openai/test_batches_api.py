"""Files and batches as OpenAI's client uses them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from tests.gateway.jobs.serving_jobs import KEYS, Serving, begin, ended, line, lines_of, serving_jobs, upload

from inferd.errors import Overloaded, QuotaExceeded
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.types import Prediction

MAX_FILE = 60_000
MAX_BYTES = 150_000


@pytest.fixture(scope="module")
def shared_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("jobs")
    app = {"idempotency": IdempotencyStore(60)}
    with serving_jobs(folder, max_file_bytes=MAX_FILE, max_bytes=MAX_BYTES, max_lines=200, app=app) as started:
        yield started


@pytest.fixture
def serving(shared_serving: Serving) -> Iterator[Serving]:
    shared_serving.server.reset()
    shared_serving.door.keys.update(KEYS)
    shared_serving.door.permits.clear()
    yield shared_serving
    for key in ("sk-a", "sk-b"):
        with shared_serving.client(key) as client:
            for file in client.files.list():
                client.files.delete(file.id)


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with serving.client() as made:
        yield made


def test_a_batch_answers_every_line_of_a_file(serving: Serving, client: openai.OpenAI) -> None:
    content = "\n".join([line(f"r{number}") for number in range(30)])
    made = begin(client, content, metadata={"night": "1"})
    assert (made.status, made.object, made.completion_window, made.metadata) == (
        *("validating", "batch", "24h"),
        {"night": "1"},
    )
    assert made.expires_at == made.created_at + 86_400
    batch = ended(client, made)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 30, "completed": 30, "failed": 0}
    assert batch.model == "tiny"
    assert batch.errors is None
    assert batch.error_file_id is None
    assert made.created_at <= (batch.in_progress_at or 0) <= (batch.completed_at or 0)
    results = lines_of(client, batch.output_file_id)
    assert [one["custom_id"] for one in results] == [f"r{number}" for number in range(30)]
    first = results[0]["response"]
    assert first["status_code"] == 200
    assert first["body"]["choices"][0]["message"]["content"] == "Hello world!"
    assert first["request_id"] == results[0]["id"]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(one["response"]["body"]["usage"]["total_tokens"] for one in results)
    requests = [stream.request for stream in serving.server.router.streams]
    assert {request.priority for request in requests} == {1}, "the queue's last class"
    assert {permit.principal.key_id for permit in serving.door.permits} == {"a"}, "billed to the key's tenant"
    files = {file.id: file for file in client.files.list()}
    assert files[batch.output_file_id or ""].purpose == "batch_output"
    assert files[batch.input_file_id].bytes == len(content)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "hello"}),
        ("/v1/responses", {"model": "tiny", "input": "hello", "store": False}),
        ("/v1/embeddings", {"model": "tiny", "input": "hello"}),
        ("/v2/models/tiny/infer", {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}),
    ],
)
def test_every_kind_of_model_is_asked(serving: Serving, client: openai.OpenAI, path: str, body: object) -> None:
    serving.server.router.prediction = Prediction(b'{"said": "this"}')
    asked = json.dumps({"custom_id": "a", "method": "POST", "url": path, "body": body})
    batch = ended(client, begin(client, asked, path))
    results = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
    assert [one["custom_id"] for one in results] == ["a"]
    if path in ("/v1/completions", "/v1/responses"):
        assert results[0]["response"]["status_code"] == 200
    assert batch.model == "tiny"


def test_an_error_of_a_line_is_in_the_file_of_errors(client: openai.OpenAI) -> None:
    content = "\n".join([line("good"), line("bad", temperature=9), "{}", line("good"), line("last")])
    batch = ended(client, begin(client, content))
    assert batch.status == "completed"
    assert [one["custom_id"] for one in lines_of(client, batch.output_file_id)] == ["good", "last"]
    asked, *refused = lines_of(client, batch.error_file_id)
    assert asked["custom_id"] == "bad"
    assert asked["response"]["status_code"] == 400
    assert asked["response"]["body"]["error"]["param"] == "temperature"
    assert [(one["custom_id"], one["error"]["code"], one["error"]["line"]) for one in refused] == [
        (None, "invalid_line", 3),
        ("good", "duplicate_custom_id", 4),
    ]
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == [
        (3, "invalid_line"),
        (4, "duplicate_custom_id"),
    ]


def test_a_file_without_a_request_fails_the_batch(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, "this is no json"))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["no_requests", "invalid_json"]


def test_requests_wait_for_capacity_and_the_quota(serving: Serving, client: openai.OpenAI) -> None:
    serving.server.router.refusal = Overloaded("The queue is full.", code="queue_full", retry_after_s=0.01)
    made = begin(client, line("a"))
    while "queue is full" not in str(getattr(client.batches.retrieve(made.id), "note", "")):
        pass
    serving.door.refusal = QuotaExceeded("The minute is used up.", retry_after_s=0.01)
    serving.server.router.refusal = None
    while "minute is used up" not in str(getattr(client.batches.retrieve(made.id), "note", "")):
        pass
    serving.door.refusal = None
    assert ended(client, made).request_counts == openai.types.BatchRequestCounts(completed=1, failed=0, total=1)


def test_a_batch_is_cancelled(serving: Serving, client: openai.OpenAI) -> None:
    serving.server.router.script = None  # answers do not end
    made = begin(client, "\n".join([line("a"), line("b")]))
    assert serving.server.router.submitted.acquire(timeout=60)
    assert client.batches.cancel(made.id).status == "cancelling"
    batch = ended(client, made)
    assert batch.status == "cancelled"
    assert batch.output_file_id is None
    assert {one["error"]["code"] for one in lines_of(client, batch.error_file_id)} == {"batch_cancelled"}
    assert client.batches.cancel(made.id).status == "cancelled"
    done = ended(client, begin(client, "no json"))
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(done.id)


def test_a_cancelled_batch_is_resumed(serving: Serving, client: openai.OpenAI) -> None:
    serving.server.router.script = None
    made = begin(client, "\n".join([line("a"), line("b")]))
    assert serving.server.router.submitted.acquire(timeout=60)
    client.batches.cancel(made.id)
    assert ended(client, made).status == "cancelled"
    serving.server.reset()
    path = f"/batches/{made.id}/resume"
    with serving.client("sk-b") as other, pytest.raises(openai.NotFoundError):
        other.post(path, cast_to=Batch)
    assert client.post(path, cast_to=Batch).status == "in_progress"
    batch = ended(client, made)
    assert batch.status == "completed"
    assert [one["custom_id"] for one in lines_of(client, batch.output_file_id)] == ["a", "b"]
    assert batch.error_file_id is None
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.post(path, cast_to=Batch)


def test_a_batch_whose_key_was_revoked_ends(serving: Serving, client: openai.OpenAI) -> None:
    serving.server.router.script = None
    made = begin(client, line("a"))
    assert serving.server.router.submitted.acquire(timeout=60)
    serving.door.keys["sk-a"] = KEYS["sk-a"].__class__(key_id="another", tenant="team-a")
    batch = ended(client, made)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["invalid_api_key"]


def test_another_tenants_ids_do_not_exist(serving: Serving, client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, line("a")))
    output = batch.output_file_id or ""
    with serving.client("sk-b") as other:
        for ask in (
            lambda: other.files.retrieve(output),
            lambda: other.files.content(output),
            lambda: other.files.delete(output),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert list(other.files.list()) == []
        assert list(other.batches.list()) == []
    assert client.files.retrieve(output).id == output


def test_a_deleted_file_is_gone_from_the_disk(serving: Serving, client: openai.OpenAI) -> None:
    name = upload(client, line("a"))
    assert (serving.folder / "files" / name).read_text() == line("a")
    assert client.files.delete(name).deleted
    assert list((serving.folder / "files").iterdir()) == []
    with pytest.raises(openai.NotFoundError):
        client.files.content(name)


def test_lists_are_read_page_by_page(client: openai.OpenAI) -> None:
    names = [upload(client, line(number)) for number in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == names[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == names
    assert list(client.files.list(purpose="batch_output")) == []
    made = [client.batches.create(input_file_id=name, endpoint="/v1/completions", completion_window="24h").id
            for name in names[:3]]  # fmt: skip
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == made[::-1]
    for name in made:
        ended(client, client.batches.retrieve(name))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images/edits"}, "endpoint"),
        ({"endpoint": "/v2/models/tiny/load"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"extra_body": {"priority": 1}}, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
def test_a_wrong_field_of_a_batch_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    name = upload(client, line("a"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(
            **{"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        )
    assert refused.value.param == param


def test_results_are_no_input(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, line("a")))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(
            input_file_id=batch.output_file_id or "", endpoint="/v1/completions", completion_window="24h"
        )


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08abc", b"\x00\x01", b"\xff\xfea\x00", b""])
def test_what_is_no_text_is_refused_and_not_kept(serving: Serving, client: openai.OpenAI, content: bytes) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        upload(client, content)
    assert refused.value.param == "file"
    assert nothing_is_left(serving)


def test_a_wrong_form_is_refused_and_not_kept(serving: Serving, client: openai.OpenAI) -> None:
    purposes: Any = client.files.create
    for purpose in ("fine-tune", "batch_output"):
        with pytest.raises(openai.BadRequestError) as refused:
            purposes(file=("a", b"x"), purpose=purpose)
        assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        purposes(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    assert purposes(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    headers = {"authorization": "Bearer sk-a"}
    answer = httpx.post(f"{serving.server.url}/v1/files", data={"purpose": "batch"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    for name in client.files.list():
        client.files.delete(name.id)
    assert nothing_is_left(serving)


def test_a_file_that_is_too_large_is_refused_by_name(serving: Serving, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, b"x" * (MAX_FILE + 1))
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    assert "jobs.max_file_bytes" in refused.value.message
    assert nothing_is_left(serving)


def test_a_refused_length_is_that_of_its_request_alone(serving: Serving) -> None:
    """The server keeps parsed heads without their lengths, for requests that arrive in one piece."""

    def uploaded(content: bytes) -> int:
        body = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        body += b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--b--\r\n' % content
        head = (
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-a\r\ncontent-length: %d\r\n"
            b"content-type: multipart/form-data; boundary=b\r\n\r\n" % len(body)
        )
        with socket.create_connection(("127.0.0.1", serving.server.port)) as connection:
            connection.sendall(head + body)
            return int(connection.recv(12)[9:])

    for _ in range(3):
        assert uploaded(b"x" * (MAX_FILE * 3)) == 413
        assert uploaded(b"x") == 200


def test_a_tenants_bytes_are_bounded_and_its_neighbours_are_not_touched(
    serving: Serving, client: openai.OpenAI
) -> None:
    kept = [upload(client, b"x" * (MAX_FILE - 1000)) for _ in range(2)]
    with pytest.raises(openai.BadRequestError) as refused:
        upload(client, b"x" * 30_000)
    assert refused.value.code == "files_quota_exceeded"
    with serving.client("sk-b") as other:
        assert upload(other, b"x" * 30_000)
    client.files.delete(kept[0])
    assert upload(client, b"x" * 30_000)


def test_an_upload_that_stops_leaves_nothing(serving: Serving) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-a\r\ncontent-length: 9000\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx'
    )
    with socket.create_connection(("127.0.0.1", serving.server.port)) as connection:
        connection.sendall(head)
        while nothing_is_left(serving):
            pass
    while not nothing_is_left(serving):
        pass


def test_the_same_key_stores_one_file_and_makes_one_batch(serving: Serving, client: openai.OpenAI) -> None:
    def stored(content: bytes, name: str = "a") -> str:
        headers = {"idempotency-key": "file"}
        return client.files.create(file=(name, content), purpose="batch", extra_headers=headers).id

    def made(endpoint: Any = "/v1/chat/completions") -> Batch:
        given = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
        return client.batches.create(**given, extra_headers={"idempotency-key": "batch"})

    content = line("a").encode()
    file = stored(content)
    assert stored(content) == file, "the boundary of the form differs, the file does not"
    for given in ((content + b" ",), (content, "b")):
        with pytest.raises(openai.UnprocessableEntityError):
            stored(*given)
    assert [path.name for path in (serving.folder / "files").iterdir()] == [file]
    batch = made()
    assert made() == batch
    with pytest.raises(openai.UnprocessableEntityError):
        made("/v1/completions")
    assert [one.id for one in client.batches.list(limit=100)].count(batch.id) == 1
    ended(client, batch)


def test_a_server_without_jobs_says_so() -> None:
    from tests.gateway.fakes import running

    with running() as server:
        answer = server.http.get(f"{server.url}/v1/files")
    assert answer.status_code == 400
    assert "jobs.enabled" in answer.json()["error"]["message"]


def nothing_is_left(serving: Serving) -> bool:
    return not [path for name in ("files", "uploads") for path in (serving.folder / name).iterdir()]


def test_a_content_is_sent_whole_or_not_at_all(serving: Serving, client: openai.OpenAI) -> None:
    content = "\n".join([line(number) for number in range(100)])
    name = upload(client, content)
    assert client.files.content(name).text == content
    head = serving.server.http.head(
        f"{serving.server.url}/v1/files/{name}/content", headers={"authorization": "Bearer sk-a"}
    )
    assert head.headers["content-length"] == str(len(content))
    path = serving.folder / "files" / name
    path.write_text(content[:-1])
    with pytest.raises(openai.APIConnectionError):
        client.files.content(name)
    path.unlink()
    with pytest.raises(openai.NotFoundError, match="upload it again"):
        client.files.content(name)


def test_names_of_files_are_shown_without_folders(client: openai.OpenAI) -> None:
    name = upload(client, line("a"), "../../etc/x y\u00e9.jsonl")
    assert client.files.retrieve(name).filename == "x y\u00e9.jsonl"


def test_the_folder_is_not_readable_for_others(serving: Serving, client: openai.OpenAI) -> None:
    name = upload(client, line("a"))
    for path in (serving.folder / "files" / name, serving.folder / "files"):
        assert Path(path).stat().st_mode & 0o077 == 0
