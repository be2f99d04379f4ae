"""The evidence of the machine, from the kernel's files as a test writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.observe.devices.reading import Reading
from inferd.observe.why.pressure import NO_STRAIN, MachinePressure, Strain


class Machine:
    """A folder in the place of /proc, with this process, a worker and two cores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = str(os.getpid())
        self.throttled = {"thermal": 0.0, "quota": 0.0}
        for pid in (self.own, "77"):
            (folder / pid / "task" / pid).mkdir(parents=True)
        (folder / self.own / "task" / self.own / "children").write_text("77 ")
        self.write()

    def write(self, *, busy_s: float = 0, own_s: float = 0, waited_s: float = 0, steal_s: float = 0) -> None:
        """Sums since the start; of the processors over both cores."""
        hz = os.sysconf("SC_CLK_TCK")
        busy, steal = round(busy_s * hz), round(steal_s * hz)
        (self.folder / "stat").write_text(f"cpu  {busy} 0 0 99 0 0 0 {steal} 0 0\ncpu0 1\ncpu1 1\nintr 1\n")
        for pid, seconds in ((self.own, 0.0), ("77", own_s)):
            fields = ["S", *["0"] * 10, str(round(seconds * hz)), "0", "0"]
            (self.folder / pid / "stat").write_text(f"{pid} (a name) {' '.join(fields)}\n")
            waited = round(waited_s * 1e9) if pid == "77" else 0
            (self.folder / pid / "task" / pid / "schedstat").write_text(f"5 {waited} 1\n")

    def readings(self) -> list[Reading]:
        return [Reading(device="d", kind="gpu", at=0.0, throttled_s=dict(self.throttled))]  # type: ignore[arg-type]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_shares_are_of_the_time_between_the_readings_around_a_call(machine: Machine) -> None:
    pressure = MachinePressure(machine.readings, machine.folder)
    pressure.sample(10.0)
    machine.write(busy_s=8.0, own_s=2.0, waited_s=1.0, steal_s=2.0)
    machine.throttled = {"thermal": 3.0, "quota": 1.0}
    pressure.sample(14.0)
    # A quarter of the time waited; of the processors' seconds 6 of 8 were other programs'.
    expected = Strain(pytest.approx(0.25 * 0.75), 0.25, 0.25, ("thermal",))  # type: ignore[arg-type]
    assert pressure.between(11.0, 13.0) == expected
    pressure.sample(18.0)
    assert pressure.between(14.5, 17.0) == Strain(0.0, 0.0, 0.0, ())
    assert pressure.between(11.0, 13.0) == expected


def test_the_counters_are_read_once_a_second(machine: Machine) -> None:
    pressure = MachinePressure(machine.readings, machine.folder)
    for tenths in range(100):
        pressure.sample(tenths / 10)
    assert len(pressure._samples) == 10


def test_a_worker_that_is_new_brings_no_wait_of_its_past(machine: Machine) -> None:
    pressure = MachinePressure(machine.readings, machine.folder)
    children = machine.folder / machine.own / "task" / machine.own / "children"
    children.write_text("")
    pressure.sample(0.0)
    machine.write(waited_s=50.0)
    children.write_text("77")
    pressure.sample(1.0)
    assert pressure.between(0.0, 1.0).taken_share == 0.0


def test_waiting_for_the_servers_own_threads_is_no_time_that_others_took(machine: Machine) -> None:
    pressure = MachinePressure(machine.readings, machine.folder)
    pressure.sample(0.0)
    machine.write(busy_s=1.9, own_s=1.8, waited_s=0.5)
    pressure.sample(1.0)
    assert pressure.between(0.0, 1.0).taken_share < 0.03


def test_a_machine_without_these_files_has_no_strain(tmp_path: Path) -> None:
    pressure = MachinePressure(proc=tmp_path / "none")
    assert pressure.between(0.0, 1.0) == NO_STRAIN
    pressure.sample(0.0)
    pressure.sample(1.0)
    assert pressure.between(0.0, 1.0) == NO_STRAIN


def test_this_machine_can_be_read() -> None:
    pressure = MachinePressure()
    pressure.sample(0.0)
    pressure.sample(1.0)
    strain = pressure.between(0.0, 1.0)
    assert 0.0 <= strain.taken_share <= 1.0
