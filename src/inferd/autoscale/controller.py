"""Looks at the load of every model whose number of replicas follows it, decides, and has the router act.

Runs in the event loop, every ``LOOK_S`` seconds, and asks nothing of requests: it reads counts that the router keeps. It
knows when to look and what to report. ``decide`` has the rules, and the router starts and drains replicas.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from inferd import clock
from inferd.autoscale.decide import Decision, Past, Seen, Spec, decide, duty_of, spec_of
from inferd.autoscale.meter import Meter, Sample, pause_s
from inferd.config import Config, ModelConfig
from inferd.errors import InferdError, InvalidRequest
from inferd.events import Emit, Scaled, ScalingRemoved
from inferd.router.replicas.engine_fields import is_same_engine
from inferd.router.status import Demand

RETRY_FAILED_S: Final = 30.0
"""Seconds without another start, after a replica that does not load."""

RETRY_MEMORY_S: Final = 5.0
"""Seconds without another attempt, after memory did not suffice."""

HELD_AGAIN_S: Final = 60.0
"""Seconds after the log was told that something holds the number before it is told the same again."""

MAX_CHANGES: Final = 20

_log = logging.getLogger("inferd.autoscale")


class Replicas(Protocol):
    """The router, as this part sees it."""

    def demands(self) -> Mapping[str, Demand]:
        """The load of each model whose number of replicas follows it."""
        ...

    async def scale(self, model: str, count: int) -> int:
        """Have so many replicas; the number that there is to be now. Raises InferdError."""
        ...

    def unload_idle(self, model: str) -> None:
        """Unload a model that has no requests."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that changed the number of replicas."""

    at: float  # seconds since the epoch
    before: int
    after: int
    rule: str
    reason: str


class NeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one input of the decision needs."""

    name: str
    replicas: int
    text: str


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The scaling of one model at this server: the last decision, what it was made of, and the last changes."""

    model: str
    min: int
    max: int
    desired: int = 0
    ready: int = 0
    starting: int = 0
    leaving: int = 0  # they end what they have
    rule: str = ""
    reason: str = ""
    needs: list[NeedReport] = []
    waiting: int = 0
    in_flight: int = 0
    deferred: int = 0  # requests of batch work; the other numbers are without them
    load: float | None = None  # requests in work and waiting: the mean of a minute, or of the last seconds if larger
    load_age_s: float | None = None  # seconds since that was last known; None: not observed for long enough yet
    age_s: float | None = None  # seconds since the last look; None: there was none
    idle_s: float = 0.0  # without a request; 0: there is one
    requests_per_s: float | None = None  # over a minute; None: not observed for long enough
    served_per_s: float | None = None  # by one replica while others wait; None: not measured
    duty: float | None = None  # the part of what the ready replicas can do that they did, of late; None: not observed
    ready_s: float | None = None  # from the start of a replica until it is ready; None: not measured
    changes: list[Change] = []


class _Limit:
    """A number that a failed attempt has shown to be the most, for some time."""

    __slots__ = ("count", "text", "until")

    def __init__(self, count: int, until: float, text: str) -> None:
        self.count = count
        self.until = until
        self.text = text


class _Model:
    """The state of one model."""

    __slots__ = ("changes", "config", "held", "last", "limit", "load", "meter", "past", "seen", "spec", "told")

    def __init__(self, config: ModelConfig, spec: Spec) -> None:
        self.config = config
        self.spec = spec
        self.meter = Meter()
        self.past = Past()
        self.limit: _Limit | None = None
        self.seen: tuple[Seen, Demand] | None = None
        self.load: tuple[float, float] | None = None  # the last one that was known, and when
        self.last: Decision | None = None
        self.told: tuple[object, ...] = ()
        self.held: dict[str, float] = {}  # when the log was last told of each rule that holds the number
        self.changes: deque[Change] = deque(maxlen=MAX_CHANGES)


class Autoscaler:
    """``holds`` says why no replica of a model may leave now, or gives an empty text."""

    def __init__(
        self,
        replicas: Replicas,
        holds: Callable[[str], str],
        emit: Emit,
        *,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self._replicas = replicas
        self._holds = holds
        self._emit = emit
        self._now = now
        self._wall = wall
        self._models: dict[str, _Model] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_models = asyncio.Event()

    def configure(self, config: Config) -> None:
        """Follow another configuration from now on."""
        specs = {name: (model, spec) for name, model in config.models.items() if (spec := spec_of(model)) is not None}
        for name in self._models.keys() - specs.keys():
            del self._models[name]
            self._emit(ScalingRemoved(model=name))
        for name, (model, spec) in specs.items():
            known = self._models.get(name)
            if known is None:
                self._models[name] = _Model(model, spec)
                continue
            if not is_same_engine(known.config, model):
                known.meter.forget_speed()
            known.config, known.spec = model, spec
        if self._models:
            self._has_models.set()
        else:
            self._has_models.clear()

    async def keep(self) -> None:
        """Look and decide until cancelled."""
        for number in itertools.count():
            await self._has_models.wait()
            await asyncio.sleep(pause_s(number))
            try:
                self.look()
            except Exception:  # a loop's boundary: a defect must not end the scaling
                _log.exception("the number of replicas could not be decided")

    def stop(self) -> None:
        """Begin no more changes."""
        for task in self._tasks.values():
            task.cancel()

    def look(self) -> None:
        """Decide for every model once, and begin what was decided."""
        demands = self._replicas.demands()
        now = self._now()
        for name, model in self._models.items():
            demand = demands.get(name)
            if demand is not None and name not in self._tasks:
                self._look_at(name, model, demand, now)

    def _look_at(self, name: str, model: _Model, demand: Demand, now: float) -> None:
        model.meter.add(
            Sample(
                at=now,
                accepted=demand.accepted,
                ended=demand.ended,
                waiting=demand.waiting,
                in_flight=demand.in_flight,
                busy=demand.busy,
                ready=demand.ready,
            )
        )
        seen = self._seen(name, model, demand, now)
        decision = decide(model.spec, seen, model.past, now)
        model.past, model.seen, model.last = decision.past, (seen, demand), decision
        if seen.load is not None:
            model.load = (max(seen.load, seen.load_now or 0.0), now)
        if decision.current and not demand.is_changing:
            if decision.desired == 0:
                self._replicas.unload_idle(name)
            elif decision.desired != decision.current or (demand.failed and demand.ready):
                self._tasks[name] = asyncio.get_running_loop().create_task(self._scale(name, model, decision, demand))
        self._report(name, model, decision, demand)

    def _seen(self, name: str, model: _Model, demand: Demand, now: float) -> Seen:
        limit, limited_by = model.spec.most, "scaling.max"
        # A replica whose threads have no core of their own takes it from another one.
        if demand.num_threads and demand.num_cores and not model.config.device.startswith("cuda"):
            by_cores = demand.num_cores // demand.num_threads
            if by_cores < limit:
                limit, limited_by = by_cores, f"the number of cores ({demand.num_cores})"
        if model.limit is not None and now >= model.limit.until:
            model.limit = None
        if demand.failed and model.limit is None:
            count = demand.ready + demand.starting
            model.limit = _Limit(count, now + RETRY_FAILED_S, "a replica that did not load")
        if model.limit is not None and model.limit.count < limit:
            limit, limited_by = model.limit.count, model.limit.text
        hold = "another change of its replicas is under way" if demand.is_changing else self._holds(name)
        return model.meter.measured(
            Seen(
                at=now,
                ready=demand.ready,
                starting=demand.starting,
                waiting=demand.waiting,
                in_flight=demand.in_flight,
                deferred=demand.deferred,
                oldest_wait_s=demand.oldest_wait_s,
                idle_s=demand.idle_s,
                ready_s=demand.ready_s,
                limit=limit,
                limited_by=limited_by,
                hold=hold,
            )
        )

    async def _scale(self, name: str, model: _Model, decision: Decision, demand: Demand) -> None:
        count, now, limited_by = decision.desired, self._now(), "the memory"
        try:
            allowed = await self._replicas.scale(name, count)
        except InferdError as error:
            _log.warning("%s cannot have %d replicas: %s", name, count, error.message)
            allowed, limited_by = decision.current, "a refused change of its replicas"
        finally:
            del self._tasks[name]
        if allowed < count:
            model.limit = _Limit(allowed, now + RETRY_MEMORY_S, limited_by)
        if allowed == decision.current:
            return
        change = Change(
            at=self._wall(), before=decision.current, after=allowed, rule=decision.rule, reason=decision.reason
        )
        model.changes.append(change)
        self._emit(self._event(name, decision._replace(desired=allowed), demand, model, is_news=True))

    def _report(self, name: str, model: _Model, decision: Decision, demand: Demand) -> None:
        """Tell of a decision if it differs from the last one that was told."""
        told = (decision.desired, demand.ready, demand.starting, demand.leaving, decision.rule)
        if told == model.told:
            return
        is_held = decision.rule in ("limit", "hold", "no_data") and decision.rule != (model.told or ("",))[-1]
        if is_held:
            now = self._now()
            is_held = now - model.held.get(decision.rule, -math.inf) >= HELD_AGAIN_S
            if is_held:
                model.held[decision.rule] = now
        model.told = told
        if decision.desired == 0 and decision.current:
            change = Change(
                at=self._wall(), before=decision.current, after=0, rule=decision.rule, reason=decision.reason
            )
            model.changes.append(change)
            is_held = True
        self._emit(self._event(name, decision, demand, model, is_news=is_held))

    def _event(self, name: str, decision: Decision, demand: Demand, model: _Model, *, is_news: bool) -> Scaled:
        return Scaled(
            model=name,
            desired=decision.desired,
            before=decision.current,
            ready=demand.ready,
            starting=demand.starting,
            leaving=demand.leaving,
            rule=decision.rule,
            reason=decision.reason,
            needs={need.name: need.replicas for need in decision.needs},
            waiting=demand.waiting,
            in_flight=demand.in_flight,
            requests_per_s=None if model.seen is None else model.seen[0].rate_per_s,
            served_per_s=None if model.seen is None else model.seen[0].served_per_s,
            ready_s=demand.ready_s,
            is_news=is_news,
        )

    def reports(self) -> list[ScalingReport]:
        """The scaling of every model that has one."""
        return [self._report_of(name, model) for name, model in self._models.items()]

    def report(self, model: str) -> ScalingReport:
        """The scaling of one model. Raises InvalidRequest where its number of replicas is fixed."""
        known = self._models.get(model)
        if known is None:
            raise InvalidRequest(
                f"The model {model!r} has a fixed number of replicas; write models.{model}.scaling to have it follow "
                "the load.",
                param="model",
                code="no_scaling",
            )
        return self._report_of(model, known)

    def _report_of(self, name: str, model: _Model) -> ScalingReport:
        spec, decision = model.spec, model.last
        if decision is None or model.seen is None:
            return ScalingReport(model=name, min=spec.least, max=spec.most, rule="none", reason="not observed yet")
        seen, demand = model.seen
        now = self._now()
        load, load_at = (None, None) if model.load is None else model.load
        return ScalingReport(
            model=name,
            min=spec.least,
            max=spec.most,
            desired=decision.desired,
            ready=demand.ready,
            starting=demand.starting,
            leaving=demand.leaving,
            rule=decision.rule,
            reason=decision.reason,
            needs=[NeedReport(name=need.name, replicas=need.replicas, text=need.text) for need in decision.needs],
            waiting=demand.waiting,
            in_flight=demand.in_flight,
            deferred=demand.deferred,
            load=load,
            load_age_s=None if load_at is None else now - load_at,
            age_s=now - seen.at,
            idle_s=demand.idle_s,
            requests_per_s=seen.rate_per_s,
            served_per_s=seen.served_per_s,
            duty=_duty_now(seen),
            ready_s=seen.ready_s,
            changes=list(reversed(model.changes)),
        )


def _duty_now(seen: Seen) -> float | None:
    """The duty that decides, and before two minutes were observed that of the last seconds."""
    duty = duty_of(seen)
    if duty is None and seen.ready and seen.busy_now is not None:
        return min(1.0, seen.busy_now / seen.ready)
    return duty
