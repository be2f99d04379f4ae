"""Rollouts of several gateways on one database: they count together, decide once, and divide the units alike."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.compare.golden import GoldenItem
from inferd.config import Config
from inferd.config.versions import draw
from inferd.errors import InvalidRequest, StateUnavailable
from inferd.events import Assigned, CopyEnded, CopyResult, Event, HttpServed, ReplicaChanged, RolloutChanged
from inferd.rollout import golden, ledger
from inferd.rollout.evidence import Count
from inferd.rollout.golden import Reply
from inferd.rollout.judge import Verdict
from inferd.rollout.ledger import Change, Local, NoStages, Stages
from inferd.rollout.machine import Progress
from inferd.rollout.plan import Plan, plan_of
from inferd.rollout.rollouts import Rollouts
from inferd.rollout.split import Split, with_weights
from inferd.rollout.tally import BadEvent, Batch
from inferd.state.database import Database, Transaction
from inferd.state.open import open_database
from inferd.state.presence import Members
from inferd.state.thread import StateThread

STEPS = [{"weight": 5, "for_s": 60}, {"weight": 50, "for_s": 60}, {"weight": 100, "for_s": 60}]


def config(**rollout: Any) -> Config:
    models = {
        "m": {"source": "x", "version": "1", "rollout": {"stable": 1, "new": 2, "steps": STEPS, **rollout}},
        "m@2": {"source": "y", "version": "2"},
    }
    return msgspec.convert({"models": models}, Config)


class World:
    """One database, one clock, and the gateways that are alive."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.now = 1000.0
        self.alive: set[str] = set()


class Seat:
    """A presence that dies when the world says so."""

    def __init__(self, world: World, name: str) -> None:
        self.id = name
        self._world = world
        world.alive.add(name)

    def members(self, transaction: Transaction) -> Members:
        return Members(frozenset(self._world.alive), frozenset())

    def remove_dead(self, dead: frozenset[str]) -> None:
        pass


class Gateway:
    """A gateway's rollouts, and the requests that it answers."""

    def __init__(self, world: World, name: str, wanted: Config) -> None:
        self.world = world
        self.config = self.divided = wanted
        self.splits: Mapping[str, Split] = {}
        self.ready = {"m@2"}
        self.events: list[Event] = []
        self.recorded: list[str] = []
        self.loaded: list[str] = []
        self.asked: list[str] = []  # models, by the questions of the golden set
        self.answers: dict[str, Callable[[Any], Reply]] = {}
        self.stages: Stages = NoStages()
        self.served = 0
        self.state = StateThread(lambda: open_database(world.url, world.folder))
        self.state.start(open_database(world.url, world.folder))
        self.rollouts = Rollouts(
            self.state,
            Seat(world, name),
            lambda entry: entry in self.ready,
            self._load,
            self.events.append,
            self._divide,
            self._record,
            self._answer,
            now=lambda: world.now,
            stages=self,
        )
        self.rollouts.configure(wanted)

    def _divide(self, plans: Mapping[str, Plan], splits: Mapping[str, Split]) -> None:
        self.divided, self.splits = with_weights(self.config, plans, splits), splits

    async def _load(self, entry: str) -> None:
        self.loaded.append(entry)

    async def _record(self, name: str, change: Change) -> None:
        self.recorded.append(f"{name} {change.progress.state}")

    def problem(self, transaction: Transaction, plan: Plan) -> str:
        return self.stages.problem(transaction, plan)

    def follow(
        self, transaction: Transaction, plan: Plan, before: Progress, after: Progress, verdict: Verdict, actor: str
    ) -> None:
        self.stages.follow(transaction, plan, before, after, verdict, actor)

    async def _answer(self, path: str, body: Any) -> Reply:
        self.asked.append(body["model"])
        return self.answers[body["model"]](body)

    def adopt(self, wanted: Config) -> None:
        self.config = wanted
        self.rollouts.configure(wanted)

    def ask(self, unit: str, bad: Callable[[str], bool], request_id: str = "") -> str:
        """A request of a unit, which fails where ``bad`` of its version; the version."""
        found = draw(self.divided.models, "m", unit)
        split = self.splits.get("m")
        assigned = None
        if split is not None and split.is_counted and found.was_free:
            assigned = Assigned(
                rollout=split.rollout,
                run=split.run,
                share=split.share,
                is_new=found.entry == split.new_entry,
                unit=found.digest,
            )
        self.served += 1
        self.rollouts.handle(
            HttpServed(
                request_id=request_id or f"{unit}-{self.served}",
                method="POST",
                route="/x",
                status=500 if bad(found.entry) else 200,
                duration_s=0.1,
                assigned=assigned,
            )
        )
        return found.entry

    @property
    def share(self) -> float:
        weights = self.divided.models["m"].versions.weights
        return weights["2"] / sum(weights.values())

    def close(self) -> None:
        self.state.close()


Test = Callable[..., Awaitable[None]]


@pytest.fixture
def world(state_url: str, tmp_path: Path) -> World:
    return World(state_url, tmp_path)


@contextlib.asynccontextmanager
async def gateways(world: World, number: int, wanted: Config) -> AsyncIterator[list[Gateway]]:
    made = [Gateway(world, f"g{index}", wanted) for index in range(number)]
    try:
        yield made
    finally:
        for gateway in made:
            gateway.close()


async def looked(*made: Gateway) -> None:
    """Each gateway looks until none changes anything."""
    for _ in range(4):
        for gateway in made:
            await gateway.rollouts.look()


def never(entry: str) -> bool:
    return False


def of_new(entry: str) -> bool:
    return entry == "m@2"


def test_two_gateways_bring_a_good_version_to_all_units(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config(guards={"errors": {"max_fraction": 0.05}})) as (one, two):
            await looked(one, two)
            assert (one.share, two.share) == (0.0, 0.0), "nothing began"
            two.ready.clear()
            await two.rollouts.look()
            report = await one.rollouts.command("m", "start", "key:a", "start by key:a")
            assert report.progress.state == "preparing"
            await looked(one, two)
            assert (one.share, two.share) == (0.0, 0.0), "it is not ready at the second gateway"
            assert (one.loaded, two.loaded) == ([], ["m@2"]), "which loads it once"
            two.ready.add("m@2")
            await looked(two, one)
            assert (one.share, two.share) == (0.05, 0.05)
            world.now += 61
            await looked(one, two)
            assert one.rollouts.reports()[0].progress.state == "inconclusive", "no data is no evidence"
            for index in range(1500):
                (one, two)[index % 2].ask(f"user {index}", never)
            await looked(one, two)
            assert (one.share, two.share) == (0.05, 0.05), "some 75 units of the new version are too few"
            for index in range(1500, 4000):
                (one, two)[index % 2].ask(f"user {index}", never)
            await looked(one, two)
            assert (one.share, two.share) == (0.5, 0.5)
            units = one.rollouts.reports()[0].readings[0].units
            assert units.stable + units.new == 4000, "what both have counted"
            for _ in range(2):
                world.now += 61
                await looked(one, two)
            assert (one.share, two.share) == (1.0, 1.0)
            assert one.rollouts.reports()[0].progress.state == "promoted"
            changes = [change.progress.state for change in (await two.rollouts.report("m")).changes]
            assert changes == [
                "promoted",
                "running",
                "running",
                "inconclusive",
                "running",
                "preparing",
            ]
            decided = one.recorded + two.recorded
            assert sorted(decided) == sorted(f"m:1:2 {state}" for state in changes[:-1]), "each by one gateway"

    asyncio.run(run())


def test_every_change_is_told_also_one_that_time_alone_makes(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config(steps=[{"weight": 5, "for_s": 60}])) as (one,):
            await looked(one)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            world.now += 61
            await one.rollouts.look()
            told = [event.state for event in one.events if isinstance(event, RolloutChanged) and event.is_news]
            assert told == ["running", "inconclusive"]
            assert one.recorded == ["m:1:2 running", "m:1:2 inconclusive"]

    asyncio.run(run())


def test_a_worse_version_is_taken_back_on_every_gateway_with_the_numbers(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 3, config(steps=[{"weight": 20, "for_s": 60}])) as made:
            await looked(*made)
            await made[0].rollouts.command("m", "start", "key:a", "start")
            await looked(*made)
            asked = 0
            while any(gateway.share for gateway in made):
                gateway = made[asked % 3]
                gateway.ask(f"user {asked}", of_new)
                asked += 1
                await gateway.rollouts.look()
                if not gateway.share:
                    await asyncio.gather(*(other.rollouts.look() for other in made))
                    assert [other.share for other in made] == [0.0] * 3, "one look later"
            assert asked < 100
            found = await made[1].rollouts.report("m")
            assert found.progress.state == "rolled_back"
            assert "errors: " in found.progress.reason
            assert f"{found.readings[0].bad.new} of {found.readings[0].units.new} units" in found.progress.reason
            assert {gateway.ask(f"user {index}", of_new) for gateway in made for index in range(30)} == {"m"}
            told = [event for event in made[2].events if isinstance(event, RolloutChanged)]
            assert (told[-1].state, told[-1].share, told[-1].is_news) == ("rolled_back", 0.0, True)
            assert told[-1].guards[0].against >= 1.0

    asyncio.run(run())


def test_a_unit_that_is_bad_everywhere_is_one_bad_unit(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config()) as (one, two):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one, two)
            for gateway in (one, two):
                for _ in range(20):
                    gateway.ask("always the same", lambda entry: True)
            await looked(one, two)
            (reading,) = two.rollouts.reports()[0].readings
            assert sum(reading.bad) == 1

    asyncio.run(run())


def test_a_server_that_comes_back_goes_on_where_it_was(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            for index in range(300):
                one.ask(f"user {index}", of_new if index % 50 == 0 else never)
            await looked(one)
            before = one.rollouts.reports()
            assert one.share == 0.05
        world.alive.clear()
        async with gateways(world, 1, config()) as (two,):
            two.world.alive = {"g0"}
            assert two.share == 0.0, "nothing is known yet"
            assert (await two.rollouts.report("m")).progress.state == "running", "a report looks first"
            await looked(two)
            assert two.share == 0.05
            assert two.rollouts.reports() == before

    asyncio.run(run())


def test_a_dead_gateway_is_not_waited_for(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config()) as (one, two):
            two.ready.clear()
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            assert one.share == 0.0
            world.alive.discard("g1")
            await looked(one)
            assert one.share == 0.05

    asyncio.run(run())


def test_deaths_of_the_new_version_at_all_gateways_take_it_back(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config(max_deaths=3)) as (one, two):
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one, two)
            for gateway, model in ((one, "m@2"), (two, "m@2"), (one, "m"), (two, "m"), (one, "m")):
                gateway.rollouts.handle(ReplicaChanged(model=model, replica=0, state="died"))
            await looked(one, two)
            assert one.share == 0.05, "two deaths, and three of the stable version"
            two.rollouts.handle(ReplicaChanged(model="m@2", replica=0, state="died"))
            await looked(two, one)
            assert (one.share, two.share) == (0.0, 0.0)
            assert "3 workers of version 2 died" in one.rollouts.reports()[0].progress.reason

    asyncio.run(run())


def test_commands_are_of_one_rollout_and_say_who_and_why(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config()) as (one, two):
            with pytest.raises(InvalidRequest, match="no rollout; those with one: m"):
                await one.rollouts.command("other", "start", "key:a", "start")
            with pytest.raises(InvalidRequest, match="pending, so 'abort' is not possible"):
                await one.rollouts.command("m", "abort", "key:a", "abort")
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
            with pytest.raises(InvalidRequest, match="It is under way"):
                await two.rollouts.command("m", "start", "key:b", "start")
            await looked(one, two)
            for command, share in [("pause", 0.05), ("promote", 0.5), ("promote_full", 1.0), ("undo", 0.0)]:
                report = await two.rollouts.command("m", command, "key:b", f"{command} by key:b: because")  # type: ignore[arg-type]
                assert two.share == share, "in effect when the command returns"
                assert report.changes[0].actor == "key:b"
                assert report.changes[0].progress.reason == f"{command} by key:b: because"
            await one.rollouts.look()
            assert one.share == 0.0
            again = await one.rollouts.command("m", "start", "key:a", "again")
            assert again.progress.run == 2

    asyncio.run(run())


def test_a_run_counts_anew(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config(steps=[{"weight": 20}])) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            for index in range(300):
                one.ask(f"user {index}", of_new)
            await looked(one)
            assert one.rollouts.reports()[0].progress.state == "rolled_back"
            await one.rollouts.command("m", "start", "key:a", "it is repaired")
            await looked(one)
            assert one.share == 0.2
            assert one.rollouts.reports()[0].readings[0].bad == Count(0, 0)
            for index in range(300):
                one.ask(f"user {index}", never)
            await looked(one)
            assert sum(one.rollouts.reports()[0].readings[0].units) == 300

    asyncio.run(run())


def test_a_report_of_a_request_counts_its_unit(world: World) -> None:
    async def run() -> None:
        wanted = config(steps=[{"weight": 50}], guards={"errors": None, "reported": {}})
        async with gateways(world, 1, wanted) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            with pytest.raises(InvalidRequest, match="'nothing' was not divided by the rollout of m"):
                one.rollouts.note_bad("m", "nothing")
            asked = 0
            while one.share:
                if one.ask(f"user {asked}", never, f"r{asked}") == "m@2":
                    for _ in range(2):
                        one.rollouts.note_bad("m", f"r{asked}")
                asked += 1
            await looked(one)
            (reading,) = one.rollouts.reports()[0].readings
            assert sum(reading.units) == asked
            assert reading.bad.new == reading.units.new, "each once"
            assert one.rollouts.reports()[0].progress.state == "rolled_back"
            assert one.rollouts.reports()[0].progress.reason.startswith("reported: ")

    asyncio.run(run())


def test_a_rollout_that_the_configuration_has_no_more_ends(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            assert one.share == 0.05
            models = dict(config().models)
            models["m"] = msgspec.structs.replace(models["m"], rollout=None)
            one.adopt(msgspec.structs.replace(config(), models=models))
            assert one.divided.models["m"].versions.weights == {}
            await one.rollouts.look()
            one.adopt(config())
            await looked(one)
            assert one.share == 0.0
            report = await one.rollouts.report("m")
            assert (report.progress.state, report.changes[0].actor) == ("aborted", "config-file")
            assert one.recorded[-1] == "m:1:2 aborted"

    asyncio.run(run())


def without_rollout() -> Config:
    models = dict(config().models)
    models["m"] = msgspec.structs.replace(models["m"], rollout=None)
    return msgspec.structs.replace(config(), models=models)


async def stored_state(gateway: Gateway, world: World) -> str:
    """The state in the database, as a server would find it that has the rollout."""
    plan = plan_of("m", config().models["m"])
    assert plan is not None
    seat = Seat(world, gateway.rollouts._presence.id)

    def read(database: Database) -> str:
        with database.reading() as transaction:
            return ledger.read(transaction, seat, plan).progress.state

    return await gateway.state.call(read)


def test_a_rollout_that_left_the_configuration_while_no_server_ran_ends_at_the_start(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            assert one.share == 0.05
        world.alive.clear()
        async with gateways(world, 1, without_rollout()) as (two,):
            await looked(two)
            assert two.recorded == ["m:1:2 aborted"], "once"
            assert two.divided.models["m"].versions.weights == {}
            two.adopt(config())
            await looked(two)
            report = await two.rollouts.report("m")
            assert (report.progress.state, two.share) == ("aborted", 0.0)
            assert report.progress.reason == "the configuration does not have it any more"
            assert report.changes[0].actor == "config-file"

    asyncio.run(run())


@pytest.mark.parametrize("models", [{}, {"other": {"source": "x"}}])
def test_a_server_of_other_models_ends_no_rollout(world: World, models: dict[str, Any]) -> None:
    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
        world.alive.clear()
        async with gateways(world, 1, msgspec.convert({"models": models}, Config)) as (two,):
            await looked(two)
            assert (two.recorded, await stored_state(two, world)) == ([], "running")

    asyncio.run(run())


def test_a_rollout_goes_on_while_another_server_that_lives_has_it(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            two = Gateway(world, "new", without_rollout())
            try:
                await looked(two, one)
                assert (one.share, two.recorded) == (0.05, [])
                world.alive.discard("g0")
                await looked(two)
                assert (two.recorded, await stored_state(two, world)) == (["m:1:2 aborted"], "aborted")
            finally:
                two.close()

    asyncio.run(run())


def test_another_pair_of_versions_is_another_rollout(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 1, config()) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)
            await one.rollouts.command("m", "promote_full", "key:a", "promote")
            assert one.share == 1.0
            one.ask("user", never)
            assert one.rollouts.reports()[0].readings[0].units == Count(), "nothing is counted any more"
            back = config()
            models = {**back.models}
            models["m"] = msgspec.structs.replace(
                models["m"], rollout=msgspec.convert({"stable": 2, "new": 1}, type(models["m"].rollout))
            )
            one.adopt(msgspec.structs.replace(back, models=models))
            await looked(one)
            assert one.rollouts.reports()[0].progress.state == "pending"
            assert one.divided.models["m"].versions.weights == {"2": 100.0, "1": 0.0}

    asyncio.run(run())


# -- the database ------------------------------------------------------------------------------


class Breaking:
    """A database whose connection breaks at the end of a transaction."""

    def __init__(self, database: Database, *, is_committed: bool) -> None:
        self._database = database
        self._is_committed = is_committed
        self.reading = database.reading

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[Transaction]:
        with self._database.transaction(durable=durable) as begun:
            yield begun
            if not self._is_committed:
                raise StateUnavailable("the connection broke before the commit")
        raise StateUnavailable("the connection broke after the commit")


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_batch_that_is_written_again_counts_once(world: World, is_committed: bool) -> None:
    database = open_database(world.url, world.folder)
    seat = Seat(world, "g0")
    plan = plan_of("m", config().models["m"])
    assert plan is not None
    batch = Batch(
        {("", 0.05): Count(3, 2)},
        [BadEvent("errors", 0.05, True, b"u"), BadEvent("errors", 0.05, False, b"")],
    )
    local = Local(plan=plan, is_ready=True, deaths=0, batch=batch)
    broken: Any = Breaking(database, is_committed=is_committed)
    with pytest.raises(StateUnavailable):
        ledger.exchange(broken, seat, [local], None, lambda: world.now)
    found = ledger.exchange(database, seat, [local], None, lambda: world.now)
    (reading,) = found.stored["m:1:2"].verdict.readings
    assert (reading.bad, reading.units) == (Count(1, 1), Count(3, 2))
    after = msgspec.structs.replace(local, sums=found.sums["m:1:2"], number=1)
    again = ledger.exchange(database, seat, [after], found, lambda: world.now)
    (reading,) = again.stored["m:1:2"].verdict.readings
    assert (reading.bad, reading.units) == (Count(2, 1), Count(6, 4)), "the unit is known, the request is another"
    database.close()


def test_deaths_before_a_rollout_was_started_again_do_not_count(world: World) -> None:
    database = open_database(world.url, world.folder)
    seat = Seat(world, "g0")
    plan = plan_of("m", config().models["m"])
    assert plan is not None
    local = Local(plan=plan, is_ready=True, deaths=2)
    assert ledger.exchange(database, seat, [local], None, lambda: world.now).stored["m:1:2"].deaths == 2
    with database.transaction() as transaction:
        ledger.store(transaction, plan.name, Progress(state="aborted", run=1), Verdict(), world.now, "operator")
        assert ledger.read(transaction, seat, plan).deaths == 0
    database.close()


def test_without_news_the_database_is_only_read(world: World) -> None:
    database = open_database(world.url, world.folder)
    seat = Seat(world, "g0")
    plan = plan_of("m", config().models["m"])
    assert plan is not None
    local = Local(plan=plan, is_ready=True, deaths=0)
    found = ledger.exchange(database, seat, [local], None, lambda: world.now)
    quiet = msgspec.structs.replace(local, is_news=False)
    broken: Any = Breaking(database, is_committed=False)
    assert ledger.exchange(broken, seat, [quiet], found, lambda: world.now).stored == found.stored
    database.close()


def test_enough_evidence_here_holds_the_new_version_before_the_database_decides(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config(steps=[{"weight": 20}])) as (one, two):
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one, two)
            asked = 0
            while one.share:
                one.ask(f"user {asked}", of_new)
                asked += 1
                assert asked < 100
            assert two.share == 0.2, "the database was not asked"
            assert one.rollouts.reports()[0].progress.state == "inconclusive"
            await looked(one, two)
            assert (one.share, two.share) == (0.0, 0.0)
            assert one.rollouts.reports()[0].progress.state == "rolled_back"

    asyncio.run(run())


def test_a_hold_ends_where_the_database_knows_better(world: World) -> None:
    """The other gateway has seen as many bad units of the stable version."""

    async def run() -> None:
        async with gateways(world, 2, config(steps=[{"weight": 20}])) as (one, two):
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one, two)
            for index in range(400):
                two.ask(f"other {index}", lambda entry: True)
            await two.rollouts.look()
            asked = 0
            while one.share:
                one.ask(f"user {asked}", of_new)
                asked += 1
                assert asked < 100
            await looked(one, two)
            assert (one.share, two.share) == (0.2, 0.2)
            assert one.rollouts.reports()[0].progress.state != "rolled_back"

    asyncio.run(run())


def test_while_the_database_is_away_shares_stay_and_counts_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with gateways(world, 1, config(steps=[{"weight": 20}])) as (one,):
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one)

            def fail(*given: object, **named: object) -> None:
                raise StateUnavailable("the database is away")

            with monkeypatch.context() as patched:
                patched.setattr(ledger, "exchange", fail)
                for index in range(100):
                    one.ask(f"user {index}", lambda entry: True)
                with pytest.raises(StateUnavailable):
                    await one.rollouts.look()
                assert one.share == 0.2, "both versions are as bad"
                for index in range(100, 400):
                    one.ask(f"user {index}", of_new)
                assert one.share == 0.0, "no database is needed to hold a worse one"
                with pytest.raises(StateUnavailable):
                    await one.rollouts.look()
                assert one.share == 0.0
                asked = sum(one.rollouts._here["m:1:2"].tally.units["", 0.2])
            for _ in range(200):
                with contextlib.suppress(StateUnavailable):
                    await looked(one)
                    break
                await asyncio.sleep(0.02)
            assert one.rollouts.reports()[0].progress.state == "rolled_back"
            assert sum(one.rollouts.reports()[0].readings[0].units) == asked

    asyncio.run(run())


def test_the_loop_looks_soon_after_a_bad_event_and_by_itself(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config(steps=[{"weight": 20}], start="auto")) as (one, two):
            keeping = [asyncio.create_task(gateway.rollouts.keep()) for gateway in (one, two)]
            try:
                async with asyncio.timeout(20):
                    while (one.share, two.share) != (0.2, 0.2):
                        await asyncio.sleep(0.02)
                    for index in range(100):
                        one.ask(f"user {index}", of_new)
                    while (one.share, two.share) != (0.0, 0.0):
                        await asyncio.sleep(0.02)
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)

    asyncio.run(run())


SHADOW = [{"shadow": 100, "for_s": 60}, {"weight": 5, "shadow": 20, "for_s": 60}, {"weight": 100}]


def copied(gateway: Gateway, unit: str, result: CopyResult) -> None:
    """What came of the copy of a unit's request, if it was copied."""
    found, split = draw(gateway.divided.models, "m", unit), gateway.splits["m"]
    assert found.entry == "m", "copies are of the stable version's requests"
    if split.is_shadowed(found.digest):
        assigned = Assigned(rollout=split.rollout, run=split.run, share=split.share, is_new=False, unit=found.digest)
        event = CopyEnded(model="m", assigned=assigned, result=result, request_id=unit, part="text", position=3)
        gateway.rollouts.handle(event)


def test_gateways_count_copies_together_and_pass_a_shadow_step(world: World) -> None:
    async def run() -> None:
        wanted = config(steps=SHADOW, guards={"differs": {"max_fraction": 0.1}})
        async with gateways(world, 2, wanted) as (one, two):
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one, two)
            assert [gateway.splits["m"].shadow for gateway in (one, two)] == [1.0, 1.0]
            assert (one.share, two.share) == (0.0, 0.0)
            world.now += 61
            await looked(one, two)
            assert one.rollouts.reports()[0].progress.state == "inconclusive"
            for index in range(120):
                for gateway in (one, two):
                    copied(gateway, f"user {index}", "equal")
                copied(one, f"user {index}", "busy")
            await looked(one, two)
            reading = one.rollouts.reports()[0].readings[1]
            assert (reading.guard, reading.units.new, reading.bad.new) == ("differs", 240, 0)
            assert (one.share, one.splits["m"].shadow) == (0.05, 0.2)
            assert one.rollouts.reports()[0].copies == {"equal": 120, "busy": 120}
            report = await two.rollouts.report("m")
            assert (report.shadows, report.copies) == ([100.0, 20.0, 0.0], {"equal": 120})

    asyncio.run(run())


def test_differing_copies_take_a_version_back_on_every_gateway_and_at_once_on_the_one_that_knows(world: World) -> None:
    async def run() -> None:
        async with gateways(world, 2, config(steps=SHADOW, guards={"differs": {"max_fraction": 0.02}})) as (one, two):
            await looked(one, two)
            await one.rollouts.command("m", "start", "key:a", "start")
            await looked(one, two)
            index = 0
            while one.splits["m"].shadow:
                copied(one, f"user {index}", "differs" if index % 2 else "equal")
                index += 1
                assert index < 40
            assert two.splits["m"].shadow == 1.0, "no database was asked"
            await looked(one, two)
            assert {gateway.rollouts.reports()[0].progress.state for gateway in (one, two)} == {"rolled_back"}
            assert not one.splits
            assert not two.splits
            report = await one.rollouts.report("m")
            assert "differs: " in report.progress.reason
            assert len(report.differing) == index // 2
            assert (report.differing[0].request_id, report.differing[0].position) == ("user 1", 3)

    asyncio.run(run())


GOLDEN = [GoldenItem(path="/v1/completions", request={"prompt": str(number)}, equals="yes") for number in range(5)]


def right(body: Any) -> Reply:
    return Reply(200, b'{"choices":[{"text":"yes","index":0}]}')


def often_wrong(body: Any) -> Reply:
    return right(body) if body["prompt"] != "3" else Reply(200, b'{"choices":[{"text":"no","index":0}]}')


def golden_config(**guard: Any) -> Config:
    steps = [{"weight": 0}, {"weight": 100, "for_s": 3600}]
    return config(guards={"errors": None, "golden": {"file": "g.jsonl", **guard}}, steps=steps)


async def questioned(gateway: Gateway, until: Callable[[], bool]) -> None:
    """The gateway looks, and its questions are answered meanwhile, until something is so."""
    async with asyncio.timeout(60):
        while not until():
            await gateway.rollouts.look()
            await asyncio.sleep(0.001)


def golden_run(world: World, wanted: Config, answers: Mapping[str, Callable[[Any], Reply]], state: str) -> Gateway:
    """A rollout of one gateway from its start to a state."""

    async def run() -> Gateway:
        async with gateways(world, 1, wanted) as (one,):
            one.answers.update(answers)
            one.rollouts.configure(wanted, {"m": GOLDEN})
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
            await questioned(one, lambda: one.rollouts.reports()[0].progress.state == state)
            assert (await one.rollouts.report("m")).progress.state == state
            return one

    return asyncio.run(run())


def test_a_version_that_fails_one_question_of_five_is_taken_back_before_it_serves(world: World) -> None:
    one = golden_run(world, golden_config(), {"m@2": often_wrong}, "rolled_back")
    report = one.rollouts.reports()[0]
    assert report.progress.reason.startswith("golden: ")
    assert "answers of the new version were not the expected ones" in report.progress.reason
    assert report.progress.step == 0, "at the step of 0 %"
    assert report.golden is not None
    assert report.golden.wrong == report.readings[0].bad.new > 1
    assert {wrong.name for wrong in report.golden.last_wrong} == {""}
    assert "'no'" in report.golden.last_wrong[0].reason
    assert set(one.asked) == {"m@2"}, "the stable version is not asked"


def test_a_version_that_answers_the_golden_set_goes_on_and_is_asked_in_every_step(world: World) -> None:
    async def run() -> None:
        wanted = golden_config(max_fraction=0.2)
        async with gateways(world, 1, wanted) as (one,):
            steps: list[int] = []

            def noting(body: Any) -> Reply:
                steps.append(one.rollouts.reports()[0].progress.step)
                return right(body)

            one.answers["m@2"] = noting
            one.rollouts.configure(wanted, {"m": GOLDEN})
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
            await questioned(one, lambda: steps.count(1) >= len(GOLDEN))
            assert steps.count(0) >= 10, "fewer are not enough for one of five"
            await one.rollouts.command("m", "pause", "key:a", "pause by key:a")
            asked = len(one.asked)
            for _ in range(5):
                await one.rollouts.look()
                await asyncio.sleep(0.001)
            assert len(one.asked) <= asked + 1, "a rollout that is paused asks nothing"

    asyncio.run(run())


def test_a_golden_set_that_both_versions_fail_alike_takes_nothing_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the questions go to each, so that the same set of bad questions speaks for no version."""

    monkeypatch.setattr(golden, "_random", random.Random(1))  # any other is taken back once in a hundred times

    async def run() -> None:
        wanted = golden_config(max_fraction=None, max_ratio=2)
        async with gateways(world, 1, wanted) as (one,):
            one.answers.update({"m": often_wrong, "m@2": often_wrong})
            one.rollouts.configure(wanted, {"m": GOLDEN})
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
            await questioned(one, lambda: len(one.asked) > 60 or one.rollouts.reports()[0].progress.step == 1)
            await one.rollouts.look()
            report = one.rollouts.reports()[0]
            assert report.progress.state in ("running", "inconclusive")
            assert report.readings[0].bad.stable > 0
            assert report.readings[0].units.stable > 5
            assert set(one.asked) == {"m", "m@2"}

    asyncio.run(run())


def test_questions_that_are_dropped_prove_nothing(world: World) -> None:
    async def run() -> None:
        wanted = golden_config()
        async with gateways(world, 1, wanted) as (one,):
            one.answers["m@2"] = lambda body: Reply(429, b'{"error": {"message": "A copy does not wait."}}')
            one.rollouts.configure(wanted, {"m": GOLDEN})
            await one.rollouts.command("m", "start", "key:a", "start by key:a")
            await questioned(
                one, lambda: bool(one.asked) and one.rollouts.reports()[0].progress.state == "inconclusive"
            )
            report = one.rollouts.reports()[0]
            assert report.golden is not None
            assert (report.golden.asked, report.golden.problem) == (0, "429: A copy does not wait.")
            assert report.readings[0].units == Count()

    asyncio.run(run())


class Killed(BaseException):
    """The process dies before the audit log has its line."""


def test_a_change_of_a_gateway_that_died_before_its_line_is_told_by_another_once(world: World) -> None:
    async def test() -> None:
        async with gateways(world, 2, config(start="auto")) as (one, two):

            async def die(name: str, change: Change) -> None:
                raise Killed

            one.rollouts._record = die
            with pytest.raises(Killed):
                await one.rollouts.look()
            await two.rollouts.look()
            assert "m:1:2 preparing" not in two.recorded, "the gateway that decided it is alive"
            world.alive.discard("g0")
            await looked(two)
            assert two.recorded.count("m:1:2 preparing") == 1

    asyncio.run(test())
