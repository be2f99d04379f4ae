"""Whether an answer is what a golden set expects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from inferd.replay.answers import Answer
from inferd.replay.edit_distance import edit_distance
from inferd.replay.golden import Expected, Numeric
from inferd.structured.check import Validator

_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
_SHOWN: Final = 120


def failures(expected: Expected, answer: Answer) -> list[str]:
    """Why an answer is not what was expected, one sentence for each check; empty: it is."""
    if answer.error:
        return [answer.error]
    return list(_failures(expected, answer))


def _failures(expected: Expected, answer: Answer) -> Iterator[str]:
    text = answer.text
    if expected.equals is not None and text != expected.equals:
        yield f"equals: {_short(text)} is not {_short(expected.equals)}"
    if expected.contains is not None:
        wanted = [expected.contains] if isinstance(expected.contains, str) else expected.contains
        missing = [one for one in wanted if one not in text]
        if missing:
            yield f"contains: {_short(text)} does not have {', '.join(map(_short, missing))}"
    if expected.regex is not None and re.search(expected.regex, text) is None:
        yield f"regex: nothing in {_short(text)} matches {_short(expected.regex)}"
    if expected.json_schema is not None:
        problem = Validator(expected.json_schema).errors(text)
        if problem is not None:
            yield f"json_schema: {problem}"
    if expected.label is not None:
        found = answer.labels[0] if answer.labels else text.strip()
        if found != str(expected.label):
            yield f"label: {_short(found)} is not {_short(str(expected.label))}"
    if expected.numeric is not None:
        yield from _numeric(expected.numeric, answer)
    if expected.max_distance is not None:
        distance = edit_distance(text, expected.max_distance.text)
        if distance is None or distance > expected.max_distance.distance:
            yield f"max_distance: {_short(text)} is {distance} characters away, {expected.max_distance.distance} are allowed"


def _numeric(expected: Numeric, answer: Answer) -> Iterator[str]:
    wanted = expected.value if isinstance(expected.value, list) else [expected.value]
    found = numbers_of(answer)
    if len(found) < len(wanted):
        yield f"numeric: {len(found)} numbers were answered, {len(wanted)} are expected"
        return
    if isinstance(expected.value, list) and len(found) > len(wanted):
        yield f"numeric: {len(found)} numbers were answered, {len(wanted)} are expected"
        return
    for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if not abs(one - other) <= expected.abs + expected.rel * abs(other):
            yield f"numeric: number {index} is {one:.8g}, and {other:.8g} is expected"
            return


def numbers_of(answer: Answer) -> Sequence[float]:
    """The numbers of an answer's tensors or, without tensors, those in its text."""
    tensors = [array for array in answer.tensors.values() if array.dtype.kind in "fiu"]
    if tensors:
        found: list[float] = np.concatenate([array.ravel().astype(np.float64) for array in tensors]).tolist()
        return found
    return [float(one.replace(",", "")) for one in _NUMBER.findall(answer.text)]


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
