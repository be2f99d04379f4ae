"""The errors that users meet. A message is a sentence with the value and the remedy.

Only the gateway maps errors to status codes.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from inferd.types import Failure

CLIENT_ERRORS: Final = (
    "cancelled",
    "context_length_exceeded",
    "deadline_exceeded",
    "forbidden",
    "idempotency_conflict",
    "invalid_request",
    "key_not_found",
    "model_not_found",
    "quota_exceeded",
    "stored_not_found",
    "unauthenticated",
)
"""Kinds of errors that are not the server's: HTTP answers them with a status below 500, or to no client at all."""


def is_bad_utf8(error: Exception) -> bool:
    """Whether a decoder of JSON refused bytes because a text in them is not UTF-8: msgspec before 0.23 raises
    UnicodeDecodeError, and later ones a DecodeError that says so."""
    return isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8")


def type_remedy(said: str) -> str:
    """What to do about msgspec's "Expected `int | null`, got `str`": only a field that may be null may be left out."""
    expected = said.partition(", got ")[0]
    return "Correct it or leave the field out." if "null" in expected else "Correct it."


def printable(text: str, limit: int = 64) -> str:
    """``text`` without control characters and no longer than ``limit`` characters."""
    cut = text[:limit]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else " " for c in cut)
    return cut if len(text) <= limit else cut + "..."


class InferdError(Exception):
    """The base of all errors that a user can meet.

    ``param`` names the invalid field of the request or the configuration; ``code`` is a stable word for programs.
    """

    kind: ClassVar[str] = "internal"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s  # seconds until a retry makes sense; None: unknown

    def to_failure(self) -> Failure:
        return Failure(self.kind, self.message, self.param, self.code, self.retry_after_s)


class CodeFailed(Exception):
    """The code of a model has raised. ``__cause__`` is its exception, with message and lines for the operator's log;
    a client never sees it."""


class InternalError(InferdError):
    """A defect in inferd. Details are in the log and never in the message."""

    kind = "internal"
    default_code = "internal_error"


class InvalidRequest(InferdError):
    kind = "invalid_request"
    default_code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    kind = "context_length_exceeded"
    default_code = "context_length_exceeded"


class ModelNotFound(InferdError):
    kind = "model_not_found"
    default_code = "model_not_found"


class Unauthenticated(InferdError):
    """The key is missing, unknown, expired or revoked. The message never says which of the last three."""

    kind = "unauthenticated"
    default_code = "invalid_api_key"


class Forbidden(InferdError):
    """The key is valid and does not allow this: another scope, model or priority class is needed."""

    kind = "forbidden"
    default_code = "insufficient_permissions"


class QuotaExceeded(InferdError):
    """The client's own quota is used up (429); ``retry_after_s`` says when it allows the request again."""

    kind = "quota_exceeded"
    default_code = "rate_limit_exceeded"
    limit: Literal["requests", "tokens", "in_flight"] = "requests"
    headers: tuple[tuple[bytes, bytes], ...] = ()  # x-ratelimit-* at the time of the refusal


class IdempotencyConflict(InferdError):
    """An Idempotency-Key was used again with another body (422), or is still being worked on (409)."""

    kind = "idempotency_conflict"
    default_code = "idempotency_conflict"


class Overloaded(InferdError):
    """The server's capacity is used up (503); ``retry_after_s`` says when to try again."""

    kind = "overloaded"
    default_code = "overloaded"


class UpstreamFailed(InferdError):
    """A remote server did not answer in time, could not be reached, or sent an invalid answer (502, 504)."""

    kind = "upstream_failed"
    default_code = "upstream_failed"


class Unavailable(InferdError):
    """No replica can take the request now (loading, restarting, draining)."""

    kind = "unavailable"
    default_code = "unavailable"


class KeyNotFound(InferdError):
    """No API key has this id."""

    kind = "key_not_found"
    default_code = "key_not_found"


class StoredNotFound(InferdError):
    """No stored response, conversation or item of the tenant has this id."""

    kind = "stored_not_found"
    default_code = "not_found"


class StateUnavailable(InferdError):
    """The database did not answer in time or refused; the operation was not done."""

    kind = "state_unavailable"
    default_code = "state_unavailable"


class WorkerDied(InferdError):
    """The replica of the request died after a part of the answer was sent."""

    kind = "worker_died"
    default_code = "worker_died"


class DeadlineExceeded(InferdError):
    kind = "deadline_exceeded"
    default_code = "deadline_exceeded"


class Cancelled(InferdError):
    kind = "cancelled"
    default_code = "cancelled"


class ModelLoadError(InferdError):
    """A model folder that cannot be served, with the file and the remedy."""

    kind = "model_load"
    default_code = "model_load_error"


class QualityError(InferdError):
    """The quality of a quantised model is below the allowed bound."""

    kind = "quality"
    default_code = "quality_error"


class ConfigError(InferdError):
    """One or more problems in the configuration, all listed."""

    kind = "config"
    default_code = "config_error"


def _kinds(cls: type[InferdError]) -> dict[str, type[InferdError]]:
    found = {cls.kind: cls}
    for sub in cls.__subclasses__():
        found.update(_kinds(sub))
    return found


def from_failure(failure: Failure) -> InferdError:
    """The exception a ``Failure`` stands for; an unknown kind is an InternalError."""
    cls = _kinds(InferdError).get(failure.kind, InternalError)
    return cls(failure.message, param=failure.param, code=failure.code, retry_after_s=failure.retry_after_s)
