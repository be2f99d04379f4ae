"""What an operator may ask of a running server, as a shape, and the words it answers in.

``inferd.app`` has this shape; tests put a small fake of it here. The gateway carries it out for whoever
has the scope admin, and knows nothing of how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from inferd.config import ModelConfig
from inferd.gateway.upstream import ModelState
from inferd.tenancy.keys import KeyInfo, KeySpec, NewKey
from inferd.tenancy.principal import Principal


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a model, local or remote."""

    index: int
    kind: Literal["local", "remote"]
    name: str  # for people: where it runs
    state: str
    in_flight: int = 0
    breaker: str = "closed"  # closed, open, half_open or ejected
    weight: float = 1.0
    region: str = ""
    is_fallback: bool = False
    restarts: int = 0
    memory_bytes: int = 0  # 0: unknown, or elsewhere
    pid: int | None = None  # of its worker
    artifact: str = ""  # which content its files had when it loaded them: equal for equal files
    detail: str = ""  # why it is in this state


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: ModelState
    load: Literal["startup", "on_demand"]
    replicas_ready: int
    replicas: list[ReplicaReport]
    waiting: int
    in_flight: int
    waiting_tokens: int = 0
    memory_bytes: int = 0
    version: str = "1"
    aliases: list[str] = []  # names for this version: stable, of model@stable
    not_batched: str = ""  # why its requests are computed one by one, where its files are the reason
    share: float | None = None  # of the requests for the model's own name; None: its versions have no weights
    detail: str = ""
    num_threads: int = 0  # compute threads of a replica; 0: unknown, or elsewhere
    cores: list[int] = []  # where they may run


class ReloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of reading the configuration file again."""

    at: float  # seconds since the epoch
    accepted: bool
    details: tuple[str, ...]  # what changed, or everything that is wrong
    failed: tuple[str, ...] = ()  # the file is in use, and yet these models are not what it says

    @property
    def is_whole(self) -> bool:
        """What is served is what the file says."""
        return self.accepted and not self.failed


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """What of a tenant's limits is in use at this server; no entry: no limit."""

    name: str
    limits: dict[str, float]  # requests and tokens per minute, requests in flight
    used: dict[str, float]


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """GET /admin/status"""

    status: Literal["serving", "draining"]
    version: str
    pid: int
    started_at: float  # seconds since the epoch
    config_path: str | None
    last_reload: ReloadReport | None
    reload_since: float | None  # seconds since the epoch; None: no reload is under way
    memory_bytes: int  # of all local models
    memory_budget_bytes: int | None
    models: list[ModelReport]
    tenants: list[TenantReport] = []
    address: str = ""  # where clients on the server's machine find it: http://127.0.0.1:8000


class UnloadReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    freed_bytes: int


class KeyActions(Protocol):
    """Every call may wait for the database, boundedly, and raises StateUnavailable where it does not answer."""

    async def list_keys(self, tenant: str | None) -> Sequence[KeyInfo]:
        """A tenant's keys; None: all."""
        ...

    async def create_key(self, spec: KeySpec, by: Principal) -> NewKey:
        """Raises InvalidRequest; Forbidden for a key stronger than its maker."""
        ...

    async def revoke_key(self, key_id: str) -> KeyInfo:
        """Raises KeyNotFound."""
        ...

    async def rotate_key(self, key_id: str, overlap_s: float, by: Principal) -> NewKey:
        """Raises KeyNotFound, InvalidRequest, Forbidden."""
        ...


class ControlActions(Protocol):
    """The server as its operator sees it."""

    @property
    def keys(self) -> KeyActions: ...

    def status(self) -> ServerReport: ...

    def drain(self) -> None:
        """Leave as after SIGTERM; returns at once."""

    async def reload(self) -> ReloadReport:
        """Read the configuration file now. Raises InvalidRequest where the server was started without one."""
        ...

    async def load(self, model: str) -> ModelReport:
        """Returns when each of its replicas is ready or cannot be. Raises ModelNotFound, ModelLoadError, Overloaded (no
        memory for it)."""
        ...

    async def override(self, model: str, config: ModelConfig) -> None:
        """Serve the model with other settings until the configuration is read again. Raises ModelNotFound;
        InferdError, with nothing changed, where it cannot be or does not load."""

    async def unload(self, model: str) -> UnloadReport:
        """Returns when its memory has come back. Raises ModelNotFound, InvalidRequest (remote)."""
        ...

    async def restart(self, model: str) -> ModelReport:
        """Replace its replicas, each new one ready before an old one leaves. Raises ModelNotFound, InvalidRequest
        (remote)."""
        ...
