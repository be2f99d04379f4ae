"""Whole bodies of a call, for ``inferd replay``: the bytes of its request and of its answer, or why they are not kept.

A body is kept as it is or not at all. It is not kept where redaction would change one of its texts, or where it has
texts in a form in which nothing can be recognised. Without patterns of redaction every body is kept.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from inferd.events import HttpServed
from inferd.observe.payloads.capture import Capture
from inferd.observe.payloads.texts import REPEATED
from inferd.types import JSON

MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
KEPT_HEADERS: Final = ("content-type", "inference-header-content-length", "anthropic-version", "anthropic-beta")
"""Headers that decide what a request asks for. Keys and cookies are never among them."""

_ANSWERED: Final = frozenset((200, 400, 404, 413, 415, 422))
"""Statuses that the request alone decides, not the load of the server."""

_MAX_DEPTH: Final = 64
_LONG_NUMBER: Final = 10**8
_TOKEN_IDS: Final = 8  # more integers in a row may be a text

_any: Final = msgspec.json.Decoder()

Redact = Callable[[str], str]


class _Refused(Exception):
    """The body is not kept; the message is the reason, as a word."""


def keep_whole(line: JSON, capture: Capture, event: HttpServed, redact: Redact | None) -> None:
    """Add the fields of a call that can be asked again to its record, or ``not_replayable`` with the reason.

    ``redact``: replaces what must not be kept; None: everything may be kept.
    """
    try:
        asked, told = _checked(capture, event, redact)
    except _Refused as refused:
        line["not_replayable"] = str(refused)
        return
    head = capture.head
    assert head is not None, "without one it is refused"
    headers = {name: head.header(name.encode()) for name in KEPT_HEADERS}
    line["path"] = head.path
    line["headers"] = {name: value.decode("latin-1") for name, value in headers.items() if value is not None}
    line["request"]["whole"] = _encoded(asked)
    line["answer"]["whole"] = _encoded(told)


def _checked(capture: Capture, event: HttpServed, redact: Redact | None) -> tuple[bytes, bytes]:
    if capture.head is None or event.method != "POST" or event.operation is None:
        raise _Refused("no_request_over_http")
    if event.status not in _ANSWERED or event.outcome not in (None, "done", "refused"):
        raise _Refused("not_answered")
    asked, told = capture.request or b"", b"".join(capture.answer)
    if capture.is_cut or len(asked) > MAX_REQUEST_BYTES:
        raise _Refused("too_large")
    document = _json(asked)
    if isinstance(document, dict) and _depends_on_state(document):
        raise _Refused("depends_on_state")
    if redact is None:
        return asked, told
    generates = event.operation.generates
    _check(asked, document, redact, generates)
    if redact(capture.head.path) != capture.head.path:
        raise _Refused("redacted")
    if event.stream and not capture.is_whole:
        for data in _events(told):
            _check(data, _json(data), redact, False)
    else:
        _check(told, _json(told), redact, False)
    texts = capture.texts
    if texts is not None and generates:
        opaque = texts.left_out - REPEATED
        if any(_has(_json(data), opaque, 0) for data in (asked, *_events(told), told)):
            raise _Refused("opaque")
        joined = texts.of_answer(capture.answer, is_streamed=event.stream and not capture.is_whole)
        _walk(joined, redact, False, 0)
    return asked, told


def _depends_on_state(document: JSON) -> bool:
    parameters = document.get("parameters")
    return any(document.get(name) for name in ("previous_response_id", "conversation", "background")) or (
        isinstance(parameters, dict) and bool(parameters.get("sequence_id"))
    )


def _check(data: bytes, document: Any, redact: Redact, generates: bool) -> None:
    """Raises _Refused where a body may not be kept. ``generates``: many integers in a row may be a text."""
    if document is not None:
        _walk(document, redact, generates, 0)
        return
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")  # texts among binary tensors are still found, as far as they are ASCII
    if redact(text) != text:
        raise _Refused("redacted")


def _walk(value: Any, redact: Redact, generates: bool, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise _Refused("opaque")
    if isinstance(value, str):
        if value.startswith("data:") and len(value) > 256:
            raise _Refused("opaque")
        if redact(value) != value:
            raise _Refused("redacted")
    elif isinstance(value, dict):
        for key, below in value.items():
            _walk(key, redact, generates, depth + 1)
            _walk(below, redact, generates, depth + 1)
    elif isinstance(value, list):
        if _are_small(value):
            if generates and len(value) > _TOKEN_IDS and all(isinstance(one, int) for one in value):
                raise _Refused("opaque")
            return
        for one in value:
            _walk(one, redact, generates, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= _LONG_NUMBER:
        text = str(int(value)) if value == value and abs(value) < 1e30 else str(value)
        if redact(text) != text:
            raise _Refused("redacted")


def _are_small(values: list[Any]) -> bool:
    """Whether all values are numbers too small to be a card's or a phone's. Large tensors are checked without a loop
    in Python."""
    try:
        return bool(values) and min(values) > -_LONG_NUMBER and max(values) < _LONG_NUMBER
    except TypeError:
        return False


def _has(value: Any, names: frozenset[str], depth: int) -> bool:
    """Whether one of the fields has a value."""
    if not names or depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return any((key in names and bool(below)) or _has(below, names, depth + 1) for key, below in value.items())
    return isinstance(value, list) and any(_has(one, names, depth + 1) for one in value)


def _events(answer: bytes) -> Iterator[bytes]:
    """The data of the server-sent events of an answer."""
    for event in answer.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])
        if data and data != b"[DONE]":
            yield data


def _json(data: bytes) -> Any:
    """None: it is no JSON."""
    try:
        return _any.decode(data)
    except (ValueError, RecursionError):
        return None


def _encoded(data: bytes) -> JSON:
    try:
        return {"text": data.decode("utf-8"), "sha256": hashlib.sha256(data).hexdigest()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii"), "sha256": hashlib.sha256(data).hexdigest()}
