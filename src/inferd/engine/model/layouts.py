"""Over how many devices a replica is divided, and how: one rule for plans, checks and servers.

A device more costs messages in every step, so the fewest devices that hold the replica are taken. Of layouts of equally
many devices, the one that divides layers among most of them is taken: it divides the work of one request, and its
devices exchange most, so they are joined by fast links. Knows sizes and bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.engine.model.share import indivisible


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica is divided over devices."""

    tensor: int  # devices that share each layer
    pipeline: int  # groups of them that have different layers

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def text(self) -> str:
        return "1" if self.devices == 1 else f"{self.devices} ({self.tensor} x {self.pipeline})"


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, and the device of each rank. Ranks count along the parts of a stage first, as ``Share`` counts."""

    layout: Layout
    devices: tuple[int, ...]


def layouts(dims: DecoderConfig, counts: Iterable[int], linked: int) -> Iterator[Layout]:
    """The layouts that are possible, in the order of preference. ``counts``: of devices, ascending; ``linked``: how
    many devices fast links join."""
    for count in counts:
        for tensor in range(min(count, linked), 0, -1):
            if count % tensor == 0 and indivisible(dims, tensor, count // tensor) is None:
                yield Layout(tensor=tensor, pipeline=count // tensor)


def choose(
    possible: Iterable[Layout], needs: Callable[[Layout], Sequence[int]], rooms: Sequence[int], linked: int
) -> Choice | None:
    """The first of the ``possible`` layouts that fits; None: none does.

    ``needs``: bytes of a rank of each stage; ``rooms``: bytes that each device has; the first ``linked`` devices are
    joined by fast links, and so are the next ones.
    """
    for layout in possible:
        if layout.devices <= len(rooms):
            devices = place(needs(layout), layout.tensor, rooms, linked)
            if devices is not None:
                return Choice(layout, devices)
    return None


def place(needs: Sequence[int], tensor: int, rooms: Sequence[int], linked: int) -> tuple[int, ...] | None:
    """The device of each rank, if the ranks of a stage are to be on linked devices; None: they do not fit.

    Stages are placed in the order of their needs. A device that has room for one stage has room for the later ones, so
    which of the groups with enough devices a stage takes changes nothing for them.
    """
    free = [list(range(first, min(first + linked, len(rooms)))) for first in range(0, len(rooms), linked)]
    of_stage: dict[int, list[int]] = {}
    for stage in sorted(range(len(needs)), key=lambda stage: -needs[stage]):
        fitting = [[device for device in group if rooms[device] >= needs[stage]] for group in free]
        # The emptiest devices, so that replicas share none as long as there are others.
        roomy = max(
            fitting, key=lambda group: (len(group) >= tensor, sum(sorted(rooms[one] for one in group)[-tensor:]))
        )
        if len(roomy) < tensor:
            return None
        taken = sorted(sorted(roomy, key=lambda device: (-rooms[device], device))[:tensor])
        of_stage[stage] = taken
        free = [[device for device in group if device not in taken] for group in free]
    return tuple(device for stage in range(len(needs)) for device in of_stage[stage])
