"""Which inputs could be pictures, and an example of a command for a model: from names, datatypes and shapes alone.

Knows no array, so that ``inferd serve`` can show it without importing numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from inferd.types import TensorSpec

_CHANNELS: Final = (1, 3, 4)
_MOST_NUMBERS: Final = 8  # of an example that is typed
_PICTURES: Final = ("image", "img", "picture", "photo")
_LEAST_SIDE: Final = 8  # of rows and columns that may be a picture: less is a table or a series


class Layout(NamedTuple):
    """Where a picture's axes are in an input; 0: as large as the picture is."""

    height: int
    width: int
    channels: int
    is_channels_first: bool | None  # None: there is no axis of channels


def layout_of(spec: TensorSpec) -> Layout | None:
    """How a picture could be laid out in an input of numbers; None: it could not."""
    shape = spec.shape
    if len(shape) == 4 and shape[0] in (-1, 1):
        shape = shape[1:]
    elif len(shape) == 3 and shape[0] == -1 and -1 not in shape[1:]:
        shape = shape[1:]  # rows of grey pictures
    if len(shape) == 2 and min(shape) >= _LEAST_SIDE:
        return Layout(shape[0], shape[1], 1, None)
    if len(shape) != 3:
        return None
    if shape[0] in _CHANNELS:
        return Layout(max(shape[1], 0), max(shape[2], 0), shape[0], True)
    if shape[2] in _CHANNELS:
        return Layout(max(shape[0], 0), max(shape[1], 0), shape[2], False)
    return None


def takes_pictures(spec: TensorSpec) -> bool:
    """Whether a picture is what an input is for: its files by its name, its pixels by its shape."""
    if spec.datatype == "BYTES":
        return any(word in spec.name.lower() for word in _PICTURES)
    return layout_of(spec) is not None


def example_input(specs: Sequence[TensorSpec]) -> str:
    """The options of ``inferd predict`` for an example request of a model."""
    needed = [spec for spec in specs if not spec.is_optional] or list(specs[:1])
    values = {spec.name: _example_value(spec) for spec in needed}
    if len(needed) == 1:
        return f"--input {values[needed[0].name]}"
    return " ".join(f"--input {name}={value}" for name, value in values.items())


def _example_value(spec: TensorSpec) -> str:
    if takes_pictures(spec):
        return "PICTURE.jpg"
    if spec.datatype == "BYTES":
        return "'some text'"
    count = math.prod(size for size in spec.shape if size != -1)
    return ",".join(["0"] * count) if count <= _MOST_NUMBERS else "VALUES.npy"
