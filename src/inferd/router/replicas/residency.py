"""Which models leave memory so that another fits. Pure: the decision alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from inferd.types import RANKS, PriorityClass


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is in memory, or on its way in or out."""

    name: str
    num_bytes: int
    is_pinned: bool = False  # never asked to leave
    is_idle: bool = True  # nothing waits for it or is in flight in it
    last_used_at: float = 0.0
    priority: PriorityClass = "normal"


class RoomDecision(msgspec.Struct, frozen=True):
    """The verdict. ``wait``: what is missing would be there once busy models are idle."""

    action: Literal["fits", "evict", "wait", "never"]
    evict: tuple[str, ...] = ()
    missing_bytes: int = 0


def make_room(residents: Sequence[Resident], need_bytes: int, budget_bytes: int) -> RoomDecision:
    """Whether ``need_bytes`` more fit into the budget, and who leaves for it.

    Models of the class batch leave first, then the least recently used; nobody leaves in vain, and nobody
    who has work or is pinned.
    """
    missing = need_bytes + sum(resident.num_bytes for resident in residents) - budget_bytes
    if missing <= 0:
        return RoomDecision("fits")
    movable = [resident for resident in residents if not resident.is_pinned]
    if missing > sum(resident.num_bytes for resident in movable):
        return RoomDecision("never", (), missing)
    idle = sorted(
        (resident for resident in movable if resident.is_idle and resident.num_bytes),
        key=lambda resident: (-RANKS[resident.priority] if resident.priority == "batch" else 0, resident.last_used_at),
    )
    leaving: list[Resident] = []
    for resident in idle:
        if sum(one.num_bytes for one in leaving) >= missing:
            break
        leaving.append(resident)
    freed = sum(one.num_bytes for one in leaving)
    if freed < missing:
        return RoomDecision("wait", (), missing)
    for resident in list(leaving):  # a later, larger one may have made an earlier one's leaving needless
        if freed - resident.num_bytes >= missing:
            leaving.remove(resident)
            freed -= resident.num_bytes
    return RoomDecision("evict", tuple(resident.name for resident in leaving), missing)
