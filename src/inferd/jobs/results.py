"""The lines of a batch's files of results, in the form of OpenAI's Batch API, and what an answer tells of its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from inferd.jobs.batch import Ending, Problem, Tokens
from inferd.jobs.folder import Kind


class Answer(NamedTuple):
    """What a request was answered with."""

    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.status >= 400


class Form(NamedTuple):
    """How results are written: the file for errors, and the lines of an answer and of a request that was not asked."""

    errors: Kind
    answered: Callable[[str, str | None, Answer], bytes]
    refused: Callable[[str, str | None, Problem], bytes]


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class ResultLine(msgspec.Struct, frozen=True):
    """A line of a file of results."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None  # of Anthropic's answers, whose input_tokens leave them out


class _Used(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_used_decoder: Final = msgspec.json.Decoder(_Used)
_encode: Final = msgspec.json.Encoder().encode
_json: Final = msgspec.json.Decoder()

EARLY: Final[dict[Ending, tuple[str, str]]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expired": ("batch_expired", "The completion window ended before this request was answered."),
    "failed": ("batch_failed", "The batch failed before this request was answered; the batch says why."),
}
"""The errors of requests that were not asked because their batch ended."""


def request_id(batch_id: str, line: int) -> str:
    """The id of the request of a line: the same each time that it is asked."""
    return "batch_req_" + hashlib.blake2b(f"{batch_id}:{line}".encode(), digest_size=16).hexdigest()


def answered(name: str, custom_id: str | None, answer: Answer) -> bytes:
    """The line of an answer. ``name``: of ``request_id``."""
    response = _Response(answer.status, name, msgspec.Raw(one_line(answer.body)))
    return _encode(ResultLine(name, custom_id, response, None)) + b"\n"


def refused(name: str, custom_id: str | None, problem: Problem) -> bytes:
    """The line of a request that was not asked."""
    error = _Error(problem.code, problem.message, problem.line, problem.param)
    return _encode(ResultLine(name, custom_id, None, error)) + b"\n"


LINES: Final = Form("errors", answered, refused)


def tokens_of(body: bytes) -> Tokens:
    """The tokens that an answer reports; none for an answer that reports none."""
    try:
        usage = _used_decoder.decode(body).usage
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Tokens()
    if usage is None:
        return Tokens()
    of_input = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    of_output = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    read = usage.cache_read_input_tokens or 0
    return Tokens(
        usage.prompt_tokens + usage.input_tokens + read,
        of_input.cached_tokens + read,
        usage.completion_tokens + usage.output_tokens,
        of_output.reasoning_tokens,
    )


def one_line(body: bytes) -> bytes:
    """The body as JSON on one line. A body that is not JSON, such as tensors in bytes, becomes a JSON text."""
    try:
        value = _json.decode(body)
    except (ValueError, RecursionError):
        return _encode(body.decode("utf-8", "replace"))
    return _encode(value) if b"\n" in body else body
