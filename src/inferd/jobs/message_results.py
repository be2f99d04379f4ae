"""The lines of a message batch's results, in the form of Anthropic's Message Batches API: all in one file."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.jobs.batch import MESSAGES, Problem
from inferd.jobs.results import EARLY, LINES, Answer, Form, one_line

_encode: Final = msgspec.json.Encoder().encode


class _Succeeded(msgspec.Struct, frozen=True, tag="succeeded"):
    message: msgspec.Raw


class _Errored(msgspec.Struct, frozen=True, tag="errored"):
    error: msgspec.Raw


class _Canceled(msgspec.Struct, frozen=True, tag="canceled"):
    pass


class _Expired(msgspec.Struct, frozen=True, tag="expired"):
    pass


class MessageLine(msgspec.Struct, frozen=True):
    """A line of the results: the id of a request, and what became of it."""

    custom_id: str | None
    result: _Succeeded | _Errored | _Canceled | _Expired


class _Reason(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    kind: str
    message: str


class _Error(msgspec.Struct, frozen=True, tag="error"):
    error: _Reason
    request_id: str


_ENDED: Final[dict[str, _Canceled | _Expired]] = {EARLY["cancelled"][0]: _Canceled(), EARLY["expired"][0]: _Expired()}
_FAILED: Final = EARLY["failed"][0]


def _answered(name: str, custom_id: str | None, answer: Answer) -> bytes:
    body = msgspec.Raw(one_line(answer.body))
    return _encode(MessageLine(custom_id, _Errored(body) if answer.is_error else _Succeeded(body))) + b"\n"


def _refused(name: str, custom_id: str | None, problem: Problem) -> bytes:
    ended: _Errored | _Canceled | _Expired | None = _ENDED.get(problem.code)
    if ended is None:
        kind = "api_error" if problem.code == _FAILED else "invalid_request_error"
        ended = _Errored(msgspec.Raw(_encode(_Error(_Reason(kind, problem.message), name))))
    return _encode(MessageLine(custom_id, ended)) + b"\n"


MESSAGE_LINES: Final = Form("output", _answered, _refused)


def form_of(endpoint: str) -> Form:
    """The form of the results of a batch for this endpoint."""
    return MESSAGE_LINES if endpoint == MESSAGES else LINES
