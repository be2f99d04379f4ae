"""The one table from the vocabulary of failure to gRPC's status codes."""

from __future__ import annotations

from typing import Final

from grpc import StatusCode

from inferd.errors import InferdError
from inferd.gateway.errors import MAX_MESSAGE_CHARS, printable

TABLE: Final[dict[str, StatusCode]] = {
    "internal": StatusCode.INTERNAL,
    "invalid_request": StatusCode.INVALID_ARGUMENT,
    "context_length_exceeded": StatusCode.INVALID_ARGUMENT,
    "unauthenticated": StatusCode.UNAUTHENTICATED,
    "forbidden": StatusCode.PERMISSION_DENIED,
    "quota_exceeded": StatusCode.RESOURCE_EXHAUSTED,
    "idempotency_conflict": StatusCode.ABORTED,
    "upstream_failed": StatusCode.UNAVAILABLE,
    "model_not_found": StatusCode.NOT_FOUND,
    "key_not_found": StatusCode.NOT_FOUND,
    "state_unavailable": StatusCode.UNAVAILABLE,
    "overloaded": StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": StatusCode.UNAVAILABLE,
    "worker_died": StatusCode.UNAVAILABLE,
    "deadline_exceeded": StatusCode.DEADLINE_EXCEEDED,
    "cancelled": StatusCode.CANCELLED,
    "model_load": StatusCode.UNAVAILABLE,
    "config": StatusCode.INTERNAL,
    "unsupported": StatusCode.UNIMPLEMENTED,
}


class Unsupported(InferdError):
    """A call of the protocol that this server does not serve."""

    kind = "unsupported"
    default_code = "unsupported"


def status_of(error: InferdError) -> StatusCode:
    return TABLE.get(error.kind, StatusCode.INTERNAL)


def details_of(error: InferdError) -> str:
    """The sentence that goes with the status; an unnamed kind shows nothing but that it is internal."""
    if error.kind not in TABLE:
        return "The server met an internal error; the log has the details."
    return printable(error.message, MAX_MESSAGE_CHARS)
