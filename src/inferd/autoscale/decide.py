"""The number of replicas that a model is to have: a function of its settings, what was observed, and the time.

Every input says how many replicas it needs, and the largest of them counts:

- ``stable``: the rate of arrivals over a minute, at ``HIGH`` of what a replica serves (Little's law).
- ``panic``: the rate that the last seconds surely had, by the lower bound of a Poisson count, or the rate of a moment
  with more arrivals than the rate over a minute gives by chance.
- ``backlog``: the waiting requests that will be left when a replica that is started now is ready, beside the arrivals
  until then. A wait that ends before that is not shortened by another replica. Before a replica's speed is known, the
  most that it can be is taken, so the number is not above what is needed.
- ``forecast``: the rate at that time, if it grows on as it surely did.
- ``wait``: one more than is ready, where requests wait for too long and the speed of a replica is not known yet. While
  the rate surely grows, the target of the wait is too long; else a wait that a new replica could shorten is.
- ``in_flight``: requests in work and waiting, over a minute and over the last seconds, at the target for each replica.
- ``duty``: one more than is ready, where the replicas of now worked at more than the target's part of what they can
  over two minutes. That is the rate of arrivals over the rate that they serve, where that is known. Else it is the time
  in which they had requests, and counts only where there were more requests than replicas. Of a replica that computes
  requests together, a part of that time counts: that in which full steps would have done the same work. It has requests
  nearly always, and serves several times as many before its time is full. N replicas, and N - 1 with the same load,
  have the same sum of these parts where a step takes a fixed time and one for each request.

Replicas that start are part of the number and never of an input, so they are counted once. A replica leaves only where
one fewer would hold: each load times N / (N - 1) stays below ``LOW`` of what is served, by the highest number that was
needed in ``down_after_s``. ``LOW`` below ``HIGH`` keeps a number from alternating with the next. Where arrivals are
random, a replica that left may be needed again by chance: each time that this happens soon, replicas stay for twice as
long, at most ``MAX_PATIENCE`` times ``down_after_s``.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

from inferd.config import ModelConfig
from inferd.config.routing import IDLE_AFTER_S

HIGH: Final = 0.8
"""The part of its capacity at which a replica is to work, for the wait to be short."""

LOW: Final = 0.7
"""The part of its capacity at which the replicas that stay may work after one has left."""

SPARE: Final = 0.25
"""So many more requests than replicas start another one by the duty; a replica leaves without them."""

STALE_S: Final = 2.0
"""An observation that is older counts as missing."""

MAX_PATIENCE: Final = 16

MAX_WAIT_S: Final = 1.0
"""A request that has waited for so long needs another replica, however slow it is to start."""

UNKNOWN_READY_S: Final = 5.0
"""Seconds that a replica is taken to need until it is ready, before one was measured."""

InputName = Literal["stable", "panic", "backlog", "forecast", "wait", "in_flight", "duty"]
INPUTS: Final[tuple[InputName, ...]] = ("stable", "panic", "backlog", "forecast", "wait", "in_flight", "duty")


class Spec(NamedTuple):
    """The settings of one model."""

    least: int
    most: int
    queue_s: float = 0.2
    in_flight: float | None = None
    duty: float | None = 0.7
    down_after_s: float = 60.0
    idle_after_s: float | None = None  # the last replica stops after so long without a request; None: never


class Seen(NamedTuple):
    """What was observed of one model. None: it was not, or not for long enough."""

    at: float
    ready: int
    starting: int = 0
    waiting: int = 0
    in_flight: int = 0
    deferred: int = 0  # requests of batch work, which are in no other number
    oldest_wait_s: float = 0.0
    idle_s: float = 0.0  # 0: there is a request
    ready_s: float | None = None  # from the start of a replica until it is ready
    rate_per_s: float | None = None  # arrivals, over a minute
    surge_per_s: float = 0.0  # arrivals that the last three seconds, or a moment in them, surely had
    recent_per_s: float = 0.0  # arrivals that the last moment probably had
    rise_per_s2: float = 0.0  # the growth of the rate that is beyond chance
    served_per_s: float | None = None  # by one replica while requests wait
    took_s: float | None = None  # by a request that did not wait, at least
    load: float | None = None  # requests in work and waiting, the mean over a minute
    load_now: float | None = None  # over the last three seconds
    rate_long: float | None = None  # arrivals per second over two minutes; None also if other replicas were ready
    load_long: float | None = None  # likewise
    busy_long: float | None = None  # replicas that work, as far as they are utilized, likewise
    busy_now: float | None = None  # over the last three seconds
    limit: int | None = None  # replicas that memory and cores allow
    limited_by: str = ""
    hold: str = ""  # why no replica may leave now; empty: one may


class Need(NamedTuple):
    """What one input needs."""

    name: InputName
    replicas: int
    text: str  # the numbers in words


class Past(NamedTuple):
    """What earlier decisions leave to later ones. ``peaks``: times and numbers of replicas that would have held, each
    lower than those before it."""

    since: float | None = None  # of the first of the observations without a gap
    peaks: tuple[tuple[float, int], ...] = ()
    fell_at: float | None = None  # when a replica left
    patience: int = 1  # replicas stay for so many times down_after_s


class Decision(NamedTuple):
    """``desired`` replicas, those that start included. ``rule``: the input that decided, or another word for why."""

    desired: int
    current: int
    rule: str
    reason: str
    needs: tuple[Need, ...]
    past: Past


def spec_of(config: ModelConfig) -> Spec | None:
    """The settings of a model; None: its number of replicas is fixed."""
    scaling = config.scaling
    if scaling is None or config.is_remote:
        return None
    idle_after_s = config.idle_after_s if config.idle_after_s is not None else IDLE_AFTER_S
    return Spec(
        least=scaling.min,
        most=scaling.max,
        queue_s=scaling.target.queue_ms / 1000.0,
        in_flight=scaling.target.in_flight,
        duty=scaling.target.duty,
        down_after_s=scaling.down_after_s,
        idle_after_s=idle_after_s if scaling.min == 0 else None,
    )


def decide(spec: Spec, seen: Seen, past: Past, now: float) -> Decision:
    """The number of replicas that the model is to have. It lies between ``least`` and ``most``."""
    current = seen.ready + seen.starting
    stays = min(max(current, spec.least), spec.most)
    if now - seen.at > STALE_S:
        text = f"held at {stays}: the last observation is {now - seen.at:.1f} s old"
        return Decision(stays, current, "no_data", text, (), Past())
    needs = needs_of(spec, seen)
    past = _remembered(spec, seen, needs, past, now)
    most_needed = max(needs, key=lambda need: need.replicas, default=None)
    want = 0 if most_needed is None else most_needed.replicas
    has_work = seen.waiting > 0 or seen.in_flight > 0 or seen.deferred > 0
    floor = max(spec.least, 1 if has_work else 0)
    if current == 0:
        rule = "work" if floor > spec.least else "least"
        text = "requests wait for the model" if rule == "work" else "there is no request" if not floor else "the least"
        return Decision(min(floor, spec.most), current, rule, text, needs, past)
    if current > spec.most or current < spec.least:
        text = f"{current} replicas are outside of {spec.least} to {spec.most}"
        return Decision(stays, current, "bounds", text, needs, past)
    if most_needed is not None and want > current:
        return _more(spec, seen, most_needed, needs, past)
    if spec.least == 0 and spec.idle_after_s is not None and not has_work and seen.idle_s >= spec.idle_after_s:
        if seen.hold:
            return Decision(current, current, "hold", f"held at {current}: {seen.hold}", needs, past)
        text = f"no request for {seen.idle_s:.0f} s, of {spec.idle_after_s:g} s"
        return Decision(0, current, "idle", text, needs, past)
    return _fewer(spec, seen, current, needs, past, now)


def _more(spec: Spec, seen: Seen, need: Need, needs: tuple[Need, ...], past: Past) -> Decision:
    current = seen.ready + seen.starting
    if seen.limit is None:
        text = f"held at {current}: it is not known how many replicas fit; {need.name} needs {need.replicas}"
        return Decision(current, current, "no_data", text, needs, past)
    desired = max(current, min(need.replicas, spec.most, seen.limit))
    bound = "scaling.max" if desired >= spec.most else seen.limited_by or "the limit"
    if desired == current:
        text = f"{need.name} needs {need.replicas} ({need.text}), and {bound} allows {current}"
        return Decision(current, current, "limit", text, needs, past)
    reached = "" if desired == need.replicas else f"; {need.replicas} are needed, and {bound} allows {desired}"
    past = _regretted(spec, past, seen.at)
    past = past._replace(peaks=(*(peak for peak in past.peaks if peak[1] > desired), (seen.at, desired)))
    return Decision(desired, current, need.name, f"{need.text}{reached}", needs, past)


def _regretted(spec: Spec, past: Past, now: float) -> Past:
    """A replica is needed: if one has just left, the next ones stay for longer."""
    soon_s = 4.0 * spec.down_after_s * past.patience
    if past.fell_at is None:
        return past
    if now - past.fell_at >= soon_s:
        return past._replace(fell_at=None, patience=max(1, past.patience // 2))
    return past._replace(fell_at=None, patience=min(MAX_PATIENCE, past.patience * 2))


def _fewer(spec: Spec, seen: Seen, current: int, needs: tuple[Need, ...], past: Past, now: float) -> Decision:
    """Some replicas leave, or none."""
    held = max((count for _, count in past.peaks), default=current)
    desired = max(held, spec.least, 1)
    if desired >= current:
        text = "fewer would not have held lately"
        if held <= spec.least == current:
            text = "scaling.min allows no fewer"
        elif held <= current == 1 and spec.idle_after_s is not None:
            text = f"the last one leaves after {spec.idle_after_s:g} s without a request"
        return Decision(current, current, "enough", text, needs, past)
    window_s = spec.down_after_s * past.patience
    observed_s = 0.0 if past.since is None else now - past.since
    if observed_s < window_s:
        text = f"{desired} would hold; observed for {observed_s:.0f} s, of {window_s:g} s"
        return Decision(current, current, "window", text, needs, past)
    if seen.hold:
        return Decision(current, current, "hold", f"{desired} would hold; held at {current}: {seen.hold}", needs, past)
    text = f"{desired} have held for {window_s:g} s, at {100 * LOW:.0f} % of their capacity or less"
    return Decision(desired, current, "consolidation", text, needs, past._replace(fell_at=now))


def needs_of(spec: Spec, seen: Seen) -> tuple[Need, ...]:
    """What each input needs, of those that are known."""
    needs = []
    each = seen.served_per_s
    rate = max(seen.rate_per_s or 0.0, seen.surge_per_s)
    ready_s = UNKNOWN_READY_S if seen.ready_s is None else seen.ready_s
    if each is not None and each > 0:
        if seen.rate_per_s is not None:
            text = f"{seen.rate_per_s:.3g} requests/s over a minute, of {each:.3g} that one replica serves"
            needs.append(Need("stable", _ceil(seen.rate_per_s / (each * HIGH)), text))
        text = f"{seen.surge_per_s:.3g} requests/s in the last seconds, of {each:.3g} that one replica serves"
        needs.append(Need("panic", _ceil(seen.surge_per_s / (each * HIGH)), text))
        ahead = rate + seen.rise_per_s2 * ready_s
        text = f"{ahead:.3g} requests/s in {ready_s:.3g} s, of {each:.3g} that one replica serves"
        needs.append(Need("forecast", _ceil(ahead / (each * HIGH)), text))
        needs += _backlog(spec, seen, each, max(rate, seen.recent_per_s), ready_s)
    else:
        most = _most_per_s(seen)
        needs += [] if most is None else _backlog(spec, seen, most, rate, ready_s)
        if seen.oldest_wait_s >= (spec.queue_s if seen.rise_per_s2 else max(spec.queue_s, min(ready_s, MAX_WAIT_S))):
            text = f"a request has waited for {seen.oldest_wait_s:.3g} s, of {spec.queue_s:g} s"
            needs.append(Need("wait", seen.ready + 1, text))
    if spec.in_flight is not None and (seen.load is not None or seen.load_now is not None):
        load = max(seen.load or 0.0, seen.load_now or 0.0)
        text = f"{load:.3g} requests in work or waiting, of {spec.in_flight:g} for a replica"
        needs.append(Need("in_flight", _ceil(load / spec.in_flight), text))
    duty = duty_of(seen)
    if spec.duty is not None and duty is not None and duty >= spec.duty:
        is_guess = each is None and seen.load_long is not None
        count = min(seen.ready + 1, _ceil((seen.load_long or 0.0) - SPARE)) if is_guess else seen.ready + 1
        text = f"replicas worked at {100 * duty:.0f} % of what they can over two minutes, of {100 * spec.duty:g} %"
        needs.append(Need("duty", count, text))
    return tuple(needs)


def _backlog(spec: Spec, seen: Seen, each: float, arriving: float, ready_s: float) -> list[Need]:
    """What the waiting requests need, where a replica serves ``each`` requests per second; none: they wait briefly."""
    if seen.waiting <= seen.ready * each * spec.queue_s:
        return []
    horizon_s = max(ready_s, spec.queue_s)
    left = max(0.0, seen.waiting + (arriving - seen.ready * each) * horizon_s)
    count = _ceil(arriving / each + left / (each * horizon_s)) if left else 0
    text = f"{seen.waiting} waiting and {arriving:.3g} requests/s leave {left:.3g} in {horizon_s:.3g} s"
    return [Need("backlog", count, text)]


def _most_per_s(seen: Seen) -> float | None:
    """Requests per second that one replica serves at most, by Little's law: those that it works at, over the seconds
    that one takes where none waits. A fuller replica is not faster for each. None: not known."""
    if not seen.took_s or not seen.ready or not seen.in_flight:
        return None
    return seen.in_flight / seen.ready / seen.took_s


def duty_of(seen: Seen) -> float | None:
    """The part of what the replicas can do that they did in two minutes; None: not known."""
    if not seen.ready:
        return None
    if seen.served_per_s:
        return None if seen.rate_long is None else min(1.0, seen.rate_long / (seen.served_per_s * seen.ready))
    return None if seen.busy_long is None else min(1.0, seen.busy_long / seen.ready)


def holding(spec: Spec, seen: Seen, needs: tuple[Need, ...]) -> int:
    """The smallest number of replicas, of those there are, that would hold with room to spare. All: not known."""
    current = seen.ready + seen.starting
    if seen.waiting:
        return current
    counts = [need.replicas for need in needs]
    is_known = False
    each = seen.served_per_s
    if each is not None and each > 0:
        if seen.rate_per_s is None:
            return current
        part = LOW if spec.duty is None else min(LOW, spec.duty * LOW / HIGH)
        counts.append(_ceil(max(seen.rate_per_s, seen.surge_per_s) / (each * part)))
        is_known = True
    if spec.in_flight is not None:
        if seen.load_now is None:
            return current
        counts.append(_ceil(max(seen.load or 0.0, seen.load_now) / (spec.in_flight * LOW / HIGH)))
        is_known = True
    if spec.duty is not None and not each:
        if seen.busy_now is None or seen.load_now is None:
            return current
        counts.append(_by_duty(spec.duty, seen.busy_now, seen.load_now, current))
        is_known = True
    if not is_known:
        return current
    return min(current, max(counts, default=0))


def _by_duty(target: float, busy: float, load: float, current: int) -> int:
    """The smallest number of replicas to which the duty would not add one."""
    return next((n for n in range(1, current) if busy / n < target * LOW / HIGH or n >= _ceil(load)), current)


def _remembered(spec: Spec, seen: Seen, needs: tuple[Need, ...], past: Past, now: float) -> Past:
    """The numbers of replicas that would have held until now, within ``down_after_s``."""
    count = holding(spec, seen, needs)
    oldest = now - spec.down_after_s * past.patience
    kept = [peak for peak in past.peaks if peak[0] >= oldest and peak[1] > count]
    since = now if past.since is None else past.since
    return past._replace(since=since, peaks=(*kept, (now, count)))


def _ceil(value: float) -> int:
    """Rounded up, but for what rounding errors add."""
    return math.ceil(value - 1e-9)
