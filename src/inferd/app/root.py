"""The composition root: builds every part once, wires them, runs them, and takes them down in order.

It knows the order in which the parts start and stop, and nothing of their work.

The server leaves on SIGTERM, SIGINT, SIGHUP or the operator's command. Readiness turns false. For ``drain_delay_s``
requests are still accepted, because load balancers notice late. Then new requests are refused, and those in flight get
``grace_s`` to finish. The rest is ended with an error that says so. Another signal does not start this again; a second
Ctrl-C ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from inferd import __version__, clock
from inferd.app.adapters import AdapterActions, with_adapters
from inferd.app.answered_by import AnsweringVersions
from inferd.app.audit import AuditTrail
from inferd.app.change import changed_settings, refuse_empty, refuse_restarts
from inferd.app.compared_settings import compared_settings
from inferd.app.control_socket import ControlSocket, NoControlSocketError, open_control_socket
from inferd.app.departure import Departure
from inferd.app.device_usage import DeviceUsage
from inferd.app.hint_exchange import HintExchange
from inferd.app.keeping import Keeping
from inferd.app.pinned_folder import pinned_folder
from inferd.app.stages import RegistryStages
from inferd.autoscale.controller import Autoscaler
from inferd.cache.open import open_cache
from inferd.config import Config, ModelConfig, ObjectivesConfig, ServerConfig
from inferd.config.versions import base_of
from inferd.drift.monitors import Monitors
from inferd.drift.reference import read_references
from inferd.errors import ConfigError, InternalError, ModelLoadError
from inferd.events import Emit, Event, GatewaysCompared, ReplicaChanged, RequestEnded, ignore
from inferd.jobs.folder import open_folder
from inferd.jobs.runner import Runner
from inferd.jobs.store import JobStore
from inferd.lifecycle.actions import RegistryActions
from inferd.lifecycle.adapters import Rows, RuntimeAdapters
from inferd.lifecycle.webhooks import Webhooks
from inferd.nodes.listener import NodesListener, bound_socket, open_nodes
from inferd.nodes.ray.placer import Placer, check_installed
from inferd.observe import Observer
from inferd.observe.devices import Devices
from inferd.observe.devices.nvml import gpu_bytes
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.plain import is_plain
from inferd.observe.traces.settings import Settings, settings_of
from inferd.observe.why import Explainer
from inferd.observe.why.pressure import MachinePressure
from inferd.rollout.copies import Copies
from inferd.rollout.golden import Reply, read_golden_sets
from inferd.rollout.ledger import Change
from inferd.rollout.plan import Plan
from inferd.rollout.rollouts import Rollouts
from inferd.rollout.split import Split, with_weights
from inferd.router.replicas.loading import Plan as MemoryPlan
from inferd.router.replicas.loading import plan_model
from inferd.router.router import Router
from inferd.router.status import Applied, ModelStatus
from inferd.state.folder import data_folder
from inferd.state.group import GatewayReport, Group
from inferd.state.hints import HintTable
from inferd.stored.store import DurableStore
from inferd.tenancy.control import Control
from inferd.tenancy.principal import OPERATOR
from inferd.types import JSON, ModelInfo
from inferd.worker.dumps import forbid_dumps
from inferd.worker.line_writer import FileTarget
from inferd.worker.process import WORKER_COMMAND
from inferd.worker.supervisor import Patience

if TYPE_CHECKING:
    from inferd.app.source import ConfigSource
    from inferd.gateway.console.parts import Console
    from inferd.gateway.server import Gateway
    from inferd.http.listener import HttpServer
    from inferd.http.tls import Tls
    from inferd.worker.line_writer import LogStream

LAST_BYTES_S = 1.0  # for sending the last bytes of complete answers
SWITCH_INTERVAL_S = 0.001  # for which the event loop waits for a thread in Python code, which may read a large body
MAX_FILES = 65_536  # open files that are requested; every connection is one

_log = logging.getLogger("inferd.app")


class Ready(NamedTuple):
    """What the operator is shown when the server accepts requests."""

    address: str  # for clients on this machine
    needs_key: bool
    grpc_address: str | None = None
    models: Mapping[str, ModelInfo] = {}  # those that are ready: what they say of themselves
    failed: Mapping[str, str] = {}  # those that could not be loaded, and why
    away: Mapping[str, str] = {}  # those whose remote servers do not answer, and their errors; they are tried again
    waiting: Mapping[str, str] = {}  # those whose replicas wait for a machine, and what is missing


class Listener(Protocol):
    """Something that clients connect to."""

    async def serve(self) -> None:
        """Accept connections until ``stop``; then requests in flight finish, within the grace period."""

    def stop(self, *, now: bool = False) -> None: ...


def none_registered(config: Config) -> Mapping[str, str]:
    """Of a configuration without references to the registry."""
    return {}


def unchanged(model: str, sentence: str) -> str:
    """The words of a message about a model where nothing edits them."""
    return sentence


class ServeOptions(NamedTuple):
    """How a server is started, beside its configuration."""

    source: ConfigSource | None = None  # read again when its file changes
    on_ready: Callable[[Ready], None] | None = None  # called when every model is ready or has failed
    watch: Emit = ignore  # called with every event as it happens
    log: LogStream | None = None  # receives the log instead of stderr
    words: Callable[[str, str], str] = unchanged  # edits what is shown of a model's failures; takes its name first
    command: Sequence[str] = WORKER_COMMAND  # starts a worker
    patience: Patience = Patience()
    plan: MemoryPlan = plan_model  # what memory a worker takes
    registered: Callable[[Config], Mapping[str, str]] = none_registered  # versions of the registry, by entry


def run(config: Config, options: ServeOptions = ServeOptions()) -> int:
    """``serve`` in an event loop of its own, uvloop's where it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as factory

    def ready(found: Ready) -> None:
        # The objects of a start live until the end, and those of requests are freed by their reference counts.
        gc.freeze()
        gc.set_threshold(20_000, *gc.get_threshold()[1:])
        if options.on_ready is not None:
            options.on_ready(found)

    forbid_dumps()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=factory) as runner:
        _allow_files()
        return runner.run(serve(config, options._replace(on_ready=ready)))


def _allow_files() -> None:
    """Raise the limit of open files, which is low for programs that use select(), as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(config: Config, options: ServeOptions = ServeOptions()) -> int:
    """Serve until a signal or the operator ends it; the exit code. The port answers at once.

    Raises ConfigError, before any worker is started, when the port is in use, clients on other machines could use it
    without a key, or the state is not usable. Raises ModelLoadError when no model could be loaded.
    """
    from inferd.http.tls import Tls, certificate_of

    certificate = certificate_of(config.server.tls)
    references = read_references(config)
    golden = read_golden_sets(config)
    tls = Tls(certificate) if certificate is not None else None
    departure = Departure()
    async with contextlib.AsyncExitStack() as stack:
        ports = _open_ports(config, stack)
        devices = Devices(config.devices)
        devices.configure(config)
        tracing = settings_of(config.tracing, os.environ)
        observer, emit = _observer(config, options, devices, stack, tracing.settings)
        for warning in tracing.warnings:
            _log.warning("%s", warning)
        observer.startup.enter("state")
        control_socket = _control_socket(config, ports.http.getsockname()[1])
        if control_socket is not None:
            stack.callback(control_socket.close)
        keeping = _keeping(config, observer)
        if keeping is not None:
            keeping.begin()
            stack.push_async_callback(keeping.close)
        departure.handle_signals()
        stack.callback(departure.release_signals)
        cache = open_cache(config.cache, emit)
        stack.push_async_callback(cache.close)
        control = Control(config, emit)
        stored = None
        if config.state.responses.enabled:
            stored = DurableStore(control.state, control.presence, config.state.responses, _from_threads(emit))
            stored.schedule()
        job_store = None
        if config.jobs.enabled:
            folder = open_folder(config.state, config.jobs)
            job_store = JobStore(control.state, control.presence, folder, config.jobs, _from_threads(emit))
            job_store.schedule()
        group = Group(control.state, control.presence, _told_of_gateways(_from_threads(emit)))
        group.configure(compared_settings(config))
        group.schedule()
        await control.start()
        stack.push_async_callback(control.close)
        if config.devices.enabled:
            usage = DeviceUsage(devices.energy, lambda: observer.tally_of(""), control.door.usage.record)
            stack.callback(usage.enter)  # when the requests have ended
            entering = asyncio.create_task(usage.run())
            stack.callback(entering.cancel)
        pin_below = stack.enter_context(pinned_folder(data_folder(config.state) / "kept"))
        command = (*options.command, *_log_options(config.server))
        patience, plan = options.patience, options.plan

        async def load(entry: str) -> None:
            await router.load(entry)

        def divide(plans: Mapping[str, Plan], splits: Mapping[str, Split]) -> None:
            site.divide(plans, splits)

        def held(model: str) -> str:
            return site.held(model)

        async def ask(path: str, body: JSON) -> Reply:
            return await questions.ask(path, body)

        rollouts = Rollouts(
            control.state,
            control.presence,
            lambda entry: _is_ready(router.model(entry)),
            load,
            emit,
            divide,
            lambda name, change: _record(audit, name, change),
            ask,
            stages=RegistryStages(lambda: site.config.registry, clock.wall),
        )
        monitors = Monitors(control.state, emit)
        counted = _counted(monitors, _both(rollouts.handle, emit))
        copies = Copies(counted)
        stack.callback(copies.close)
        nodes: NodesListener | None = None

        placer: Placer | None = None

        async def close_nodes() -> None:
            if placer is not None:
                await placer.stop()
            if nodes is not None:
                await nodes.stop()

        stack.push_async_callback(close_nodes)  # after the router, whose workers on nodes are asked to stop

        async def adopt_adapters(rows: Rows) -> None:
            await site.adapt(rows)

        runtime_adapters = RuntimeAdapters(control.state, adopt_adapters)
        adapted = with_adapters(_bound(config), await runtime_adapters.read())
        router = Router(adapted, counted, command=command, patience=patience, plan=plan, pin_below=pin_below)
        stack.push_async_callback(router.stop)
        nodes = await _nodes(config, ports.nodes, router, emit)
        if nodes is not None and config.nodes.ray is not None:
            placer = Placer(config.nodes.ray, nodes, router.machines)
            router.machines.reserver = placer
            placer.start()
        scaling = Autoscaler(router, held, emit)
        observer.startup.enter("workers")
        await router.start()  # before the imports below: the workers' own take longer
        observer.startup.enter("routes")
        await asyncio.to_thread(_import_parts)
        from inferd.app.actions import Actions
        from inferd.app.questions import Questions
        from inferd.app.reload import Reloader
        from inferd.gateway.console.parts import Console
        from inferd.gateway.jobs.asking import Asking
        from inferd.gateway.runs import Runs
        from inferd.gateway.server import create_app

        console = Console(config, observer.live)

        def config_of(name: str) -> ModelConfig | None:
            return site.config.models.get(name)

        answered_by = AnsweringVersions(router.info, config_of)
        payloads = PayloadLog(data_folder(config.state), config.payloads, observer.payload_dropped, answered_by)
        stack.callback(payloads.close)
        site = Site(
            *(config, router, control, observer, devices, console, payloads, rollouts, monitors, scaling),
            group=group,
            tls=tls,
            copies=copies,
            registered=options.registered,
            adapters=runtime_adapters,
        )
        questions = Questions(router, config)
        devices.start()  # when the workers have started: what the drivers do at first may take long
        stack.callback(devices.stop)
        source = options.source
        audit = AuditTrail(data_folder(config.state), emit)
        stack.callback(audit.close)
        rollouts.configure(config, golden, options.registered(config))
        scaling.configure(config)
        if rollouts.plans:
            await rollouts.look()  # before the first request, as a version that was promoted serves all of them
        monitors.configure(config, references)
        monitoring = asyncio.create_task(monitors.keep())
        stack.callback(monitoring.cancel)
        watching = asyncio.create_task(rollouts.keep())
        stack.callback(watching.cancel)
        stack.callback(scaling.stop)
        following_load = asyncio.create_task(scaling.keep())
        stack.callback(following_load.cancel)
        starting = asyncio.create_task(audit.record_own("start", "done", detail=f"version {__version__}"))
        stack.callback(starting.cancel)
        reloader = None if source is None else Reloader(source, site.adopt, emit, audit.record_own)
        follows = reloader.look_soon if reloader is not None and config.server.reload else None
        path = None if source is None else source.path
        address = _address(config.server, ports.http.getsockname()[1])
        hints = HintExchange(router, HintTable(control.state, control.presence), group, emit)
        actions = Actions(
            *(router, control, departure, reloader, lambda: site.divided, site.override, path, address, devices),
            startup=observer.startup,
            rollouts=rollouts,
            scaling=scaling,
            versions=RegistryActions(control.state, lambda: site.config.registry, clock.wall),
            drift=monitors,
            webhooks=Webhooks(lambda: site.config.mlflow, follows, clock.wall, emit),
            stored=stored,
            jobs=job_store,
            nodes=nodes,
            group=group,
            hints=hints,
            adapters=AdapterActions(runtime_adapters, router, lambda: site.config),
        )
        await site.adapt(runtime_adapters.rows)
        telling = asyncio.create_task(hints.keep())
        stack.callback(telling.cancel)
        following_adapters = asyncio.create_task(runtime_adapters.keep())
        stack.callback(following_adapters.cancel)
        asking = Asking(router, control.door)
        jobs = None
        if job_store is not None:
            max_line_bytes = config.server.max_body_bytes
            jobs = Runner(job_store, asking, lambda: router.draining, max_line_bytes=max_line_bytes, tell=emit)
        runs = None if stored is None else Runs(stored, control.door, lambda: router.draining)
        create = functools.partial(
            create_app,
            router,
            config,
            _both(rollouts.handle, observer.emit),
            metrics=observer.page,
            door=control.door,
            control=actions,
            tally_of=observer.tally_of,
            explainer=observer.explainer,
            audit=audit,
            payloads=payloads,
            cache=cache,
            idempotency=control.idempotency,
            stored=stored,
            runs=runs,
            jobs=jobs,
            copies=copies,
            console=console,
            sampler=None if tracing.settings is None else tracing.settings.sampler,
        )
        if keeping is not None:
            keeping.config = lambda: site.config.metrics
            saving = asyncio.create_task(keeping.run())
            stack.callback(saving.cancel)
        keeping_live = asyncio.create_task(observer.keep_live())
        stack.callback(keeping_live.cancel)
        observer.startup.enter("listeners")
        listeners, grpc_address = await _open_listeners(site, create, ports, control_socket, emit)
        site.add(questions.gateway)  # behind those of the listeners
        if runs is not None:
            running = asyncio.create_task(runs.keep(site.gateways[0]))
            stack.callback(running.cancel)
        if jobs is not None:
            asking.application = site.gateways[0]
            working = asyncio.create_task(jobs.keep())
            stack.callback(working.cancel)
        if reloader is not None and config.server.reload:
            for follow in (reloader.follow(), reloader.follow_references()):
                following = asyncio.create_task(follow)
                stack.callback(following.cancel)
        ready = Ready(address, control.door.needs_keys, grpc_address)
        await _run(site, listeners, departure, ready, options.on_ready)
    return 0


def _both(first: Emit, second: Emit) -> Emit:
    """Passes every event to both."""

    def emit(event: Event) -> None:
        first(event)
        second(event)

    return emit


def _counted(monitors: Monitors, emit: Emit) -> Emit:
    """Counts the ends of requests for drift, and passes every event on."""

    def emit_counted(event: Event) -> None:
        if type(event) is RequestEnded:
            monitors.ended(event)
        emit(event)

    return emit_counted


def _is_ready(status: ModelStatus | None) -> bool:
    return status is not None and status.replicas_ready > 0


async def _record(audit: AuditTrail, name: str, change: Change) -> None:
    """A change of a rollout that no command asked for, in the audit log."""
    progress = change.progress
    detail = f"{progress.state.replace('_', ' ')}, {100 * progress.share:g} %: {progress.reason}"
    await audit.record_own("rollout", "done", actor=change.actor, target=name, detail=detail)


def _from_threads(emit: Emit) -> Emit:
    """Emits events in this event loop, which may end before the thread that tells of them."""
    loop = asyncio.get_running_loop()

    def emit_soon(event: Event) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(emit, event)

    return emit_soon


def _told_of_gateways(emit: Emit) -> Callable[[Sequence[GatewayReport]], None]:
    """Emits what the comparison of this server with the other gateways of its database has found."""

    def tell(reports: Sequence[GatewayReport]) -> None:
        digest = next((each.digest for each in reports if each.is_this), "")
        num_differing = sum(1 for each in reports if each.differs)
        emit(GatewaysCompared(digest=digest, num_gateways=len(reports), num_differing=num_differing))

    return tell


class _Ports(NamedTuple):
    """The sockets that clients and nodes reach; only ``http`` listens yet."""

    http: socket.socket
    grpc: socket.socket | None
    nodes: socket.socket | None


def _open_ports(config: Config, stack: contextlib.AsyncExitStack) -> _Ports:
    """Raises ConfigError for a port that is in use, before anything costly is started."""
    from inferd.http.listener import bind, reserve

    listener = bind(config.server)
    stack.callback(listener.close)
    reserved = reserve(config.server)
    if reserved is not None:
        stack.callback(reserved.close)
    if config.nodes.ray is not None:
        check_installed()
    listen = config.nodes.listen or (None if config.nodes.ray is None else "0.0.0.0:0")
    nodes = None if listen is None else bound_socket(listen)
    if nodes is not None:
        stack.callback(nodes.close)
    return _Ports(listener, reserved, nodes)


async def _nodes(config: Config, listener: socket.socket | None, router: Router, emit: Emit) -> NodesListener | None:
    """The nodes, and their port open; None: no machine can join. Raises ConfigError."""
    if listener is None:
        return None
    nodes = open_nodes(config.nodes, data_folder(config.state) / "nodes", router.machines, router.vacate, emit)
    await nodes.start(listener)
    _log.info("machines join as nodes at %s; inferd node token prints what to run there", nodes.address)
    return nodes


def _observer(
    config: Config,
    options: ServeOptions,
    devices: Devices,
    stack: contextlib.AsyncExitStack,
    tracing: Settings | None,
) -> tuple[Observer, Emit]:
    """The log, the metrics and the traces, and the function that every event goes to. Raises ConfigError for a file of
    the log that cannot be opened."""
    server = config.server
    observer = Observer(
        models=_replicas(config),
        objectives=_objectives(config),
        devices=devices,
        aliases=config.metrics.aliases,
        versions=_versions(config),
        access_log=server.access_log,
        log_speed=server.log_speed,
        stream=options.log if server.log_file is None else _log_file(server.log_file),
        plain=_is_plain_log(server),
        level=server.log_level,
        tracing=tracing,
        explainer=Explainer(server.request_records, pressure=MachinePressure(devices.current)),
    )
    stack.callback(observer.close)
    stack.enter_context(_logging_into(observer.log_handler, server.log_level))
    stack.callback(observer.close_traces)  # while its warnings still reach the log
    watch, words = options.watch, options.words

    def emit(event: Event) -> None:
        if type(event) is ReplicaChanged and event.reason:
            event = msgspec.structs.replace(event, reason=words(event.model, event.reason))
        watch(event)
        observer.emit(event)

    return observer, emit


async def _open_listeners(
    site: Site, create: Callable[..., Gateway], ports: _Ports, control_socket: ControlSocket | None, emit: Emit
) -> tuple[list[Listener], str | None]:
    """The servers of all ports, as parts of the site, and the address of the one for gRPC."""
    from inferd.http.listener import HttpServer

    server = site.config.server
    app = site.add(create())
    site.servers.append(HttpServer(app, server, ports.http, emit=emit, tls=_listening(site.tls, "http/1.1")))
    if control_socket is not None:
        site.servers.append(HttpServer(site.add(create(principal=OPERATOR)), server, control_socket.listener))
    listeners: list[Listener] = [*site.servers]
    if ports.grpc is None:
        return listeners, None
    await asyncio.to_thread(_import_grpc)
    from inferd.gateway.grpc.server import GrpcServer

    grpc_server = GrpcServer(site.gateways[0], server, ports.grpc, _listening(site.tls, "h2"))
    await grpc_server.start()
    listeners.append(grpc_server)
    return listeners, _reachable(server.host, grpc_server.port)


class Site:
    """The parts of a running server, and the configuration they have now."""

    def __init__(
        self,
        config: Config,
        router: Router,
        control: Control,
        observer: Observer,
        devices: Devices,
        console: Console,
        payloads: PayloadLog,
        rollouts: Rollouts,
        monitors: Monitors,
        scaling: Autoscaler,
        group: Group | None = None,
        tls: Tls | None = None,
        copies: Copies | None = None,
        registered: Callable[[Config], Mapping[str, str]] = none_registered,
        adapters: RuntimeAdapters | None = None,
    ) -> None:
        self._registered = registered
        self._group = group
        self._adapters = adapters
        self.rollouts = rollouts
        self.scaling = scaling
        self.copies = copies if copies is not None else Copies(ignore)
        self.monitors = monitors
        self.payloads = payloads
        self.devices = devices
        self.tls = tls
        self.console = console
        self.config = config
        self.router = router
        self.control = control
        self.observer = observer
        self.gateways: list[Gateway] = []
        self.servers: list[HttpServer] = []
        self.divided = config
        """The configuration with the weights that rollouts have set."""
        self._splits: Mapping[str, Split] = {}
        self._adopting = asyncio.Lock()

    async def override(self, model: str, config: ModelConfig) -> None:
        """Other settings for one model, until a whole configuration is adopted again. Raises as ``adopt``, and
        ModelLoadError, with the old settings in use, where the model does not load with them."""
        async with self._adopting:
            before = self.config
            applied = await self._adopt(msgspec.structs.replace(before, models={**before.models, model: config}))
            if applied.failed:
                await self._adopt(before)
                raise ModelLoadError(" ".join(applied.failed))

    async def adopt(self, config: Config) -> Applied:
        """Use another configuration from now on, without dropping a request.

        Raises InferdError, with nothing changed, where it cannot be done while the server runs.
        """
        async with self._adopting:
            return await self._adopt(config)

    async def _adopt(self, config: Config) -> Applied:
        refuse_empty(config)
        refuse_restarts(self.config, config)
        certificate = None
        if self.tls is not None:
            from inferd.http.tls import certificate_of

            certificate = await asyncio.to_thread(certificate_of, config.server.tls)
        references = await asyncio.to_thread(read_references, config)
        golden = await asyncio.to_thread(read_golden_sets, config)
        rows: Rows = {} if self._adapters is None else self._adapters.rows
        bound = with_adapters(await asyncio.to_thread(_bound, config), rows)
        # Events of a model may come before it is ready, so the observer knows it first.
        before = self.config
        known = _replicas(with_adapters(before, rows))
        self._configure_observer(before, known | _replicas(bound))
        try:
            applied = await self.router.apply(bound)
        except BaseException:
            self._configure_observer(before, known)
            raise
        self.control.apply(config)
        if self._group is not None:
            self._group.configure(compared_settings(config))
        self.devices.configure(config)
        self.payloads.configure(config.payloads)
        changed = changed_settings(before, config)
        self.config = config
        self.rollouts.configure(config, golden, self._registered(config))  # which divides the units again
        self.scaling.configure(config)
        self.monitors.configure(config, references)
        for server in self.servers:
            server.configure(config.server)
        self._configure_observer(config, _replicas(bound))
        self.observer.explainer.configure(config.server.request_records)
        if self.tls is not None and certificate is not None and self.tls.replace(certificate):
            applied.done.append("server.tls: new connections are shown the certificate of now.")
        applied.done.extend(changed)
        return applied

    async def adapt(self, rows: Rows) -> None:
        """Have the adapters of the configuration and of these rows."""
        async with self._adopting:
            adapted = with_adapters(self.config, rows)
            self._configure_observer(self.config, _replicas(adapted))  # which knows a name before its first request
            await self.router.set_adapters({name: model.adapters for name, model in adapted.models.items()})

    def held(self, model: str) -> str:
        """Why no replica of a model may leave now; empty: one may."""
        if self._adopting.locked():
            return "another configuration is being adopted"
        split = self._splits.get(base_of(model))
        return "its rollout is under way" if split is not None and split.is_counted else ""

    def divide(self, plans: Mapping[str, Plan], splits: Mapping[str, Split]) -> None:
        """Divide the units of models among their versions as rollouts say, from the next request on."""
        self.divided, self._splits = with_weights(self.config, plans, splits), splits
        for gateway in self.gateways:
            gateway.configure(self.divided, splits)

    def add(self, gateway: Gateway) -> Gateway:
        """Take a gateway into the site."""
        gateway.configure(self.divided, self._splits)
        self.gateways.append(gateway)
        return gateway

    def _configure_observer(self, config: Config, replicas: Mapping[str, int]) -> None:
        server = config.server
        self.observer.configure(
            replicas,
            access_log=server.access_log,
            log_speed=server.log_speed,
            objectives=_objectives(config),
            aliases=config.metrics.aliases,
            versions=_versions(config),
        )


def _is_plain_log(server: ServerConfig) -> bool:
    """Whether the lines of the log are text. A file has JSON lines unless it is asked for text."""
    return server.log_format == "text" if server.log_file is not None else is_plain(server.log_format)


def _log_file(name: str) -> FileTarget:
    """Raises ConfigError."""
    path = Path(name).expanduser().absolute()
    target = FileTarget(str(path))
    try:
        target.open()
    except OSError as error:
        raise ConfigError(
            f"server.log_file: {path} cannot be opened ({error.strerror}); choose another file, or change its owner.",
            param="server.log_file",
        ) from None
    return target


def _log_options(server: ServerConfig) -> list[str]:
    """The options of a worker for its log, which follows the settings of the server's."""
    options = [] if _is_plain_log(server) else ["--json-log"]
    if server.log_file is not None:
        options += ["--log-file", str(Path(server.log_file).expanduser().absolute())]
    return [*options, "--log-level", server.log_level]


def _listening(tls: Tls | None, protocol: str) -> ssl.SSLContext | None:
    return None if tls is None else tls.listening(protocol)


def _bound(config: Config) -> Config:
    """The configuration with every model bound to its part of the memory budgets, if there are any, and in its layout.
    Raises ConfigError when the models do not fit."""
    budgets = (config.server.memory_bytes, config.server.devices.memory_bytes)
    gpus = gpu_bytes()
    if budgets == (None, None) and config.nodes.listen is None and not gpus:
        return config
    from inferd.planning.memory import bind  # most servers have no budget, no nodes and one GPU at most
    from inferd.planning.spreading import spread

    found = spread(config, gpus=gpus)
    for name, reasons in found.reasons.items():
        text = found.config.models[name].parallel.text
        _log.info("%s is divided among %s, as fewer do not hold it: %s", name, text, " ".join(reasons))
    return bind(found.config)


def _control_socket(config: Config, port: int) -> ControlSocket | None:
    """The socket for the operator's commands. None: it could not be made, and the server works without it."""
    try:
        return open_control_socket(data_folder(config.state), port)
    except NoControlSocketError as error:
        _log.warning("there is no control socket, so commands such as inferd status do not find this server: %s", error)
        return None


def _keeping(config: Config, observer: Observer) -> Keeping | None:
    """What saves the counters. None: the server takes any free port, so the next one would not find them."""
    if config.server.port == 0:
        return None
    path = data_folder(config.state) / "metrics" / f"{config.server.port}.bin"
    return Keeping(observer, path, lambda: config.metrics)


def _replicas(config: Config) -> dict[str, int]:
    """The replicas of each name that clients use. Adapters have none of their own, as they are in those of their
    models."""
    adapters = [name for model in config.models.values() for name in model.adapters]
    return dict.fromkeys(adapters, 0) | {
        name: model.num_local + len(model.upstreams) for name, model in config.models.items()
    }


def _objectives(config: Config) -> dict[str, ObjectivesConfig]:
    return {name: model.objectives for name, model in config.models.items()}


def _versions(config: Config) -> dict[str, str]:
    return {name: model.version for name, model in config.models.items()}


@contextlib.contextmanager
def _logging_into(handler: logging.Handler, log_level: str) -> Iterator[None]:
    """Send Python's logging through the non-blocking log, so that a stuck reader stops no request."""
    ours = logging.getLogger("inferd")
    loggers = [ours, logging.getLogger("asyncio")]
    level = ours.level
    ours.setLevel(log_level.upper())  # by default info, so that successes such as an adopted file are logged
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        ours.setLevel(level)
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True


def _import_parts() -> None:
    """In a thread, so that the workers get their first messages meanwhile."""
    import inferd.gateway.server  # noqa: F401


def _import_grpc() -> None:
    import inferd.gateway.grpc.server  # noqa: F401


async def _run(
    site: Site,
    servers: Sequence[Listener],
    departure: Departure,
    ready: Ready,
    on_ready: Callable[[Ready], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    serving = [loop.create_task(server.serve()) for server in servers]
    site.observer.startup.accepts()
    settled = loop.create_task(site.router.settled())
    leaving = loop.create_task(departure.leave.wait())
    try:
        await asyncio.wait((*serving, settled, leaving), return_when=asyncio.FIRST_COMPLETED)
        if settled.done() and not leaving.done():
            _refuse_if_all_failed(site)
            if on_ready is not None:
                infos = {status.name: status.info for status in site.router.models() if status.info is not None}
                failed = {name: failure.message for name, failure in site.router.load_failures().items()}
                away = {
                    status.name: _silence(site.router, status) for status in site.router.models() if _is_away(status)
                }
                waiting = _waiting(site.router)
                needs_key = site.control.door.needs_keys
                on_ready(ready._replace(needs_key=needs_key, models=infos, failed=failed, away=away, waiting=waiting))
            await asyncio.wait((*serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not leaving.done():
            for task in serving:
                if task.done():
                    await task
            raise InternalError("A listener ended although it was not stopped.")
        await _leave(site, servers, serving, departure)
    finally:
        settled.cancel()
        leaving.cancel()
        await _close(servers, serving, LAST_BYTES_S)


def _is_away(status: ModelStatus) -> bool:
    return not status.has_local and status.replicas_ready == 0


def _waiting(router: Router) -> dict[str, str]:
    """What the replicas wait for of the local models of which none is ready, as far as they have not failed. A model
    that is loaded on demand has no replica yet."""
    failed = router.load_failures()
    slow = [one for one in router.models() if one.has_local and not one.replicas_ready and one.name not in failed]
    return {status.name: why for status in slow if (why := _reason(router, status.name))}


def _silence(router: Router, status: ModelStatus) -> str:
    return _reason(router, status.name) or status.detail


def _reason(router: Router, model: str) -> str:
    """What a replica of the model says of its state; empty: none says anything."""
    return next((replica.detail for replica in router.replica_statuses(model) if replica.detail), "")


def _refuse_if_all_failed(site: Site) -> None:
    """Raises ModelLoadError when no model could be loaded. One failed model among others does not end the start."""
    failures = site.router.load_failures()  # each is in the log, as its replica's
    if failures and len(failures) == len(site.config.models):
        raise ModelLoadError(
            "\n".join(
                failure.message if len(failures) == 1 else f"{name}: {failure.message}"
                for name, failure in failures.items()
            )
        )


async def _leave(
    site: Site, servers: Sequence[Listener], serving: Sequence[asyncio.Task[None]], departure: Departure
) -> None:
    site.router.begin_drain()
    await departure.wait_unless_interrupted(asyncio.sleep(site.config.server.drain_delay_s))
    site.copies.cancel()  # which no client waits for
    deadline = clock.now() + site.config.server.grace_s
    await departure.wait_unless_interrupted(site.router.drain(site.config.server.grace_s))
    await site.router.cancel_and_wait()
    site.router.abort()
    site.console.close()
    for server in servers:
        server.stop()
    # Answers that are complete here may still be on their way to slow readers.
    left = max(LAST_BYTES_S, deadline - clock.now())
    await departure.wait_unless_interrupted(asyncio.wait(serving, timeout=left))


async def _close(servers: Sequence[Listener], serving: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """End the servers, in any state."""
    for server in servers:
        server.stop()
    await asyncio.wait(serving, timeout=seconds)
    for server in servers:
        server.stop(now=True)
    await asyncio.wait(serving, timeout=seconds)
    for task in serving:
        task.cancel()
    for task in serving:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _address(config: ServerConfig, port: int) -> str:
    """Where a client on this machine finds the server."""
    return f"{'http' if config.tls.certificate is None else 'https'}://{_reachable(config.host, port)}"


def _reachable(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
