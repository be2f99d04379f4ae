"""A source in a thread of its own: what hangs or fails is counted, and stops nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.worker.watching import until_now

from inferd import clock
from inferd.config import DevicesConfig
from inferd.observe.devices import Devices, Reading
from inferd.observe.devices.reading import Source


class Steps:
    """A source whose readings are functions, one after the other; the last one again and again."""

    def __init__(self, *steps: Callable[[float], list[Reading]]) -> None:
        self._steps = list(steps)

    def read(self, now: float) -> list[Reading]:
        return (self._steps.pop(0) if len(self._steps) > 1 else self._steps[0])(now)


def sensor(name: str, **values: float) -> Callable[[float], list[Reading]]:
    return lambda now: [Reading(device=name, kind="sensor", at=now, **values)]  # type: ignore[arg-type]


@contextmanager
def reading(now: Callable[[], float] = clock.now, **sources: Source | None) -> Iterator[Devices]:
    def finder(source: Source | None) -> Callable[[], Source | None]:
        return lambda: source

    devices = Devices(
        DevicesConfig(interval_s=0.05),
        sources={name: finder(source) for name, source in sources.items()},
        now=now,
        limit_s=0.2,
    )
    devices.start()
    try:
        yield devices
    finally:
        devices.stop()


def names(devices: Devices) -> list[str]:
    return [one.device for one in devices.current()]


def by_device(devices: Devices, found: dict[str, Reading]) -> dict[str, Reading]:
    """The readings that were found so far, with those of now."""
    found.update({one.device: one for one in devices.current()})
    return found


def test_a_source_that_hangs_vanishes_and_the_others_stay() -> None:
    begun, released = threading.Event(), threading.Event()
    now = 100.0

    def hang(at: float) -> list[Reading]:
        begun.set()
        released.wait(30)
        return sensor("a")(at)

    def is_read(name: str) -> bool:
        return any(one.at == now for one in devices.current() if one.device == name)

    def let_pass(tenths: int) -> None:
        """Time passes in parts that are shorter than the limit, and each time the good one is read."""
        nonlocal now
        for _ in range(tenths):
            now += 0.1
            until_now(lambda: is_read("b"), "the good one is read", 10)

    with reading(lambda: now, bad=Steps(sensor("a"), hang), good=Steps(sensor("b"))) as devices:
        until_now(lambda: names(devices) == ["a", "b"], "both were read", 10)
        assert begun.wait(10)
        let_pass(2)
        assert names(devices) == ["a", "b"], "a reading may be late"
        let_pass(3)
        assert names(devices) == ["b"]
        assert devices.failures() == {"bad": 2, "good": 0}
        let_pass(2)
        assert devices.failures() == {"bad": 3, "good": 0}
        released.set()
        until_now(lambda: names(devices) == ["a", "b"], "it is back", 10)
        let_pass(1)
        until_now(lambda: is_read("a"), "it is read again", 10)
        assert devices.failures() == {"bad": 3, "good": 0}


def test_a_source_that_fails_is_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail(now: float) -> list[Reading]:
        raise OSError("the driver is gone")

    with reading(bad=Steps(fail, fail, sensor("a"))) as devices:
        until_now(lambda: names(devices) == ["a"], "it was read", 10)
        assert devices.failures() == {"bad": 2}
    assert [record.message for record in caplog.records if record.name == "inferd.devices"] == [
        "devices cannot be read from bad: the driver is gone"
    ], "once, not with every reading"


def test_a_source_that_is_not_here_has_neither_readings_nor_failures() -> None:
    with reading(none=None, good=Steps(sensor("b"))) as devices:
        until_now(lambda: names(devices) == ["b"], "the other was read", 10)
        until_now(lambda: devices.failures() == {"good": 0}, "the absent one is known", 10)


def test_power_comes_from_energy_and_energy_from_power_where_one_is_told() -> None:
    counted = iter(range(0, 10_000))
    with reading(
        counting=Steps(lambda now: [Reading(device="c", kind="cpu", at=now, energy_j=10.0 * next(counted))]),
        drawing=Steps(sensor("d", power_w=50.0)),
        silent=Steps(sensor("s", temperature_c=20.0)),
    ) as devices:
        begin: dict[str, Reading] = {}
        end: dict[str, Reading] = {}
        until_now(lambda: set(by_device(devices, begin)) == {"c", "d", "s"}, "all are read", 10)
        until_now(
            lambda: all(name in by_device(devices, end) and end[name].at > begin[name].at for name in begin),
            "all were read again",
            10,
        )
    assert end["c"].power_w is not None
    assert end["c"].power_w > 0
    drawn = (end["d"].energy_j or 0) - (begin["d"].energy_j or 0)
    assert drawn == pytest.approx(50.0 * (end["d"].at - begin["d"].at))
    assert (end["s"].power_w, end["s"].energy_j) == (None, None), "absent, not 0"


def test_devices_that_are_not_wanted_are_not_read() -> None:
    devices = Devices(DevicesConfig(enabled=False))
    devices.start()
    assert (devices.current(), devices.failures()) == ([], {})
    devices.stop()


def test_a_stop_waits_for_a_reading_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.observe.devices.devices.STOP_LIMIT_S", 30)
    begun, released = threading.Event(), threading.Event()

    def slow(at: float) -> list[Reading]:
        begun.set()
        released.wait(30)
        return sensor("a")(at)

    with reading(slow=Steps(slow)) as devices:
        assert begun.wait(10)
        threading.Timer(0.05, released.set).start()
        devices.stop()
        assert "devices-slow" not in [thread.name for thread in threading.enumerate()]
