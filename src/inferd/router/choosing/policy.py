"""Which replica takes the next request. Pure: the time and the dice are arguments.

Whom a request must not go to at all (a breaker, an ejection, an earlier failure) is the caller's to leave
out. Among the others, in this order:

- a replica of the request's region, where it names one; a fallback only while no other can take it;
- the session's replica: weighted rendezvous hashing (Thaler, Ravishankar 1998; weights by Schindelhauer,
  Schomaker 2005) among those that can take, so a replica that comes or goes moves its own sessions alone;
- the replica that has seen most of the prompt, while it has at most ``slack`` times its share of the
  outstanding work, plus one;
- the less loaded of two drawn at random by weight (Mitzenmacher 2001, "The power of two choices"): nearly
  as even as asking all, and no herd runs to the one that looks idle. Load is outstanding work by weight.

A replica that became ready a moment ago counts with part of its weight (slow start, as Envoy's).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import Final, Protocol, TypeVar

_LEAST_RAMP: Final = 0.1
_NONE: Final[Mapping[int, float]] = {}


class Candidate(Protocol):
    """A replica as the choice sees it."""

    @property
    def index(self) -> int: ...
    @property
    def can_take(self) -> bool: ...
    @property
    def outstanding(self) -> int:
        """Sequences it has been given and has not finished."""
        ...

    @property
    def weight(self) -> float:
        """Its share of the work relative to the others'; above 0."""
        ...

    @property
    def region(self) -> str: ...
    @property
    def is_fallback(self) -> bool: ...


C = TypeVar("C", bound=Candidate)


def choose(
    replicas: Iterable[C],
    *,
    random: Random,
    now: float = 0.0,
    region: str = "",
    prefer: Mapping[int, int] | None = None,
    session: str = "",
    slack: float = 1.5,
    ready_since: Mapping[int, float] = _NONE,
    slow_start_s: float = 0.0,
) -> C | None:
    """The replica that takes the next request; None: nobody can.

    ``prefer``: bytes of the prompt that each replica, by index, has seen. ``ready_since``: when each became
    ready; one that is missing has its full weight.
    """
    able = [replica for replica in replicas if replica.can_take and (not region or replica.region == region)]
    if not able:
        return None
    primary = [replica for replica in able if not replica.is_fallback]
    able = primary or able
    if len(able) == 1:
        return able[0]
    if session:
        return max(able, key=lambda replica: _affinity(session, replica))
    weights = [replica.weight * ramp(ready_since.get(replica.index, -math.inf), now, slow_start_s) for replica in able]
    if prefer:
        chosen = _preferred(able, weights, prefer, slack)
        if chosen is not None:
            return chosen
    first = _draw(weights, -1, random)
    second = _draw(weights, first, random)
    # On equal terms the first drawn, so that idle replicas share by weight as well.
    is_second_freer = able[second].outstanding / weights[second] < able[first].outstanding / weights[first]
    return able[second if is_second_freer else first]


def ramp(ready_since: float, now: float, slow_start_s: float) -> float:
    """The part of its weight that a replica has ``now``, in (0, 1]: growing evenly from a tenth."""
    age = now - ready_since
    if slow_start_s <= 0 or age >= slow_start_s:
        return 1.0
    return max(_LEAST_RAMP, age / slow_start_s)


def _preferred(able: Sequence[C], weights: Sequence[float], prefer: Mapping[int, int], slack: float) -> C | None:
    """The one that has seen most, the less loaded of equals, among those that are not overloaded."""
    share = sum(replica.outstanding for replica in able) / sum(weights)
    best: C | None = None
    best_rank = (0, 0.0)
    for replica, weight in zip(able, weights, strict=True):
        seen = prefer.get(replica.index, 0)
        if seen > 0 and replica.outstanding <= slack * share * weight + 1:
            rank = (seen, -replica.outstanding / weight)
            if best is None or rank > best_rank:
                best, best_rank = replica, rank
    return best


def _affinity(session: str, replica: Candidate) -> float:
    """A uniform draw fixed by session and replica, stretched by the replica's weight."""
    digest = blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8, key=b"%d" % replica.index).digest()
    uniform = ((int.from_bytes(digest) >> 11) + 0.5) / 2.0**53
    return -replica.weight / math.log(uniform)


def _draw(weights: Sequence[float], without: int, random: Random) -> int:
    """An index, each with the probability of its weight."""
    total = sum(weights) - (weights[without] if without >= 0 else 0.0)
    point = random.random() * total
    last = -1
    for index, weight in enumerate(weights):
        if index == without:
            continue
        last = index
        point -= weight
        if point < 0:
            break
    return last
