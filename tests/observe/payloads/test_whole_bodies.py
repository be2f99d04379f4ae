"""Whole bodies in records: kept byte for byte or not at all, and conversations whole or not at all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import PayloadsConfig
from inferd.events import HttpServed, Operation
from inferd.gateway.operations import CHAT, PREDICT
from inferd.gateway.routes import ROUTES
from inferd.observe.payloads.capture import Capture
from inferd.observe.payloads.content import AnsweredBy, record_of
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.payloads.redaction import Redactor
from inferd.observe.payloads.sample import is_drawn, unit_of
from inferd.observe.payloads.store import PayloadStore

TEXTS = {route.pattern: route.texts for route in ROUTES}
CHAT_ROUTE, INFER = "/v1/chat/completions", "/v2/models/{model}/infer"
ALL = ("api_key", "email", "card", "phone")


class Head:
    """A head with its path and headers."""

    def __init__(self, path: str, **headers: str) -> None:
        self.path = path
        self._headers = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)


class Sink:
    def offer(self, capture: Capture, event: HttpServed) -> None:
        raise AssertionError("the test takes the capture itself")


def recorded(
    body: bytes,
    answer: bytes,
    *,
    route: str = CHAT_ROUTE,
    redact: tuple[str, ...] = ALL,
    head: Head | None = None,
    stream: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    operation: Operation | None = PREDICT if route == INFER else CHAT
    base: dict[str, Any] = {"status": 200, "outcome": "done", "operation": operation, "model": "chat"}
    event = HttpServed(request_id="r", method="POST", route=route, duration_s=0.5, stream=stream, **(base | changes))
    capture = Capture(Sink(), TEXTS[route], head or Head("/v1/chat/completions"), "u")
    capture.request = body
    (capture.add if stream else capture.take)(answer)
    redactor = Redactor(redact)
    line = record_of(
        *(capture, event, 1e9, redactor, frozenset(("replay",)), 100, AnsweredBy("2", "fp_1")),
        redacts=not redactor.is_empty,
    )
    found: dict[str, Any] = json.loads(line)
    return found


def bytes_of(part: dict[str, Any]) -> bytes:
    whole = part["whole"]
    return whole["text"].encode() if "text" in whole else base64.b64decode(whole["base64"])


def chat(text: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


ANSWER = b'{"choices":[{"index":0,"message":{"content":"fine"}}]}'


def test_a_call_is_kept_with_all_that_asking_again_needs() -> None:
    head = Head("/v1/chat/completions", content_type="application/json", authorization="Bearer sk-secret")
    found = recorded(chat("hello \u00e9"), ANSWER, head=head)
    assert bytes_of(found["request"]) == chat("hello \u00e9")
    assert bytes_of(found["answer"]) == ANSWER
    assert (found["path"], found["headers"]) == ("/v1/chat/completions", {"content-type": "application/json"})
    assert (found["version"], found["fingerprint"], found["schema"]) == ("2", "fp_1", 2)
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (chat("I am anna@example.com"), ANSWER),
        (chat("hello"), ANSWER.replace(b"fine", b"ask anna@example.com")),
        (chat("hello", user="anna@example.com"), ANSWER),
        (chat("hello", tokens="anna@example.com"), ANSWER),
        (chat("hello", card=4111111111111111), ANSWER),
        (b"not json, of anna@example.com \xff", ANSWER),
    ],
)
def test_what_redaction_would_change_is_not_kept_whole(body: bytes, answer: bytes) -> None:
    found = recorded(body, answer)
    assert found["not_replayable"] == "redacted"
    assert "whole" not in found["request"]
    assert "whole" not in found["answer"]
    assert "anna" not in json.dumps(found)
    assert bytes_of(recorded(body, answer, redact=())["request"]) == body


def test_a_secret_that_a_stream_splits_is_not_kept_whole() -> None:
    pieces = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in ("anna@exam", "ple.com")]
    stream = "".join([f"data: {piece}\n\n" for piece in pieces]).encode() + b"data: [DONE]\n\n"
    assert recorded(chat("hello"), stream, stream=True)["not_replayable"] == "redacted"
    assert bytes_of(recorded(chat("hello"), stream, stream=True, redact=())["answer"]) == stream


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": 499}, "not_answered"),
        ({"status": 503, "outcome": "refused"}, "not_answered"),
        ({"outcome": "cancelled"}, "not_answered"),
        ({"operation": None}, "no_request_over_http"),
        ({"body": chat("hi", previous_response_id="resp_1")}, "depends_on_state"),
        ({"body": json.dumps({"parameters": {"sequence_id": 7}}).encode()}, "depends_on_state"),
        ({"body": json.dumps({"prompt": list(range(20))}).encode()}, "opaque"),
        ({"body": chat("data:image/png;base64," + "A" * 400)}, "opaque"),
        ({"body": b" " * (4 * 1024 * 1024 + 1)}, "too_large"),
    ],
)
def test_a_call_that_cannot_be_asked_again_says_why(changes: dict[str, Any], reason: str) -> None:
    body = changes.pop("body", chat("hi"))
    assert recorded(body, ANSWER, **changes)["not_replayable"] == reason


def test_tensors_are_kept_also_with_redaction_and_in_binary() -> None:
    pixels = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1, 20], "data": list(range(20))}]}
    head = Head("/v2/models/digits/infer", inference_header_content_length="7")
    whole = recorded(json.dumps(pixels).encode(), b'{"outputs":[]}', route=INFER, head=head)
    assert json.loads(bytes_of(whole["request"])) == pixels
    binary = b'{"a":1}' + bytes(range(256))
    found = recorded(binary, binary, route=INFER, head=head)
    assert bytes_of(found["request"]) == bytes_of(found["answer"]) == binary
    assert found["headers"] == {"inference-header-content-length": "7"}


# -- the sample --------------------------------------------------------------------------------


def test_each_call_of_a_conversation_has_the_unit_of_the_first() -> None:
    said: list[dict[str, str]] = [{"role": "system", "content": "be kind"}]
    units = set()
    for turn in range(5):
        said = [*said, {"role": "user", "content": f"question {turn}"}]
        body = json.dumps({"max_tokens": turn + 1, "messages": said}).encode()
        units.add(unit_of(Head("/"), body, f"{turn}"))
        said = [*said, {"role": "assistant", "content": "answer"}]
    assert len(units) == 1
    other = json.dumps({"messages": [{"role": "user", "content": "question 0"}]}).encode()
    assert unit_of(Head("/"), other, "0") not in units


def test_a_session_comes_before_a_user_and_a_user_before_the_messages() -> None:
    body = chat("hi", user="anna")
    assert unit_of(Head("/", x_session_id="s"), body, "1") == "session s"
    assert unit_of(Head("/"), body, "1") == "user anna"
    assert unit_of(Head("/"), chat("hi", metadata={"user_id": "b"}), "1") == "user b"
    assert unit_of(Head("/"), b"[1]", "1") == unit_of(None, b"broken", "1") == "1"


@given(st.text(), st.text(max_size=20), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_larger_ratio_keeps_the_units_of_a_smaller_one(unit: str, tenant: str, one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert is_drawn(tenant, unit, many) or not is_drawn(tenant, unit, few)
    assert is_drawn(tenant, unit, 1.0)


def test_conversations_are_recorded_whole_or_not_at_all(tmp_path: Path) -> None:
    """By a session header, which the event loop draws, and by their messages, which the thread draws."""
    config = PayloadsConfig(tenants=("team-a",), keep=("replay",), ratio=0.5)
    log = PayloadLog(tmp_path, config, lambda: None)
    kept = {"session": set(), "messages": set()}  # type: dict[str, set[str]]
    for number in range(40):
        for kind in kept:
            for turn in range(3):
                name = f"{kind} {number}"
                head = Head("/v1/chat/completions", **({"x_session_id": name} if kind == "session" else {}))
                capture = log.begin("team-a", f"{number}-{turn}", TEXTS[CHAT_ROUTE], head)
                if capture is not None:
                    messages = [{"role": "user", "content": name}] + [{"role": "assistant", "content": "x"}] * turn
                    capture.request = json.dumps({"messages": messages}).encode()
                    capture.take(ANSWER)
                    served = HttpServed(
                        *(), request_id=name, method="POST", route=CHAT_ROUTE, status=200, duration_s=0.1,
                        tenant="team-a", operation=CHAT, outcome="done",
                    )  # fmt: skip
                    capture.finish(served)
    log.close(30)
    counts: dict[str, int] = {}
    for one in PayloadStore(tmp_path).records():
        counts[one["request_id"]] = counts.get(one["request_id"], 0) + 1
    assert set(counts.values()) == {3}
    for kind in kept:
        assert 5 < sum(name.startswith(kind) for name in counts) < 35


def test_the_configuration_of_a_ratio_is_between_nothing_and_all() -> None:
    for ratio in (0, 1.5):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"tenants": ["a"], "ratio": ratio}, PayloadsConfig)
