"""Where an engine's steps spent their time during a run: the difference of two readings of ``/metrics``.

Knows the names of inferd's step metrics, so it works for no other server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

import msgspec

from inferd.benchmark.load import Connection, ServerError, Target
from inferd.errors import Unavailable

_SAMPLE = re.compile(r"inferd_(step_seconds_sum|step_seconds_count|step_part_seconds_total)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Reading(msgspec.Struct, frozen=True):
    """Counters of one model, all replicas together, since its server started."""

    steps: float = 0.0
    step_s: float = 0.0
    parts_s: dict[str, float] = {}


class StepProfile(msgspec.Struct, frozen=True):
    """Mean seconds of a step. ``parts_s`` without ``send`` adds up to ``step_s``, because it contains ``other``.
    ``send`` happens between steps."""

    steps: int
    step_s: float
    parts_s: dict[str, float]


def parse(lines: Iterable[str], model: str) -> Reading:
    """One reading out of the text of ``/metrics``."""
    steps = step_s = 0.0
    parts: dict[str, float] = {}
    for line in lines:
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found[2]))
        if labels.get("model") != model:
            continue
        if found[1] == "step_seconds_count":
            steps += float(found[3])
        elif found[1] == "step_seconds_sum":
            step_s += float(found[3])
        else:
            parts[labels["part"]] = parts.get(labels["part"], 0.0) + float(found[3])
    return Reading(steps, step_s, parts)


async def read(target: Target) -> Reading:
    """The counters now. Raises Unavailable when the server has none of them."""
    connection = Connection(target.url, 10.0, target.api_key)
    try:
        lines = [line.decode("utf-8", "replace") async for line in connection.lines("GET", "/metrics")]
    except (OSError, ServerError, asyncio.IncompleteReadError, TimeoutError) as error:
        raise Unavailable(
            f"{target.url}/metrics cannot be read ({str(error) or type(error).__name__}), which --profile needs; run "
            "without --profile."
        ) from None
    finally:
        connection.close()
    reading = parse(lines, target.model)
    if not reading.parts_s:
        raise Unavailable(
            f"{target.url}/metrics has no step times of {target.model!r}; --profile is for models that an "
            "inferd server computes itself."
        )
    return reading


def between(before: Reading, after: Reading) -> StepProfile:
    """Means over the steps between two readings."""
    steps = after.steps - before.steps
    each = 1 / steps if steps > 0 else 0.0
    step_s = (after.step_s - before.step_s) * each
    parts = {name: (seconds - before.parts_s.get(name, 0.0)) * each for name, seconds in after.parts_s.items()}
    inside = sum(seconds for name, seconds in parts.items() if name != "send")
    return StepProfile(int(steps), step_s, {**parts, "other": max(step_s - inside, 0.0)})
