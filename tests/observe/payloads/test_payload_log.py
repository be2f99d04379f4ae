"""Which calls are recorded, what a record has, and that its time ends."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import PayloadsConfig, load_config
from inferd.errors import ConfigError
from inferd.events import HttpServed
from inferd.gateway.routes import ROUTES
from inferd.observe.payloads.capture import MAX_ANSWER_BYTES, Capture
from inferd.observe.payloads.content import record_of
from inferd.observe.payloads.log import MAX_WAITING, PayloadLog
from inferd.observe.payloads.redaction import Redactor
from inferd.observe.payloads.sample import is_drawn
from inferd.observe.payloads.store import PayloadStore, folder_of
from inferd.types import Usage

DAY = 86_400.0
NOON = 1_700_000_000.0 // DAY * DAY + DAY / 2
BOTH = frozenset(("prompts", "answers"))
TEXTS = {route.pattern: route.texts for route in ROUTES}
redact = Redactor(("api_key", "email", "card", "phone"))


def event(route: str = "/v1/chat/completions", tenant: str = "team-a", **changes: Any) -> HttpServed:
    base: dict[str, Any] = {"request_id": "req-1", "method": "POST", "status": 200, "duration_s": 0.5, "model": "chat"}
    return HttpServed(**(base | {"route": route, "tenant": tenant, "usage": Usage(3, 2, 0)} | changes))


class Sink:
    def offer(self, capture: Capture, event: HttpServed) -> None:
        raise AssertionError("the test takes the capture itself")


def recorded(
    request: bytes, *answer: bytes, keep: frozenset[str] = BOTH, characters: int = 10_000, **changes: Any
) -> dict[str, Any]:
    served = event(**changes)
    capture = Capture(Sink(), TEXTS[served.route])
    capture.request = request
    for part in answer:
        capture.add(part)
    line = record_of(capture, served, NOON, redact, keep, characters)
    assert line.isascii()
    assert line.decode().isprintable()
    found: dict[str, Any] = json.loads(line)
    return found


# -- a record ----------------------------------------------------------------------------------

PROMPT = json.dumps(
    {"model": "chat", "messages": [{"role": "user", "content": "I am a\u0040b.example, 4111111111111111"}]}
)
ANSWER = b'{"choices":[{"message":{"content":"write to a@b.example"},"logprobs":{"content":[{"token":"a@"}]}}]}'


def test_texts_are_kept_redacted_and_only_where_asked_for() -> None:
    found = recorded(PROMPT.encode(), ANSWER)
    assert found["request"]["body"]["messages"][0]["content"] == "I am [email], [card]"
    assert found["answer"]["body"] == {"choices": [{"message": {"content": "write to [email]"}}]}
    assert (found["tenant"], found["model"], found["status"], found["usage"]) == ("team-a", "chat", 200, [3, 2])
    assert "body" not in recorded(PROMPT.encode(), ANSWER, keep=frozenset(("answers",)))["request"]
    nothing = recorded(PROMPT.encode(), ANSWER, keep=frozenset())
    assert set(nothing["request"]) == set(nothing["answer"]) == {"bytes", "sha256"}
    assert nothing["request"]["bytes"] == len(PROMPT)


def test_a_secret_that_is_split_between_two_pieces_of_a_stream_is_redacted() -> None:
    def piece(text: str, index: int = 0) -> bytes:
        return b"data: " + json.dumps({"choices": [{"index": index, "delta": {"content": text}}]}).encode() + b"\n\n"

    found = recorded(
        b"{}", piece("4111 1111"), piece("other", 1), piece(" 1111 1111 is"), b"data: [DONE]\n\n", stream=True
    )
    assert found["answer"]["body"] == {"choices[0].content": "[card] is", "choices[1].content": "other"}


def test_the_texts_of_a_streamed_message_are_joined_by_block_and_redacted() -> None:
    def named(data: dict[str, Any], line: str = "\n") -> bytes:
        return f"event: {data['type']}{line}data: {json.dumps(data)}{line}{line}".encode()

    def delta(index: int, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": fields}

    encoded = base64.b64encode(b"think of anna@example.com").decode()
    found = recorded(
        b"{}",
        named({"type": "message_start", "message": {"id": "msg_1", "content": []}}),
        named({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}),
        named(delta(0, type="thinking_delta", thinking="who is anna@")),
        named(delta(0, type="thinking_delta", thinking="example.com"), "\r\n"),
        named(delta(0, type="signature_delta", signature=encoded)),
        named({"type": "content_block_stop", "index": 0}),
        named({"type": "ping"}),
        named(delta(1, type="text_delta", text="4111 1111")),
        named(delta(1, type="text_delta", text=" 1111 1111 is")),
        named(delta(2, type="input_json_delta", partial_json='{"to":"anna@')),
        named(delta(2, type="input_json_delta", partial_json='example.com"}')),
        named({"type": "error", "error": {"type": "api_error", "message": "the worker died"}}),
        route="/v1/messages",
        stream=True,
    )
    body = found["answer"]["body"]
    assert "the worker died" in body.pop("error")
    assert body == {"[0].thinking": "who is [email]", "[1].text": "[card] is", "[2].partial_json": '{"to":"[email]"}'}


def test_what_a_message_has_encoded_is_no_way_around_the_redaction() -> None:
    encoded = base64.b64encode(b"think of anna@example.com").decode()
    content = [
        {"type": "thinking", "thinking": "", "signature": encoded},
        {"type": "redacted_thinking", "data": encoded},
        {"type": "text", "text": "to anna@example.com"},
    ]
    body = json.dumps({"system": "be kind to b@example.com", "messages": [{"role": "assistant", "content": content}]})
    found = recorded(body.encode(), json.dumps({"content": content}).encode(), route="/v1/messages")
    assert encoded not in json.dumps(found)
    assert found["request"]["body"]["system"] == "be kind to [email]"
    assert found["request"]["body"]["messages"][0]["content"][2] == {"type": "text", "text": "to [email]"}
    assert found["answer"]["body"]["content"][2] == {"type": "text", "text": "to [email]"}


def test_an_error_within_a_stream_is_kept() -> None:
    found = recorded(b"{}", b'data: {"error":{"message":"the worker died"}}\n\n', stream=True)
    assert "the worker died" in found["answer"]["body"]["error"]


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v2/models/{model}/infer", "/rerank", "/tokenize"])
def test_predictions_are_recorded_by_size_and_digest(route: str) -> None:
    found = recorded(b'{"input":"canary"}', b"\x00\xff" * 10, route=route)
    assert found["request"]["bytes"] == 18
    assert found["answer"]["bytes"] == 20
    assert "canary" not in json.dumps(found)


def test_labels_of_classes_are_answers() -> None:
    found = recorded(b'{"inputs":"canary"}', b'[{"label":"spam","score":0.9}]', route="/predict")
    assert found["answer"]["body"] == [{"label": "spam", "score": 0.9}]
    assert "canary" not in json.dumps(found)


def test_a_body_that_is_no_json_is_never_kept() -> None:
    assert "body" not in recorded(b"a@b.example", b"{}", status=400)["request"]


def test_token_ids_images_and_long_numbers_are_no_way_around_the_redaction() -> None:
    image = "data:image/png;base64," + "A" * 1000
    body = json.dumps({"prompt": list(range(100)), "image_url": {"url": image}, "n": 4111111111111111})
    found = recorded(body.encode(), route="/v1/completions")["request"]["body"]
    assert found["prompt"] == {"token_ids": 100}
    assert found["image_url"]["url"].startswith("data:image/png;base64 (1022 characters, sha256 ")
    assert found["n"] == "[card]"


def test_a_long_text_is_cut() -> None:
    found = recorded(json.dumps({"prompt": "x" * 50_000}).encode(), route="/v1/completions", characters=100)
    assert found["request"]["cut"] is True
    assert len(json.dumps(found)) < 1000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES, st.binary(max_size=60), st.text(st.characters(codec=None), max_size=20))
def test_any_body_and_any_text_is_one_line_of_printable_ascii(value: Any, answer: bytes, name: str) -> None:
    recorded(json.dumps(value).encode(), answer, request_id=name, tenant=name, model=name)
    recorded(json.dumps(value).encode(), b"data: " + answer + b"\n\n", stream=True)


# -- which calls -------------------------------------------------------------------------------


def a_log(folder: Path, wall: Callable[[], float] = lambda: NOON, **config: Any) -> tuple[PayloadLog, list[int]]:
    dropped: list[int] = []
    made = PayloadsConfig(**({"tenants": ("team-a",), "keep": ("prompts", "answers")} | config))
    return PayloadLog(folder, made, lambda: dropped.append(1), wall=wall), dropped


def record(log: PayloadLog, served: HttpServed, unique: str = "0" * 24, request: bytes = b"{}") -> None:
    capture = log.begin(served.tenant, unique, TEXTS[served.route])
    if capture is not None:
        capture.request = request
        capture.take(b"{}")
        capture.take(b"compressed")
        capture.finish(served)


def test_only_named_tenants_and_models_are_recorded(tmp_path: Path) -> None:
    log, dropped = a_log(tmp_path, models=("chat",))
    for tenant, model in (("team-a", "chat"), ("team-b", "chat"), ("team-a", "other"), ("", "chat")):
        record(log, event(tenant=tenant, model=model))
    log.close()
    assert [(one["tenant"], one["model"]) for one in PayloadStore(tmp_path).records()] == [("team-a", "chat")]
    assert dropped == []


def test_nothing_is_written_and_no_thread_runs_by_default(tmp_path: Path) -> None:
    log = PayloadLog(tmp_path, PayloadsConfig(), lambda: None)
    assert not log.is_on
    assert log._thread is None
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_ratio_takes_its_part_of_calls_without_a_conversation(tmp_path: Path) -> None:
    """1024 draws at 1/4: outside of 190 .. 325 with a probability below 1e-5, and always the same."""
    assert 190 < sum(is_drawn("team-a", f"{index:024x}", 0.25) for index in range(1024)) < 325


def test_files_are_for_the_servers_user_alone_and_names_of_tenants_cannot_leave_the_folder(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path, tenants=("*",))
    names = ["../../etc", "..", ".", "", "a/b", "a\\b", "x" * 500, "\u202e\x1b", "A", "a", "\ud800"]
    for name in names:
        record(log, event(tenant=name))
    log.close()
    folders = list((tmp_path / "payloads").iterdir())
    assert len(folders) == len(names)
    assert list(tmp_path.iterdir()) == [tmp_path / "payloads"]
    for path in (tmp_path / "payloads").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    assert {path.name for path in folders} == {folder_of(name) for name in names}


def test_a_full_disk_and_a_full_queue_drop_records_and_count_them(tmp_path: Path) -> None:
    log, dropped = a_log(tmp_path)
    (tmp_path / "payloads").write_text("no folder can be made here")
    record(log, event())
    log.close()
    assert dropped == [1]
    record(log, event())
    assert dropped == [1, 1]


def test_more_calls_than_may_wait_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PayloadLog, "_start", lambda self: None)  # a thread that is stuck on its disk
    log, dropped = a_log(tmp_path)
    for _ in range(MAX_WAITING + 3):
        record(log, event())
    assert len(dropped) == 3
    log, dropped = a_log(tmp_path)
    for _ in range(20):
        record(log, event(), request=b"x" * MAX_ANSWER_BYTES)
    assert len(dropped) == 5  # 64 MiB wait at most


# -- the end of a record -----------------------------------------------------------------------


def test_records_are_gone_after_their_days(tmp_path: Path) -> None:
    """A canary is written, the clock moves, and the canary is in no file of the folder."""
    canary, now = b'{"prompt":"canary-7f3a"}', [NOON]
    log, _ = a_log(tmp_path, wall=lambda: now[0], keep_days=2)
    record(log, event(route="/v1/completions"), request=canary)
    log.close()

    def is_there() -> bool:
        return any(b"canary-7f3a" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    assert is_there()
    for days, kept in ((1.9, True), (2.1, False)):
        now[0] = NOON + days * DAY
        log, _ = a_log(tmp_path, wall=lambda: now[0], keep_days=2)
        log.close()
        assert is_there() is kept
    assert list((tmp_path / "payloads").iterdir()) == []


def test_they_are_deleted_also_when_recording_was_turned_off(tmp_path: Path) -> None:
    PayloadStore(tmp_path).append("team-a", b"{}\n", NOON, 1 << 20)
    PayloadLog(tmp_path, PayloadsConfig(keep_days=1), lambda: None, wall=lambda: NOON + 3 * DAY).close()
    assert list(PayloadStore(tmp_path).records()) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a", "b"])), max_size=30), st.integers(0, 60))
def test_a_purge_deletes_all_that_is_too_old_and_nothing_younger(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, str]], hours: int
) -> None:
    store = PayloadStore(tmp_path_factory.mktemp("p"))
    for at, tenant in written:
        store.append(tenant, b'{"at":%d}\n' % at, NOON + at * 3600, 1 << 30)
    store.purge(NOON + hours * 3600 + DAY, 1)
    left = sorted(one["at"] for one in store.records())
    assert left == sorted(at for at, _ in written if at + 1 > hours)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), max_size=40))
def test_the_size_of_a_tenant_has_a_bound_and_the_oldest_leave_first(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, int]]
) -> None:
    store, most = PayloadStore(tmp_path_factory.mktemp("p")), 1000
    for index, (hour, size) in enumerate(sorted(written)):
        line = b'{"i":%d,"x":"%b"}\n' % (index, b"x" * size)
        store.append("a", line, NOON + hour * 3600, most)
        assert sum(path.stat().st_size for path in store.folder.rglob("*.jsonl")) <= most + len(line)
    found = [one["i"] for one in store.records()]
    assert found == list(range(len(written) - len(found), len(written)))


def test_a_tenants_records_are_deleted_alone(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    for tenant in ("a", "b"):
        for hours in (0, 30):
            store.append(tenant, b'{"t":"%b"}\n' % tenant.encode(), NOON + hours * 3600, 1 << 20)
    assert store.delete("a", NOON + DAY) == 1
    assert len(list(store.records("a"))) == 1
    assert store.delete("a", None) == 1
    assert [one["t"] for one in store.records()] == ["b", "b"]
    assert not (store.folder / folder_of("a")).exists()


def test_a_link_in_the_folder_is_not_written_through(tmp_path: Path) -> None:
    store, outside = PayloadStore(tmp_path), tmp_path / "outside"
    store.append("a", b"{}\n", NOON, 1 << 20)
    (path,) = store.folder.rglob("*.jsonl")
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        store.append("a", b"{}\n", NOON, 1 << 20)
    assert not outside.exists()


# -- settings ----------------------------------------------------------------------------------


def test_a_pattern_without_a_bound_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "inferd.yaml"
    file.write_text(
        "payloads: {tenants: [a], patterns: {slow: '(a+)+b'}, models: [nope]}\nmodels: {m: {source: demo}}\n"
    )
    with pytest.raises(ConfigError) as refused:
        load_config(file, {}, {})
    assert "payloads.patterns.slow: '(a+)+b' cannot be used: it has a repetition without a bound" in str(refused.value)
    assert "payloads.models[0]: there is no model 'nope'" in str(refused.value)


def test_the_defaults_keep_no_text() -> None:
    assert msgspec.to_builtins(PayloadsConfig())["keep"] == ()
    assert os.environ.get("INFERD_PAYLOADS__TENANTS") is None
