"""Whether an answer is what a line of a golden set expects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from inferd.compare.answers import Answer as Parts
from inferd.compare.golden import unmet
from inferd.compare.reading import answer_of_body
from inferd.compare.tensors import UnreadableAnswer
from inferd.replay.answers import Answer, read_answer
from inferd.replay.edit_distance import edit_distance
from inferd.replay.golden import Case, Numeric
from inferd.structured.check import Validator

_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
_SHOWN: Final = 120


def failures(case: Case, status: int, body: bytes) -> list[str]:
    """Why an answer is not what was expected, one sentence for each check; empty: it is."""
    answer = read_answer(case.item.path, status, body, is_stream=False)
    if answer.error:
        return [f"failed: {answer.error}"]
    try:
        parts = answer_of_body(body)
    except UnreadableAnswer as error:
        return [f"failed: {error}"]
    return list(_failures(case, answer, parts))


def _failures(case: Case, answer: Answer, parts: Parts) -> Iterator[str]:
    item, text = case.item, answer.text
    if item.contains is not None or item.equals is not None or item.label is not None:
        found = unmet(item, parts)
        if found is not None:
            yield f"expected: {found}"
    if case.regex is not None and re.search(case.regex, text) is None:
        yield f"regex: nothing in {_short(text)} matches {_short(case.regex)}"
    if case.json_schema is not None:
        problem = Validator(case.json_schema).errors(text)
        if problem is not None:
            yield f"json_schema: {problem}"
    if case.numeric is not None:
        yield from _numeric(case.numeric, numbers_of(answer))
    if case.max_distance is not None:
        near = case.max_distance
        distance = edit_distance(text, near.text)
        if distance is None or distance > near.distance:
            yield f"max_distance: {_short(text)} is {distance} characters away, {near.distance} are allowed"


def _numeric(expected: Numeric, found: Sequence[float]) -> Iterator[str]:
    wanted = expected.value if isinstance(expected.value, list) else [expected.value]
    if len(found) < len(wanted) or (isinstance(expected.value, list) and len(found) > len(wanted)):
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
