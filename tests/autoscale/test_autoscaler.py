"""The controller's loop, with a router that is told what its models do: what it begins, reports and holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from inferd.autoscale.controller import HELD_AGAIN_S, RETRY_MEMORY_S, Autoscaler
from inferd.config import Config, ModelConfig, ScalingConfig
from inferd.errors import InvalidRequest, Unavailable
from inferd.events import Event, Scaled, ScalingRemoved
from inferd.router.status import Demand

QUIET = Demand(
    accepted=0,
    ended=0,
    waiting=0,
    oldest_wait_s=0.0,
    in_flight=0,
    busy=0,
    ready=1,
    starting=0,
    failed=0,
    leaving=0,
    ready_s=1.0,
    idle_s=0.0,
    num_threads=1,
    num_cores=8,
    is_changing=False,
)


class Router:
    """One model; does at once what it is asked, within ``room`` replicas."""

    def __init__(self) -> None:
        self.demand = QUIET
        self.room = 64
        self.asked: list[int] = []
        self.unloaded = 0

    def demands(self) -> Mapping[str, Demand]:
        return {"chat": self.demand}

    async def scale(self, model: str, count: int) -> int:
        self.asked.append(count)
        allowed = min(count, self.room)
        ready = min(self.demand.ready, allowed)
        self.demand = msgspec.structs.replace(self.demand, ready=ready, starting=allowed - ready, failed=0)
        return allowed

    def unload_idle(self, model: str) -> None:
        self.unloaded += 1
        self.demand = msgspec.structs.replace(self.demand, ready=0, starting=0)


class Bench:
    """The controller with a clock that stands still between looks."""

    def __init__(self, scaling: ScalingConfig, hold: str = "") -> None:
        self.router = Router()
        self.hold = hold
        self.now = 100.0
        self.events: list[Event] = []
        self.scaler = Autoscaler(
            self.router, lambda model: self.hold, self.events.append, now=lambda: self.now, wall=lambda: self.now
        )
        self.configure(scaling)

    def configure(self, scaling: ScalingConfig | None, **model: object) -> None:
        chat = msgspec.structs.replace(ModelConfig(source="demo", scaling=scaling), **model)
        self.scaler.configure(Config(models={"chat": chat, "other": ModelConfig(source="demo")}))

    async def look(self, seconds: float = 0.25, **demand: object) -> None:
        """Looks, each a quarter of a second after the last."""
        self.router.demand = msgspec.structs.replace(self.router.demand, **demand)
        for _ in range(max(1, round(seconds / 0.25))):
            self.now += 0.25
            self.scaler.look()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def scaled(self) -> list[Scaled]:
        return [event for event in self.events if isinstance(event, Scaled) and event.is_news]


def test_a_request_that_waits_too_long_starts_a_replica_which_is_counted_once() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        await bench.look(1.0)
        assert bench.router.asked == []
        await bench.look(20.0, waiting=3, oldest_wait_s=2.0, in_flight=1, busy=1, accepted=4)
        assert bench.router.asked == [2]
        (event,) = bench.scaled
        assert (event.before, event.desired, event.rule) == (1, 2, "wait")
        assert "2 s" in event.reason
        await bench.look(ready=2, starting=0)
        assert bench.router.asked == [2, 3]
        report = bench.scaler.report("chat")
        assert [(change.before, change.after) for change in report.changes] == [(2, 3), (1, 2)]
        assert (report.min, report.max, report.waiting) == (1, 4, 3)

    asyncio.run(run())


@pytest.mark.parametrize(("busy", "asked"), [(0.6, []), (0.8, [2])])
def test_a_replica_with_many_requests_gets_another_one_where_it_is_utilized(busy: float, asked: list[int]) -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        await bench.look(122.0, in_flight=9, busy=busy)
        assert bench.router.asked == asked
        report = bench.scaler.report("chat")
        assert report.duty == pytest.approx(busy)
        told = [change.reason for change in report.changes]
        assert told == ["replicas worked at 80 % of what they can over two minutes, of 70 %"] * len(asked)

    asyncio.run(run())


def test_missing_memory_limits_the_number_and_is_tried_again_later() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        bench.router.room = 1
        busy = {"waiting": 3, "oldest_wait_s": 2.0, "in_flight": 1, "busy": 1}
        await bench.look(2.0, **busy)
        assert bench.router.asked == [2]
        report = bench.scaler.report("chat")
        assert (report.desired, report.rule) == (1, "limit")
        assert "the memory allows 1" in report.reason
        assert [event.rule for event in bench.scaled] == ["limit"], "held is told once"
        bench.router.room = 4
        await bench.look(RETRY_MEMORY_S, **busy)
        assert bench.router.asked == [2, 2]

    asyncio.run(run())


def test_a_start_that_is_refused_changes_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        asked = []

        async def scale(model: str, count: int) -> int:
            asked.append(count)
            raise Unavailable("chat is being reloaded")

        with monkeypatch.context() as patch:
            patch.setattr(bench.router, "scale", scale)
            await bench.look(1.0, waiting=3, oldest_wait_s=2.0, in_flight=1, busy=1, accepted=4)
        assert asked == [2]
        report = bench.scaler.report("chat")
        assert report.changes == []
        assert "a refused change of its replicas allows 1" in report.reason
        assert {event.desired for event in bench.scaled} <= {1}
        await bench.look(RETRY_MEMORY_S + 1.0)
        assert bench.router.asked == [2]
        assert [change.after for change in bench.scaler.report("chat").changes] == [2]

    asyncio.run(run())


def test_what_holds_the_number_again_and_again_is_told_once_a_minute() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=1))
        for _ in range(5):
            await bench.look(waiting=3, oldest_wait_s=2.0, in_flight=1, busy=1)
            await bench.look(2.0, waiting=0, oldest_wait_s=0.0, in_flight=0, busy=0)
        assert [event.rule for event in bench.scaled] == ["limit"]
        bench.now += HELD_AGAIN_S
        await bench.look(waiting=3, oldest_wait_s=2.0, in_flight=1, busy=1)
        assert [event.rule for event in bench.scaled] == ["limit", "limit"]

    asyncio.run(run())


def test_no_more_replicas_than_the_cores_have_threads_for() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        await bench.look(5.0, waiting=3, oldest_wait_s=2.0, in_flight=1, num_threads=4, num_cores=4)
        assert bench.router.asked == []
        assert "the number of cores (4) allows 1" in bench.scaler.report("chat").reason
        bench.configure(ScalingConfig(min=1, max=4), device="cuda:0")
        await bench.look()
        assert bench.router.asked == [2]

    asyncio.run(run())


@pytest.mark.parametrize("hold", ["", "its rollout is under way"])
def test_replicas_leave_after_the_window_unless_something_holds_them(hold: str) -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4, down_after_s=20.0), hold)
        await bench.look(15.0, ready=3)
        assert bench.router.asked == []
        await bench.look(30.0)
        assert bench.router.asked == ([] if hold else [1])
        if hold:
            assert hold in bench.scaler.report("chat").reason
            bench.hold = ""
            await bench.look()
            assert bench.router.asked == [1]

    asyncio.run(run())


def test_another_change_of_the_replicas_is_waited_for() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        busy = {"waiting": 3, "oldest_wait_s": 2.0, "in_flight": 1, "busy": 1}
        await bench.look(3.0, is_changing=True, **busy)
        assert bench.router.asked == []
        await bench.look(is_changing=False)
        assert bench.router.asked == [2]

    asyncio.run(run())


def test_a_replica_that_does_not_load_is_removed_and_not_started_again_at_once() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        await bench.look(10.0, failed=1, waiting=3, oldest_wait_s=2.0, in_flight=1, busy=1)
        assert bench.router.asked == [1]
        assert "did not load" in bench.scaler.report("chat").reason
        await bench.look(25.0)
        assert bench.router.asked == [1, 2]

    asyncio.run(run())


def test_the_last_replica_leaves_an_idle_model_and_the_on_demand_load_brings_it_back() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=0, max=4))
        await bench.look(idle_s=299.0)
        assert bench.router.unloaded == 0
        await bench.look(idle_s=301.0)
        assert bench.router.unloaded == 1
        assert [(event.desired, event.rule) for event in bench.scaled] == [(0, "idle")]
        await bench.look(waiting=1, idle_s=0.0)
        assert bench.router.asked == [], "the request itself loads the model"
        assert bench.scaler.report("chat").desired == 1

    asyncio.run(run())


def test_a_model_whose_number_is_fixed_has_no_report_and_one_that_becomes_fixed_says_so() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=4))
        assert [report.model for report in bench.scaler.reports()] == ["chat"]
        assert bench.scaler.report("chat").reason == "not observed yet"
        with pytest.raises(InvalidRequest, match=r"models\.other\.scaling"):
            bench.scaler.report("other")
        bench.configure(None)
        assert bench.events == [ScalingRemoved(model="chat")]
        assert bench.scaler.reports() == []

    asyncio.run(run())


def test_what_a_replica_serves_is_measured_anew_where_another_model_is_served() -> None:
    async def run() -> None:
        bench = Bench(ScalingConfig(min=1, max=1))
        for count in range(80):
            await bench.look(0.25, accepted=count + 9, ended=count, waiting=8, in_flight=1, busy=1)
        measured = bench.scaler.report("chat").served_per_s
        assert measured == pytest.approx(4.0, rel=0.1)
        bench.configure(ScalingConfig(min=1, max=2))
        await bench.look(0.25)
        assert bench.scaler.report("chat").served_per_s is not None, "it is the same model"
        bench.configure(ScalingConfig(min=1, max=2), source="other")
        await bench.look(0.25)
        assert bench.scaler.report("chat").served_per_s is None

    asyncio.run(run())
