"""The state of this machine's GPUs, from NVIDIA's management library, which comes with its driver.

The library is called through ctypes: five functions need no package. Knows no metric's name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_uint, c_ulonglong, c_void_p, create_string_buffer
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_LIBRARY = "libnvidia-ml.so.1"
_DRIVER = Path("/proc/driver/nvidia")  # without it there is nothing to load
_CORE_TEMPERATURE = 0
_UUID_BYTES = 96


class Library(Protocol):
    """The functions of NVML by name; each returns 0 on success."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of one GPU; None: the library does not report it."""

    index: int
    uuid: str
    duty: float | None  # part of the last sampling period in which a kernel ran, 0 to 1
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_w: float | None


class Gpus:
    """The machine's GPUs that the library reports."""

    __slots__ = ("_handles", "_library")

    def __init__(self, library: Library) -> None:
        self._library = library
        self._handles: list[tuple[str, c_void_p]] = []
        count = c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(byref(count)):
            return
        for index in range(count.value):
            handle, uuid = c_void_p(), create_string_buffer(_UUID_BYTES)
            if library.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)):
                continue
            known = library.nvmlDeviceGetUUID(handle, uuid, c_uint(_UUID_BYTES)) == 0
            self._handles.append((uuid.value.decode() if known else str(index), handle))

    def read(self) -> list[Gpu]:
        return [self._one(index, uuid, handle) for index, (uuid, handle) in enumerate(self._handles)]

    def _one(self, index: int, uuid: str, handle: c_void_p) -> Gpu:
        library = self._library
        busy, memory, temperature, power = _Utilization(), _Memory(), c_uint(), c_uint()
        has_busy = library.nvmlDeviceGetUtilizationRates(handle, byref(busy)) == 0
        has_memory = library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        has_temperature = library.nvmlDeviceGetTemperature(handle, c_uint(_CORE_TEMPERATURE), byref(temperature)) == 0
        has_power = library.nvmlDeviceGetPowerUsage(handle, byref(power)) == 0
        return Gpu(
            index=index,
            uuid=uuid,
            duty=busy.gpu / 100 if has_busy else None,
            memory_used_bytes=memory.used if has_memory else None,
            memory_total_bytes=memory.total if has_memory else None,
            temperature_c=temperature.value if has_temperature else None,
            power_w=power.value / 1000 if has_power else None,
        )


def find_gpus() -> Gpus | None:
    """None where no driver of NVIDIA's is loaded, or it comes without the library."""
    if not _DRIVER.exists():
        return None
    try:
        library: Library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return Gpus(library)
