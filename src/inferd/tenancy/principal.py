"""The identity of a request: the principal that a credential stands for, and what it allows.

Does not know HTTP or where keys are stored.
"""

from __future__ import annotations

import fnmatch
from typing import Literal, Protocol, get_args

import msgspec

from inferd.config.versions import base_of
from inferd.errors import Unauthenticated
from inferd.types import Priority, Usage

KeyScope = Literal["infer", "models", "metrics", "admin"]
"""The scopes of a key. infer: use models; models: list them; metrics: read metrics; admin: change the server.
admin includes the others."""

Scope = Literal["public"] | KeyScope
"""The scope that a route requires. public: none; it is not a scope of a key."""

GRANTABLE: tuple[KeyScope, ...] = get_args(KeyScope)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and tokens per minute, and requests at the same time; None: no limit."""

    rpm: int | None = None
    tpm: int | None = None
    max_in_flight: int | None = None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a request, made from its key; ``LOCAL`` where no key is needed."""

    key_id: str = ""  # empty: no key was needed
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset(("infer", "models", "metrics"))
    models: tuple[str, ...] = ()  # names or patterns (team-*); none: every model
    priority: Priority = -2  # the best class that a request may ask for
    default_priority: Priority = 0  # the class of a request that asks for none
    weight: float = 1.0
    region: str = ""
    limits: Limits = Limits()  # the key's own
    expires_at: float | None = None  # seconds since the epoch

    def may(self, scope: Scope) -> bool:
        return scope == "public" or scope in self.scopes or "admin" in self.scopes

    def may_use(self, model: str) -> bool:
        """Permission for a model is permission for its versions."""
        if not self.models:
            return True
        names = (model, base_of(model))
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.models for name in names)


LOCAL = Principal()
"""A request without a key, where no keys are needed: it may infer, list models and read metrics, not administrate."""

OPERATOR = Principal(key_id="operator", scopes=frozenset(GRANTABLE))
"""A request over the control socket, which only the user that the server runs as can open."""


class Permit(Protocol):
    """The part of its quotas that an admitted request holds. It is settled exactly once, however the request ends."""

    def learned(self, prompt_tokens: int) -> None:
        """Return what was reserved beyond the real length of the prompt. Idempotent."""

    def settle(self, usage: Usage | None, outcome: str) -> None:
        """Charge what was used (None: nothing was computed) and return the rest of the reservation. Idempotent."""

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """``x-ratelimit-*`` as they stand now; empty where there are no limits."""
        ...


class Door(Protocol):
    """Authenticates and admits requests. No method waits for a database."""

    def authenticate(self, token: str | None) -> Principal:
        """The principal of a credential; None: the client sent none. Raises Unauthenticated."""
        ...

    def holder(self, key_id: str) -> Principal | None:
        """The principal of a key that is valid now. None: the key is unknown, expired or revoked."""
        ...

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> Permit:
        """Reserve one request and upper bounds of its tokens. Raises QuotaExceeded, whose ``retry_after_s`` says when
        the same request would be admitted."""
        ...


def holder_of(door: Door, key_id: str, tenant: str) -> Principal | None:
    """The principal of work that was begun with a key, or without one, of a tenant. None: it may not go on, because the
    key has ended, or requests without a key are refused meanwhile."""
    found: Principal | None
    if key_id == OPERATOR.key_id:
        found = OPERATOR
    elif key_id:
        found = door.holder(key_id)
    else:
        try:
            found = door.authenticate(None)
        except Unauthenticated:
            return None
    return found if found is not None and found.tenant == tenant else None


class OpenPermit:
    """The permit of a server without limits and without usage records."""

    def learned(self, prompt_tokens: int) -> None:
        pass

    def settle(self, usage: Usage | None, outcome: str) -> None:
        pass

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ()


class OpenDoor:
    """Admits every request as ``LOCAL``: no keys, limits or usage records. For tests and libraries."""

    def authenticate(self, token: str | None) -> Principal:
        return LOCAL

    def holder(self, key_id: str) -> Principal | None:
        return None

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> Permit:
        return OpenPermit()
