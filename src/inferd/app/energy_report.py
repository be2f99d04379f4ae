"""What ``GET /admin/status`` says of devices and of the energy that models and tenants have used."""

from __future__ import annotations

from inferd.config import DevicesConfig
from inferd.gateway.control import DeviceReport, EnergyReport, UseReport
from inferd.observe.devices import Devices
from inferd.observe.devices.cost import cost_of, per_1000_tokens
from inferd.observe.devices.energy import Use


def energy_report(devices: Devices) -> EnergyReport | None:
    """None: devices are not read."""
    if not devices.config.enabled:
        return None
    energy, readings = devices.energy, devices.refresh()
    idle_j = energy.idle_j()
    return EnergyReport(
        currency=devices.config.currency,
        devices=[
            DeviceReport(
                device=one.device,
                kind=one.kind,
                name=one.name,
                duty=one.duty,
                memory_used_bytes=one.memory_used_bytes,
                memory_total_bytes=one.memory_total_bytes,
                temperature_c=one.temperature_c,
                power_w=one.power_w,
                idle_j=idle_j.get(one.device),
            )
            for one in readings
        ],
        models=[_use(name, use, devices.config) for name, use in energy.models().items()],
        tenants=[_use(name, use, devices.config) for name, use in energy.tenants().items()],
    )


def _use(name: str, use: Use, prices: DevicesConfig) -> UseReport:
    return UseReport(
        name=name,
        device_s=use.device_s,
        energy_j=use.energy_j,
        tokens=use.tokens,
        device_s_per_1000_tokens=per_1000_tokens(use.device_s, use.tokens),
        energy_j_per_1000_tokens=per_1000_tokens(use.energy_j, use.tokens),
        cost=cost_of(use, prices),
    )
