"""The live numbers of an observer: read from what it counts, once a second, with the feed of events beside them."""

from __future__ import annotations

import io
from math import isnan
from typing import Any

import msgspec
import pytest
from tests.worker.watching import until

from inferd.events import (
    BreakerChanged,
    ConfigReloaded,
    Event,
    ModelUnloaded,
    QueueChanged,
    ReplicaChanged,
    RequestEnded,
    RequestRefused,
    StateChanged,
    StepDone,
)
from inferd.observe import Observer
from inferd.observe.devices import Reading
from inferd.observe.live.feed import BURST_S, MAX_LINES
from inferd.observe.live.live import Tick
from inferd.observe.live.machine import MachineReader
from inferd.types import StepStats, Timings, Usage


class Clock:
    """Three clocks that a test moves: monotonic, wall and since boot."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        self.boot = 5000.5

    def pass_(self, seconds: float, *, asleep: float = 0.0, set_: float = 0.0) -> None:
        self.now += seconds
        self.boot += seconds + asleep
        self.wall += seconds + asleep + set_


class Watched:
    """An observer and what its live numbers told."""

    def __init__(self, models: dict[str, int]) -> None:
        self.clock = Clock()
        self.observer = Observer(
            models=models, stream=io.StringIO(), now=lambda: self.clock.now, wall=lambda: self.clock.wall
        )
        self.live = self.observer.live
        self.live._since_boot = lambda: self.clock.boot
        self.told: list[Tick] = []
        self.live.listeners.append(self.told.append)

    def tick(self, seconds: float = 1.0, *events: Event, **clock: float) -> dict[str, float | None]:
        for event in events:
            self.observer.emit(event)
        self.clock.pass_(seconds, **clock)
        self.live.tick()
        return dict(self.told[-1].values)

    def lines(self) -> list[tuple[str, str]]:
        return [(line.level, line.text) for line in self.live.feed.lines]


@pytest.fixture
def watched() -> Any:
    made = Watched({"chat": 1, "digits": 1})
    made.tick()
    yield made
    made.observer.close()


def ended(
    model: str = "chat", outcome: Any = "done", tokens: int = 10, error_kind: str | None = None, **timings: float
) -> RequestEnded:
    times = msgspec.structs.replace(
        Timings(), **{"dispatched": 0.1, "scheduled": 0.1, "first_token": 0.2, "finished": 1.1, **timings}
    )
    return RequestEnded(
        model=model,
        replica=0,
        request_id="r",
        tenant="",
        outcome=outcome,
        error_kind=error_kind,
        usage=Usage(5, tokens, 0),
        timings=times,
    )


def test_rates_are_of_the_time_that_passed(watched: Watched) -> None:
    values = watched.tick(1.0, *[ended() for _ in range(4)], ended(outcome="failed"))
    assert values["requests_s|chat"] == pytest.approx(5)
    assert values["errors_s|chat"] == pytest.approx(1)
    assert values["requests_s|digits"] == 0
    assert watched.tick(4.0, *[ended() for _ in range(8)])["requests_s|chat"] == pytest.approx(2)
    assert watched.tick()["requests_s|chat"] == 0


def test_refusals_for_lack_of_capacity_are_errors_and_those_of_quotas_are_not(watched: Watched) -> None:
    full, quota = RequestRefused(model="chat", reason="queue_full"), RequestRefused(model="chat", reason="quota_tokens")
    assert watched.tick(1.0, full, full, quota)["errors_s|chat"] == pytest.approx(2)


def test_tokens_flow_with_the_steps_of_an_engine_and_not_with_the_ends_of_requests(watched: Watched) -> None:
    assert watched.tick()["tokens_s|chat"] is None  # it never had one
    step = StepStats(num_running=8, step_tokens=108, step_sequences=8, blocks_total=100, blocks_used=25)
    values = watched.tick(1.0, *[StepDone(model="chat", replica=0, stats=step)] * 10)
    assert values["tokens_s|chat"] == pytest.approx(80)
    assert values["prompt_tokens_s|chat"] == pytest.approx(1000)
    assert values["batch_rows|chat"] == pytest.approx(8)
    assert values["running|chat"] == 8
    assert values["kv_use|chat"] == pytest.approx(0.25)
    assert watched.tick(1.0, ended(tokens=80))["tokens_s|chat"] == 0  # counted already


def test_tokens_of_a_replica_without_steps_are_counted_when_its_requests_end(watched: Watched) -> None:
    assert watched.tick(1.0, ended(tokens=30), ended(tokens=12))["tokens_s|chat"] == pytest.approx(42)


def test_what_is_unknown_is_absent_and_never_zero(watched: Watched) -> None:
    values = watched.tick()
    for name in ("ttft_p50", "tpot_p99", "total_p95", "kv_use", "prefix_hits", "speculation_accepted", "batch_rows"):
        assert values[f"{name}|chat"] is None, name
    assert values["queue|chat"] == 0
    assert values["memory_limit|"]
    assert values["memory_used|"]


def test_quantiles_are_of_the_last_minute(watched: Watched) -> None:
    values = watched.tick(1.0, *[ended(first_token=0.1 * n) for n in range(1, 101)])
    assert values["ttft_p50|chat"] == pytest.approx(5.0, rel=0.03)
    assert values["ttft_p99|chat"] == pytest.approx(9.9, rel=0.03)
    watched.tick(70.0)
    assert watched.tick()["ttft_p50|chat"] is None


def test_hits_and_accepted_guesses_are_shares_of_what_was_asked(watched: Watched) -> None:
    step = StepStats(
        step_tokens=4, step_sequences=1, prefix_query_tokens=100, prefix_hit_tokens=75,
        num_drafts=1, drafted_tokens=3, accepted_tokens=2,
    )  # fmt: skip
    values = watched.tick(1.0, StepDone(model="chat", replica=0, stats=step))
    assert values["prefix_hits|chat"] == pytest.approx(0.75)
    assert values["speculation_accepted|chat"] == pytest.approx(2 / 3)
    assert values["tokens_s|chat"] == pytest.approx(3)
    assert watched.tick()["prefix_hits|chat"] is None


# -- clocks --------------------------------------------------------------------------------------


def fine(watched: Watched, key: str) -> list[float | None]:
    return [None if isnan(value) else value for value in watched.live.rings.values(key, 0)]


def test_a_wall_clock_that_is_set_moves_no_value(watched: Watched) -> None:
    queued = [QueueChanged(model="chat", waiting=n, in_flight=0) for n in range(1, 5)]
    watched.tick(1.0, queued[0])
    watched.tick(1.0, queued[1], set_=-3600)
    watched.tick(1.0, queued[2], set_=86_400)
    watched.tick(1.0, queued[3])
    assert fine(watched, "queue|chat")[-5:] == [0, 1, 2, 3, 4]
    assert watched.told[-1].at == watched.clock.wall


def test_a_machine_that_slept_leaves_a_gap(watched: Watched) -> None:
    watched.tick(1.0, QueueChanged(model="chat", waiting=1, in_flight=0))
    watched.tick(1.0, QueueChanged(model="chat", waiting=2, in_flight=0), asleep=3)
    assert fine(watched, "queue|chat")[-5:] == [1, None, None, None, 2]


def test_a_late_tick_leaves_a_gap_and_two_in_a_second_are_one(watched: Watched) -> None:
    watched.tick(1.0)
    watched.tick(2.0)
    num_told = len(watched.told)
    watched.clock.pass_(0.1)
    watched.live.tick()
    assert len(watched.told) == num_told
    assert fine(watched, "queue|chat")[-3:] == [0, None, 0]


# -- other models --------------------------------------------------------------------------------


def test_another_set_of_models_has_other_series_and_what_stays_goes_on(watched: Watched) -> None:
    watched.tick(1.0, QueueChanged(model="chat", waiting=7, in_flight=0))
    version = watched.live.version
    watched.observer.configure({"chat": 1, "new": 1}, access_log=False)
    assert watched.live.version > version
    values = watched.tick()
    assert [key for key, _ in watched.told[-1].values] == [series.key for series in watched.live.series]
    assert values["queue|chat"] == 7
    assert values["queue|new"] == 0
    assert "queue|digits" not in values
    assert fine(watched, "queue|chat")[-2:] == [7, 7]


# -- the feed ------------------------------------------------------------------------------------


def changed(state: Any, **fields: Any) -> ReplicaChanged:
    return ReplicaChanged(model="chat", replica=0, state=state, **fields)


def test_the_feed_tells_what_changed_once_and_with_its_level(watched: Watched) -> None:
    watched.tick(
        1.0,
        changed("loading"),
        changed("loading", rss_bytes=5),
        changed("ready", load_s={"weights": 0.03, "warmup": 0.013}),
        changed("died", reason="signal 9 in /secret/path"),
        BreakerChanged(model="chat", replica=1, state="open"),
        ModelUnloaded(model="digits", reason="idle"),
        ConfigReloaded(accepted=False, is_whole=False, detail="models.x: wrong"),
        StateChanged(available=False),
    )
    assert watched.lines() == [
        ("info", "chat/0 is loading"),
        ("info", "chat/0 is ready, loaded in 43 ms"),
        ("error", "chat/0 died"),
        ("warning", "chat/1 gets no requests, because it failed several times in a row"),
        ("info", "digits was unloaded because it was idle"),
        ("error", "The configuration file was refused; the old one is in use"),
        ("error", "The database does not answer"),
    ]
    details = [line.detail for line in watched.told[-1].lines]
    assert details[2] == "signal 9 in /secret/path"
    assert watched.tick()
    assert watched.told[-1].lines == []


def test_a_burst_of_refusals_is_one_line(watched: Watched) -> None:
    refused = RequestRefused(model="chat", reason="queue_full")
    watched.tick(1.0, *[refused] * 500)
    assert watched.lines() == [("warning", "chat: 500 requests were refused (queue full)")]
    for _ in range(int(BURST_S) - 1):
        watched.tick(1.0, *[refused] * 10)
    assert len(watched.lines()) == 1
    watched.tick(1.0)
    assert watched.lines()[1:] == [("warning", "chat: 90 requests were refused (queue full)")]


def test_the_feed_is_bounded(watched: Watched) -> None:
    for _ in range(MAX_LINES):
        watched.tick(1.0, changed("loading"), changed("ready"))
    assert len(watched.live.feed.lines) == MAX_LINES
    assert len(watched.live.lines(100)) == 100


def test_a_defect_in_a_listener_is_counted_and_ends_nothing(watched: Watched) -> None:
    def fail(tick: Tick) -> None:
        raise ValueError("a defect")

    import asyncio

    watched.live.listeners.append(fail)
    watched.live.until_tick_s = lambda: 0.001  # type: ignore[method-assign]

    async def main() -> None:
        keeping = asyncio.create_task(watched.observer.keep_live())
        for number in range(1, 4):
            watched.clock.pass_(1.0)
            await until(lambda number=number: len(watched.told) >= number, "it goes on")  # type: ignore[misc]
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(main())
    page = watched.observer.render_metrics().decode()
    assert "inferd_observer_failures_total 0" not in page
    assert len(watched.told) > 2


def test_a_device_has_a_series_for_each_figure_that_it_tells(watched: Watched) -> None:
    readings: list[Reading] = []
    live = Observer(models={}, stream=io.StringIO()).live
    live._machine = MachineReader(lambda: readings)
    clock = watched.clock
    live._since_boot = lambda: clock.boot
    live.configure(["chat"])

    def devices() -> dict[str, float | None]:
        clock.pass_(1.0)
        live.tick()
        values = {series.id: live.rings.last(series.key, 1) for series in live.series if "device" in series.id}
        return {id_: found[0] if found else None for id_, found in values.items()}

    assert devices() == {}
    version = live.version
    readings.append(Reading(device="gpu0", kind="gpu", at=1.0, name="A card", duty=0.5, power_w=250.0))
    assert devices() == {"device_duty:gpu0": 0.5, "device_power:gpu0": 250.0}
    assert live.version > version
    assert {series.title for series in live.series if "device" in series.id} == {
        "Duty cycle of A card",
        "Power of A card",
    }
    readings.clear()
    assert devices() == {"device_duty:gpu0": None, "device_power:gpu0": None}
    readings += [Reading(device=f"sensor{n}", kind="sensor", at=1.0, temperature_c=40.0) for n in range(1000)]
    devices()
    assert len(live.series) < 200
