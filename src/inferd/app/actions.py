"""The operator's commands to a running server: implements ``gateway.control.ControlActions``.

Calls the parts by their public methods. The gateway checks the permission for each command.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from inferd import __version__, clock
from inferd.app.adapters import AdapterActions
from inferd.app.departure import Departure
from inferd.app.energy_report import energy_report
from inferd.app.hint_exchange import HintExchange
from inferd.app.reload import Reloader
from inferd.autoscale.controller import Autoscaler
from inferd.config import Config, ModelConfig, VersionsConfig
from inferd.config.versions import base_of
from inferd.drift.monitors import Monitors
from inferd.errors import InvalidRequest
from inferd.gateway.control import (
    AdapterReport,
    BatchReport,
    ModelReport,
    ReloadReport,
    ReplicaReport,
    ServerReport,
    TenantReport,
    UnloadReport,
)
from inferd.jobs.store import JobReport, JobStore
from inferd.lifecycle.actions import RegistryActions
from inferd.lifecycle.webhooks import Webhooks
from inferd.nodes.listener import NewToken, NodeReport, NodesListener
from inferd.observe.devices import Devices
from inferd.observe.startup import LoadReport, Startup, StartupReport
from inferd.rollout.rollouts import Rollouts
from inferd.router.hints import HintReport
from inferd.router.router import Router
from inferd.router.status import ModelStatus, ReplicaStatus
from inferd.state.group import Group
from inferd.stored.store import DurableStore
from inferd.tenancy.control import Control
from inferd.tenancy.keys import KeyInfo, KeySpec, NewKey
from inferd.tenancy.limiter import QuotaUse
from inferd.tenancy.principal import Principal
from inferd.types import ModelInfo

_TENANT = "tenant:"  # owners of limits are tenants and keys


class Keys:
    """The keys of the server's database, as the admin API asks for them."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def list_keys(self, tenant: str | None) -> Sequence[KeyInfo]:
        return await self._control.list_keys(tenant)

    async def create_key(self, spec: KeySpec, by: Principal) -> NewKey:
        return await self._control.create_key(spec, by=by)

    async def revoke_key(self, key_id: str) -> KeyInfo:
        return await self._control.revoke_key(key_id)

    async def rotate_key(self, key_id: str, overlap_s: float, by: Principal) -> NewKey:
        return await self._control.rotate_key(key_id, by=by, overlap_s=overlap_s)


class NodeCommands:
    """The nodes of a server, as the admin API asks for them; ``listener`` is None where none can join."""

    def __init__(self, listener: NodesListener | None) -> None:
        self._listener = listener

    def reports(self) -> Sequence[NodeReport]:
        return [] if self._listener is None else self._listener.reports()

    def new_token(self, *, revoke: bool) -> NewToken:
        if self._listener is None:
            raise InvalidRequest(
                "No machine can join this server; set nodes.listen to HOST:PORT and restart it.", param="nodes.listen"
            )
        return self._listener.new_token(revoke=revoke)


class Actions:
    """One server, as its operator sees it."""

    def __init__(
        self,
        router: Router,
        control: Control,
        departure: Departure,
        reloader: Reloader | None,
        config: Callable[[], Config],
        override: Callable[[str, ModelConfig], Awaitable[None]],
        config_path: Path | None,
        address: str,
        devices: Devices,
        startup: Startup,
        rollouts: Rollouts,
        scaling: Autoscaler,
        versions: RegistryActions,
        drift: Monitors,
        webhooks: Webhooks,
        stored: DurableStore | None = None,
        jobs: JobStore | None = None,
        nodes: NodesListener | None = None,
        group: Group | None = None,
        hints: HintExchange | None = None,
        *,
        adapters: AdapterActions,
    ) -> None:
        self._group = group
        self._hints = hints
        self.adapters = adapters
        self._jobs = jobs
        self._stored = stored
        self.nodes = NodeCommands(nodes)
        self._startup = startup
        self.rollouts = rollouts
        self.scaling = scaling
        self.versions = versions
        self.drift = drift
        self.webhooks = webhooks
        self._devices = devices
        self._address = address
        self._router = router
        self._departure = departure
        self._reloader = reloader
        self._config = config
        self._override = override
        self._config_path = config_path
        self._started_at = clock.wall()
        self._control = control
        self.keys = Keys(control)

    def status(self) -> ServerReport:
        config = self._config()
        loads = self._last_loads()
        desired = {report.model: report.desired for report in self.scaling.reports()}
        models = [self._report(status, config, loads, desired.get(status.name)) for status in self._router.models()]
        return ServerReport(
            status="draining" if self._router.draining else "serving",
            version=__version__,
            pid=os.getpid(),
            started_at=self._started_at,
            config_path=None if self._config_path is None else str(self._config_path),
            last_reload=None if self._reloader is None else self._reloader.last,
            reload_since=None if self._reloader is None else self._reloader.since,
            memory_bytes=sum(model.memory_bytes for model in models),
            memory_budget_bytes=config.server.memory_bytes,
            models=models,
            start=self._startup.start(),
            tenants=_tenants(self._control.quotas(), self._stored),
            energy=energy_report(self._devices),
            address=self._address,
            jobs=[] if self._jobs is None else [_job(each) for each in self._jobs.reports()],
            nodes=list(self.nodes.reports()),
            gateways=[] if self._group is None else list(self._group.reports),
            hints=None if self._hints is None or self._hints.report == HintReport() else self._hints.report,
        )

    def startup(self) -> StartupReport:
        return self._startup.report()

    def _last_loads(self) -> dict[tuple[str, int], LoadReport]:
        return {(load.model, load.replica): load for load in reversed(self._startup.loads())}

    def drain(self) -> None:
        self._departure.request("the operator's inferd drain")

    async def reload(self) -> ReloadReport:
        if self._reloader is None:
            raise InvalidRequest(
                "This server was started without a configuration file, so there is none to read again; "
                "start it with inferd serve FILE.yaml. A model's own file that was replaced is taken by inferd models "
                "load NAME.",
                code="no_config_file",
            )
        return await self._reloader.reload()

    async def load(self, model: str) -> ModelReport:
        return self._report(await self._router.load(model), self._config(), self._last_loads())

    async def override(self, model: str, config: ModelConfig) -> None:
        await self._override(model, config)

    async def unload(self, model: str) -> UnloadReport:
        gone = await self._router.unload(model)
        return UnloadReport(model=gone.name, freed_bytes=gone.freed_bytes)

    async def restart(self, model: str) -> ModelReport:
        await self._router.restart(model)
        status = next(status for status in self._router.models() if status.name == model)
        return self._report(status, self._config(), self._last_loads())

    def _report(
        self,
        status: ModelStatus,
        config: Config,
        loads: Mapping[tuple[str, int], LoadReport],
        desired: int | None = None,
    ) -> ModelReport:
        report = model_report(status, self._router.replica_statuses(status.name), config, loads, desired)
        adapters = [_adapter(one) for one in self._router.adapters() if one.parent == status.name]
        return msgspec.structs.replace(report, adapters=adapters) if adapters else report


def _tenants(quotas: Sequence[QuotaUse], stored: DurableStore | None) -> list[TenantReport]:
    """The tenants with a limit, and those that have something stored."""
    limits: dict[str, dict[str, float]] = {}
    used: dict[str, dict[str, float]] = {}
    for quota in quotas:
        if quota.owner.startswith(_TENANT):
            name = quota.owner.removeprefix(_TENANT)
            limits.setdefault(name, {})[quota.kind] = quota.whole
            used.setdefault(name, {})[quota.kind] = quota.used
    if stored is not None:
        for total in stored.tenants():
            if total.tenant:  # requests without a key store without a tenant
                limits.setdefault(total.tenant, {})["stored_bytes"] = stored.max_bytes
                used.setdefault(total.tenant, {}).update(
                    stored_bytes=total.num_bytes,
                    stored_responses=total.num_responses,
                    stored_conversations=total.num_conversations,
                )
    return [TenantReport(name=name, limits=limits[name], used=used[name]) for name in sorted(limits)]


def model_report(
    status: ModelStatus,
    replicas: Iterable[ReplicaStatus],
    config: Config,
    loads: Mapping[tuple[str, int], LoadReport] = {},
    desired: int | None = None,
) -> ModelReport:
    """``loads``: the last load of each replica, by model and index. ``desired``: its replicas by the load."""
    model = config.models.get(status.name)
    version = "1" if model is None else model.version
    named = config.models.get(base_of(status.name), model)
    versions = VersionsConfig() if named is None else named.versions
    weights = versions.weights
    return ModelReport(
        name=status.name,
        state=status.state,
        load=status.load,
        replicas_ready=status.replicas_ready,
        replicas=[_replica(replica, loads.get((status.name, replica.index)), status.info) for replica in replicas],
        waiting=status.waiting,
        in_flight=status.in_flight,
        waiting_tokens=status.waiting_tokens,
        memory_bytes=status.memory_bytes,
        version=version,
        aliases=sorted(alias for alias, number in versions.aliases.items() if str(number) == version),
        share=weights.get(version, 0.0) / sum(weights.values()) if weights else None,
        not_batched="" if status.info is None else status.info.not_batched,
        detail=status.detail,
        answer_format="" if status.info is None else status.info.answer_format,
        verified="" if status.info is None else status.info.verified,
        desired=desired,
        num_threads=0 if status.info is None else status.info.num_threads,
        cores=[] if status.info is None else list(status.info.cores),
    )


def _adapter(status: ModelStatus) -> AdapterReport:
    return AdapterReport(
        name=status.name,
        is_loaded=status.memory_bytes > 0,
        memory_bytes=status.memory_bytes,
        in_flight=status.in_flight,
        detail=status.detail,
    )


def _replica(replica: ReplicaStatus, load: LoadReport | None, info: ModelInfo | None) -> ReplicaReport:
    is_planned = info is not None and info.memory.process_bytes > 0 and replica.rss_bytes > 0
    return ReplicaReport(
        index=replica.index,
        kind=replica.kind,
        name=replica.name,
        state=replica.state,
        in_flight=replica.in_flight,
        breaker="ejected" if replica.ejected else replica.breaker,
        weight=replica.weight,
        region=replica.region,
        role=replica.role,
        layout=replica.layout,
        is_fallback=replica.is_fallback,
        restarts=replica.restarts,
        memory_bytes=replica.rss_bytes,
        planned_bytes=info.memory.total_bytes if info is not None and is_planned else 0,
        pid=replica.pid,
        node=replica.node,
        rank_nodes=replica.rank_nodes,
        load=load,
        artifact=replica.artifact,
        detail=replica.detail,
    )


def _job(report: JobReport) -> BatchReport:
    batch = report.batch
    return BatchReport(
        id=batch.id,
        tenant=batch.tenant,
        status=batch.status,
        is_at_work=report.is_at_work,
        created_at=batch.created_at,
        endpoint=batch.endpoint,
        model=batch.model,
        total=batch.total,
        completed=batch.num_done,
        failed=batch.num_failed,
        note=batch.note,
    )
