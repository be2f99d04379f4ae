"""What is read of the machine's devices, and what their use costs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from inferd.config.section import Section


class DevicesConfig(Section, frozen=True, kw_only=True):
    """GPUs, processors and sensors: whether they are read, and the price of their time and energy."""

    enabled: Annotated[bool, Meta(description="Read the machine's devices for metrics, energy and the console.")] = True
    interval_s: Annotated[
        float,
        Meta(description="Seconds between two readings; the duty cycle is the mean of that time.", ge=0.05, le=60),
    ] = 1.0
    simulated: Annotated[
        str | None,
        Meta(
            description="JSON file of simulated devices, which take the place of the machine's, for tests and "
            "demonstrations (docs/devices.md)."
        ),
    ] = None
    price_per_kwh: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Price of a kilowatt-hour, in `currency`; unset: energy costs nothing."),
    ] = None
    price_per_device_hour: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Price of an hour in which a device computes for a model; unset: time costs nothing."),
    ] = None
    currency: Annotated[str, Meta(description="Currency of the prices, as a text.", min_length=1, max_length=16)] = (
        "EUR"
    )
