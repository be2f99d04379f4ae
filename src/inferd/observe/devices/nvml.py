"""NVIDIA's GPUs, from the management library that comes with the driver.

The library is called through ctypes, so no package is needed. A function that an old driver lacks counts as one that is
not supported. https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref, c_uint, c_ulonglong, c_void_p, create_string_buffer
from itertools import takewhile
from pathlib import Path
from typing import Final, Protocol

from inferd.machine.gpus import num_visible_gpus
from inferd.observe.devices.reading import ErrorType, Reading, Reason

LIBRARY: Final = "libnvidia-ml.so.1"
DRIVER: Final = Path("/proc/driver/nvidia")  # without it there is nothing to load

_NOT_SUPPORTED: Final = 3
_CORE_TEMPERATURE: Final = 0
_UTILIZATION_SAMPLES: Final = 1
_MAX_SAMPLES: Final = 1024
_TEXT_BYTES: Final = 96
_AGGREGATE: Final = 1
_ERRORS: Final[tuple[tuple[ErrorType, int], ...]] = (("corrected", 0), ("uncorrected", 1))

# Bits of nvmlClocksEventReasons. A board that slows itself down also sets the bit of the cause.
_POWER, _HW_SLOWDOWN, _THERMAL, _POWER_BRAKE = 0x4, 0x8, 0x20 | 0x40, 0x80


class Library(Protocol):
    """The functions of NVML by name; each returns 0 on success."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class _Value(ctypes.Union):
    _fields_ = [("as_uint", c_uint), ("as_ulonglong", c_ulonglong)]


class _Sample(ctypes.Structure):
    _fields_ = [("at_us", c_ulonglong), ("value", _Value)]


class _Gpu:
    """One GPU: its handle, and what was seen of it."""

    def __init__(self, index: int, handle: c_void_p, name: str, uuid: str, place: str) -> None:
        self.index = index
        self.handle = handle
        self.name = name
        self.uuid = uuid
        self.place = place
        self.sampled_us = 0
        self.read_at: float | None = None
        self.throttled_s: dict[Reason, float] = {}


class Nvml:
    """The machine's GPUs that the library reports. ``visible``: the value of CUDA_VISIBLE_DEVICES."""

    def __init__(self, library: Library, visible: str | None = None) -> None:
        self._library = library
        self._gpus: list[_Gpu] = []
        count = c_uint()
        if self._call("nvmlInit_v2") or self._call("nvmlDeviceGetCount_v2", byref(count)):
            return
        for index in range(count.value):
            handle = c_void_p()
            if self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)):
                continue
            uuid = self._text("nvmlDeviceGetUUID", handle) or str(index)
            name = self._text("nvmlDeviceGetName", handle)
            self._gpus.append(_Gpu(index, handle, name, uuid, cuda_place(index, uuid, visible)))

    def read(self, now: float) -> list[Reading]:
        return [self._one(gpu, now) for gpu in self._gpus]

    def memory_bytes(self) -> tuple[int, ...]:
        """Of each GPU that CUDA may use in this process, as CUDA counts them, up to one that does not tell."""
        found = {one.place: one.memory_total_bytes or 0 for one in self.read(0.0)}
        return tuple(takewhile(bool, (found.get(f"cuda:{number}", 0) for number in range(len(found)))))

    def _one(self, gpu: _Gpu, now: float) -> Reading:
        memory, temperature, power, energy = _Memory(), c_uint(), c_uint(), c_ulonglong()
        handle = gpu.handle
        has_memory = self._call("nvmlDeviceGetMemoryInfo", handle, byref(memory)) == 0
        has_temperature = (
            self._call("nvmlDeviceGetTemperature", handle, c_uint(_CORE_TEMPERATURE), byref(temperature)) == 0
        )
        has_power = self._call("nvmlDeviceGetPowerUsage", handle, byref(power)) == 0
        has_energy = self._call("nvmlDeviceGetTotalEnergyConsumption", handle, byref(energy)) == 0
        self._note_throttling(gpu, now)
        return Reading(
            device=f"gpu{gpu.index}",
            kind="gpu",
            at=now,
            name=gpu.name,
            uuid=gpu.uuid,
            index=gpu.index,
            place=gpu.place,
            duty=self._duty(gpu),
            memory_used_bytes=memory.used if has_memory else None,
            memory_total_bytes=memory.total if has_memory else None,
            temperature_c=temperature.value if has_temperature else None,
            power_w=power.value / 1000 if has_power else None,
            energy_j=energy.value / 1000 if has_energy else None,
            throttled_s=dict(gpu.throttled_s),
            errors=self._errors(gpu),
        )

    def _duty(self, gpu: _Gpu) -> float | None:
        """The mean of the driver's samples since the last reading; of its last period where it keeps no samples."""
        kind, count, samples = c_uint(), c_uint(_MAX_SAMPLES), (_Sample * _MAX_SAMPLES)()
        since = c_ulonglong(gpu.sampled_us)
        has_samples = self._call(
            "nvmlDeviceGetSamples", gpu.handle, _UTILIZATION_SAMPLES, since, byref(kind), byref(count), samples
        )
        if has_samples == 0:
            new = [one for one in samples[: count.value] if one.at_us > gpu.sampled_us]
            if new:
                gpu.sampled_us = max(one.at_us for one in new)
                percent: int = sum(one.value.as_uint for one in new)
                return percent / len(new) / 100
        rates = _Utilization()
        if self._call("nvmlDeviceGetUtilizationRates", gpu.handle, byref(rates)):
            return None
        return float(rates.gpu / 100)

    def _note_throttling(self, gpu: _Gpu, now: float) -> None:
        """Count the time since the last reading for the reasons that hold now."""
        bits = c_ulonglong()
        if self._call("nvmlDeviceGetCurrentClocksThrottleReasons", gpu.handle, byref(bits)):
            return
        if not gpu.throttled_s:
            gpu.throttled_s = {"power": 0.0, "thermal": 0.0, "hardware": 0.0}
        passed = 0.0 if gpu.read_at is None else now - gpu.read_at
        gpu.read_at = now
        for reason in throttle_reasons(bits.value):
            gpu.throttled_s[reason] += passed

    def _errors(self, gpu: _Gpu) -> dict[ErrorType, int]:
        found: dict[ErrorType, int] = {}
        for word, number in _ERRORS:
            count = c_ulonglong()
            if self._call("nvmlDeviceGetTotalEccErrors", gpu.handle, number, _AGGREGATE, byref(count)) == 0:
                found[word] = count.value
        return found

    def _text(self, function: str, handle: c_void_p) -> str:
        text = create_string_buffer(_TEXT_BYTES)
        return "" if self._call(function, handle, text, c_uint(_TEXT_BYTES)) else text.value.decode(errors="replace")

    def _call(self, function: str, *arguments: object) -> int:
        try:
            called = getattr(self._library, function)
        except AttributeError:  # an older driver
            return _NOT_SUPPORTED
        return int(called(*arguments))


def throttle_reasons(bits: int) -> list[Reason]:
    """The reasons in the library's bits. The limit of power holds in normal work at full load."""
    reasons: list[Reason] = []
    if bits & _POWER:
        reasons.append("power")
    if bits & _THERMAL:
        reasons.append("thermal")
    elif bits & (_HW_SLOWDOWN | _POWER_BRAKE):
        reasons.append("hardware")
    return reasons


def cuda_place(index: int, uuid: str, visible: str | None) -> str:
    """What CUDA calls this GPU in this process; empty where it is not visible."""
    if visible is None:
        return f"cuda:{index}"
    for number, chosen in enumerate(part.strip() for part in visible.split(",")):
        if chosen and (chosen == str(index) or (not chosen.isdecimal() and uuid.startswith(chosen))):
            return f"cuda:{number}"
    return ""


def find_nvml() -> Nvml | None:
    """None where no driver of NVIDIA's is loaded, or it comes without the library."""
    if not DRIVER.exists():
        return None
    try:
        library: Library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return Nvml(library, os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_bytes() -> tuple[int, ...]:
    """The memory of the GPUs that this process may use; none where there are fewer than two."""
    nvml = find_nvml() if num_visible_gpus() > 1 else None
    return () if nvml is None else nvml.memory_bytes()
