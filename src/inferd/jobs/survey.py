"""What the lines of a batch's input are: requests, or what is wrong with them.

A line is ``{"custom_id", "method", "url", "body"}`` (OpenAI's Batch API). A wrong line is answered with an error of its
own, and the others go on. The survey reads the whole input once, before the first request: it counts the requests and
finds the ids that are there twice. Surveys of the same file are equal.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from inferd.config.units import bytes_text
from inferd.jobs.batch import MAX_PROBLEMS, MESSAGES, Place, Problem
from inferd.jobs.lines import Line, Lines

MAX_ID_CHARS: Final = 512
_SHOWN: Final = 64
_BINARY: Final = (b"\x1f\x8b", b"PK\x03\x04", b"\xff\xfe", b"\xfe\xff", b"PAR1")


class _Envelope(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Named(msgspec.Struct, frozen=True):
    """What is read of a line that is not a request."""

    custom_id: Any = None


class _Body(msgspec.Struct, frozen=True):
    """What is read of a request. The server checks it when it is asked."""

    model: str | None = None
    stream: bool | None = None
    background: bool | None = None


_envelope_decoder: Final = msgspec.json.Decoder(_Envelope)
_named_decoder: Final = msgspec.json.Decoder(_Named)
_body_decoder: Final = msgspec.json.Decoder(_Body)


class Question(NamedTuple):
    """A line that is a request."""

    line: Line
    custom_id: str
    body: bytes
    model: str | None


class Fault(NamedTuple):
    """A line that is no request."""

    line: Line
    custom_id: str | None
    problem: Problem


class Survey(NamedTuple):
    total: int  # lines that are not blank
    model: str | None  # of the first request
    repeated: frozenset[int]  # numbers of the lines whose custom_id an earlier line has
    problems: tuple[Problem, ...]  # the first ones
    refusal: Problem | None = None  # why the whole file is refused


class Reading(NamedTuple):
    """How lines are read: the endpoint of the batch, the longest line, and what the survey has found."""

    endpoint: str
    max_line_bytes: int
    model: str | None = None
    repeated: frozenset[int] = frozenset()

    def read(self, line: Line) -> Question | Fault:
        """What a line is that is not blank."""
        if line.data is None:
            size = line.end.offset - line.begin.offset
            return _fault(
                *(line, None, "line_too_long", None),
                f"it has {bytes_text(size)}, and a line may have {bytes_text(self.max_line_bytes)} "
                "(server.max_body_bytes); send less.",
            )
        try:
            envelope = _envelope_decoder.decode(line.data)
        except msgspec.ValidationError as error:
            return _fault(
                *(line, _name_in(line.data), "invalid_line", _field(str(error))),
                f"{error}; a line is an object with custom_id, method, url and body.",
            )
        except (ValueError, RecursionError) as error:
            return _fault(line, None, "invalid_json", None, f"it is not valid JSON ({error}); write one object a line.")
        name = envelope.custom_id
        if not 0 < len(name) <= MAX_ID_CHARS:
            return _fault(
                *(line, name[:MAX_ID_CHARS] or None, "invalid_custom_id", "custom_id"),
                f"custom_id must have 1 to {MAX_ID_CHARS} characters, not {len(name)}.",
            )
        if line.number in self.repeated:
            return _fault(
                *(line, name, "duplicate_custom_id", "custom_id"),
                f"an earlier line has the custom_id {_shown(name)} too; give each line an id of its own.",
            )
        if envelope.method != "POST":
            return _fault(
                *(line, name, "invalid_method", "method"), f"method must be POST, not {_shown(envelope.method)}."
            )
        if envelope.url != self.endpoint:
            return _fault(
                *(line, name, "mismatched_endpoint", "url"),
                f"url is {_shown(envelope.url)}, and the batch is for {self.endpoint}; make a batch for each endpoint.",
            )
        body = bytes(envelope.body)
        try:
            read = _body_decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _fault(line, name, "invalid_body", "body", f"body is not a request ({error}).")
        for field, value in (("stream", read.stream), ("background", read.background)):
            if value:
                return _fault(
                    *(line, name, "unsupported_value", f"body.{field}"),
                    f"{field} cannot be true in a batch; leave it out.",
                )
        if self.model is not None and read.model != self.model and self.endpoint != MESSAGES:
            asked = "no model is named" if read.model is None else f"the model is {_shown(read.model)}"
            return _fault(
                *(line, name, "mismatched_model", "body.model"),
                f"{asked}, and the first request of the file asks {_shown(self.model)}; make a batch for each model.",
            )
        return Question(line, name, body, read.model)


def refuse_binary(begin: bytes) -> str | None:
    """Why a file that begins so has no lines of JSON; None: it may have them."""
    if begin.startswith(_BINARY) or b"\x00" in begin:
        return "The file is not UTF-8 text; upload JSON lines as UTF-8, not compressed."
    return None


def survey(file: BinaryIO, endpoint: str, max_line_bytes: int, max_lines: int) -> Survey:
    """Read all lines. Takes some 100 bytes for each of them, until it returns. Raises OSError."""
    lines = Lines(file, Place(), max_line_bytes)
    reading = Reading(endpoint, max_line_bytes)
    key = os.urandom(16)
    seen: set[bytes] = set()
    repeated: set[int] = set()
    problems: list[Problem] = []
    total = num_questions = 0
    while (line := lines.read()) is not None:
        if line.is_blank:
            continue
        total += 1
        if total > max_lines:
            refusal = Problem(
                "too_many_lines", f"The file has more than {max_lines} lines (jobs.max_lines); make several files."
            )
            return Survey(0, reading.model, frozenset(), (), refusal)
        found = reading.read(line)
        if isinstance(found, Question):
            digest = hashlib.blake2b(found.custom_id.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()
            if digest in seen:
                repeated.add(line.number)
                found = reading._replace(repeated=frozenset((line.number,))).read(line)
            else:
                seen.add(digest)
        if isinstance(found, Question):
            num_questions += 1
            if reading.model is None and found.model is not None:
                reading = reading._replace(model=found.model)
        elif len(problems) < MAX_PROBLEMS:
            problems.append(found.problem)
    if not total:
        return Survey(
            0, None, frozenset(), (), Problem("empty_file", "The file has no lines; write one request a line.")
        )
    if not num_questions:
        refusal = Problem("no_requests", "No line of the file is a request; errors.data says what is wrong with them.")
        return Survey(0, None, frozenset(), tuple(problems), refusal)
    return Survey(total, reading.model, frozenset(repeated), tuple(problems))


def _fault(line: Line, name: str | None, code: str, param: str | None, message: str) -> Fault:
    return Fault(line, name, Problem(code, f"Line {line.number}: {message}", line.number, param))


def _name_in(data: bytes) -> str | None:
    try:
        name = _named_decoder.decode(data).custom_id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARS else None


def _field(message: str) -> str | None:
    """The field that msgspec complains of."""
    return next((name for name in ("custom_id", "method", "url", "body") if name in message), None)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
