"""The policy that chooses the replica for a request. Pure: time and the random generator are arguments.

The caller leaves out replicas that must not get the request (an open breaker, an ejection, an earlier failure). Among
the others the choice is made in this order:

- a replica of the request's region, where it names one; a fallback only while no other replica can take it;
- the session's replica: weighted rendezvous hashing (Thaler, Ravishankar 1998; weights by Schindelhauer, Schomaker
  2005) among the replicas that can take it, so that a replica that comes or goes moves only its own sessions. The hash
  is over the replica's identity, so several gateways choose the same remote server for a session without an exchange;
- for a prompt, among the replicas that have at most ``slack`` times their share of the outstanding work, plus one:
  those that have received the most of it. A replica that has received less than ``LEAST_PART`` of the prompt counts as
  one that has received nothing (as ``cache_threshold`` of SGLang's router): a short system prompt, which all prompts
  share, would otherwise keep them on the first replicas that received it, and leave the caches of the others unused.
  Of equals, such as all replicas for a new prompt, the less loaded of the two with the highest rendezvous rank for
  ``continuation``. So several gateways send prompts with an equal beginning to the same remote server without an
  exchange (consistent hashing with bounded loads, Mirrokni, Thorup, Zadimoghaddam 2018), and the load stays as even as
  by two random choices;
- otherwise the less loaded of two drawn at random by weight (Mitzenmacher 2001, "The power of two choices"). This is
  nearly as even as comparing all, and avoids that all requests go to the replica that looks idle. Load is outstanding
  work divided by weight: the sequences that are not finished, and the prompts that are not computed yet
  (``replicas/prompt_work.py``), as Dynamo and llm-d count tokens.

A replica that became ready a short time ago counts with a part of its weight (slow start, as Envoy's).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import Final, Protocol, TypeVar

LEAST_PART: Final = 0.25
"""The part of a prompt that a replica must have received to be preferred."""

_LEAST_RAMP: Final = 0.1
_NONE: Final[Mapping[int, float]] = {}


class Candidate(Protocol):
    """The properties of a replica that the policy uses."""

    @property
    def index(self) -> int:
        """The number of the replica, by which prefixes remember it."""
        ...

    @property
    def identity(self) -> str:
        """What the replica is, equal at every gateway that has it: the address of a remote server."""
        ...

    @property
    def can_take(self) -> bool:
        """Whether the replica has room for one more request."""
        ...

    @property
    def load(self) -> float:
        """The outstanding work, in sequences: those that are not finished, and prompts that are not computed yet."""
        ...

    @property
    def weight(self) -> float:
        """The share of the work relative to other replicas; above 0."""
        ...

    @property
    def region(self) -> str:
        """The region of the replica; empty: none."""
        ...

    @property
    def is_fallback(self) -> bool:
        """Whether the replica is used only while no other one can take a request."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(
    replicas: Iterable[C],
    *,
    random: Random,
    now: float = 0.0,
    region: str = "",
    prefer: Mapping[int, int] | None = None,
    prompt_bytes: int = 0,
    continuation: int | None = None,
    session: str = "",
    slack: float = 1.5,
    ready_since: Mapping[int, float] = _NONE,
    slow_start_s: float = 0.0,
) -> C | None:
    """The replica for the next request; None: no replica can take it.

    ``prefer``: the bytes of the prompt that each replica, by index, has received, of at most ``prompt_bytes``.
    ``continuation``: a hash of the prompt's beginning, up to what no replica has received; None: replicas are not
    shared with other gateways, and equals are chosen by their load. ``ready_since``: when each replica became ready; a
    missing one has its full weight. ``slow_start_s``: seconds until a replica has its full weight.
    """
    able = [replica for replica in replicas if replica.can_take and (not region or replica.region == region)]
    if not able:
        return None
    primary = [replica for replica in able if not replica.is_fallback]
    able = primary or able
    if len(able) == 1:
        return able[0]
    if session:
        return max(able, key=lambda replica: _rank(session, replica, replica.weight))
    weights = [replica.weight * ramp(ready_since.get(replica.index, -math.inf), now, slow_start_s) for replica in able]
    if prefer or continuation is not None:
        chosen = _preferred(able, weights, prefer or {}, LEAST_PART * prompt_bytes, continuation, slack)
        if chosen is not None:
            return chosen
    first = _draw(weights, -1, random)
    second = _draw(weights, first, random)
    # On equal terms the first drawn, so that idle replicas share by weight as well.
    is_second_freer = able[second].load / weights[second] < able[first].load / weights[first]
    return able[second if is_second_freer else first]


def ramp(ready_since: float, now: float, slow_start_s: float) -> float:
    """The part of a replica's weight that counts at ``now``, in (0, 1]. It grows linearly from a tenth."""
    age = now - ready_since
    if slow_start_s <= 0 or age >= slow_start_s:
        return 1.0
    return max(_LEAST_RAMP, age / slow_start_s)


def _preferred(
    able: Sequence[C],
    weights: Sequence[float],
    prefer: Mapping[int, int],
    least: float,
    continuation: int | None,
    slack: float,
) -> C | None:
    """Among the replicas, not overloaded, that have received the most of the prompt: the less loaded, of the two that
    have the highest rank where there is a ``continuation``. Fewer than ``least`` bytes count as none."""
    share = sum((replica.load for replica in able), 0.0) / sum(weights, 0.0)
    most = 0 if continuation is not None else 1
    equals: list[tuple[C, float]] = []
    for replica, weight in zip(able, weights, strict=True):
        seen = prefer.get(replica.index, 0)
        if seen < least:
            seen = 0
        if seen >= most and replica.load <= slack * share * weight + 1:
            if seen > most:
                most, equals = seen, []
            equals.append((replica, weight))
    if not equals:
        return None
    if continuation is not None and len(equals) > 1:
        text = f"{continuation:x}"
        equals.sort(key=lambda equal: _rank(text, *equal), reverse=True)
        del equals[2:]
    return min(equals, key=lambda equal: equal[0].load / equal[1])[0]


def _rank(text: str, replica: Candidate, weight: float) -> float:
    """The rank of a replica for a text: a uniform number from a hash of both, scaled by the replica's weight."""
    hashed = f"{replica.identity}\n{text}".encode("utf-8", "surrogatepass")
    digest = blake2b(hashed, digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 11) + 0.5) / 2.0**53
    return -weight / math.log(uniform)


def _draw(weights: Sequence[float], without: int, random: Random) -> int:
    """A random index other than ``without``, drawn by weight."""
    total = sum(weights, 0.0) - (weights[without] if without >= 0 else 0.0)
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
