"""What GPUs tell, over a library that is not there."""

from __future__ import annotations

from ctypes import Structure, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any, cast

import pytest

from inferd.observe.devices import nvml
from inferd.observe.devices.nvml import Library, Nvml, cuda_place, find_nvml, throttle_reasons
from inferd.observe.devices.reading import Reading


class FakeLibrary:
    """Two GPUs; the second one tells neither its temperature nor its power, and keeps no samples."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = [(1, 20), (2, 40), (3, 90)]  # at microseconds, per cent
        self.reasons = 0x1

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: c_uint, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetUUID(self, handle: c_void_p, uuid: Any, length: c_uint) -> int:  # noqa: N802
        uuid.value = f"GPU-{handle.value}".encode()
        assert length.value >= len(uuid.value)
        return 0

    def nvmlDeviceGetName(self, handle: c_void_p, name: Any, length: c_uint) -> int:  # noqa: N802
        name.value = b"NVIDIA H100"
        return 0

    def nvmlDeviceGetSamples(  # noqa: N802
        self, handle: c_void_p, kind: int, since: c_ulonglong, value_kind: Any, count: Any, samples: Any
    ) -> int:
        assert kind == 1, "of the utilization of the GPU"
        if handle.value != 100:
            return 3
        new = [sample for sample in self.samples if sample[0] > since.value]
        if not new:
            return 6  # NVML_ERROR_NOT_FOUND
        for place, (at_us, percent) in enumerate(new):
            samples[place].at_us = at_us
            samples[place].value.as_uint = percent
        value_kind._obj.value, count._obj.value = 1, len(new)
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: c_void_p, rates: Any) -> int:  # noqa: N802
        return self._fill(rates._obj, gpu=37, memory=90)

    def nvmlDeviceGetMemoryInfo(self, handle: c_void_p, memory: Any) -> int:  # noqa: N802
        return self._fill(memory._obj, total=150 << 30, free=50 << 30, used=100 << 30)

    def nvmlDeviceGetTemperature(self, handle: c_void_p, sensor: c_uint, temperature: Any) -> int:  # noqa: N802
        assert sensor.value == 0
        temperature._obj.value = 64
        return 0 if handle.value == 100 else 3

    def nvmlDeviceGetPowerUsage(self, handle: c_void_p, power: Any) -> int:  # noqa: N802
        power._obj.value = 412_500
        return 0 if handle.value == 100 else 3

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: c_void_p, energy: Any) -> int:  # noqa: N802
        energy._obj.value = 7_500_000
        return 0 if handle.value == 100 else 3

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: c_void_p, bits: Any) -> int:  # noqa: N802
        bits._obj.value = self.reasons
        return 0 if handle.value == 100 else 3

    def nvmlDeviceGetTotalEccErrors(self, handle: c_void_p, kind: int, counter: int, count: Any) -> int:  # noqa: N802
        count._obj.value = 5 - 4 * kind
        return 0 if handle.value == 100 else 3

    @staticmethod
    def _fill(structure: Structure, **values: int) -> int:
        for name, value in values.items():
            setattr(structure, name, value)
        return 0


class NoGpus(FakeLibrary):
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 9


class OldLibrary:
    """Lacks everything but what a GPU is."""

    def __init__(self) -> None:
        self._whole = FakeLibrary()

    def __getattr__(self, name: str) -> Any:
        if name in ("nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"):
            return getattr(self._whole, name)
        raise AttributeError(name)


def nvml_over(library: object, visible: str | None = None) -> Nvml:
    return Nvml(cast(Library, library), visible)


def test_each_gpu_tells_what_it_can() -> None:
    assert nvml_over(FakeLibrary()).read(10.0) == [
        Reading(
            device="gpu0",
            kind="gpu",
            at=10.0,
            name="NVIDIA H100",
            uuid="GPU-100",
            index=0,
            place="cuda:0",
            duty=0.5,
            memory_used_bytes=100 << 30,
            memory_total_bytes=150 << 30,
            temperature_c=64,
            power_w=412.5,
            energy_j=7500.0,
            throttled_s={"power": 0.0, "thermal": 0.0, "hardware": 0.0},
            errors={"corrected": 5, "uncorrected": 1},
        ),
        Reading(
            device="gpu1",
            kind="gpu",
            at=10.0,
            name="NVIDIA H100",
            uuid="GPU-101",
            index=1,
            place="cuda:1",
            duty=0.37,
            memory_used_bytes=100 << 30,
            memory_total_bytes=150 << 30,
        ),
    ]


def test_the_duty_cycle_is_the_mean_of_the_samples_since_the_last_reading() -> None:
    library = FakeLibrary()
    gpus = nvml_over(library)
    assert gpus.read(1.0)[0].duty == 0.5
    library.samples += [(4, 10), (5, 20)]
    assert gpus.read(2.0)[0].duty == 0.15
    assert gpus.read(3.0)[0].duty == 0.37, "without a new sample, of the driver's last period"


def test_throttling_counts_the_time_between_readings() -> None:
    library = FakeLibrary()
    gpus = nvml_over(library)
    gpus.read(1.0)
    library.reasons = 0x40 | 0x8
    assert gpus.read(3.0)[0].throttled_s == {"power": 0.0, "thermal": 2.0, "hardware": 0.0}
    library.reasons = 0x4
    assert gpus.read(4.0)[0].throttled_s == {"power": 1.0, "thermal": 2.0, "hardware": 0.0}


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [(0x1, []), (0x4, ["power"]), (0x20, ["thermal"]), (0x48, ["thermal"]), (0x8, ["hardware"]), (0x88, ["hardware"])],
)
def test_reasons_of_throttling(bits: int, reasons: list[str]) -> None:
    assert throttle_reasons(bits) == reasons


@pytest.mark.parametrize(
    ("visible", "places"),
    [
        (None, ["cuda:0", "cuda:1"]),
        ("1", ["", "cuda:0"]),
        ("1,0", ["cuda:1", "cuda:0"]),
        ("GPU-b", ["", "cuda:0"]),
        ("", ["", ""]),
    ],
)
def test_a_gpu_has_the_name_that_cuda_gives_it_in_this_process(visible: str | None, places: list[str]) -> None:
    assert [cuda_place(index, uuid, visible) for index, uuid in enumerate(("GPU-a", "GPU-b"))] == places


def test_a_library_that_does_not_start_has_no_gpus() -> None:
    assert nvml_over(NoGpus()).read(0.0) == []


def test_a_function_that_an_old_driver_lacks_is_one_that_is_not_told() -> None:
    first, _ = nvml_over(OldLibrary()).read(0.0)
    assert first == Reading(device="gpu0", kind="gpu", at=0.0, uuid="0", index=0, place="cuda:0")


def test_without_a_driver_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "DRIVER", tmp_path / "none")
    assert find_nvml() is None
    monkeypatch.setattr(nvml, "DRIVER", tmp_path)
    monkeypatch.setattr(nvml, "LIBRARY", "libinferd-has-no-such-library.so")
    assert find_nvml() is None


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("1,0", 2), ("GPU-100", 1), ("", 0)])
def test_the_memory_of_the_gpus_that_this_process_may_use_is_told(visible: str | None, count: int) -> None:
    library = cast("Library", FakeLibrary())
    (one, other) = (reading.memory_total_bytes for reading in Nvml(library).read(0))
    assert one == other is not None
    assert Nvml(library, visible).memory_bytes() == (one,) * count
