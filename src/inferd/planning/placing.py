"""On which devices of a server the ranks of a replica are: the layout, the reasons, and what does not fit.

A device is a budget of memory (``server.devices``), or a machine of several. Each rank is on one of them:

    weights    its part of the checkpoint (``engine.model.share``)
    KV cache   blocks x tokens of a block x bytes per token of its layers and its key heads
    process    Python, torch and the temporary tensors of a step

The layout is that of ``engine.model.layouts``, which plans of hardware use too. Knows no configuration file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

import msgspec

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.config import ParallelConfig, ServerDevicesConfig
from inferd.config.units import bytes_text, enough_text
from inferd.engine.model.layouts import Layout, layouts, place
from inferd.engine.model.share import indivisible
from inferd.errors import ModelLoadError

MOST: Final = 64
"""Devices that a remedy asks for at most."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a server."""

    rooms: tuple[int, ...]  # bytes that each of them still has
    linked: int  # how many fast links join
    noun: Literal["device", "machine", "GPU"] = "device"

    def without(self, placed: Placed) -> Devices:
        """What the ranks of a model leave."""
        rooms = list(self.rooms)
        for rank in placed.ranks:
            rooms[rank.device] -= rank.total_bytes
        return replace(self, rooms=tuple(rooms))


def machines_of(count: int, room_bytes: int) -> Devices:
    """Machines with so much memory each. A network is between them, so no layer is divided."""
    return Devices((room_bytes,) * count, linked=1, noun="machine")


def gpus_of(count: int, room_bytes: int) -> Devices:
    """GPUs of one machine with so much memory each. Fast links are taken to join them all."""
    return Devices((room_bytes,) * count, linked=count, noun="GPU")


def devices_of(settings: ServerDevicesConfig) -> Devices | None:
    """The devices that the server may use; None: there are no budgets."""
    if settings.memory_bytes is None:
        return None
    return Devices((settings.memory_bytes,) * settings.count, settings.linked or settings.count)


@dataclass(frozen=True, slots=True)
class StageNeed:
    """The memory of a rank of one stage. Bytes."""

    weights_bytes: int
    process_bytes: int
    block_bytes: int  # of a block of the KV cache
    blocks: int  # the fewest that serve

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.process_bytes + self.blocks * self.block_bytes


class PlacedRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank on its device. Bytes."""

    device: int  # from 0
    room_bytes: int  # of the device, before this model
    weights_bytes: int
    kv_bytes: int
    process_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.process_bytes


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replicas of a model are, and why."""

    ranks: tuple[PlacedRank, ...]  # of all replicas
    count: int  # ranks of a replica
    not_fewer: tuple[str, ...] = ()  # a sentence for each smaller number of devices

    @property
    def fullest(self) -> PlacedRank:
        return max(self.ranks, key=lambda rank: rank.total_bytes / rank.room_bytes)


@dataclass(frozen=True, slots=True)
class Spot:
    """A layout with its devices, before the size of the KV cache is known."""

    parallel: ParallelConfig
    needs: tuple[StageNeed, ...]  # of each stage
    devices: tuple[tuple[int, ...], ...]  # of each replica, of each of its ranks
    most_blocks: int  # of a replica's KV cache
    not_fewer: tuple[str, ...]

    def placed(self, blocks: int, rooms: Sequence[int]) -> Placed:
        """``blocks``: of a replica's KV cache; ``rooms``: bytes that the devices had."""
        return Placed(
            ranks=tuple(
                PlacedRank(
                    device=device,
                    room_bytes=rooms[device],
                    weights_bytes=need.weights_bytes,
                    kv_bytes=blocks * need.block_bytes,
                    process_bytes=need.process_bytes,
                )
                for replica in self.devices
                for device, need in zip(replica, self._of_ranks(), strict=True)
            ),
            count=self.parallel.count,
            not_fewer=self.not_fewer,
        )

    def _of_ranks(self) -> list[StageNeed]:
        return [need for need in self.needs for _ in range(self.parallel.tensor)]


Needs = Callable[[ParallelConfig], tuple[StageNeed, ...]]
"""The memory of a rank of each stage, in a layout."""


def find_spot(
    name: str, dims: DecoderConfig, asked: ParallelConfig | None, copies: int, devices: Devices, needs: Needs
) -> Spot:
    """The layout of a model's replicas, and their devices.

    ``asked``: the configured layout; None: the smallest that fits. ``copies``: replicas. Raises
    ModelLoadError, with the remedy, where none fits.
    """
    spot = fitting_spot(dims, asked, copies, devices, needs)
    if spot is None:
        raise ModelLoadError(_refusal(name, dims, asked, copies, devices, needs), param="parallel")
    return spot


def fitting_spot(
    dims: DecoderConfig, asked: ParallelConfig | None, copies: int, devices: Devices, needs: Needs
) -> Spot | None:
    """``find_spot`` without a refusal; None: no layout fits."""
    found: dict[Layout, tuple[StageNeed, ...]] = {}
    linked = devices.linked if asked is None else len(devices.rooms)
    for layout in _possible(dims, asked, len(devices.rooms), devices.linked):
        machines = layout.devices if devices.noun == "machine" else 1
        parallel = ParallelConfig(tensor=layout.tensor, pipeline=layout.pipeline, machines=machines)
        found[layout] = of_stages = needs(parallel)
        sizes = [need.total_bytes for need in of_stages]
        places = _places(sizes, layout, copies, devices.rooms, linked)
        if places is not None:
            spare = list(devices.rooms)
            for taken in places:
                for rank, device in enumerate(taken):
                    spare[device] -= sizes[rank // layout.tensor]
            most = _most_blocks(of_stages, layout, places, spare)
            reasons = () if asked is not None else tuple(_not_fewer(dims, layout, linked, devices, copies, found))
            return Spot(parallel, of_stages, tuple(places), most, reasons)
    return None


def _possible(dims: DecoderConfig, asked: ParallelConfig | None, count: int, linked: int) -> Iterator[Layout]:
    """The layouts on ``count`` devices, in the order of preference: the one that is configured, if one is."""
    if asked is not None:
        return iter([Layout(tensor=asked.tensor, pipeline=asked.pipeline)])
    return layouts(dims, range(1, count + 1), min(linked, count))


def _places(
    sizes: Sequence[int], layout: Layout, copies: int, rooms: Sequence[int], linked: int
) -> list[tuple[int, ...]] | None:
    """The devices of the ranks of each copy; ``sizes``: bytes of a rank of each stage. None: they do not fit."""
    spare, places = list(rooms), list[tuple[int, ...]]()
    while len(places) < copies:
        taken = place(sizes, layout.tensor, spare, linked)
        if taken is None:
            return None
        places.append(taken)
        for rank, device in enumerate(taken):
            spare[device] -= sizes[rank // layout.tensor]
    return places


def _most_blocks(
    needs: Sequence[StageNeed], layout: Layout, places: Sequence[tuple[int, ...]], spare: Sequence[int]
) -> int:
    """The blocks that every rank has room for; ranks on one device share what it has left."""
    sharing = Counter(device for replica in places for device in replica)
    return min(
        need.blocks + spare[device] // sharing[device] // need.block_bytes
        for replica in places
        for rank, device in enumerate(replica)
        for need in [needs[rank // layout.tensor]]
    )


def _not_fewer(
    dims: DecoderConfig,
    taken: Layout,
    linked: int,
    devices: Devices,
    copies: int,
    found: dict[Layout, tuple[StageNeed, ...]],
) -> list[str]:
    """Why fewer devices do not hold a replica, and why its layers are not divided among more of them."""
    room, noun, reasons = max(devices.rooms), devices.noun, []
    for count in range(1, taken.devices):
        fullest = {
            layout: max(need.total_bytes for need in needs)
            for layout, needs in found.items()
            if layout.devices == count
        }
        if not fullest:
            reasons.append(f"{_devices(count, noun)}: {_no_layout(dims, count)}.")
            continue
        best = min(fullest, key=lambda layout: fullest[layout])
        of = "" if count == 1 else f", with {_text(best)} the fullest"
        many = len(devices.rooms)
        enough = "" if fullest[best] > room else f", which {many} {noun}s do not have {copies} times"
        reasons.append(f"{_devices(count, noun)}{of}: {bytes_text(fullest[best])} of {bytes_text(room)}{enough}.")
    for tensor in range(min(taken.devices, linked), taken.tensor, -1):
        if taken.devices % tensor == 0:
            obstacle = indivisible(dims, tensor, taken.devices // tensor)
            reasons.append(f"Not tensor {tensor}: {'it does not fit' if obstacle is None else obstacle.why}.")
    return reasons


def _no_layout(dims: DecoderConfig, count: int) -> str:
    obstacle = indivisible(dims, 1, count) or indivisible(dims, count, 1)
    return "not possible" if obstacle is None else obstacle.why


def _refusal(
    name: str, dims: DecoderConfig, asked: ParallelConfig | None, copies: int, devices: Devices, needs: Needs
) -> str:
    count, room = len(devices.rooms), max(devices.rooms)
    if asked is not None and asked.count > count:
        return (
            f"parallel divides {name} among {asked.count} ranks, but server.devices has {count}. Take fewer ranks, "
            "or leave parallel out: then the layout is chosen."
        )

    @cache
    def sizes(layout: Layout) -> list[int]:
        return [need.total_bytes for need in needs(ParallelConfig(tensor=layout.tensor, pipeline=layout.pipeline))]

    whole = max(sizes(Layout(tensor=1, pipeline=1)))
    best = min(_possible(dims, asked, count, devices.linked), key=lambda layout: max(sizes(layout)))
    times = f" {copies} times" if copies > 1 else ""
    more = _more_bytes(dims, asked, copies, devices, sizes)
    wider = _more_devices(dims, asked, copies, devices, sizes)
    remedies = [f"give each device {enough_text(more)} more"]
    if wider is not None:
        remedies.append(f"take {wider[0]} devices of this size ({_text(wider[1])})")
    obstacle = indivisible(dims, 1, 2) if asked is None and wider is None else None
    why = "" if obstacle is None else f"{obstacle.why[:1].upper()}{obstacle.why[1:]}. "
    sentence = f"{', '.join(remedies)}, lower max_model_len or kv_cache, or take fewer bits (quantization)."
    return (
        f"A replica of {name} takes at least {bytes_text(whole)} in one process, and {_devices(count)} with at most "
        f"{bytes_text(room)} left do not hold it{times}: with {_text(best)} the fullest takes "
        f"{bytes_text(max(sizes(best)))}. {why}{sentence[:1].upper()}{sentence[1:]}"
    )


def _more_bytes(
    dims: DecoderConfig,
    asked: ParallelConfig | None,
    copies: int,
    devices: Devices,
    sizes: Callable[[Layout], list[int]],
) -> int:
    """The fewest bytes that each of the present devices must have more, so that some layout holds all copies."""
    count = len(devices.rooms)
    linked = devices.linked if asked is None else count

    def fits(layout: Layout, more: int) -> bool:
        return _places(sizes(layout), layout, copies, [room + more for room in devices.rooms], linked) is not None

    least: int | None = None
    for layout in _possible(dims, asked, count, devices.linked):
        # Where each device has room for the largest rank of every copy, a layout fits, or its stages never do.
        enough = copies * max(sizes(layout)) - min(devices.rooms)
        low, high = 0, max(0, enough) if least is None else least
        if not fits(layout, high):
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(layout, middle) else (middle + 1, high)
        least = high
    assert least is not None, "one process is possible on any device that is large enough"
    return least


def _more_devices(
    dims: DecoderConfig,
    asked: ParallelConfig | None,
    copies: int,
    devices: Devices,
    sizes: Callable[[Layout], list[int]],
) -> tuple[int, Layout] | None:
    """The fewest devices of the present size that hold all copies, with the layout; None: not with ``MOST``."""
    present, room = len(devices.rooms), max(devices.rooms)
    for count in range(present + 1, MOST + 1):
        rooms = (*devices.rooms, *(room,) * (count - present))
        linked = devices.linked if asked is None else count
        for layout in _possible(dims, asked, count, devices.linked):
            if max(sizes(layout)) <= room and _places(sizes(layout), layout, copies, rooms, linked) is not None:
                return count, layout
    return None


def _devices(count: int, noun: str = "device") -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _text(layout: Layout) -> str:
    return "one process" if layout.devices == 1 else f"tensor {layout.tensor} x pipeline {layout.pipeline}"
