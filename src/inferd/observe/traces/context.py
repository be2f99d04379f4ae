"""W3C trace context (www.w3.org/TR/trace-context), and the decision which traces are kept.

Pure functions. The decision depends on the trace id and the caller's flag alone, so every server on a request's way
makes the same one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

SAMPLED: Final = 1
RANDOM: Final = 2  # the id's last 56 bits are random; kept as the caller set it

_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16

_MAX_MEMBERS: Final = 32
_MAX_STATE_CHARS: Final = 512
_KEY: Final = r"[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}|[a-z][_0-9a-z\-*/]{0,255}"
_VALUE: Final = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER: Final = re.compile(f"({_KEY})=({_VALUE})")

_EVERY: Final = "g"  # greater than every hexadecimal digit


class Parent(NamedTuple):
    """The caller's span, in which the call was made."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    flags: int

    @property
    def text(self) -> str:
        """The header ``traceparent``."""
        return traceparent(self.trace_id, self.span_id, self.flags)


def parent_of(value: bytes) -> Parent | None:
    """The caller's span in a header ``traceparent``. None: the header is invalid, and a new trace begins.

    Of a later version than 00 the fields of version 00 are read, as the specification demands.
    """
    found = _PARENT.fullmatch(value.strip(b" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    parent = Parent(trace_id.decode(), span_id.decode(), int(flags, 16) & (SAMPLED | RANDOM))
    return None if parent.trace_id == _NO_TRACE or parent.span_id == _NO_SPAN else parent


def state_of(values: Sequence[bytes]) -> str:
    """The header ``tracestate``, of all headers with this name in their order. Empty: there is none, or it is invalid.

    It is for other tracing systems and passed on as it came. Members beyond 512 characters are dropped from its end.
    """
    try:
        members = [member.strip(" \t") for value in values for member in value.decode("ascii").split(",")]
    except UnicodeDecodeError:
        return ""
    members = [member for member in members if member]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    if len(members) > _MAX_MEMBERS or len(keys) != len(members):
        return ""
    while members and len(",".join(members)) > _MAX_STATE_CHARS:
        members.pop()
    return ",".join(members)


def traceparent(trace_id: str, span_id: str, flags: int) -> str:
    """The header ``traceparent``."""
    return f"00-{trace_id}-{span_id}-{flags:02x}"


def is_sampled(trace: str) -> bool:
    """Whether the spans of a ``traceparent`` are recorded. False for an empty text."""
    return trace[-1:] in ("1", "3")


class Sampler:
    """Decides which traces are kept: those of callers that keep theirs, and a share of the traces that begin here.

    ``ratio``: the share, 0 to 1. ``follows_parent``: whether the caller's decision counts; if not, the share is of all
    traces. The decision compares the last 64 bits of the trace id with the share, as OpenTelemetry's SDKs do, so it is
    the same everywhere.
    """

    __slots__ = ("_below", "_prefix", "follows_parent")

    def __init__(self, ratio: float, *, follows_parent: bool = True, prefix: str = "5f0c1e77") -> None:
        """``prefix``: eight hexadecimal digits with which the ids of traces begin that begin here."""
        bound = round(ratio * 2**64)
        self._below = _EVERY if bound >= 1 << 64 else f"{bound:016x}"
        self._prefix = prefix
        self.follows_parent = follows_parent

    @property
    def is_off(self) -> bool:
        """Whether no trace that begins here is kept."""
        return self._below <= "0" * 16

    def keeps(self, trace_id: str) -> bool:
        """Whether the share of traces has this one."""
        return trace_id[16:] < self._below

    def trace(self, parent: Parent | None, unique: str) -> str:
        """The ``traceparent`` of a call's own span. Empty: a trace that would begin here is not kept.

        ``unique``: the call's 24 random hexadecimal digits, from which its ids are made.
        """
        if parent is None:
            if unique[8:] < self._below:
                return f"00-{self._prefix}{unique}-{unique[:16]}-01"
            return ""
        if self.follows_parent:
            flags = parent.flags
        else:
            flags = parent.flags & RANDOM | (SAMPLED if self.keeps(parent.trace_id) else 0)
        return traceparent(parent.trace_id, unique[:16], flags)

    def untraced(self, unique: str) -> str:
        """The ``traceparent`` that tells the next server that a trace which would begin here is not kept."""
        return f"00-{self._prefix}{unique}-{unique[:16]}-00"
