"""Whether two outputs of a model are equal except for rounding.

Knows arrays and contracts; knows neither runtimes nor requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from inferd.predict.contract import Array, Contract, widened

_OF_SCALE: Final = 1e-4  # the difference that rounding may make, as a part of the output's largest number
_OF_VALUE: Final = 1e-3  # relative to the number itself
_HALF: Final = 30.0  # times as much where numbers have 16 bits
_SHORT: Final = 10.0  # relative, when products of 32 bits are rounded to fewer, as GPUs do (TF32)
_OF_NOISE: Final = 4.0  # times what differs when the same is computed again
_COARSE: Final[Mapping[str, float]] = {"float16": _HALF, "BF16": _HALF, "float32": 1.0, "float64": 1.0}
_HALF_MODELS: Final = frozenset({"float16", "bfloat16"})


def reals(array: Array) -> npt.NDArray[np.float64]:
    """Real numbers as float64; uint16 are bfloat16."""
    if array.dtype == np.uint16:
        return widened(array).astype(np.float64)
    return array.astype(np.float64)


def distance(contract: Contract, name: str, one: Array, other: Array) -> float:
    """The largest difference of an output of real numbers; infinite for any other that differs."""
    if _kind(contract, name, one) not in _COARSE or np.shape(one) != np.shape(other):
        return 0.0 if np.array_equal(one, other) else math.inf
    with np.errstate(all="ignore"):
        differences = np.abs(reals(one) - reals(other))
    return float(np.max(differences[np.isfinite(differences)], initial=0.0))


def agree(contract: Contract, name: str, expected: Array, found: Array, noise: float) -> bool:
    """Whether an output is the expected one. ``noise``: its ``distance`` when the same is computed again. An output
    that is drawn at random agrees with any."""
    if np.shape(expected) != np.shape(found):
        return False
    kind = _kind(contract, name, found)
    if kind not in _COARSE:
        return noise > 0.0 or np.array_equal(expected, found)
    one, other = reals(expected), reals(found)
    scale = float(np.max(np.abs(one[np.isfinite(one)]), initial=0.0))
    is_half, is_short = contract.dtype in _HALF_MODELS, contract.rounds_products
    coarse = max(_COARSE[kind], _HALF if is_half else _SHORT if is_short else 1.0)
    atol = coarse * _OF_SCALE * scale + _OF_NOISE * noise
    return bool(np.allclose(other, one, rtol=coarse * _OF_VALUE, atol=atol, equal_nan=True))


def _kind(contract: Contract, name: str, array: Array) -> str:
    is_bfloat16 = any(spec.name == name and spec.datatype == "BF16" for spec in contract.outputs)
    return "BF16" if is_bfloat16 and array.dtype == np.uint16 else array.dtype.name
