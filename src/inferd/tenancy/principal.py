"""Who asks: the identity that a credential stands for, and what it allows.

Knows neither HTTP nor where keys are kept.
"""

from __future__ import annotations

import fnmatch
from typing import Literal, Protocol, get_args

import msgspec

from inferd.config.versions import base_of
from inferd.types import Priority, Usage

KeyScope = Literal["infer", "models", "metrics", "admin"]
"""What a key can be given. infer: use models; models: list them; metrics: read numbers; admin: everything that
changes the server. admin includes the others."""

Scope = Literal["public"] | KeyScope
"""What a route asks for. public: nothing, so no key is given it."""

GRANTABLE: tuple[KeyScope, ...] = get_args(KeyScope)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much in a minute, and at once; None: no limit."""

    rpm: int | None = None
    tpm: int | None = None
    max_in_flight: int | None = None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who a request comes from. Immutable; made from a key, or for somebody without one."""

    key_id: str = ""  # empty: no key was needed
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset(("infer", "models", "metrics"))
    models: tuple[str, ...] = ()  # names or patterns (team-*); none: every model
    priority: Priority = -2  # the best class it may ask for, which it also gets when it does not ask
    default_priority: Priority = 0  # the class of a request that asks for none
    weight: float = 1.0
    region: str = ""
    limits: Limits = Limits()  # the key's own
    tenant_limits: Limits = Limits()  # shared by all keys of the tenant
    expires_at: float | None = None  # seconds since the epoch

    def may(self, scope: Scope) -> bool:
        return scope == "public" or scope in self.scopes or "admin" in self.scopes

    def may_use(self, model: str) -> bool:
        """Whoever may use a model may use its versions."""
        if not self.models:
            return True
        names = (model, base_of(model))
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.models for name in names)


LOCAL = Principal()
"""Somebody on this machine while no keys are needed: may infer, list and read metrics, not administrate."""

OPERATOR = Principal(key_id="operator", scopes=frozenset(GRANTABLE))
"""Whoever can open the control socket: the user the server runs as."""


class Permit(Protocol):
    """One admitted request's part of its quotas. Settled exactly once, however the request ends."""

    def learned(self, prompt_tokens: int) -> None:
        """The prompt's true length is known: give back what was reserved beyond it. Idempotent."""

    def settle(self, usage: Usage | None, outcome: str) -> None:
        """The end: charge what was used (None: nothing was computed) and give back the rest. Idempotent."""

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """``x-ratelimit-*`` as they stand now; empty where there are no limits."""
        ...


class Door(Protocol):
    """Decides who comes in. Nothing here waits for a database."""

    def authenticate(self, token: str | None) -> Principal:
        """Whose credential this is; None where the client sent none. Raises Unauthenticated."""
        ...

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> Permit:
        """Take one request, and upper bounds of its tokens, from the quotas. Raises QuotaExceeded, whose
        ``retry_after_s`` is when the same request would pass."""
        ...


class OpenPermit:
    """Where nothing is limited and nobody keeps books."""

    def learned(self, prompt_tokens: int) -> None:
        pass

    def settle(self, usage: Usage | None, outcome: str) -> None:
        pass

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ()


class OpenDoor:
    """Everybody is ``LOCAL``: no keys, no limits, no books. For tests and libraries."""

    def authenticate(self, token: str | None) -> Principal:
        return LOCAL

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> Permit:
        return OpenPermit()
