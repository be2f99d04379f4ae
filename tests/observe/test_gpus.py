"""What GPUs tell, over a library that is not there."""

from __future__ import annotations

from ctypes import Structure, c_uint, c_void_p
from typing import Any, cast

import pytest

from inferd.observe import gpus
from inferd.observe.gpus import Gpu, Gpus, Library, find_gpus
from inferd.observe.sink import Observer


class FakeLibrary:
    """Two GPUs; the second one tells neither its temperature nor its power."""

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

    @staticmethod
    def _fill(structure: Structure, **values: int) -> int:
        for name, value in values.items():
            setattr(structure, name, value)
        return 0


class NoGpus(FakeLibrary):
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 9


def test_each_gpu_tells_what_it_can() -> None:
    assert Gpus(cast(Library, FakeLibrary())).read() == [
        Gpu(0, "GPU-100", 0.37, 100 << 30, 150 << 30, 64, 412.5),
        Gpu(1, "GPU-101", 0.37, 100 << 30, 150 << 30, None, None),
    ]


def test_a_library_that_does_not_start_has_no_gpus() -> None:
    assert Gpus(cast(Library, NoGpus())).read() == []


def test_without_a_driver_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "none")
    assert find_gpus() is None
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
    monkeypatch.setattr(gpus, "_LIBRARY", "libinferd-has-no-such-library.so")
    assert find_gpus() is None


def test_the_metrics_page_has_them_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: Gpus(cast(Library, FakeLibrary())))
    observer = Observer()
    page = observer.render_metrics().decode()
    observer.close()
    assert 'inferd_gpu_duty_cycle{gpu="0",uuid="GPU-100"} 0.37' in page
    assert 'nv_gpu_utilization{gpu="0",gpu_uuid="GPU-100"} 0.37' in page
    used = next(line for line in page.splitlines() if line.startswith('inferd_gpu_memory_used_bytes{gpu="1"'))
    assert float(used.split()[-1]) == 100 << 30
    assert 'inferd_gpu_temperature_celsius{gpu="0",uuid="GPU-100"} 64' in page
    assert 'inferd_gpu_temperature_celsius{gpu="1"' not in page
    assert 'inferd_gpu_power_watts{gpu="0",uuid="GPU-100"} 412.5' in page


def test_gpus_are_looked_for_once_and_read_for_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    def find() -> Gpus:
        nonlocal num_looks
        num_looks += 1
        return Gpus(cast(Library, FakeLibrary()))

    monkeypatch.setattr(gpus, "find_gpus", find)
    observer = Observer()
    pages = [observer.render_metrics().decode() for _ in range(3)]
    observer.close()
    assert num_looks == 1
    assert all('inferd_gpu_duty_cycle{gpu="1"' in page for page in pages)
