"""Recorded requests as ``inferd payloads export`` prints them: which of them can be asked again, and why others cannot.

Knows the form of a record. A file is read line by line, so its size is no limit.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.types import JSON

SCHEMA: Final = 2
"""Of the records that are understood."""

REASONS: Final = {
    "redacted": "its texts were redacted",
    "opaque": "it has texts that redaction cannot read",
    "not_answered": "it was not answered, or for reasons of that moment",
    "too_large": "its body or its answer was too large to be kept",
    "depends_on_state": "it depends on a stored response, a sequence or a background task",
    "no_request_over_http": "it was no request over HTTP to a model",
    "no_bodies": "its whole bodies were not kept; payloads.keep has no 'replay'",
    "schema": "it was written by an earlier version of inferd, without whole bodies",
    "other_model": "it is of another model",
}


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and the answer that it had."""

    request_id: str
    route: str  # the pattern
    path: str
    headers: dict[str, str]
    model: str  # its name in the configuration
    version: str
    fingerprint: str  # empty: unknown
    status: int
    is_stream: bool
    duration_s: float
    first_s: float | None
    usage: tuple[int, int] | None  # prompt and answer, in tokens
    body: bytes
    answer: bytes


def read(file: Path | None, skipped: dict[str, int]) -> Iterator[Recorded]:
    """The records of a file (None: of stdin) that can be asked again; the others are counted in ``skipped`` by their
    reason, a key of ``REASONS``. Raises InvalidRequest, with the line."""
    try:
        with sys.stdin.buffer if file is None else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found = _record(line, f"line {number} of {'the records' if file is None else file}")
                    if isinstance(found, Recorded):
                        yield found
                    else:
                        skipped[found] = skipped.get(found, 0) + 1
    except OSError as error:
        raise InvalidRequest(f"The records {file} cannot be read ({error.strerror}).", param="from") from None


def _record(line: bytes, place: str) -> Recorded | str:
    """A record, or why it cannot be asked again."""
    try:
        found: Any = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        cut = "" if line.endswith(b"\n") else " The file ends within the record: it was cut off, so export it again."
        raise InvalidRequest(f"{place} is no record: it is not valid JSON.{cut}", param="from") from None
    if not isinstance(found, dict) or not {"request", "answer", "route"} <= found.keys():
        raise InvalidRequest(
            f"{place} is no record; 'inferd payloads export' prints records, one a line.", param="from"
        )
    schema = found.get("schema", 1)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise InvalidRequest(
            f"{place} has schema {str(schema)[:20]}, and this version of inferd reads records up to {SCHEMA}; use the "
            "version that wrote them, or a newer one.",
            param="from",
        )
    if schema < SCHEMA:
        return "schema"
    reason = found.get("not_replayable")
    if reason is not None:
        return str(reason) if reason in REASONS else "not_answered"
    if not all(isinstance(found[part], dict) and "whole" in found[part] for part in ("request", "answer")):
        return "no_bodies"
    try:
        return _typed(found)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InvalidRequest(f"{place} is damaged ({error}); export the records again.", param="from") from None


def _typed(found: JSON) -> Recorded:
    usage = found["usage"]
    fields = {
        "request_id": found["request_id"],
        "route": found["route"],
        "path": found["path"],
        "headers": found["headers"],
        "model": found["model"] or "",
        "version": found["version"],
        "fingerprint": found["fingerprint"],
        "status": found["status"],
        "is_stream": found["stream"],
        "duration_s": found["duration_s"],
        "first_s": found["first_s"],
        "usage": None if usage is None else tuple(usage),
        "body": _bytes_of(found["request"]["whole"]),
        "answer": _bytes_of(found["answer"]["whole"]),
    }
    return msgspec.convert(fields, Recorded)


def _bytes_of(whole: JSON) -> bytes:
    data = whole["text"].encode() if "text" in whole else base64.b64decode(whole["base64"], validate=True)
    if hashlib.sha256(data).hexdigest() != whole["sha256"]:
        raise ValueError("a body does not have the digest that was recorded")
    return bytes(data)
