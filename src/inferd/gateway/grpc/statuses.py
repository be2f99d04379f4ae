"""gRPC's status codes, and the table from kinds of errors to them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from inferd.errors import InferdError
from inferd.gateway.errors import MAX_MESSAGE_CHARS, printable


class Status(IntEnum):
    """As grpc.io/grpc/core/md_doc_statuscodes numbers them."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


TABLE: Final[dict[str, Status]] = {
    "internal": Status.INTERNAL,
    "invalid_request": Status.INVALID_ARGUMENT,
    "context_length_exceeded": Status.INVALID_ARGUMENT,
    "unauthenticated": Status.UNAUTHENTICATED,
    "forbidden": Status.PERMISSION_DENIED,
    "quota_exceeded": Status.RESOURCE_EXHAUSTED,
    "idempotency_conflict": Status.ABORTED,
    "upstream_failed": Status.UNAVAILABLE,
    "model_not_found": Status.NOT_FOUND,
    "key_not_found": Status.NOT_FOUND,
    "request_not_found": Status.NOT_FOUND,
    "stored_not_found": Status.NOT_FOUND,
    "state_unavailable": Status.UNAVAILABLE,
    "overloaded": Status.RESOURCE_EXHAUSTED,
    "unavailable": Status.UNAVAILABLE,
    "worker_died": Status.UNAVAILABLE,
    "deadline_exceeded": Status.DEADLINE_EXCEEDED,
    "cancelled": Status.CANCELLED,
    "model_load": Status.UNAVAILABLE,
    "config": Status.INTERNAL,
    "quality": Status.INTERNAL,
    "unsupported": Status.UNIMPLEMENTED,
    "route_not_found": Status.NOT_FOUND,
    "body_too_large": Status.RESOURCE_EXHAUSTED,
    "body_timeout": Status.DEADLINE_EXCEEDED,
    "unsupported_media_type": Status.INVALID_ARGUMENT,
}


def status_of(error: InferdError) -> Status:
    """The gRPC status of an error, by its kind."""
    return TABLE.get(error.kind, Status.INTERNAL)


def details_of(error: InferdError) -> str:
    """The message that is sent with the status. An error whose kind is not in ``TABLE`` is shown as an internal
    error."""
    if error.kind not in TABLE:
        return "The server met an internal error; the log has the details."
    return printable(error.message, MAX_MESSAGE_CHARS)
