"""Sources that read files of the kernel, by folders such as it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.observe.devices.host import Processor, find_processor
from inferd.observe.devices.rapl import find_rapl
from inferd.observe.devices.sensors import find_sensors


def folder(path: Path, **files: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(f"{text}\n")
    return path


def zone(root: Path, number: str, name: str, energy_uj: int, range_uj: int = 1000) -> Path:
    return folder(root / f"intel-rapl:{number}", name=name, energy_uj=energy_uj, max_energy_range_uj=range_uj)


def test_packages_and_their_memory_count_energy_and_cores_are_a_part_of_their_package(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 1_000_000, 262_143_328_850)
    dram = zone(tmp_path, "0:1", "dram", 5_000_000, 65_532_610_987)
    zone(tmp_path, "0:0", "core", 1_000)
    zone(tmp_path, "1", "psys", 1_000)
    found = find_rapl(tmp_path)
    assert found is not None
    folder(package, energy_uj=3_500_000)
    folder(dram, energy_uj=5_250_000)
    assert [(one.device, one.kind, one.place, one.energy_j) for one in found.read(1.0)] == [
        ("package-0", "cpu", "cpu", 2.5),
        ("dram of package-0", "memory", "cpu", 0.25),
    ]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 999), min_size=1, max_size=20))
def test_a_counter_that_wraps_around_loses_nothing(tmp_path_factory: pytest.TempPathFactory, gains: list[int]) -> None:
    root = tmp_path_factory.mktemp("powercap")
    counter = 700
    package = zone(root, "0", "package-0", counter)
    found = find_rapl(root)
    assert found is not None
    total = 0
    for gain in gains:
        counter, total = (counter + gain) % 1000, total + gain
        folder(package, energy_uj=counter)
        (reading,) = found.read(1.0)
        assert reading.energy_j == pytest.approx(total / 1e6)


def test_a_machine_without_counters_has_no_source(tmp_path: Path) -> None:
    assert find_rapl(tmp_path / "none") is None
    assert find_rapl(tmp_path) is None
    folder(tmp_path / "intel-rapl:0", name="package-0")  # the counter may not be read
    assert find_rapl(tmp_path) is None


def test_sensors_tell_temperature_power_and_energy_under_their_own_names(tmp_path: Path) -> None:
    hwmon, thermal = tmp_path / "hwmon", tmp_path / "thermal"
    chip = folder(hwmon / "hwmon0", name="coretemp", temp1_input=48_000, temp1_label="Package id 0", temp2_input=-5_000)
    folder(hwmon / "hwmon1", name="power_meter", power1_average=231_000_000)
    folder(hwmon / "hwmon2", name="power_meter", power1_average=9_000_000, power1_input=10_000_000)
    folder(thermal / "thermal_zone0", type="x86_pkg_temp", temp=51_500)
    found = find_sensors(hwmon, thermal)
    assert found is not None
    assert [(one.device, one.temperature_c, one.power_w) for one in found.read(0.0)] == [
        ("coretemp temp2", -5.0, None),
        ("coretemp Package id 0", 48.0, None),
        ("power_meter power1", None, 231.0),
        ("power_meter power1 #2", None, 10.0),
        ("thermal_zone0 x86_pkg_temp", 51.5, None),
    ]
    (chip / "temp1_input").unlink()  # such as of a disk that was removed
    assert [one.device for one in found.read(1.0)][0:2] == ["coretemp temp2", "power_meter power1"]


def test_a_machine_without_sensors_has_no_source(tmp_path: Path) -> None:
    assert find_sensors(tmp_path / "none", tmp_path / "none") is None
    assert find_sensors(tmp_path, tmp_path) is None


def proc(root: Path, cpu: str, groups: str = "0::/\n") -> Path:
    root.mkdir(exist_ok=True)
    (root / "stat").write_text(f"cpu  {cpu}\nbtime 1\n")
    folder(root / "self")
    (root / "self" / "cgroup").write_text(groups)
    return root


def test_the_load_of_the_processors_is_a_mean_since_the_last_reading(tmp_path: Path) -> None:
    root = proc(tmp_path / "proc", "100 0 100 700 100 0 0 0 50 0")
    processor = Processor(root, tmp_path / "cgroup")
    (first,) = processor.read(0.0)
    assert (first.duty, first.throttled_s) == (None, {})
    assert first.memory_total_bytes
    assert 0 < (first.memory_used_bytes or 0) < first.memory_total_bytes
    proc(root, "130 0 130 720 120 0 0 0 60 0")
    (second,) = processor.read(1.0)
    assert second.duty == pytest.approx(0.6)


def test_a_container_of_version_2_has_the_share_of_its_own_limit(tmp_path: Path) -> None:
    root = proc(tmp_path / "proc", "1 1 1 1 1 1 1 1", "0::/mine\n")
    group = folder(tmp_path / "cgroup" / "mine")
    (group / "cpu.max").write_text("200000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 1000000\nnr_throttled 3\nthrottled_usec 250000\n")
    processor = Processor(root, tmp_path / "cgroup")
    assert processor.read(10.0)[0].throttled_s == {"quota": 0.25}
    (group / "cpu.stat").write_text("usage_usec 6000000\nnr_throttled 3\nthrottled_usec 750000\n")
    (reading,) = processor.read(15.0)
    assert (reading.duty, reading.throttled_s) == (0.5, {"quota": 0.75})


def test_a_container_of_version_1_tells_the_time_that_its_limit_took(tmp_path: Path) -> None:
    root = proc(tmp_path / "proc", "1 1 1 1 1 1 1 1", "4:memory:/mine\n3:cpu,cpuacct:/mine\n")
    group = folder(tmp_path / "cgroup" / "cpu,cpuacct" / "mine")
    (group / "cpu.stat").write_text("nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n")
    assert Processor(root, tmp_path / "cgroup").read(0.0)[0].throttled_s == {"quota": 1.5}


def test_a_system_without_proc_has_no_source(tmp_path: Path) -> None:
    assert find_processor(tmp_path, tmp_path) is None
