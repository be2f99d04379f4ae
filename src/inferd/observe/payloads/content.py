"""The record of a captured call: what of its body and of its answer is kept, redacted.

Texts are kept where the route has some (``texts.py``): of calls for text, and of classes. Bodies of embeddings,
predictions and everything else are recorded by their size and SHA-256. Whole bodies are in ``whole.py``.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from inferd.events import HttpServed
from inferd.observe.payloads.capture import Capture
from inferd.observe.payloads.redaction import Redactor
from inferd.observe.payloads.whole import keep_whole
from inferd.types import JSON
from inferd.worker.log_lines import encoded
from inferd.worker.timestamp import timestamp

SCHEMA: Final = 2
"""Of a record. The first had no number, and no whole bodies."""

_CLIENT_LEFT: Final = 499  # the status of a call whose client left before its answer was whole
_MAX_DEPTH: Final = 64
_LONG_NUMBER: Final = 10**8


class AnsweredBy(NamedTuple):
    """The version of a model that answered a call."""

    version: str  # its name in the configuration
    fingerprint: str  # of everything that decides its answers; empty: unknown


UNKNOWN: Final = AnsweredBy("", "")


class Writer:
    """Copies JSON values with redacted texts, up to a number of characters.

    ``open_fields``: the texts of these fields may be cut anywhere, so that their ends may be beginnings of matches.
    """

    def __init__(
        self,
        redact: Redactor,
        max_characters: int,
        left_out: frozenset[str],
        open_fields: frozenset[str] = frozenset(),
    ) -> None:
        self._redact = redact
        self._left_out = left_out
        self._open_fields = open_fields
        self._left = max_characters
        self.is_cut = False

    def copied(self, value: Any, depth: int = 0, *, is_open: bool = False) -> Any:
        """``is_open``: the text was cut."""
        if isinstance(value, str):
            return self._text(value, is_open=is_open)
        if isinstance(value, dict):
            if depth >= _MAX_DEPTH:
                self.is_cut = True
                return {}
            return {
                self._text(key): self.copied(below, depth + 1, is_open=key.rpartition(".")[2] in self._open_fields)
                for key, below in value.items()
                if key not in self._left_out
            }
        if isinstance(value, list):
            if len(value) > 8 and all(isinstance(one, int) for one in value):
                return {"token_ids": len(value)}
            if depth >= _MAX_DEPTH:
                self.is_cut = True
                return []
            return [self.copied(one, depth + 1) for one in value]
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= _LONG_NUMBER:
            text = str(int(value)) if value == value and abs(value) < 1e30 else str(value)
            redacted = self._redact(text)
            return value if redacted == text else redacted
        return value

    def _text(self, text: str, *, is_open: bool = False) -> str:
        if text.startswith("data:") and len(text) > 256:
            head = text[:64].partition(",")[0]
            digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
            return f"{head} ({len(text)} characters, sha256 {digest})"
        searched = text[: self._left + 4096]  # a match at the cut must be whole to be recognised
        redacted = self._redact(searched, is_cut=is_open and len(searched) == len(text))
        if len(redacted) > self._left or len(searched) < len(text):
            self.is_cut = True
            redacted = redacted[: self._left]
        self._left -= len(redacted)
        return redacted


def record_of(
    capture: Capture,
    event: HttpServed,
    at: float,
    redact: Redactor,
    keep: frozenset[str],
    max_characters: int,
    answered_by: AnsweredBy = UNKNOWN,
    *,
    redacts: bool = True,
) -> bytes:
    """One line of JSON in ASCII. ``redacts``: ``redact`` changes some texts."""
    answer = b"".join(capture.answer)
    usage = event.usage
    timings = event.timings
    line: JSON = {
        "schema": SCHEMA,
        "at": timestamp(at),
        "request_id": event.request_id[:256],
        "tenant": event.tenant,
        "key_id": event.key_id,
        "model": event.model,
        "version": answered_by.version,
        "fingerprint": answered_by.fingerprint,
        "route": event.route,
        "status": event.status,
        "outcome": event.outcome,
        "error_code": event.error_code,
        "stream": event.stream,
        "duration_s": round(event.duration_s, 6),
        "first_s": None if timings is None or timings.first_token is None else round(timings.first_token, 6),
        "usage": None if usage is None else [usage.prompt_tokens, usage.completion_tokens],
        "request": _sized(capture.request or b"", False),
        "answer": _sized(answer, capture.is_cut),
    }
    texts = capture.texts
    if texts is not None:
        is_streamed = event.stream and not capture.is_whole
        asked = texts.of_request(capture.request or b"") if "prompts" in keep else None
        told = texts.of_answer(capture.answer, is_streamed=is_streamed) if answer and "answers" in keep else None
        open_fields = texts.generated if _may_be_cut(capture, event) else frozenset[str]()
        _keep(line["request"], asked, Writer(redact, max_characters, texts.left_out))
        _keep(line["answer"], told, Writer(redact, max_characters, texts.left_out, open_fields))
    if "replay" in keep:
        keep_whole(line, capture, event, redact if redacts else None)
    return encoded(line).encode("ascii")


def _may_be_cut(capture: Capture, event: HttpServed) -> bool:
    """Whether texts of the answer may be cut: its client left, it failed, or it reached a limit."""
    return (
        capture.is_cut
        or event.status == _CLIENT_LEFT
        or event.outcome not in (None, "done")
        or "length" in event.finish_reasons
    )


def _sized(data: bytes, is_cut: bool) -> JSON:
    if is_cut:
        return {"bytes": len(data), "cut": True}
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _keep(line: JSON, value: Any, writer: Writer) -> None:
    if value is None:
        return
    line["body"] = writer.copied(value)
    if writer.is_cut:
        line["cut"] = True
