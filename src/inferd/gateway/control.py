"""The protocol of the operations that an operator may request of a running server, and the types of their answers.

``inferd.app`` implements the protocol; tests pass a small fake. The gateway calls it for keys with the scope admin and
does not know how an operation is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from inferd.autoscale.controller import ScalingReport
from inferd.config import ModelConfig
from inferd.drift.monitors import DriftReport
from inferd.drift.reference import Reference
from inferd.gateway.upstream import ModelState
from inferd.lifecycle.actions import RegistryActions
from inferd.lifecycle.webhooks import Delivery
from inferd.nodes.listener import NewToken, NodeReport
from inferd.observe.startup import LoadReport, StartReport, StartupReport
from inferd.rollout.machine import Command
from inferd.rollout.rollouts import RolloutReport
from inferd.router.hints import HintReport
from inferd.state.group import GatewayReport
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
    role: str = "both"  # prefill: it computes prompts for others, decode: answers
    layout: str = ""  # "2 ranks (tensor 2 x pipeline 1)"; empty: one process, or not known
    is_fallback: bool = False
    restarts: int = 0
    memory_bytes: int = 0  # 0: unknown, or elsewhere
    planned_bytes: int = 0  # what it takes by its plan when its KV cache is full; 0: not planned, or elsewhere
    pid: int | None = None  # of its worker
    node: str = ""  # where its worker is; empty: on the server's machine
    rank_nodes: tuple[str, ...] = ()  # the nodes with its ranks that are not where its worker is
    load: LoadReport | None = None  # the last load by this replica's worker
    artifact: str = ""  # a digest of its files' content at the time of loading
    detail: str = ""  # why it is in this state


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of a model."""

    name: str
    is_loaded: bool  # by a ready replica
    memory_bytes: int = 0  # in each replica
    in_flight: int = 0  # its requests that have not ended
    detail: str = ""  # why a replica could not load it; empty: all did


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
    aliases: list[str] = []  # further names of this version, such as stable in model@stable
    not_batched: str = ""  # why the model's files do not allow batches; empty: they do
    share: float | None = None  # its part of the requests for the model's own name; None: versions have no weights
    detail: str = ""
    answer_format: str = ""  # its notation of calls and reasoning, and whether the check at load parsed it back
    verified: str = ""  # why its files were accepted, or FAILED and why not; empty: they were not verified
    desired: int | None = None  # local replicas that it is to have by its load; None: their number is fixed
    adapters: list[AdapterReport] = []
    num_threads: int = 0  # compute threads of a replica; 0: unknown, or elsewhere
    cores: list[int] = []  # where they may run


class ReloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of reading the configuration file again."""

    at: float  # seconds since the epoch
    accepted: bool
    details: tuple[str, ...]  # what changed, or everything that is wrong
    failed: tuple[str, ...] = ()  # models that could not be changed to what the accepted file says

    @property
    def is_whole(self) -> bool:
        """Whether the server serves exactly what the file says."""
        return self.accepted and not self.failed


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """What of a tenant's limits is in use; no entry: no limit."""

    name: str
    limits: dict[str, float]  # at this server: requests and tokens per minute, requests in flight; bytes it may store
    used: dict[str, float]  # the same, and the number of its stored responses and conversations


class UseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The time and the energy of devices that a model or a tenant has used since the server started.

    None: no device tells its energy, there is no price, or there are no tokens. ``tokens`` are those computed.
    """

    name: str
    device_s: float
    energy_j: float | None
    tokens: int
    device_s_per_1000_tokens: float | None
    energy_j_per_1000_tokens: float | None
    cost: float | None


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A device of the server's machine, as it was read last. None: it does not tell."""

    device: str
    kind: str
    name: str
    duty: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    idle_j: float | None  # used while no model computed on it, since the server started


class EnergyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The devices, and what models and tenants have used of them. A tenant's key sees its own line alone."""

    currency: str
    devices: list[DeviceReport]
    models: list[UseReport]
    tenants: list[UseReport]


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that has not ended."""

    id: str
    tenant: str
    status: str
    is_at_work: bool  # a server works on it; False: it waits for one
    created_at: float  # seconds since the epoch
    endpoint: str
    model: str | None
    total: int  # requests; 0: they are not counted yet
    completed: int
    failed: int
    note: str  # why it does not go on at the moment; empty: it does


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
    start: StartReport | None = None  # how the server itself started
    tenants: list[TenantReport] = []
    energy: EnergyReport | None = None  # None: devices are not read
    jobs: list[BatchReport] = []  # of all servers that share the database; a tenant's key sees its own
    address: str = ""  # where clients on the server's machine find it: http://127.0.0.1:8000
    nodes: list[NodeReport] = []
    gateways: list[GatewayReport] = []  # that share the database and are alive, with this server
    hints: HintReport | None = None  # exchanged with these gateways; None: none were


class UnloadReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    freed_bytes: int


class KeyActions(Protocol):
    """Operations on keys. Every method waits for the database for a bounded time, and raises StateUnavailable when
    the database does not answer."""

    async def list_keys(self, tenant: str | None) -> Sequence[KeyInfo]:
        """The keys of a tenant; with None the keys of all tenants."""
        ...

    async def create_key(self, spec: KeySpec, by: Principal) -> NewKey:
        """Raises InvalidRequest, and Forbidden for a key that would allow more than the key of ``by``."""
        ...

    async def revoke_key(self, key_id: str) -> KeyInfo:
        """Raises KeyNotFound."""
        ...

    async def rotate_key(self, key_id: str, overlap_s: float, by: Principal) -> NewKey:
        """Raises KeyNotFound, InvalidRequest, Forbidden."""
        ...


class RolloutActions(Protocol):
    """Operations on rollouts. Those that wait for the database do so for a bounded time, and raise StateUnavailable
    when it does not answer. All raise InvalidRequest for a model without a rollout."""

    def reports(self) -> Sequence[RolloutReport]:
        """All rollouts, without their changes."""
        ...

    async def report(self, model: str) -> RolloutReport:
        """One rollout, with its last changes."""
        ...

    async def command(self, model: str, command: Command, actor: str, why: str) -> RolloutReport:
        """Carry out a command; returns when it is in effect here. Raises InvalidRequest where the rollout's state does
        not allow it."""
        ...

    def note_bad(self, model: str, request_id: str) -> None:
        """Count the unit of a request as bad. Raises InvalidRequest for a request that is not known."""


class DriftActions(Protocol):
    """Operations on the drift of models. All but ``reports`` raise InvalidRequest for a model that is not watched."""

    def reports(self) -> Sequence[DriftReport]:
        """All versions of models that are watched."""
        ...

    def report(self, entry: str) -> DriftReport: ...

    def reference(self, entry: str) -> Reference:
        """The reference of a version's model. Raises InvalidRequest where there is none yet."""
        ...

    async def reset(self, entry: str) -> DriftReport:
        """Take another reference from the next requests. Raises InvalidRequest where a file has it, and
        StateUnavailable."""
        ...


class ScalingActions(Protocol):
    """The numbers of replicas that follow the load."""

    def reports(self) -> Sequence[ScalingReport]:
        """The scaling of every model that has one."""
        ...

    def report(self, model: str) -> ScalingReport:
        """Raises InvalidRequest for a model whose number of replicas is fixed."""
        ...


class WebhookActions(Protocol):
    """Messages of an MLflow server."""

    async def receive(self, delivery: Delivery) -> None:
        """Raises Unauthenticated for a message that is forged, too old, or was accepted before."""

    def look_soon(self) -> None:
        """Look at the MLflow registry now. Raises InvalidRequest where nothing follows it."""


class AdapterActions(Protocol):
    """Adapters of models while the server runs. Both raise StateUnavailable, with nothing changed, when the database
    does not answer."""

    async def load(self, name: str, source: str, model: str, *, in_place: bool) -> None:
        """Load an adapter of a model under a name, here and by every server of the database; returns when the ready
        replicas of this server have it. ``in_place``: it may replace one of its name.

        Raises InvalidRequest, with nothing changed, which says what is wrong.
        """
        ...

    async def unload(self, name: str) -> None:
        """Refuse further requests for an adapter; its memory is freed when its last request has ended. Raises
        ModelNotFound; InvalidRequest for one of the configuration."""
        ...


class NodeActions(Protocol):
    """The machines that joined the server."""

    def reports(self) -> Sequence[NodeReport]: ...

    def new_token(self, *, revoke: bool) -> NewToken:
        """A token with which machines join. Raises InvalidRequest where none can join this server."""
        ...


class ControlActions(Protocol):
    """The operations on a running server."""

    @property
    def keys(self) -> KeyActions: ...

    @property
    def rollouts(self) -> RolloutActions: ...

    @property
    def scaling(self) -> ScalingActions: ...

    @property
    def nodes(self) -> NodeActions: ...

    @property
    def adapters(self) -> AdapterActions: ...

    @property
    def versions(self) -> RegistryActions: ...

    @property
    def drift(self) -> DriftActions: ...

    @property
    def webhooks(self) -> WebhookActions: ...

    def status(self) -> ServerReport: ...

    def startup(self) -> StartupReport:
        """The server's start and the last loads of models."""
        ...

    def drain(self) -> None:
        """Begin to shut down as after SIGTERM; returns at once."""

    async def reload(self) -> ReloadReport:
        """Read the configuration file now. Raises InvalidRequest where the server was started without one."""
        ...

    async def load(self, model: str) -> ModelReport:
        """Load a model; returns when each of its replicas is ready or has failed.

        Raises ModelNotFound, ModelLoadError, and Overloaded when there is no memory for it.
        """
        ...

    async def override(self, model: str, config: ModelConfig) -> None:
        """Serve the model with other settings until the configuration is read again.

        Raises ModelNotFound. Raises another InferdError, with nothing changed, when the settings are not possible or
        the model does not load.
        """

    async def unload(self, model: str) -> UnloadReport:
        """Unload a model; returns when its memory is free. Raises ModelNotFound, and InvalidRequest for a model with
        remote replicas alone."""
        ...

    async def restart(self, model: str) -> ModelReport:
        """Replace a model's replicas one by one: a new replica is ready before an old one stops.

        Raises ModelNotFound, and InvalidRequest for a model with remote replicas alone.
        """
        ...
