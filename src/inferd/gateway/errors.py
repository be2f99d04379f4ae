"""The table from kinds of errors to HTTP status codes, the error bodies, and the errors that exist only in HTTP.

Code outside the gateway raises errors and does not know their status codes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from inferd.errors import (
    Cancelled,
    DeadlineExceeded,
    InferdError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QuotaExceeded,
    Unauthenticated,
    from_failure,
)
from inferd.errors import printable as printable
from inferd.types import End


class RouteNotFound(InferdError):
    kind = "route_not_found"
    default_code = "route_not_found"


class RequestNotFound(InferdError):
    """No call with this id is among those that are kept, or it is another tenant's."""

    kind = "request_not_found"
    default_code = "request_not_found"


class MethodNotAllowed(InferdError):
    kind = "method_not_allowed"
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(InferdError):
    kind = "body_too_large"
    default_code = "request_too_large"


class BodyTimeout(InferdError):
    kind = "body_timeout"
    default_code = "request_timeout"


class UpgradeRequired(InferdError):
    """The route speaks another protocol: a WebSocket, or HTTP where a WebSocket was asked for."""

    kind = "upgrade_required"
    default_code = "upgrade_required"

    def __init__(self, message: str, *, protocol: str = "websocket") -> None:
        super().__init__(message)
        self.protocol = protocol


class Unsupported(InferdError):
    """A call of a protocol that this server does not serve."""

    kind = "unsupported"
    default_code = "unsupported"


class UnsupportedMediaType(InferdError):
    kind = "unsupported_media_type"
    default_code = "unsupported_media_type"


class ErrorKind(NamedTuple):
    status: int
    type: str
    retry_after_s: int | None = None


TABLE: Final[dict[str, ErrorKind]] = {
    "internal": ErrorKind(500, "server_error"),
    "invalid_request": ErrorKind(400, "invalid_request_error"),
    "context_length_exceeded": ErrorKind(400, "invalid_request_error"),
    "unauthenticated": ErrorKind(401, "authentication_error"),
    "forbidden": ErrorKind(403, "permission_error"),
    "quota_exceeded": ErrorKind(429, "rate_limit_error", retry_after_s=1),
    "idempotency_conflict": ErrorKind(409, "invalid_request_error"),
    "upstream_failed": ErrorKind(502, "server_error"),
    "model_not_found": ErrorKind(404, "invalid_request_error"),
    "key_not_found": ErrorKind(404, "invalid_request_error"),
    "request_not_found": ErrorKind(404, "invalid_request_error"),
    "stored_not_found": ErrorKind(404, "invalid_request_error"),
    "state_unavailable": ErrorKind(503, "server_error", retry_after_s=1),
    "overloaded": ErrorKind(503, "server_error", retry_after_s=1),
    "unavailable": ErrorKind(503, "server_error", retry_after_s=1),
    "worker_died": ErrorKind(503, "server_error", retry_after_s=1),
    "deadline_exceeded": ErrorKind(408, "timeout_error"),
    "cancelled": ErrorKind(503, "server_error", retry_after_s=1),
    "model_load": ErrorKind(503, "server_error"),
    "config": ErrorKind(500, "server_error"),
    "quality": ErrorKind(500, "server_error"),  # raised by `inferd quantize` alone, which serves no client
    "route_not_found": ErrorKind(404, "invalid_request_error"),
    "method_not_allowed": ErrorKind(405, "invalid_request_error"),
    "body_too_large": ErrorKind(413, "invalid_request_error"),
    "body_timeout": ErrorKind(408, "invalid_request_error"),
    "unsupported": ErrorKind(501, "invalid_request_error"),
    "upgrade_required": ErrorKind(426, "invalid_request_error"),
    "unsupported_media_type": ErrorKind(415, "invalid_request_error"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error answer, unless a dialect has another one."""

    error: ErrorDetail


class ErrorText(msgspec.Struct, frozen=True):
    """The body of an error answer in KServe's dialects."""

    error: str


class ErrorWords(msgspec.Struct, frozen=True):
    """The body of an error answer in text-embeddings-inference's dialect."""

    error: str
    error_type: str


CLIENT_LEFT: Final = 499
MAX_MESSAGE_CHARS: Final = 2000


# Codes whose status differs from their kind's.
_BY_CODE: Final[dict[str, int]] = {
    "headers_too_large": 431,
    "idempotency_key_reused": 422,
    "upstream_connect_timeout": 504,
    "upstream_first_byte_timeout": 504,
    "upstream_idle_timeout": 504,
}


def kind_of(error: InferdError) -> ErrorKind:
    """The status, type and retry time of an error. The error's code may override the status of its kind."""
    kind = TABLE.get(error.kind, TABLE["internal"])
    status = _BY_CODE.get(error.code or "")
    return kind if status is None else kind._replace(status=status)


def error_body(error: InferdError, request_id: str = "") -> bytes:
    """The JSON body of an error. An error whose kind is not in ``TABLE`` is shown as an internal error."""
    error = known_error(error)
    detail = ErrorDetail(printable(error.message, MAX_MESSAGE_CHARS), kind_of(error).type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_text(error: InferdError, request_id: str = "") -> bytes:
    """As ``error_body``, in KServe's form."""
    return msgspec.json.encode(ErrorText(printable(known_error(error).message, MAX_MESSAGE_CHARS)))


def error_words(error: InferdError, request_id: str = "") -> bytes:
    """As ``error_body``, in the form of text-embeddings-inference."""
    status = kind_of(known_error(error)).status
    kind = "Overloaded" if status in (429, 503) else "Validation" if status < 500 else "Backend"
    return msgspec.json.encode(ErrorWords(printable(known_error(error).message, MAX_MESSAGE_CHARS), kind))


def known_error(error: InferdError) -> InferdError:
    """The error, or an internal error in the place of one whose kind is not in ``TABLE``."""
    if error.kind in TABLE:
        return error
    return InternalError("The server met an internal error; the log has the details.")


class ErrorShape(NamedTuple):
    """The form of a dialect's errors."""

    wire: type[msgspec.Struct]  # of a body, for the OpenAPI document
    encode: Callable[[InferdError, str], bytes]  # the body of an error; the text is the request's id
    event: bytes = b"data: "  # before the body of an error that ends a stream
    event_end: bytes = b"\n\n"  # behind it
    id_header: bytes = b""  # that has the request's id in every answer, beside x-request-id


OPENAI_ERRORS: Final = ErrorShape(ErrorBody, error_body)
KSERVE_ERRORS: Final = ErrorShape(ErrorText, error_text)
TEI_ERRORS: Final = ErrorShape(ErrorWords, error_words)


def error_headers(error: InferdError) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of an error answer, such as ``retry-after`` and ``allow``."""
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", error.allow.encode("ascii")),)
    if isinstance(error, UpgradeRequired):
        return ((b"upgrade", error.protocol.encode("ascii")), (b"connection", b"upgrade"))
    if isinstance(error, Unauthenticated):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, BodyTimeout):
        return ((b"connection", b"close"),)  # the rest of the body is not read
    if isinstance(error, DeadlineExceeded):
        return ((b"x-should-retry", b"false"),)  # OpenAI's clients would retry a 408 after their own deadline
    retry_after_s = kind_of(error).retry_after_s
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        retry_after_s = max(1, math.ceil(min(error.retry_after_s, 86_400.0)))
    if retry_after_s is None:
        return ()
    headers = ((b"retry-after", str(retry_after_s).encode("ascii")),)
    return (*headers, *error.headers) if isinstance(error, QuotaExceeded) else headers


def shown(value: object, limit: int = 64) -> str:
    """A client's value as a part of a message: on one line, with at most about ``limit`` characters."""
    if isinstance(value, str):
        return printable(msgspec.json.encode(value[: limit + 1]).decode(), limit)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return printable(repr(value), limit)


def invalid(param: str, message: str, code: str | None = "invalid_value") -> InvalidRequest:
    """The error (400) for a field with a wrong value."""
    return InvalidRequest(message, param=param, code=code)


_QUOTED: Final = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z))""", re.DOTALL)


def loggable(error: InferdError, model: str | None) -> str:
    """An error's message for the log. Quoted parts are replaced, because they may be text of the request. Names of
    models, fields and paths stay."""
    kept = (model, error.param)
    is_harmless = isinstance(error, ModelNotFound | RouteNotFound | MethodNotAllowed)
    said = (
        error.message
        if is_harmless
        else _QUOTED.sub(lambda found: found[0] if found[0][1:-1] in kept else "'...'", error.message)
    )
    return printable(said, 256)


def failure_of(end: End) -> InferdError | None:
    """The error of a request that ended with ``end``; None: it was done. To raise it, use ``check_end``."""
    return None if is_done(end) else _error_of(end)


def check_end(end: End) -> None:
    """Raise the error of a request that ended with ``end``, if it was not done.

    Raise with this function and not the result of ``failure_of``: a frame with the error in a variable makes a
    reference cycle of error, traceback and frame. The cycle keeps the request and its prompt in memory until the
    garbage collector runs.
    """
    if not is_done(end):
        raise _error_of(end)


def is_done(end: End) -> bool:
    """Whether a request that ended with ``end`` was computed to its end."""
    return end.failure is None and end.outcome == "done"


def _error_of(end: End) -> InferdError:
    if end.failure is not None:
        return from_failure(end.failure)
    if end.outcome == "cancelled":
        return Cancelled("The request was cancelled by the server; try again.")
    return InternalError("The request failed; the log has the details.")
