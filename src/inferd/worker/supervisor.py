"""Keeps one replica's worker alive: start, load, watch, restart, stop.

Runs in the gateway's event loop. Knows when a worker is ready, hangs or is dead, and when to start it again. Knows
nothing of queues: the requests in flight in a lost worker are the owner's. Knows nothing of machines either: a
``Place`` starts the worker, and may start each on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.events import Emit, LoadProgress, ReplicaChanged
from inferd.machine.memory import rss_bytes
from inferd.types import Failure, Handed, Link, ModelInfo, Output, StepStats
from inferd.worker.messages import (
    AdaptersSet,
    Checked,
    Detokenized,
    FromWorker,
    HandedOver,
    Heartbeat,
    Leaving,
    Load,
    LoadFailed,
    Loading,
    Outputs,
    Ready,
    Stop,
    Tokenized,
    ToWorker,
)
from inferd.worker.process import Life

State = Literal["starting", "loading", "ready", "hung", "died", "failed", "stopped"]

_STARVED = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))

_log = logging.getLogger("inferd.supervisor")


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's time limits in seconds, and its limits on restarts."""

    watch_s: float = 0.5  # between two checks of the clock
    silent_s: float = 5.0  # without a message from a ready worker
    silent_loading_s: float = 60.0  # while it loads, when one call may hold the interpreter for long
    first_delay_s: float = 0.1  # before the first restart; doubles with each in a row
    longest_delay_s: float = 30.0
    useful_s: float = 5.0  # a worker that was ready for this long, or finished a request, had a useful life
    burst: int = 20  # useful lives within ``burst_s`` from which their ends count as a crash loop
    burst_s: float = 60.0
    stop_s: float = 3.0  # between asking a worker to stop and killing it
    stacks_s: float = 0.2  # for a hung worker to write its stacks
    first_loads: int = 5  # deaths in a row, without ever having been ready, before giving up


class NoMachineError(Exception):
    """No machine may run the worker now. The message says why, without a full stop.

    ``is_coming``: a machine was asked for, and is expected within seconds.
    """

    def __init__(self, message: str, *, is_coming: bool = False) -> None:
        super().__init__(message)
        self.is_coming = is_coming


class Place(Protocol):
    """Where the workers of one replica run. It may be another machine for each of them."""

    def launch(
        self,
        name: str,
        load: Load,
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> Life:
        """Start a worker that loads the model. Raises OSError where no process can be started; NoMachineError."""
        ...

    def may_move(self) -> bool:
        """Whether a model that does not load where it was tried may be tried on another machine. Another call of
        ``launch`` does that."""
        ...

    async def wait_for_change(self) -> None:
        """Wait until ``launch`` may find a machine again."""


class Owner(Protocol):
    """Receives the worker's events: the router's replica."""

    def worker_ready(self, info: ModelInfo) -> None: ...
    def worker_lost(self, reason: str, *, is_machine_lost: bool) -> None:
        """All requests in flight are lost. Called once for each life that was ready.

        ``is_machine_lost``: the worker ended with its machine, so no request is to blame.
        """

    def worker_unplaced(self) -> None:
        """No machine may run the worker now; it is started as soon as one may."""

    def worker_failed(self, failure: Failure) -> None:
        """The model cannot be loaded; there will be no other try."""

    def worker_outputs(self, outputs: list[Output], stats: StepStats | None) -> None: ...
    def worker_answered(self, answer: Tokenized | Detokenized | Checked | AdaptersSet) -> None: ...
    def worker_handed_over(self, handed: Handed) -> None: ...
    def worker_writable(self) -> None: ...


class Ending(msgspec.Struct, frozen=True):
    """How a worker's life ended."""

    state: Literal["died", "hung", "failed"]
    reason: str
    ready_s: float | None = None  # how long it was ready; None: never
    was_useful: bool = False  # it had served requests, so its end came from outside or from one request
    failure: Failure | None = None
    is_machine_lost: bool = False


class Supervisor:
    """Keeps one replica's worker running over restarts. ``again`` gives the configuration of every start after the
    first. ``spare``: where a start takes its process from, while there is one."""

    def __init__(
        self,
        model: str,
        replica: int,
        config: ModelConfig,
        owner: Owner,
        emit: Emit,
        place: Place,
        *,
        patience: Patience = Patience(),
        again: Callable[[], Awaitable[ModelConfig]] | None = None,
        link: Link | None = None,
    ) -> None:
        """``link``: how its workers take part in hand-overs; None: they do not."""
        self._link = link
        self._model = model
        self._replica = replica
        self._config = config
        self._again = again
        self._owner = owner
        self._emit = emit
        self._place = place
        self._patience = patience
        self._process: Life | None = None
        self._task: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._watch = _Watch()
        self._info: ModelInfo | None = None
        self._load_failure: Failure | None = None
        self._leaving_reason = ""  # why the worker ends, where it ends itself
        self._has_finished = False  # a request, in this life
        self._is_starved = False  # no process could be started, for lack of a resource that may become free
        self._waits_for_machine = False
        self.is_unplaced = False  # no machine may run the worker now, and none is coming
        self.rss_bytes = 0
        self.state: State = "starting"
        self.reason = ""
        self.restarts = 0
        self.was_ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_writable(self) -> bool:
        return self._process is not None and self._process.is_writable

    def measure_rss(self) -> int:
        """Resident memory of the worker now, with its ranks on the same machine; 0: there is none, or the system does
        not say. By the last report of a worker on another machine."""
        if self._process is None:
            return 0
        pid = self._process.pid
        if pid is None:
            return self.rss_bytes
        return rss_bytes(pid) + sum(map(rss_bytes, () if self._info is None else self._info.rank_pids))

    def start(self) -> None:
        """Start the worker now, and keep it running."""
        self._start_process()
        self._task = asyncio.get_running_loop().create_task(self._supervise())
        self._task.add_done_callback(_report)

    def send(self, message: ToWorker) -> None:
        """Send a message to the present worker; it is lost if that worker ends."""
        if self._process is not None:
            self._process.send(message)

    async def stop(self) -> None:
        """Ask the worker to leave, kill it if it does not. Idempotent."""
        self._leaving.set()
        if self._process is not None:
            self._process.send(Stop())
            await self._gone_within(self._process, self._patience.stop_s)
        if self._task is not None:
            await self._task
        if self.state != "stopped":
            self._change("stopped")

    # -- lives ------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        in_a_row = 0
        useful_ends: deque[float] = deque(maxlen=self._patience.burst)
        while True:
            if self._waits_for_machine:
                await self._until_change()
                if self._leaving.is_set():
                    return
                self._start_process()
                continue
            ending = await self._live()
            if self._leaving.is_set():
                return
            if ending.is_machine_lost or (ending.ready_s is None and self._place.may_move()):
                _log.warning("%s/%d: %s; it is placed anew", self._model, self._replica, ending.reason.rstrip("."))
                if await self._start_again():
                    continue
                return
            in_a_row = 0 if ending.was_useful and not self._is_burst(useful_ends) else in_a_row + 1
            is_hopeless = ending.failure is not None or in_a_row >= self._patience.first_loads
            if is_hopeless and not self.was_ready and not self._is_starved:
                failure = (
                    ending.failure
                    or ModelLoadError(
                        f"The worker of {self._model!r} ended {in_a_row} times while loading ({ending.reason}); "
                        "its output is in the log."
                    ).to_failure()
                )
                self._change("failed", failure.message)
                self._owner.worker_failed(failure)
                return
            delay = (
                self._patience.longest_delay_s
                if ending.failure is not None
                else restart_delay(self._patience, in_a_row)
            )
            # From the third on it is a crash loop, which is an error for the operator.
            level = logging.ERROR if in_a_row >= 3 else logging.WARNING
            when = f"in {delay:.1f} s" if delay >= 0.05 else "now"
            often = f" ({in_a_row} times in a row)" if in_a_row > 1 else ""
            words = "%s/%d: %s; it is started again %s%s"
            _log.log(level, words, self._model, self._replica, ending.reason.rstrip("."), when, often)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), delay)
            if self._leaving.is_set() or not await self._start_again():
                return

    async def _start_again(self) -> bool:
        """Start another worker with the configuration of now; False: the replica is stopped."""
        if self._again is not None:
            self._config = await self._again()
            if self._leaving.is_set():
                return False
        self.restarts += 1
        self._start_process()
        return True

    async def _until_change(self) -> None:
        """Wait until a machine may run the worker, or the replica is stopped."""
        loop = asyncio.get_running_loop()
        waiting = [loop.create_task(self._place.wait_for_change()), loop.create_task(self._leaving.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def _is_burst(self, useful_ends: deque[float]) -> bool:
        """Whether useful lives end so often that something must be wrong with the model. Notes one more."""
        now, patience = clock.now(), self._patience
        is_burst = len(useful_ends) == patience.burst and now - useful_ends[0] < patience.burst_s
        useful_ends.append(now)
        return is_burst

    def _start_process(self) -> None:
        """Start a process; where that is impossible now, ``_live`` finds none."""
        self._info = self._load_failure = None
        self._leaving_reason = ""
        self._has_finished = self._is_starved = False
        self.rss_bytes = 0
        self._watch = _Watch()
        if not self._waits_for_machine:
            self._change("starting")
        name, load = f"{self._model}/{self._replica}", Load(self._model, self._config, self._replica, self._link)
        try:
            self._process = self._place.launch(name, load, self._handle_messages, self._owner.worker_writable)
        except NoMachineError as error:
            self._process = None
            was = (self._waits_for_machine, self.is_unplaced, self.reason)
            self._waits_for_machine, self.is_unplaced = True, not error.is_coming
            if was != (True, self.is_unplaced, str(error)):
                self._change("starting", str(error))
                if self.is_unplaced:
                    self._owner.worker_unplaced()
            return
        except OSError as error:
            self._process = None
            self._is_starved = error.errno in _STARVED
            self.reason = f"no process could be started: {error.strerror or error}"
        if self._waits_for_machine:
            self._waits_for_machine = self.is_unplaced = False
            self._change("starting", self.reason if self._process is None else "")

    async def _live(self) -> Ending:
        """Run the present process to its end, and release everything that belonged to it."""
        process = self._process
        if process is None:
            self._change("died", self.reason)
            return Ending("died", self.reason)
        hung = await self._until_gone(process)
        self._process = None
        if self._leaving.is_set():
            ending = Ending("died", "stopped")
        elif self._load_failure is not None:
            ending = Ending("failed", self._load_failure.message, failure=self._load_failure)
        elif hung is not None:
            ending = Ending("hung", hung)
        else:
            # A worker that ends with a machine knows less than what watches the machines.
            words = "" if process.is_machine_lost or not self._leaving_reason else f": {self._leaving_reason}"
            ending = Ending("died", f"{process.reason}{words}", is_machine_lost=process.is_machine_lost)
        if self._info is not None:
            ready_s = clock.now() - self._watch.ready_at
            was_useful = self._has_finished or ready_s >= self._patience.useful_s
            ending = msgspec.structs.replace(ending, ready_s=ready_s, was_useful=was_useful)
            self._info = None
        is_final = ending.state == "failed" and not self.was_ready  # then ``failed`` is reported, and ``died`` is not
        if not self._leaving.is_set() and ending.state != self.state and not is_final:
            self._change("died" if ending.state == "failed" else ending.state, ending.reason)
        if ending.ready_s is not None:
            self._owner.worker_lost(ending.reason, is_machine_lost=ending.is_machine_lost)
        return ending

    async def _until_gone(self, process: Life) -> str | None:
        """Wait for the end and bring it about when the worker hangs; what was wrong with it."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.gone), self._patience.watch_s)
                return None
            hung = None if self._leaving.is_set() else self._what_hangs()
            if hung is None:
                continue
            self._change("hung", hung)
            _log.error("replica %d of %s is hung: %s; killing it", self._replica, self._model, hung)
            process.signal(signal.SIGUSR1)
            await self._gone_within(process, self._patience.stacks_s)
            return hung

    def _what_hangs(self) -> str | None:
        """The reason why the worker counts as hanging; None: it does not. Time passes by checks of the clock, so a
        pause of the gateway itself does not count against a worker."""
        watch, patience = self._watch, self._patience
        watch.pass_time(clock.now(), 2 * patience.watch_s)
        if self._info is None:
            if watch.alive_s > self._config.load_timeout_s:
                said = f"loading took longer than load_timeout_s, {self._config.load_timeout_s:g} s"
                # A second try would take as long: the operator must remove the cause or raise the limit.
                self._load_failure = ModelLoadError(
                    f"The model {self._model!r} could not be loaded: {said}; raise it if the model needs longer.",
                    param="load_timeout_s",
                ).to_failure()
                return said
            if watch.silent_s > patience.silent_loading_s:
                return f"it sent nothing for {patience.silent_loading_s:g} s while loading"
            return None
        if watch.silent_s > patience.silent_s:
            return f"it sent nothing for {patience.silent_s:g} s"
        if watch.stuck_s > self._config.hang_timeout_s:
            return f"a step took longer than hang_timeout_s, {self._config.hang_timeout_s:g} s"
        return None

    async def _gone_within(self, process: Life, seconds: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(process.gone), seconds)
        except TimeoutError:
            process.kill()
            await asyncio.shield(process.gone)

    # -- messages ---------------------------------------------------------------------------

    def _handle_messages(self, messages: list[FromWorker]) -> None:
        self._watch.silent_s = 0.0
        for message in messages:
            match message:
                case Outputs(outputs, stats):
                    if not self._has_finished:
                        self._has_finished = any(o.end is not None and o.end.outcome == "done" for o in outputs)
                    self._owner.worker_outputs(outputs, stats)
                case Heartbeat():
                    self._beat(message)
                case HandedOver(handed):
                    self._owner.worker_handed_over(handed)
                case Leaving(reason):
                    self._leaving_reason = reason
                case Tokenized() | Detokenized() | Checked() | AdaptersSet():
                    self._owner.worker_answered(message)
                case Loading(phase, done, total, at):
                    if self.state == "starting":
                        self._change("loading")
                    model, replica = self._model, self._replica
                    self._emit(LoadProgress(model=model, replica=replica, phase=phase, done=done, total=total, at=at))
                case Ready(info):
                    self._info = info
                    self.was_ready = True
                    self._watch.ready_at = clock.now()
                    self.rss_bytes = self.measure_rss()
                    self._change("ready")
                    self._owner.worker_ready(info)
                case LoadFailed(failure, trace):
                    self._load_failure = failure
                    if trace:
                        _log.error("%s/%d could not be loaded:\n%s", self._model, self._replica, trace)

    def _beat(self, beat: Heartbeat) -> None:
        self._watch.progress(beat.steps, beat.busy)
        if beat.rss_bytes != self.rss_bytes and self.state == "ready":
            self.rss_bytes = beat.rss_bytes
            self._emit(self._event())

    # -- telling ----------------------------------------------------------------------------

    def _change(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self._emit(self._event())

    def _event(self) -> ReplicaChanged:
        info = self._info
        return ReplicaChanged(
            model=self._model,
            replica=self._replica,
            state=self.state,
            reason=self.reason,
            restarts=self.restarts,
            load_s=info.load_s if info is not None else {},
            verified=info.verified if info is not None else "",
            kv_blocks=info.num_blocks if info is not None else 0,
            block_size=info.block_size if info is not None else 0,
            rss_bytes=self.rss_bytes if self.state == "ready" else 0,
            max_model_len=info.max_model_len if info is not None else 0,
        )


class _Watch:
    """What is known of a worker's progress: its heartbeats and its steps."""

    __slots__ = ("_looked_at", "_steps", "alive_s", "is_busy", "ready_at", "silent_s", "stuck_s")

    def __init__(self) -> None:
        self._looked_at = clock.now()
        self._steps = -1
        self.is_busy = False
        self.alive_s = 0.0
        self.silent_s = 0.0
        self.stuck_s = 0.0
        self.ready_at = 0.0

    def pass_time(self, now: float, at_most: float) -> None:
        passed, self._looked_at = min(now - self._looked_at, at_most), now
        self.alive_s += passed
        self.silent_s += passed
        if self.is_busy:
            self.stuck_s += passed

    def progress(self, steps: int, busy: bool) -> None:
        if steps != self._steps or not busy:
            self.stuck_s = 0.0
        self._steps, self.is_busy = steps, busy


def _report(task: asyncio.Task[None]) -> None:
    """Log a defect of the supervisor's task, which otherwise shows only when the server stops."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("a supervisor failed; its replica is no longer watched", exc_info=error)


def restart_delay(patience: Patience, in_a_row: int) -> float:
    """Seconds before the next start after so many useless lives in a row: exponential, bounded, with jitter."""
    if in_a_row == 0:
        return 0.0
    longest = min(patience.longest_delay_s, patience.first_delay_s * 2.0 ** min(in_a_row - 1, 30))
    return longest * random.uniform(0.75, 1.25)
