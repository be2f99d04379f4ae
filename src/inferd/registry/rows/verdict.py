"""Whether requests may be computed together, and for which reason.

A reason is a declaration of the operator, the exporter's name of the first dimension, a kind of model whose rows are
independent by nature, or a proof over the graph. That two computations gave the same numbers is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from inferd.registry.rows.value import ROWS, Mixed, Rows, Value, worst

Because = Literal["declared", "named", "by_nature", "proved"]

CLAIM: Final = "batching.max_batch_size"
"""The setting by which an operator declares that rows are independent."""

_BATCH_NAMES: Final = re.compile(r".*batch.*|bs|(?:num_)?(?:examples|instances)", re.I)
_TIME_NAMES: Final = re.compile(r".*(?:seq|time|len|step|frame|token|position|channel|height|width).*", re.I)
_EXACT_NAMES: Final = frozenset({"N", "B"})


class Verdict(msgspec.Struct, frozen=True):
    """Why the rows of a model are a batch; ``because`` None: they are not known to be one. ``sentence`` is the reason
    in words."""

    because: Because | None = None
    sentence: str = ""

    is_open: bool = False  # whether the shapes allow a batch, so that a declaration is accepted


DECLARED: Final = Verdict("declared", f"{CLAIM} declares it")
BY_NATURE: Final = Verdict("by_nature", "each row is computed by itself")


def claimed(found: Verdict, max_batch_size: int | None) -> Verdict:
    """The verdict, or the operator's own where ``batching.max_batch_size`` declares rows: a size of 1 declares none."""
    if found.is_open and max_batch_size is not None and max_batch_size > 1:
        return DECLARED
    return found


def is_batch_name(name: str) -> bool:
    """Whether a symbolic dimension has a usual name of the batch."""
    if len(name) == 1:
        return name in _EXACT_NAMES
    return bool(_BATCH_NAMES.fullmatch(name)) and not _TIME_NAMES.fullmatch(name)


def proof(outputs: Mapping[str, Value], axes: Mapping[str, int | None] = {}) -> Verdict:
    """The verdict from the values of a graph's outputs: proved, or not known with the reason. ``axes``: the axis of the
    rows when it is not the first."""
    mixed = worst(outputs.values())
    if mixed is not None:
        return Verdict(None, mixed.reason)
    for name, value in outputs.items():
        assert not isinstance(value, Mixed)
        axis = axes.get(name, 0)
        if type(value) is not Rows or value.axis != axis or value.dims[axis] != ROWS:
            return Verdict(None, f"the output {name!r} does not have the rows along its dimension {axis}")
    return Verdict("proved", "each row of its graph is computed by itself")


def is_refuted(outputs: Mapping[str, Value]) -> bool:
    """Whether an operator is known to carry data from row to row."""
    return any(isinstance(value, Mixed) and value.is_certain for value in outputs.values())


def refutes_name(outputs: Mapping[str, Value]) -> bool:
    """Whether the graph refutes the exporter's name of the dimension as a reason."""
    mixed = worst(outputs.values())
    return mixed is not None and (mixed.is_certain or mixed.refutes_name)


def judged(outputs: Mapping[str, Value], names: Sequence[str], axes: Mapping[str, int | None] = {}) -> Verdict:
    """By the graph, else by the names of the dimensions of the rows, unless the graph refutes them. A name counts once
    a trial has computed rows alone and together (``predict/runtimes/trial.py``)."""
    found = proof(outputs, axes)
    if found.because is not None:
        return msgspec.structs.replace(found, is_open=True)
    if names and all(map(is_batch_name, names)) and not refutes_name(outputs):
        return Verdict("named", f"the file calls its first dimension {names[0]!r}", is_open=True)
    doubt = "its rows depend on each other" if is_refuted(outputs) else "its rows may depend on each other"
    return Verdict(None, f"{doubt}: {found.sentence}; {CLAIM} declares that they do not", is_open=True)
