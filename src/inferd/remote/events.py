"""Server-sent events in a remote server's answer: forwarded unchanged, and read for usage, errors and the end.

Only complete events are forwarded. So the event that reports the usage can be removed where the client did not ask for
it, and bytes that are no event never reach a client. Knows no connections.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from inferd.config.units import bytes_text
from inferd.remote.reports import ErrorReport, Event
from inferd.types import Usage

MAX_EVENT_BYTES: Final = 8 * 1024 * 1024

_UNREADABLE: Final = (ValueError, RecursionError)
"""What msgspec raises for bytes that are no JSON: DecodeError or UnicodeDecodeError (both are ValueErrors), and
RecursionError for JSON that is nested too deeply."""

_END = re.compile(rb"\n\r?\n")
_FIELDS: Final = (b"data", b"event", b"id", b"retry", b"")


class BadAnswer(Exception):
    """The remote server's answer is invalid. The message says how."""


class ReportedError(Exception):
    """The remote server reported an error instead of an answer, or within one. The message is the server's."""


_decoder = msgspec.json.Decoder(Event)
_json = msgspec.json.Decoder()


class EventReader:
    """Splits a stream's bytes into events, and records what they report.

    ``drop_usage``: remove the event that reports the usage, because only this server asked for it.
    """

    __slots__ = ("_drop_usage", "_rest", "broken", "finish_reasons", "is_done", "num_tokens", "usage")

    def __init__(self, *, drop_usage: bool) -> None:
        self._drop_usage = drop_usage
        self._rest = b""
        self.is_done = False  # the event ``data: [DONE]`` was read
        self.usage: Usage | None = None
        self.finish_reasons: dict[int, str] = {}
        self.num_tokens = 0  # events with a part of the text: an estimate of its tokens
        self.broken: BadAnswer | ReportedError | None = None  # why the stream cannot continue

    def feed(self, data: bytes) -> bytes:
        """Return the complete events of what was received. The rest waits for more bytes.

        Does not raise: an invalid event, or one that reports an error, sets ``broken``.
        """
        if self._rest:
            data = self._rest + data
        elif data.startswith(b"data: ") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            try:
                return data if self._note(data[6:-2]) else b""  # one event on one line, the usual case
            except (BadAnswer, ReportedError) as error:
                self.broken = error
                return b""
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
        try:
            if end < 3:
                self._keep(data)
                return b""
            self._keep(data[end:])
        except (BadAnswer, ReportedError) as error:
            self.broken = error
            return b""
        return self._several(data, end)

    def _keep(self, rest: bytes) -> None:
        if len(rest) > MAX_EVENT_BYTES:
            raise BadAnswer(f"an event is larger than {bytes_text(MAX_EVENT_BYTES)}")
        self._rest = rest

    def _several(self, data: bytes, end: int) -> bytes:
        kept: list[bytes] = []
        begin = 0
        for match in _END.finditer(data, 0, end):
            block = data[begin : match.start()]
            try:
                if self._event(block):
                    kept.append(data[begin : match.end()])
                else:
                    kept.append(block[: len(block) - len(block.lstrip(b"\r\n"))])  # empty lines before it
            except (BadAnswer, ReportedError) as error:
                self.broken = error
                return b"".join(kept)
            begin = match.end()
        kept.append(data[begin:end])  # further empty lines after the last event
        return b"".join(kept)

    def _event(self, block: bytes) -> bool:
        """Read one event. Return whether it is forwarded. Raises BadAnswer, ReportedError."""
        payload: list[bytes] = []
        for line in block.split(b"\n"):
            line = line.removesuffix(b"\r")
            name, _, value = line.partition(b":")
            if name not in _FIELDS:
                raise BadAnswer("its stream holds a line that belongs to no event")
            if name == b"data":
                payload.append(value.removeprefix(b" "))
        return self._note(b"\n".join(payload)) if payload else True

    def _note(self, payload: bytes) -> bool:
        if payload == b"[DONE]" or payload.strip() == b"[DONE]":
            self.is_done = True
            return True
        event = _decoded(payload)
        if event is None:
            self.num_tokens += 1
            return True
        if event.error is not None:
            raise ReportedError(error_text(event.error))
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                self.finish_reasons[choice.index] = choice.finish_reason
            delta = choice.delta
            if choice.text or (
                delta is not None and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
            ):
                self.num_tokens += 1
        if event.usage is None:
            return True
        self.usage = event.usage.usage()
        return bool(event.choices) or not self._drop_usage


def _decoded(payload: bytes) -> Event | None:
    """The event; None: a JSON object of an unknown form. Raises BadAnswer."""
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError:
        if isinstance(_parsed(payload), dict):
            return None
        raise BadAnswer("an event of its stream is no JSON object") from None
    except _UNREADABLE:
        raise BadAnswer("an event of its stream is no JSON") from None


def _parsed(payload: bytes) -> object:
    try:
        return _json.decode(payload)
    except _UNREADABLE:
        raise BadAnswer("its answer is no JSON") from None


def read_answer(body: bytes) -> Usage | None:
    """The usage that a complete answer reports; None: it reports none. Raises BadAnswer, ReportedError."""
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check the fields that it skips
        answer = _decoder.decode(body)
    except msgspec.ValidationError:
        if isinstance(_parsed(body), dict):
            return None
        raise BadAnswer("its answer is no JSON object") from None
    except _UNREADABLE:
        raise BadAnswer("its answer is no JSON") from None
    if answer.error is not None and not answer.choices:
        raise ReportedError(error_text(answer.error))
    return answer.usage.usage() if answer.usage is not None else None


def error_text(error: ErrorReport | str) -> str:
    """The message of a reported error: one printable line of at most 500 characters."""
    text = error if isinstance(error, str) else error.message or "it did not say which"
    return "".join(c if c.isprintable() else " " for c in text[:500])
