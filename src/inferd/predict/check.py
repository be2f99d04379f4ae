"""A decoded request's inputs against the model's contract: names, datatypes, shapes.

Every input of a runtime has passed this check. Every error names the input, what was expected and what was given. Knows
no dialect and no runtime; copies nothing that already fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from inferd.errors import InvalidRequest
from inferd.predict.bounds import check_answer
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import NUMPY, Array, Contract, Tensors, datatype_of, object_array
from inferd.types import TensorSpec

_MOST_LISTED: Final = 64  # names in one sentence
_FLOATS: Final = frozenset({"FP16", "FP32", "FP64"})
_INTEGERS: Final = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})


class _Plan:
    """What one input must be."""

    __slots__ = ("datatype", "dtype", "is_any_rank", "is_cast", "rest", "shape", "spec")

    def __init__(self, spec: TensorSpec, contract: Contract) -> None:
        self.spec = spec
        self.datatype = spec.datatype
        self.dtype = NUMPY[spec.datatype]
        self.is_cast = spec.name in contract.casts
        self.is_any_rank = spec.name in contract.any_rank
        self.shape = spec.shape
        is_usual = spec.shape[:1] == (-1,) and -1 not in spec.shape[1:]  # any number of rows, each of one shape
        self.rest = spec.shape[1:] if is_usual else None

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.rest is not None:
            return shape[1:] == self.rest and len(shape) > 0
        return len(shape) == len(self.shape) and all(
            want in (has, -1) for want, has in zip(self.shape, shape, strict=True)
        )


class Checker:
    """One contract's, made once: a request costs a few comparisons."""

    def __init__(self, contract: Contract) -> None:
        self._plans = {spec.name: _Plan(spec, contract) for spec in contract.inputs}
        self._specs = {spec.name: spec for spec in contract.inputs}
        self._required = tuple(spec.name for spec in contract.inputs if not spec.is_optional)
        self._outputs = frozenset(spec.name for spec in contract.outputs)
        self._has_rows = contract.max_batch_size > 0
        self._refuses_nan = contract.refuses_nan
        self._contract = contract

    def check(self, decoded: DecodedRequest) -> tuple[Tensors, int]:
        """The inputs in the model's datatypes, and their size along the batch dimension (1 when there is none).

        Raises InvalidRequest.
        """
        inputs, said = decoded.inputs, decoded.datatypes
        if len(inputs) != len(self._plans):
            self._check_names(inputs)
        if decoded.wanted and self._outputs:
            self._check_wanted(decoded.wanted)
        checked: dict[str, Array] = {}
        rows = 0
        for name, array in inputs.items():
            plan = self._plans.get(name)
            if plan is None:
                self._check_names(inputs)
                continue  # never: that raised
            word = None if said is None or plan.is_cast else said.get(name)
            if word != plan.datatype or array.dtype is not plan.dtype:
                array = _typed(plan.spec, array, word)
            shape = array.shape
            if not plan.is_any_rank and not plan.fits(shape):
                raise _unfit(plan.spec, f"got the shape {_shape(shape)}")
            if self._has_rows:
                size = shape[0] if shape else 0
                if not size or (rows and size != rows):
                    raise _uneven(name, inputs)
                rows = size
            if self._refuses_nan:
                _check_finite(plan.spec, array)
            checked[name] = array
        if decoded.is_json_answer and rows > 1:
            check_answer(rows, decoded.wanted, self._contract)
        return checked, rows or 1

    def _check_wanted(self, wanted: tuple[str, ...]) -> None:
        for name in wanted:
            if name not in self._outputs:
                raise InvalidRequest(
                    f"The model has no output {name[:64]!r}; its outputs are {_listed(self._outputs)}.", param="outputs"
                )

    def _check_names(self, inputs: Tensors) -> None:
        for name in inputs:
            if name not in self._specs:
                raise InvalidRequest(
                    f"The model has no input {name[:64]!r}; its inputs are {_listed(self._specs)}.", param="inputs"
                )
        for name in self._required:
            if name not in inputs:
                raise InvalidRequest(
                    f"The input {name!r} is missing; expected {_spec_text(self._specs[name])}, got the inputs "
                    f"{_listed(inputs)}.",
                    param="inputs",
                )


def _uneven(name: str, inputs: Tensors) -> InvalidRequest:
    """An input without rows, or with other numbers of them than the input before it."""
    array = inputs[name]
    if not array.ndim or not array.shape[0]:
        return InvalidRequest(
            f"The input {name!r} has the shape {_shape(array.shape)}; expected at least one row in its first "
            "dimension.",
            param="inputs",
        )
    shapes = ", ".join(f"{other!r} {_shape(np.shape(value))}" for other, value in inputs.items())
    return InvalidRequest(
        f"The inputs must have the same number of rows in their first dimension; got {shapes}.", param="inputs"
    )


def _typed(spec: TensorSpec, array: Array, said: str | None) -> Array:
    """The array in the contract's datatype. A datatype that the client named must be the contract's. Otherwise values
    are cast if none of them changes."""
    wanted = NUMPY[spec.datatype]
    if said is not None:
        if said != spec.datatype:
            raise _unfit(spec, f"got the datatype {said}")
        if array.dtype == wanted:
            return array
    if array.dtype == wanted and spec.datatype != "BF16":
        return array
    return _cast(spec, array, wanted)


def _cast(spec: TensorSpec, array: Array, wanted: np.dtype[np.generic]) -> Array:
    try:
        has = datatype_of(array.dtype)
    except KeyError:
        raise _unfit(spec, f"got values of the type {array.dtype}") from None
    if spec.datatype == "BYTES":
        if has != "BYTES":
            raise _unfit(spec, f"got {has}")
        texts = [value.encode() if isinstance(value, str) else bytes(value) for value in array.ravel().tolist()]
        return object_array(texts).reshape(array.shape)
    if has == "BYTES" or (spec.datatype == "BOOL") != (has == "BOOL"):
        raise _unfit(spec, f"got {has}")
    if spec.datatype == "BF16":
        if has not in _FLOATS and has not in _INTEGERS:
            raise _unfit(spec, f"got {has}")
        return _to_bfloat16(array.astype(np.float32))
    if spec.datatype in _FLOATS:
        with np.errstate(over="ignore"):
            cast = array.astype(wanted)
        if not np.isfinite(cast).all() and np.isfinite(array.astype(np.float64)).all():
            raise _unfit(spec, f"got {has} values that are too large for it")
        return cast
    if has in _FLOATS and not np.isfinite(array.astype(np.float64)).all():
        raise _unfit(spec, f"got {has} values that are no numbers")
    limits = np.iinfo(wanted.name)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise _unfit(spec, f"got {has} values beyond {limits.min} to {limits.max}")
    cast = array.astype(wanted)
    if has in _FLOATS and not np.array_equal(cast, array):
        raise _unfit(spec, f"got {has} values with fractions")
    return cast


def _to_bfloat16(array: Array) -> Array:
    """The upper halves of float32, rounded to the nearest even."""
    bits = array.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.where(np.isnan(array), np.uint16(0x7FC0), (rounded >> 16).astype(np.uint16))


def _check_finite(spec: TensorSpec, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRequest(
            f"The input {spec.name!r} holds NaN or infinity, which this model does not take; expected finite numbers.",
            param="inputs",
        )


def _unfit(spec: TensorSpec, got: str) -> InvalidRequest:
    return InvalidRequest(f"The input {spec.name!r} does not fit: expected {_spec_text(spec)}, {got}.", param="inputs")


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.datatype} of the shape {_shape(spec.shape)}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _listed(names: Mapping[str, object] | frozenset[str]) -> str:
    shown = [repr(name if len(name) <= 64 else name[:64] + "...") for name in sorted(names)[:_MOST_LISTED]]
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return (", ".join(shown) or "none") + more
