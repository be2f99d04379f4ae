"""Admission by key: authenticates a request, reserves its quota, and records its usage when it ends.

Knows keys, quotas and the usage journal. Does not know HTTP and never touches a database: keys and quotas are in
memory, and the database's thread keeps them current.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from inferd import clock
from inferd.config import Config, ServerConfig
from inferd.errors import ConfigError, QuotaExceeded, Unauthenticated
from inferd.events import Emit, RefusalReason, RequestRefused, ignore
from inferd.tenancy.buckets import Kind
from inferd.tenancy.keys import KeyRow
from inferd.tenancy.limiter import Limiter, Reservation
from inferd.tenancy.principal import LOCAL, Limits, Principal
from inferd.tenancy.ring import KeyRing, families_of
from inferd.tenancy.usage import Entry, UsageJournal
from inferd.types import Usage

_REASONS: Final[dict[Kind, RefusalReason]] = {
    "requests": "quota_requests",
    "tokens": "quota_tokens",
    "in_flight": "quota_in_flight",
}


class KeyPermit:
    """One admitted request: what it reserved of its quotas, and its record in the usage journal."""

    __slots__ = ("_door", "_is_settled", "_max_tokens", "_model", "_principal", "_taken")

    def __init__(
        self, door: KeyDoor, principal: Principal, model: str, taken: Reservation | None, max_tokens: int
    ) -> None:
        self._door = door
        self._principal = principal
        self._model = model
        self._taken = taken
        self._max_tokens = max_tokens
        self._is_settled = False

    def learned(self, prompt_tokens: int) -> None:
        if self._taken is not None and not self._is_settled:
            self._door.limiter.reduce(self._taken, prompt_tokens + self._max_tokens, self._door.now())

    def settle(self, usage: Usage | None, outcome: str) -> None:
        """A request with the ``outcome`` refused met a lack of capacity, so it does not count as a request."""
        if self._is_settled:
            return
        self._is_settled = True
        prompt, completion = (0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        if self._taken is not None:
            self._door.limiter.settle(
                self._taken, prompt + completion, refund=outcome == "refused", now=self._door.now()
            )
        if usage is not None:
            principal = self._principal
            self._door.usage.record(
                Entry(clock.wall(), principal.tenant, principal.key_id, self._model, prompt, completion)
            )

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return () if self._taken is None else self._door.limiter.headers(self._taken, self._door.now())


class KeyDoor:
    """Authenticates with the keys of the ring and reserves with the limiter."""

    def __init__(
        self,
        keys: KeyRing,
        limiter: Limiter,
        usage: UsageJournal,
        config: Config,
        emit: Emit = ignore,
    ) -> None:
        self._keys = keys
        self.limiter = limiter
        self.usage = usage
        self.now = clock.now
        self._emit = emit
        self._server = config.server
        self._is_exposed = not is_loopback(config.server.host)

    @property
    def needs_keys(self) -> bool:
        """Whether a request without a key is refused."""
        if self._server.auth == "auto":
            return self._is_exposed or len(self._keys) > 0
        return self._server.auth == "required"

    def authenticate(self, token: str | None) -> Principal:
        """The principal of a credential. Where no keys are needed, a text that is not a key (clients send ``EMPTY``)
        counts as no credential. Raises Unauthenticated."""
        if token is None:
            if not self.needs_keys:
                return LOCAL
            raise Unauthenticated("This server needs an API key; send it as 'Authorization: Bearer sk-inf-...'.")
        try:
            return self._keys.find(token).principal
        except Unauthenticated:
            if self.needs_keys:
                raise
            return LOCAL

    def holder(self, key_id: str) -> Principal | None:
        """The principal of a key that is valid now. None: the key is unknown, expired or revoked."""
        return self._keys.holder(key_id)

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> KeyPermit:
        quotas = self.limiter.quotas_of(self._keys.owners(principal))
        if not quotas:
            return KeyPermit(self, principal, model, None, max_tokens)
        try:
            taken = self.limiter.reserve(quotas, prompt_tokens + max_tokens, self.now())
        except QuotaExceeded as refused:
            self._emit(RequestRefused(model=model, reason=_REASONS[refused.limit], tenant=principal.tenant))
            raise
        return KeyPermit(self, principal, model, taken, max_tokens)


def limits_of(rows: Iterable[KeyRow], config: Config) -> dict[str, Limits]:
    """All limits, by the name of their owner. Expired keys keep theirs, because the clock may be set back."""
    wanted = {
        f"tenant:{name}": Limits(rpm=tenant.rpm, tpm=tenant.tpm, max_in_flight=tenant.max_in_flight)
        for name, tenant in config.tenants.items()
    }
    rows = sorted(rows, key=lambda row: row.created_at)  # the newest key of a family decides
    by_id = {row.id: row for row in rows}
    live = [row for row in rows if row.revoked_at is None]
    # Limits of a revoked key still hold for the keys that were created with it.
    in_force = {family for row in live for family in families_of(row, by_id.get)}
    for row in (*[row for row in rows if row.revoked_at is not None], *live):
        if row.family in in_force:
            wanted[f"key:{row.family}"] = Limits(rpm=row.rpm, tpm=row.tpm, max_in_flight=row.max_in_flight)
    return {name: limits for name, limits in wanted.items() if limits != Limits()}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(server: ServerConfig, num_keys: int) -> None:
    """Raises ConfigError for an address that other machines can reach while no key is needed."""
    if server.auth == "auto" and not is_loopback(server.host) and num_keys == 0:
        raise ConfigError(
            f"Others can reach {server.host}, and there is no API key: create one with "
            "'inferd keys create --tenant NAME', or listen on 127.0.0.1, or choose "
            "--auth required (no request is served until there are keys) or --auth off (all requests are served).",
            param="server.auth",
        )
