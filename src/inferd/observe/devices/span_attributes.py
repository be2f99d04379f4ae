"""What a span says of the device that computed: OpenTelemetry's names of what the device tells."""

from __future__ import annotations

from inferd.observe.devices.reading import Reading
from inferd.observe.traces import conventions as c


def device_attributes(reading: Reading | None) -> dict[str, str | float]:
    """What the device does not tell is not there."""
    if reading is None:
        return {}
    is_gpu = reading.kind == "gpu"
    told: dict[str, str | float | None] = {
        c.HW_ID.key: reading.uuid or reading.device,
        c.HW_TYPE.key: reading.kind,
        c.HW_NAME.key: reading.name or None,
        c.HW_UTILIZATION.key: reading.duty if is_gpu else None,
        c.HW_MEMORY_USAGE.key: reading.memory_used_bytes if is_gpu else None,
        c.HW_TEMPERATURE.key: reading.temperature_c,
        c.HW_POWER.key: reading.power_w,
    }
    return {key: value for key, value in told.items() if value is not None}
