"""The rollouts of a server: counts what happens here, has the database decide, and adopts what was decided.

Runs in the event loop. The database is asked in its own thread (``ledger.py``), every ``POLL_S`` seconds and soon after
each new bad event, so every gateway adopts a rollback within a second. The gateway that has enough evidence by itself
gives the stable version all units at once, and lets the database decide. While the database does not answer, the shares
stay as they are otherwise, and counts wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from inferd import clock
from inferd.compare.golden import GoldenItem
from inferd.config import Config
from inferd.config.versions import rollout_warnings
from inferd.errors import InferdError, InvalidRequest, StateUnavailable
from inferd.events import (
    Assigned,
    CopyEnded,
    CopyResult,
    Emit,
    Event,
    GuardRead,
    HttpServed,
    ReplicaChanged,
    RolloutChanged,
    RolloutRemoved,
)
from inferd.rollout import ledger
from inferd.rollout.evidence import added
from inferd.rollout.golden import Ask, GoldenReport, Questions
from inferd.rollout.judge import Reading, Verdict, judge, reading_text
from inferd.rollout.ledger import Change, Exchanged, Local, NoStages, Stages, Stored
from inferd.rollout.machine import ACTIVE, JUDGED, Command, Progress, commanded
from inferd.rollout.plan import GuardKind, Plan, plan_of
from inferd.rollout.split import Split, split_of
from inferd.rollout.tally import Tally
from inferd.state.presence import Presence
from inferd.state.thread import StateThread

POLL_S: Final = 0.25
MAX_RECENT: Final = 16_384
"""Calls of a rollout that bad events can be reported of."""

MAX_DIFFERING: Final = 20
"""Copies with another answer that are reported."""

BUSY_S: Final = 0.5
"""Time until the golden set is asked again, after a question that was dropped."""

SOON_S: Final = 0.02
"""Bad events are collected for so long before the database is asked."""

_GOLDEN: Final[tuple[GuardKind, ...]] = ("golden",)

_log = logging.getLogger("inferd.rollout")

Adopt = Callable[[Mapping[str, Plan], Mapping[str, Split]], None]
"""Makes the gateways divide the units so from now on."""

Record = Callable[[str, Change], Awaitable[None]]
"""Writes a change of the model's rollout that no command asked for into the audit log."""


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """A copied request that the new version answered otherwise. Nothing of the answers is kept."""

    request_id: str
    part: str  # of the answer, the first that differs; empty: the new version gave none
    position: int | None = None  # in that part: of a character or a number


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout, as this server knows it."""

    model: str
    stable: str
    new: str
    unit: str
    steps: list[float]  # the new version's percentages
    progress: Progress
    readings: tuple[Reading, ...] = ()
    is_ready: bool = False
    deaths: int = 0
    shadows: list[float] = []  # by step: percentages of the units whose requests are copied
    copies: dict[CopyResult, int] = {}  # by result, of this run at this server; see ``events.CopyResult``
    differing: list[Differing] = []  # the last ones at this server
    golden: GoldenReport | None = None  # what the golden set was answered at this server; None: there is none
    changes: list[Change] = []


class _Here:
    """This gateway's part in a rollout."""

    __slots__ = (
        *("asking", "copies", "deaths", "differing", "number", "plan", "questions", "recent", "run", "step", "sums"),
        *("tally", "told"),
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.begin(0)
        self.told: tuple[int, bool, int] | None = None  # run, readiness and deaths, as the database has them

    def begin(self, run: int) -> None:
        self.run = run
        self.tally = Tally(run, self.plan.guards)
        self.sums: ledger.Sums = {}
        self.deaths = 0
        self.number = 0
        self.copies: dict[CopyResult, int] = {}
        self.differing: list[Differing] = []
        self.recent: dict[str, Assigned | None] = {}  # calls that ended, by their ids; None: it was reported
        self.questions: Questions | None = None  # of the golden set, once the first was asked
        self.step = -1, 0  # of the questions: the step's index, and how many were answered in it
        self.asking: asyncio.Task[None] | None = None

    @property
    def takes_reports(self) -> bool:
        return any(guard.kind == "reported" for guard in self.plan.guards)

    def follow(self, plan: Plan) -> None:
        """Use a changed plan of the same rollout."""
        if plan.guards != self.plan.guards:
            self.tally.watch(plan.guards)
            self.questions = None
        self.plan = plan


class Rollouts:
    """``is_ready`` says whether a version can serve here, by its name in the configuration, and ``load`` loads it; it
    raises InferdError."""

    def __init__(
        self,
        state: StateThread,
        presence: Presence,
        is_ready: Callable[[str], bool],
        load: Callable[[str], Awaitable[object]],
        emit: Emit,
        adopt: Adopt,
        record: Record,
        ask: Ask,
        now: Callable[[], float] = clock.wall,
        stages: Stages = NoStages(),
    ) -> None:
        self._state = state
        self._presence = presence
        self._is_ready = is_ready
        self._load = load
        self._loading: dict[tuple[str, int], asyncio.Task[None]] = {}  # by rollout and run
        self._emit = emit
        self._adopt = adopt
        self._record = record
        self._ask = ask
        self._stages = stages
        self._golden: Mapping[str, Sequence[GoldenItem]] = {}
        self._now = now
        self._config = Config()
        self._here: dict[str, _Here] = {}  # by the rollout's name
        self._known: Exchanged | None = None
        self._gone: list[Plan] = []  # that the configuration had, and whose end is to be stored
        self._may_be_left = True  # the database may have rollouts that the configuration lost before the start
        self._splits: dict[str, Split] = {}
        self._wake = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._recording = asyncio.Lock()
        self._living: frozenset[str] | None = None  # gateways when each change had its line; None: not each has

    # -- what is wanted ------------------------------------------------------------------------

    def configure(
        self,
        config: Config,
        golden: Mapping[str, Sequence[GoldenItem]] = {},
        registered: Mapping[str, str] = {},
    ) -> None:
        """Follow the plans of another configuration. ``golden``: the golden sets that its guards name; ``registered``:
        versions of the registry, by the names of their entries."""
        self._config = config
        if golden != self._golden:
            self._golden = golden
            for here in self._here.values():
                here.questions = None
        plans = {
            plan.name: _registered(plan, config, registered)
            for name, model in config.models.items()
            if (plan := plan_of(name, model)) is not None
        }
        for name in self._here.keys() - plans.keys():
            plan = self._here.pop(name).plan
            self._gone.append(plan)
            self._emit(RolloutRemoved(model=plan.model))
        for name, plan in plans.items():
            if name in self._here:
                self._here[name].follow(plan)
            else:
                self._here[name] = _Here(plan)
                for sentence in rollout_warnings({plan.model: config.models[plan.model]}):
                    _log.warning("%s", sentence)
        self._gone = [plan for plan in self._gone if plan.name not in plans]
        self._splits = {
            model: self._renamed(split, plans[split.rollout])
            for model, split in self._splits.items()
            if split.rollout in plans
        }
        self._known = None
        self._adopt(self._plans(), self._splits)
        self._wake.set()

    def _renamed(self, split: Split, plan: Plan) -> Split:
        """A split with the names that its versions have in the configuration of now."""
        named = split_of(plan, Progress(), self._config)
        return split._replace(stable_entry=named.stable_entry, new_entry=named.new_entry, unit=plan.unit)

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plan of each model that has one."""
        return self._plans()

    @property
    def splits(self) -> Mapping[str, Split]:
        """How the units of each model are divided now."""
        return self._splits

    def _plans(self) -> dict[str, Plan]:
        return {here.plan.model: here.plan for here in self._here.values()}

    # -- what happens ----------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Count an event of this server."""
        if type(event) is HttpServed:
            if event.assigned is not None:
                self._ended(event, event.assigned)
        elif type(event) is CopyEnded:
            self._copy_ended(event)
        elif type(event) is ReplicaChanged and self._here:
            self._replica_changed(event)

    def _ended(self, event: HttpServed, assigned: Assigned) -> None:
        here = self._here.get(assigned.rollout)
        if here is None:
            return
        if here.tally.ended(event):
            self._wake.set()
            self._hold_if_worse(here)
        if here.takes_reports and assigned.run == here.run:
            if len(here.recent) >= MAX_RECENT:
                del here.recent[next(iter(here.recent))]
            here.recent[event.request_id] = assigned

    def _copy_ended(self, event: CopyEnded) -> None:
        here, result = self._here.get(event.assigned.rollout), event.result
        if here is None or event.assigned.run != here.run:
            return
        here.copies[result] = here.copies.get(result, 0) + 1
        if result not in ("equal", "differs", "failed"):
            return
        if result != "equal":
            found = Differing(request_id=event.request_id, part=event.part, position=event.position)
            here.differing = [*here.differing[-MAX_DIFFERING + 1 :], found]
        if here.tally.compared(event.assigned, differs=result != "equal"):
            self._wake.set()
            self._hold_if_worse(here)

    def _replica_changed(self, event: ReplicaChanged) -> None:
        for here in self._here.values():
            if self._entry(here.plan) != event.model:
                continue
            stored = None if self._known is None else self._known.stored.get(here.plan.name)
            if event.state == "died" and stored is not None and stored.progress.state in ACTIVE:
                here.deaths += 1
            self._wake.set()

    # -- the loop ----------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Look again and again, until this is cancelled."""
        try:
            await self._keep()
        finally:
            for here in self._here.values():
                if here.asking is not None:
                    here.asking.cancel()

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            if self._here or self._gone or self._may_be_left or self._living is None:
                try:
                    await self.look()
                except StateUnavailable as error:
                    _log.debug("rollouts keep their shares: %s", error.message)
                except Exception:  # a loop's boundary: a defect must not end the rollouts
                    _log.exception("the rollouts could not be looked at")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._here or self._gone or self._may_be_left else None):
                    await self._wake.wait()
                    await asyncio.sleep(SOON_S)

    async def look(self) -> None:
        """Exchange counts and decisions with the other gateways, and adopt what was decided. Raises
        StateUnavailable."""
        async with self._one_at_a_time:
            await self._withdraw()
            here = list(self._here.values())
            taken = [self._local(one) for one in here]
            job = functools.partial(
                ledger.exchange,
                presence=self._presence,
                rollouts=taken,
                before=self._known,
                now=self._now,
                stages=self._stages,
            )
            try:
                found = await self._state.call(job)
            except BaseException:
                for one, local in zip(here, taken, strict=True):
                    one.tally.put_back(local.batch)
                raise
            for one, local in zip(here, taken, strict=True):
                one.sums = found.sums[one.plan.name]
                one.number += 1
                one.told = (local.run, local.is_ready, local.deaths)
            is_current = all(
                self._here.get(one.plan.name) is one and one.plan is local.plan
                for one, local in zip(here, taken, strict=True)
            )
            if is_current and len(here) == len(self._here):  # else the configuration has changed meanwhile
                self._use(found)
        if found.has_decided:
            self._living = None  # the changes have no lines yet
            self._wake.set()  # another change may follow at once
        if found.living != self._living:
            await self._record_changes()
            self._living = found.living

    async def _record_changes(self) -> None:
        """Have the audit log tell the changes that no command asked for: those that were made here, and those of
        gateways that have died before. A gateway that dies between the line and the row has it told twice."""
        async with self._recording:
            changes = await self._state.call(lambda database: ledger.unrecorded(database, self._presence))
            for name, change in changes:
                await self._record(name, change)
                await self._state.call(functools.partial(ledger.set_recorded, name=name, number=change.number))

    async def _withdraw(self) -> None:
        if self._may_be_left:
            models, names = frozenset(self._config.models), frozenset(self._here)
            left = await self._state.call(lambda database: ledger.left(database, self._presence, models, names))
            for plan in left.orphans:
                _log.warning("%s", _orphan_text(plan))
            self._gone += [plan for plan in left.orphans if plan.name not in self._here]
            self._may_be_left = left.has_others  # until they end it, or end themselves
        if not self._gone:
            return
        gone, why = self._gone, "the configuration does not have it any more"
        now = self._now()
        await self._state.call(lambda database: ledger.withdraw(database, self._presence, gone, now, why, self._stages))
        self._gone = [plan for plan in self._gone if plan not in gone]
        self._living = None  # the ends have no lines yet

    def _local(self, here: _Here) -> Local:
        is_ready = self._is_ready(self._entry(here.plan))
        return Local(
            plan=here.plan,
            is_ready=is_ready,
            deaths=here.deaths,
            run=here.run,
            sums=here.sums,
            batch=here.tally.take(),
            number=here.number,
            is_news=here.told != (here.run, is_ready, here.deaths),
        )

    def _entry(self, plan: Plan) -> str:
        return split_of(plan, Progress(), self._config).new_entry

    def _use(self, found: Exchanged) -> None:
        """Adopt what the database says."""
        before, self._known = self._known, found
        splits: dict[str, Split] = {}
        for name, here in self._here.items():
            progress = found.stored[name].progress
            if progress.run != here.run:
                here.begin(progress.run)
            if progress.state == "preparing":
                self._prepare(here)
            if self._is_questioned(here):
                self._question(here)
            if progress.state in JUDGED or progress.state == "promoted":
                split = split_of(here.plan, progress, self._config)
                splits[here.plan.model] = _held(split) if _is_worse(here, found.stored[name]) else split
            old = None if before is None else before.stored.get(name)
            if old is None or old.progress != progress or old.verdict != found.stored[name].verdict:
                self._tell(here.plan, found.stored[name], None if old is None else old.progress)
        if splits != self._splits:
            self._splits = splits
            self._adopt(self._plans(), splits)

    def _hold_if_worse(self, here: _Here) -> None:
        """Give the stable version all units at once where what is known here is enough to take the new one back.

        That is for as long as the database has not decided: it may know more of other gateways, or be away.
        """
        model = here.plan.model
        split = self._splits.get(model)
        stored = None if self._known is None else self._known.stored.get(here.plan.name)
        has_any = split is not None and (split.share > 0.0 or split.shadow > 0.0)
        if split is not None and has_any and stored is not None and _is_worse(here, stored):
            self._splits = {**self._splits, model: _held(split)}
            _log.warning("%s: version %s is held at 0 %% until the database has decided", model, here.plan.new)
            self._adopt(self._plans(), self._splits)

    def _prepare(self, here: _Here) -> None:
        """Load the new version, once in a run: nothing else may ask for it."""
        key = here.plan.name, here.run
        if key not in self._loading and not self._is_ready(self._entry(here.plan)):
            self._loading = {other: task for other, task in self._loading.items() if not task.done()}
            self._loading[key] = asyncio.create_task(self._load_new(self._entry(here.plan)))

    def _is_questioned(self, here: _Here) -> bool:
        """Whether another question of the golden set is asked: in each step as many as the set has, and further ones
        until the guard is passed."""
        stored = None if self._known is None else self._known.stored.get(here.plan.name)
        if here.plan.golden is None or not self._golden.get(here.plan.model) or stored is None:
            return False
        progress = stored.progress
        if progress.run != here.run or progress.state not in JUDGED or progress.is_paused:
            return False
        if here.step[0] != progress.step:
            here.step = progress.step, 0
        verdict = _verdict(here, stored)
        is_over = here.step[1] >= len(self._golden[here.plan.model]) and verdict.is_passed(_GOLDEN)
        return not is_over and verdict.worse is None

    def _question(self, here: _Here) -> None:
        if here.asking is None or (here.asking.done() and not here.asking.cancelled() and not here.asking.exception()):
            here.asking = asyncio.create_task(self._ask_golden(here, here.run))
            here.asking.add_done_callback(_log_defect)

    async def _ask_golden(self, here: _Here, run: int) -> None:
        """Ask one question after the other, as long as there is a reason to."""
        while here.run == run and self._here.get(here.plan.name) is here and self._is_questioned(here):
            guard = here.plan.golden
            assert guard is not None, "else nothing is asked"
            if here.questions is None:
                here.questions = Questions(self._golden[here.plan.model], guard, self._ask)
            questions = here.questions
            split = split_of(here.plan, Progress(), self._config)
            is_new = questions.is_new()
            found = await questions.ask(split.new_entry if is_new else split.stable_entry, is_new=is_new)
            if here.run != run or here.questions is not questions:
                return
            if found.result == "dropped":
                await asyncio.sleep(BUSY_S)
                continue
            here.step = here.step[0], here.step[1] + 1
            here.tally.answered(guard.share, is_new=is_new, is_bad=found.result == "wrong")
            if found.result == "wrong":
                self._wake.set()
                self._hold_if_worse(here)

    async def _load_new(self, entry: str) -> None:
        try:
            await self._load(entry)
        except InferdError as error:
            _log.error("%s does not load, so its rollout waits: %s", entry, error.message)

    def _tell(self, plan: Plan, stored: Stored, before: Progress | None) -> None:
        progress = stored.progress
        self._emit(
            RolloutChanged(
                model=plan.model,
                stable=plan.stable,
                new=plan.new,
                state=progress.state,
                share=progress.share,
                step=progress.step,
                is_paused=progress.is_paused,
                reason=progress.reason,
                is_news=before is not None and before != progress,
                guards=tuple(
                    GuardRead(
                        guard=reading.guard,
                        against=reading.against / reading.against_limit,
                        in_favour=reading.in_favour / reading.in_favour_limit,
                        text=reading_text(reading),
                    )
                    for reading in stored.verdict.readings
                ),
            )
        )

    # -- commands ----------------------------------------------------------------------------------

    async def command(self, model: str, command: Command, actor: str, why: str) -> RolloutReport:
        """Carry out an operator's command; it is in effect here when this returns, and elsewhere within a second.
        Raises InvalidRequest, StateUnavailable."""
        plan = self._plan(model)

        def decide(stored: Stored) -> Progress:
            return commanded(plan, stored.progress, command, self._now(), is_ready=stored.is_ready, why=why)

        now = self._now()
        await self._state.call(
            lambda database: ledger.command(database, self._presence, plan, decide, now, actor, self._stages)
        )
        await self.look()
        return await self.report(model)

    async def report(self, model: str) -> RolloutReport:
        """A model's rollout with its last changes. Raises InvalidRequest, StateUnavailable."""
        plan = self._plan(model)
        if self._known is None:
            await self.look()
        changes = await self._state.call(lambda database: ledger.changes_of(database, plan.name))
        here = self._here.get(plan.name)  # the configuration may have dropped it meanwhile
        return msgspec.structs.replace(self._report(_Here(plan) if here is None else here), changes=changes)

    def note_bad(self, model: str, request_id: str) -> None:
        """Count the unit of a request as bad, for the guard ``reported``. Raises InvalidRequest."""
        here = self._here[self._plan(model).name]
        if not here.takes_reports:
            raise InvalidRequest(
                f"The rollout of {model} has no guard 'reported'; write one below rollout.guards.",
                param="model",
                code="no_guard",
            )
        if request_id not in here.recent:
            raise InvalidRequest(
                f"The request {request_id[:128]!r} was not divided by the rollout of {model} at this server lately; "
                f"give the x-request-id of one of the last {MAX_RECENT:,} answers, to the server that sent it.",
                param="request_id",
                code="unknown_request",
            )
        assigned = here.recent[request_id]
        here.recent[request_id] = None
        if assigned is not None and here.tally.reported(assigned):
            self._wake.set()
            self._hold_if_worse(here)

    def reports(self) -> list[RolloutReport]:
        """All rollouts, without their changes."""
        return [self._report(here) for here in self._here.values()]

    def _report(self, here: _Here) -> RolloutReport:
        plan = here.plan
        stored = Stored() if self._known is None else self._known.stored.get(plan.name, Stored())
        return RolloutReport(
            model=plan.model,
            stable=plan.stable,
            new=plan.new,
            unit=plan.unit,
            steps=[100.0 * step.share for step in plan.steps],
            progress=stored.progress,
            readings=stored.verdict.readings,
            is_ready=stored.is_ready,
            deaths=stored.deaths,
            shadows=[100.0 * step.shadow for step in plan.steps],
            copies=dict(here.copies),
            differing=here.differing,
            golden=self._golden_report(here),
        )

    def _golden_report(self, here: _Here) -> GoldenReport | None:
        if here.questions is not None:
            return here.questions.report
        items = self._golden.get(here.plan.model)
        return GoldenReport(questions=len(items)) if items else None

    def _plan(self, model: str) -> Plan:
        plan = self._plans().get(model)
        if plan is None:
            have = ", ".join(self._plans()) or "no model"
            raise InvalidRequest(
                f"The model {model[:64]!r} has no rollout; those with one: {have}. Write one below "
                "models.NAME.rollout, with the numbers of its versions 'stable' and 'new'.",
                param="model",
                code="no_rollout",
            )
        return plan


def _orphan_text(plan: Plan) -> str:
    return (
        f"The rollout of {plan.model} from version {plan.stable} to {plan.new} was under way when the server ended, and "
        "the configuration does not have it any more. It is aborted, and the versions serve as the configuration says."
    )


def _registered(plan: Plan, config: Config, registered: Mapping[str, str]) -> Plan:
    """The plan with the versions of the registry that it is about."""
    split = split_of(plan, Progress(), config)
    return msgspec.structs.replace(
        plan,
        registered_stable=registered.get(split.stable_entry, ""),
        registered_new=registered.get(split.new_entry, ""),
    )


def _is_worse(here: _Here, stored: Stored) -> bool:
    """Whether a guard would take the new version back, by what the database knows and what was counted here since."""
    return stored.progress.state in JUDGED and _verdict(here, stored).worse is not None


def _verdict(here: _Here, stored: Stored) -> Verdict:
    """What the guards say, by what the database knows and what was counted here since."""
    bad = {
        guard: added(stored.bad.get(guard, {}), here.tally.bad_counts.get(guard, {}))
        for guard in stored.bad.keys() | here.tally.bad_counts.keys()
    }
    populations = {guard.population for guard in here.plan.guards}
    units = {of: added(stored.units.get(of, {}), here.tally.units_of(of)) for of in populations}
    return judge(here.plan, bad, units)


def _log_defect(task: asyncio.Task[None]) -> None:
    """A defect ends the questions of its rollout and nothing else."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a golden set could not be asked", exc_info=error)


def _held(split: Split) -> Split:
    """The split with no unit for the new version."""
    return split._replace(share=0.0, shadow=0.0, is_counted=False)
