"""The composition root: builds every part once, wires them, runs them, and takes them down in order.

Knows the order in which things start and stop and what signals mean; every part's work is its own.

Leaving (SIGTERM, SIGINT, SIGHUP): readiness turns false; for ``drain_delay_s`` requests are still
accepted, as balancers learn of it late; then new ones are refused and those in flight get ``grace_s``;
what is left is ended with an error that says so. A second signal never starts this anew; a second
Ctrl-C cuts it short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from inferd import clock
from inferd.config import Config
from inferd.errors import InternalError, ModelLoadError
from inferd.events import Emit, Event, ignore
from inferd.router.router import Router
from inferd.worker.process import WORKER_COMMAND
from inferd.worker.supervisor import Patience

if TYPE_CHECKING:
    from inferd.gateway.listener import HttpServer
    from inferd.observe import Observer

FAREWELL_S = 1.0  # for the last bytes of answers that are over

_log = logging.getLogger("inferd.app")


def run(
    config: Config,
    *,
    on_ready: Callable[[str], None] | None = None,
    watch: Emit = ignore,
    command: Sequence[str] = WORKER_COMMAND,
    patience: Patience = Patience(),
) -> int:
    """``serve`` in an event loop of its own, uvloop's where it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config, on_ready=on_ready, watch=watch, command=command, patience=patience))


async def serve(
    config: Config,
    *,
    on_ready: Callable[[str], None] | None = None,
    watch: Emit = ignore,
    command: Sequence[str] = WORKER_COMMAND,
    patience: Patience = Patience(),
) -> int:
    """Serve until a signal says to leave; the exit code.

    The port answers at once; ``on_ready`` gets the server's address when every model is ready or has
    failed. ``watch`` hears every event as it happens. ``command`` starts a worker. Raises ConfigError when the port cannot be had, before any
    worker is started, and ModelLoadError when no model could be loaded.
    """
    from inferd.gateway.listener import bind

    listener = bind(config.server)
    departure = _Departure()
    departure.listen()
    events = _Events(watch)
    router = Router(config.models, events, command=command, patience=patience)
    observer: Observer | None = None
    stack = contextlib.ExitStack()
    try:
        await router.start()  # before the imports below: the workers' own take longer
        await asyncio.to_thread(_import_parts)
        from inferd.gateway.listener import HttpServer
        from inferd.gateway.server import create_app
        from inferd.observe import Observer

        replicas = {name: model.replicas for name, model in config.models.items()}
        observer = Observer(
            models=replicas, access_log=config.server.access_log, plain=_is_plain(config.server.log_format)
        )
        stack.enter_context(_logging_into(observer.log_handler))
        events.connect(observer.emit)
        app = create_app(router, config.server, observer.emit, metrics=observer.render_metrics)
        server = HttpServer(app, config.server, listener)
        await _run(config, router, server, departure, on_ready)
    finally:
        listener.close()
        await router.stop()
        stack.close()
        if observer is not None:
            observer.close()
        departure.deaf()
    return 0


def _is_plain(log_format: str) -> bool:
    """JSON for machines; words where a person watches."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


@contextlib.contextmanager
def _logging_into(handler: logging.Handler) -> Iterator[None]:
    """Have Python's logging join the log that waits for nobody: a stuck reader stops no request."""
    loggers = [logging.getLogger(name) for name in ("inferd", "uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True


def _import_parts() -> None:
    """In a thread, so that the workers get their first messages meanwhile."""
    import inferd.gateway.server
    import inferd.observe  # noqa: F401


async def _run(
    config: Config,
    router: Router,
    server: HttpServer,
    departure: _Departure,
    on_ready: Callable[[str], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    serving = loop.create_task(server.serve())
    settled = loop.create_task(router.settled())
    leaving = loop.create_task(departure.leave.wait())
    try:
        await asyncio.wait((serving, settled, leaving), return_when=asyncio.FIRST_COMPLETED)
        if settled.done() and not leaving.done():
            _refuse_if_all_failed(config, router)
            if on_ready is not None:
                on_ready(_address(config.server.host, server.port))
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not leaving.done():
            await serving
            raise InternalError("The HTTP server ended although nobody asked it to.")
        await _leave(config, router, server, serving, departure)
    finally:
        settled.cancel()
        leaving.cancel()
        await _close(server, serving, FAREWELL_S)


def _refuse_if_all_failed(config: Config, router: Router) -> None:
    """A server that can serve nothing is a failed start; one bad model among others is not."""
    failures = router.load_failures()
    for name, failure in failures.items():
        _log.error("the model %s could not be loaded: %s", name, failure.message)
    if failures and len(failures) == len(config.models):
        raise ModelLoadError(
            "\n".join(
                failure.message if len(failures) == 1 else f"{name}: {failure.message}"
                for name, failure in failures.items()
            )
        )


async def _leave(
    config: Config, router: Router, server: HttpServer, serving: asyncio.Task[None], departure: _Departure
) -> None:
    router.begin_drain()
    await departure.cut_short(asyncio.sleep(config.server.drain_delay_s))
    deadline = clock.now() + config.server.grace_s
    await departure.cut_short(router.drain(config.server.grace_s))
    router.abort()
    server.stop()
    # Answers that are complete here may still be on their way to slow readers.
    left = max(FAREWELL_S, deadline - clock.now())
    await departure.cut_short(asyncio.wait((serving,), timeout=left))


async def _close(server: HttpServer, serving: asyncio.Task[None], seconds: float) -> None:
    """End the HTTP server whatever state it is in."""
    server.stop()
    await asyncio.wait((serving,), timeout=seconds)
    server.stop(now=True)
    await asyncio.wait((serving,), timeout=seconds)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _address(host: str, port: int) -> str:
    """Where a client on this machine finds the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class _Departure:
    """What signals have asked for."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self._at_once = asyncio.Event()
        self._num_interrupts = 0
        self._heard: list[signal.Signals] = []

    def listen(self) -> None:
        """From now on signals are heard; only a main thread may."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                loop.add_signal_handler(number, self._on_signal, number)
                self._heard.append(number)

    def deaf(self) -> None:
        """No more. A process that is leaving already stays deaf: one more Ctrl-C has nothing to end."""
        loop = asyncio.get_running_loop()
        for number in self._heard:
            loop.remove_signal_handler(number)
            if self.leave.is_set():
                signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._at_once.set()
        if not self.leave.is_set():
            _log.warning("%s: finishing what is in flight, then leaving (Ctrl-C again: at once)", number.name)
        self.leave.set()

    async def cut_short(self, waiting: Awaitable[object]) -> None:
        """Wait, but not longer than until a second Ctrl-C."""
        task, at_once = asyncio.ensure_future(waiting), asyncio.ensure_future(self._at_once.wait())
        await asyncio.wait((task, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


class _Events:
    """Holds events back until there is an observer."""

    def __init__(self, watch: Emit) -> None:
        self._watch = watch
        self._emit: Emit | None = None
        self._held: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._watch(event)
        if self._emit is None:
            self._held.append(event)
        else:
            self._emit(event)

    def connect(self, emit: Emit) -> None:
        self._emit = emit
        for event in self._held:
            emit(event)
        self._held.clear()
