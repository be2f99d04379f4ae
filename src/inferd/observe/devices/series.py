"""Devices and energy as metrics. A device that cannot be read now has no series, and its counters go on when it can."""

from __future__ import annotations

from inferd.observe import metrics as m
from inferd.observe.devices.cost import cost_of
from inferd.observe.devices.devices import Devices
from inferd.observe.devices.energy import Use
from inferd.observe.devices.reading import Reading
from inferd.observe.metrics import Metric
from inferd.observe.series import Store

_Key = tuple[Metric, tuple[str, ...]]

_GAUGES = tuple(
    row for row in m.TABLE if row.kind == "gauge" and row.name.startswith(("inferd_device_", "inferd_gpu_"))
)


class DeviceSeries:
    """Used from the thread of the store."""

    def __init__(self, store: Store, devices: Devices) -> None:
        self._store = store
        self._devices = devices
        self._sources: dict[_Key, float] = {}  # what each counter's source said last
        self._uses: dict[str, Use] = {}  # by model, when they were last shown
        self._away: dict[_Key, float] = {}  # counters that are not shown now

    def show(self) -> None:
        """Set every series to what is known now."""
        readings = self._devices.refresh()
        for metric in _GAUGES:
            self._store.clear(metric)
        shown: set[_Key] = set()
        for reading in readings:
            self._show_gauges(reading)
            self._show_counters(reading, shown)
        for key in self._sources.keys() - self._away.keys() - shown:
            self._away[key] = self._store.withdraw(*key)
        for source, failures in self._devices.failures().items():
            self._count(m.DEVICE_FAILURES, (source,), failures)
        self._show_energy()

    def _show_gauges(self, reading: Reading) -> None:
        value, labels = self._store.value, (reading.device, reading.kind)
        value(m.DEVICE_INFO, *labels, reading.name, reading.uuid).set(1)
        rows: list[tuple[Metric, Metric, float | None]] = [
            (m.DEVICE_DUTY, m.GPU_DUTY, reading.duty),
            (m.DEVICE_MEMORY_USED, m.GPU_MEMORY_USED, reading.memory_used_bytes),
            (m.DEVICE_MEMORY_TOTAL, m.GPU_MEMORY_TOTAL, reading.memory_total_bytes),
            (m.DEVICE_TEMPERATURE, m.GPU_TEMPERATURE, reading.temperature_c),
            (m.DEVICE_POWER, m.GPU_POWER, reading.power_w),
        ]
        for metric, of_gpu, number in rows:
            if number is not None:
                value(metric, *labels).set(number)
                if reading.index is not None:
                    value(of_gpu, str(reading.index), reading.uuid).set(number)

    def _show_counters(self, reading: Reading, shown: set[_Key]) -> None:
        labels = (reading.device, reading.kind)
        numbers: dict[_Key, float] = {}
        energy_j = self._devices.energy.total_j().get(reading.device)
        if energy_j is not None:
            numbers[m.DEVICE_ENERGY, labels] = energy_j
        idle_j = self._devices.energy.idle_j().get(reading.device)
        if idle_j is not None:
            numbers[m.DEVICE_IDLE_ENERGY, labels] = idle_j
        for reason, seconds in reading.throttled_s.items():
            numbers[m.DEVICE_THROTTLED_S, (*labels, reason)] = seconds
        for word, count in reading.errors.items():
            numbers[m.DEVICE_ERRORS, (*labels, word)] = count
        for key, number in numbers.items():
            # What a driver counted before the server started is not of this server.
            of_server = key[0] in (m.DEVICE_ENERGY, m.DEVICE_IDLE_ENERGY)
            self._count(*key, number, begins_at_zero=of_server)
            shown.add(key)

    def _count(self, metric: Metric, labels: tuple[str, ...], number: float, *, begins_at_zero: bool = True) -> None:
        """Add what a source has counted since it was last asked."""
        key = (metric, labels)
        value = self._store.value(metric, *labels)
        if key in self._away:
            value.set(self._away.pop(key))
        before = self._sources.get(key, 0.0 if begins_at_zero else number)
        value.add(number - before if number >= before else number)
        self._sources[key] = number

    def _show_energy(self) -> None:
        prices = self._devices.config
        for model, use in self._devices.energy.models().items():
            self._count(m.MODEL_DEVICE_S, (model,), use.device_s)
            if use.energy_j is not None:
                self._count(m.MODEL_ENERGY, (model,), use.energy_j)
            # What was used since the last time, at the prices of now.
            before = self._uses.get(model, Use())
            energy_j = None if use.energy_j is None else use.energy_j - (before.energy_j or 0.0)
            cost = cost_of(Use(use.device_s - before.device_s, energy_j), prices)
            self._uses[model] = use
            if cost is not None:
                self._store.value(m.MODEL_COST, model, prices.currency).add(cost)
