"""What a request asks for beside its content: its terms, its cost, and the fields of a prediction."""

from __future__ import annotations

import msgspec

from inferd.types import Priority


class Terms(msgspec.Struct, frozen=True, gc=False):
    """The fields of a Request that do not depend on its content. ``deadline_s`` and ``first_byte_s`` are seconds after
    its arrival, None: no limit."""

    priority: Priority
    deadline_s: float | None
    first_byte_s: float | None
    tenant: str
    weight: float
    session: str
    region: str


class HeadTerms(msgspec.Struct, frozen=True, gc=False):
    """The terms that the headers set."""

    priority: Priority | None
    deadline_s: float | None
    sdk_timeout_s: float | None
    session: str


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a request. ``max_prompt`` and ``max_answer`` are upper bounds, which its quota must allow. ``expected``
    is the likely total, which the queue counts."""

    max_prompt: int
    max_answer: int
    expected: int


class PredictFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request for a prediction that the gateway uses, and its body for the worker."""

    dialect: str
    body: bytes
    header_bytes: int = -1
    version: str = ""
    sequence: str = ""
    sequence_start: bool = False
    sequence_end: bool = False
    may_wait: bool = True
    priority: int | None = None  # as in ``Request``
    timeout: float | None = None  # seconds
    tokens: int = 0  # an upper bound of its tokens, for the tenant's quota; 0: it has no tokens
