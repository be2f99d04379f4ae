"""Which devices serve a model, how fast, and for how much: the answer of ``inferd plan``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from inferd.engine.model.layouts import Layout
from inferd.planning.capacity import MOST_DEVICES, WARNING, Load, Need, need, possible, smallest
from inferd.planning.measured import Measured
from inferd.planning.shape import Format, Shape
from inferd.planning.speed import Speed, speed
from inferd.planning.tables import Device, Offer, Prices
from inferd.planning.trace import Lengths

HOURS: Final = 730
"""Of a month."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of all replicas together."""

    load: Load = Load()  # of one replica
    per_second: float | None = None  # requests that arrive; None: not known
    busy: Annotated[float, Meta(gt=0, le=1)] = 0.7  # part of the time that replicas work
    copies: Annotated[int, Meta(ge=1, le=1000)] = 1  # replicas at least, so that one may fail


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of all replicas, in the prices' currency."""

    per_hour: float
    per_month: float
    per_1000_tokens: float  # of answers, of a replica that is busy as the demand says


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One format on one kind of device."""

    device: str
    form: Format
    reason: str = ""  # why it cannot be; empty: it can
    layout: Layout | None = None
    need: Need | None = None  # of the fullest device
    machines: int = 1  # that the devices of a replica are in
    memory_bytes: int = 0  # of one device
    requests_at_once: int = 0  # of the demand's length, in one replica
    speed: Speed | None = None
    replicas: int = 0
    weight: float = 0.0  # of a replica among those on other devices, by its tokens/s
    cost: Cost | None = None  # None: the device has no price
    notes: tuple[str, ...] = ()

    @property
    def used(self) -> float:
        """Part of a device's memory that is in use when every request has all its tokens."""
        return 0.0 if self.need is None else self.need.total_bytes / self.memory_bytes

    @property
    def is_tight(self) -> bool:
        return self.used > WARNING


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest choice after one change of the demand."""

    change: str
    choice: Choice | None  # None: nothing holds it


class FormatNeed(msgspec.Struct, frozen=True, kw_only=True):
    """A format on one device of any size."""

    form: Format
    need: Need


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """What ``inferd plan --json`` prints. Sizes in bytes."""

    model: str
    source: str
    num_parameters: int
    demand: Demand
    kv_bytes_per_token: int
    formats: tuple[FormatNeed, ...]
    choices: tuple[Choice, ...]
    smallest: Choice | None  # the one to take where nothing else decides: 16 bits if they fit on one device
    what_if: tuple[WhatIf, ...]
    prices: Prices
    measured: Measured
    trace: Lengths | None = None
    warnings: tuple[str, ...] = ()

    @property
    def parameters_text(self) -> str:
        """The number of parameters in words."""
        if self.num_parameters >= 1e9:
            return f"{self.num_parameters / 1e9:,.2f} billion parameters"
        return f"{self.num_parameters / 1e6:,.2f} million parameters"


def sizing(
    shape: Shape,
    demand: Demand,
    offers: Sequence[Offer],
    prices: Prices,
    measured: Measured,
    *,
    forms: Sequence[Format] = (),
    trace: Lengths | None = None,
) -> Sizing:
    """The plan of a model. ``forms``: formats to compare; none: all but fp32, which few serve."""
    wanted = tuple(forms) or tuple(form for form in shape.formats if form != "fp32")
    found = choices(shape, demand, offers, prices, wanted)
    best = pick(found, offers)
    alone = Layout(tensor=1, pipeline=1)
    warnings = []
    trained = shape.dims.max_position_embeddings
    if demand.load.tokens > trained:
        warnings.append(
            f"{demand.load.tokens:,} tokens of a request are more than the {trained:,} positions that the model was "
            "made for; lower --tokens."
        )
    needs = tuple(FormatNeed(form=form, need=need(shape, form, demand.load, alone, on_cpu=False)) for form in wanted)
    return Sizing(
        model=shape.name,
        source=shape.source,
        num_parameters=shape.num_parameters,
        demand=demand,
        # All formats but fp32 have the same cache.
        kv_bytes_per_token=needs[-1].need.kv_bytes_per_request // demand.load.tokens,
        formats=needs,
        choices=found,
        smallest=best,
        what_if=tuple(_what_if(shape, demand, offers, prices, wanted, best)),
        prices=prices,
        measured=measured,
        trace=trace,
        warnings=tuple(warnings),
    )


def choices(
    shape: Shape, demand: Demand, offers: Sequence[Offer], prices: Prices, forms: Iterable[Format]
) -> tuple[Choice, ...]:
    """Every format on every kind of device."""
    found = [choice(shape, form, demand, offer, prices) for form in forms for offer in offers]
    fastest = max((one.speed.tokens_per_s for one in found if one.speed is not None), default=1.0)
    return tuple(
        one if one.speed is None else msgspec.structs.replace(one, weight=round(one.speed.tokens_per_s / fastest, 4))
        for one in found
    )


def choice(shape: Shape, form: Format, demand: Demand, offer: Offer, prices: Prices) -> Choice:
    """A format on a kind of device: the fewest devices that hold the load, their speed and their cost."""
    device, load = offer.device, demand.load
    lacks = device.lacks(form)
    if lacks:
        return Choice(device=offer.name, form=form, reason=lacks)
    found = smallest(shape, form, load, offer)
    if found is None:
        return Choice(device=offer.name, form=form, reason=_too_large(shape, form, load, offer))
    layout, needed = found
    estimate = speed(shape, form, load, layout, device)
    replicas = max(demand.copies, _replicas(demand, estimate))
    if offer.count is not None and replicas * layout.devices > offer.count:
        return Choice(
            device=offer.name,
            form=form,
            reason=f"{replicas} replicas need {replicas * layout.devices} devices, and there are {offer.count}",
        )
    price = prices.per_hour.get(offer.name)
    return Choice(
        device=offer.name,
        form=form,
        layout=layout,
        machines=math.ceil(layout.devices / device.group),
        need=needed,
        memory_bytes=device.memory_bytes,
        requests_at_once=needed.requests_within(device.memory_bytes),
        speed=estimate,
        replicas=replicas,
        cost=None if price is None else _cost(price * layout.devices, replicas, estimate, demand.busy),
        notes=tuple(_notes(form, layout, device)),
    )


def pick(found: Sequence[Choice], offers: Sequence[Offer]) -> Choice | None:
    """The smallest choice: 16 bits on one device if possible, then fewer bits on one, then as few devices as possible.
    Among equals one with room for a burst, and then the one with the least memory, which is the cheapest as a rule."""
    order = ("stored", "fp16", "fp8", "int8", "int4", "fp32")
    memory = {offer.name: offer.device.memory_bytes for offer in offers}

    def size(one: Choice) -> tuple[int, int, bool, int]:
        assert one.layout is not None
        return one.layout.devices, order.index(one.form), one.is_tight, memory[one.device]

    return min((one for one in found if one.layout is not None), key=size, default=None)


def _replicas(demand: Demand, estimate: Speed) -> int:
    """Replicas that answer the arriving requests while each works ``busy`` of the time."""
    if demand.per_second is None:
        return 1
    return max(1, math.ceil(demand.per_second * demand.load.answer / (estimate.tokens_per_s * demand.busy)))


def _cost(per_hour: float, replicas: int, estimate: Speed, busy: float) -> Cost:
    """cost per token = price of a second / (tokens per second x part of the time that is used)."""
    return Cost(
        per_hour=per_hour * replicas,
        per_month=per_hour * replicas * HOURS,
        per_1000_tokens=1000.0 * per_hour / 3600.0 / (estimate.tokens_per_s * busy),
    )


def _too_large(shape: Shape, form: Format, load: Load, offer: Offer) -> str:
    """Why no layout holds the load, and what one device would hold, or which devices would do."""
    device = offer.device
    on_cpu = device.vendor == "cpu"
    alone = need(shape, form, load, Layout(tensor=1, pipeline=1), on_cpu=on_cpu)
    fits = alone.requests_within(device.memory_bytes)
    if fits:
        return f"one device holds {fits} requests of {load.tokens:,} tokens, not {load.requests:,}"
    count = min(offer.count or MOST_DEVICES, MOST_DEVICES)
    enough = smallest(shape, form, load, msgspec.structs.replace(offer, count=None))
    least = min(need(shape, form, load, layout, on_cpu=on_cpu).total_bytes for layout in possible(shape, offer))
    remedies = [] if enough is None else [f"take {enough[0].text}"]
    remedies.append(f"{count} of at least {math.ceil(least / 1e9):,} GB")
    return (
        f"needs {alone.total_bytes / 1e9:,.0f} GB, which {count} devices of {device.memory_gb:,.0f} GB do not hold: "
        f"{', or '.join(remedies)}"
    )


def _notes(form: Format, layout: Layout, device: Device) -> list[str]:
    """What inferd itself does not do of this choice."""
    notes = []
    if layout.devices > 1:
        notes.append("parallel")
    if layout.devices > device.group and device.vendor == "cpu":
        notes.append("machines")
    if form == "int4" and device.vendor != "cpu":
        notes.append("int4")
    if device.vendor in ("amd", "other"):
        notes.append("vendor")
    return notes


NOTES: Final[Mapping[str, str]] = {
    "parallel": "inferd divides a replica among processes on CPUs, and on GPUs not yet. A layout of several GPUs needs "
    "another engine, which may stand behind inferd as a remote server.",
    "machines": "parallel: {pipeline: N, machines: N} puts a stage of layers on each of N machines: the server's, and "
    "nodes that join it (docs/parallel.md).",
    "int4": "inferd computes int4 on processors only; on this device another engine, or int8.",
    "vendor": "inferd was never run on this device.",
}


def _what_if(
    shape: Shape,
    demand: Demand,
    offers: Sequence[Offer],
    prices: Prices,
    forms: tuple[Format, ...],
    best: Choice | None,
) -> Iterable[WhatIf]:
    """One change at a time: context, load, format, device."""
    load = demand.load
    changed = [
        ("twice the tokens", msgspec.structs.replace(load, tokens=2 * load.tokens, answer=2 * load.answer)),
        ("twice the requests at once", msgspec.structs.replace(load, requests=2 * load.requests)),
        ("one request at a time", msgspec.structs.replace(load, requests=1)),
    ]
    if load.kv == "auto":
        changed.append(("an 8-bit KV cache", msgspec.structs.replace(load, kv="int8")))
    for name, other in changed:
        other_demand = msgspec.structs.replace(demand, load=other)
        yield WhatIf(change=name, choice=pick(choices(shape, other_demand, offers, prices, forms), offers))
    found = choices(shape, demand, offers, prices, forms)
    if best is not None:
        for form in forms:
            if form != best.form:
                yield WhatIf(change=f"{form} weights", choice=pick([c for c in found if c.form == form], offers))
        for offer in offers:
            if offer.name != best.device:
                yield WhatIf(
                    change=f"on {offer.name}", choice=pick([c for c in found if c.device == offer.name], offers)
                )
    yield WhatIf(
        change="one more replica, so that one may fail",
        choice=pick(
            choices(shape, msgspec.structs.replace(demand, copies=demand.copies + 1), offers, prices, forms), offers
        ),
    )
