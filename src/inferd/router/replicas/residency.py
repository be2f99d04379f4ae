"""The decision which models are unloaded from memory so that another one fits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from inferd.types import RANKS, PriorityClass


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is in memory, is being loaded or is being unloaded."""

    name: str
    num_bytes: int
    is_pinned: bool = False  # never unloaded for another model
    is_idle: bool = True  # no request is queued or in flight
    last_used_at: float = 0.0
    priority: PriorityClass = "normal"


class RoomDecision(msgspec.Struct, frozen=True):
    """The decision of ``make_room``.

    ``fits``: there is enough memory. ``evict``: unload the models of ``evict`` first. ``wait``: there will be enough
    when busy models are idle. ``never``: there is not enough even then; ``missing_bytes`` more would be needed.
    """

    action: Literal["fits", "evict", "wait", "never"]
    evict: tuple[str, ...] = ()
    missing_bytes: int = 0


def make_room(residents: Sequence[Resident], need_bytes: int, budget_bytes: int) -> RoomDecision:
    """Whether ``need_bytes`` more fit into the budget, and which models are unloaded for them.

    Models of the class batch are unloaded first, then the least recently used. No model is unloaded that has requests
    or is pinned, and none without need.
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
    for resident in list(leaving):  # a later, larger model may make it needless to unload an earlier one
        if freed - resident.num_bytes >= missing:
            leaving.remove(resident)
            freed -= resident.num_bytes
    return RoomDecision("evict", tuple(resident.name for resident in leaving), missing)
