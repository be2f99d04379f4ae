"""Which calls are in the sample: those of a part of all units, so that a conversation is recorded whole or not at all.

The unit of a call is its session, else its user, else the messages that its conversation began with, else the call
itself. A unit is drawn by a digest, so every gateway draws alike, and a larger ratio keeps the units of a smaller one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from inferd.observe.payloads.capture import Head

_SESSION_HEADERS: Final = (b"x-session-id", b"x-inferd-session")
_any: Final = msgspec.json.Decoder()


def session_of(head: Head | None) -> str:
    """The session that a request's headers name; empty: none."""
    if head is None:
        return ""
    for name in _SESSION_HEADERS:
        value = head.header(name)
        if value is not None:
            return value.decode("latin-1")
    return ""


def unit_of(head: Head | None, body: bytes, unique: str) -> str:
    """The unit of a call. ``unique``: the call's random id, the unit of a call without a session, user or message."""
    session = session_of(head)
    if session:
        return f"session {session}"
    try:
        document = _any.decode(body)
    except (ValueError, RecursionError):
        return unique
    if not isinstance(document, dict):
        return unique
    user = document.get("user")
    if user is None and isinstance(document.get("metadata"), dict):
        user = document["metadata"].get("user_id")  # the Messages API
    if isinstance(user, str) and user:
        return f"user {user}"
    beginning = _beginning(document)
    return unique if beginning is None else f"conversation {beginning}"


def is_drawn(tenant: str, unit: str, ratio: float) -> bool:
    """Whether a tenant's unit is in the sample."""
    digest = hashlib.blake2b(f"{tenant}\0{unit}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < ratio * 0x1_0000_0000_0000_0000


def _beginning(document: Mapping[str, Any]) -> str | None:
    """A digest of a conversation's messages up to the first one of its user, which each later call has as well."""
    messages = document.get("messages", document.get("input"))
    if not isinstance(messages, list):
        return None
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            head = msgspec.json.encode([document.get("system"), messages[: index + 1]], order="deterministic")
            return hashlib.blake2b(head, digest_size=16).hexdigest()
    return None
