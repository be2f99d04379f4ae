"""Operations on numbers of any meaning: normalisation, axes, datatypes, joining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from inferd.config.pipeline_graph import Spec
from inferd.errors import InvalidRequest
from inferd.predict.contract import NUMPY, Array, Tensors
from inferd.predict.steps.operation import (
    Function,
    Operation,
    as_floats,
    axis_of,
    dense,
    floats,
    is_behind_rows,
    numbers,
)

Factors = float | tuple[float, ...]
_Positive = Annotated[float, Meta(gt=0)]


class Normalize(Operation, frozen=True, kw_only=True):
    """(input * scale - mean) / std, with one number for all or one for each place of ``axis``."""

    mean: Factors = 0.0
    std: _Positive | tuple[_Positive, ...] = 1.0
    scale: float = 1.0
    axis: int = -1

    def expects_for(self, output: Spec) -> Spec | None:
        return Spec("FP32", output.shape)

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = numbers("input", inputs["input"])
        for name, factors in (("mean", self.mean), ("std", self.std)):
            if isinstance(factors, tuple):
                place = axis_of(spec, self.axis)
                assert spec.shape is not None
                if spec.shape[place] not in (-1, len(factors)):
                    raise ValueError(
                        f"{name} has {len(factors)} numbers, but axis {self.axis} of its input has {spec.shape[place]}"
                    )
        return {"output": as_floats(spec)}

    def is_by_rows(self, ndim: int) -> bool:
        has_places = isinstance(self.mean, tuple) or isinstance(self.std, tuple)
        return not has_places or is_behind_rows(self.axis, ndim)

    def load(self) -> Function:
        doubles = [np.asarray(factors, dtype=np.float64) for factors in (self.mean, self.std)]
        factors = {np.dtype(kind): [one.astype(kind) for one in doubles] for kind in (np.float32, np.float64)}
        scales = {dtype: dtype.type(self.scale) for dtype in factors}

        def run(inputs: Tensors) -> Tensors:
            array = floats(inputs["input"])
            mean, std = (self._along(array, one) for one in factors[array.dtype])
            scaled = array * scales[array.dtype] if self.scale != 1.0 else array
            made = np.subtract(scaled, mean)
            return {"output": np.divide(made, std, out=made)}

        return run

    def _along(self, array: Array, factors: Array) -> Array:
        if not factors.ndim:
            return factors
        if array.shape[self.axis] != factors.size:
            raise InvalidRequest(
                f"An input has {array.shape[self.axis]} places where {factors.size} features are expected.",
                param="inputs",
            )
        if self.axis == -1:
            return factors
        shape = [1] * array.ndim
        shape[self.axis] = factors.size
        return factors.reshape(shape)


class Rescale(Operation, frozen=True, kw_only=True):
    """input * scale + offset, or e to the power of that: a regression's output in the units of its target."""

    by_rows: ClassVar[bool] = True

    scale: float = 1.0
    offset: float = 0.0
    exp: bool = False

    def expects_for(self, output: Spec) -> Spec | None:
        return Spec("FP32", output.shape)

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        return {"output": as_floats(numbers("input", inputs["input"]))}

    def run(self, inputs: Tensors) -> Tensors:
        array = floats(inputs["input"])
        made = array * array.dtype.type(self.scale) + array.dtype.type(self.offset)
        if self.exp:
            with np.errstate(over="ignore"):
                made = np.exp(made)
        return {"output": made}


class Transpose(Operation, frozen=True, kw_only=True):
    """The axes in another order: [0, 3, 1, 2] turns images with channels last into channels first. Copies nothing."""

    axes: tuple[int, ...]

    def expects_for(self, output: Spec) -> Spec | None:
        if output.shape is None or sorted(self.axes) != list(range(len(output.shape))):
            return None
        return Spec(output.datatype, tuple(output.shape[self.axes.index(axis)] for axis in range(len(self.axes))))

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = inputs["input"]
        if sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"axes are each of 0 to {len(self.axes) - 1} once, not {list(self.axes)}")
        if spec.shape is None:
            return {"output": Spec(spec.datatype, (-1,) * len(self.axes))}
        if len(spec.shape) != len(self.axes):
            raise ValueError(f"it has {len(self.axes)} axes, but its input has {len(spec.shape)} dimensions")
        return {"output": Spec(spec.datatype, tuple(spec.shape[axis] for axis in self.axes))}

    def is_by_rows(self, ndim: int) -> bool:
        return self.axes[:1] == (0,)

    def run(self, inputs: Tensors) -> Tensors:
        array = dense(inputs["input"])
        if array.ndim != len(self.axes):
            raise InvalidRequest(
                f"An input has {array.ndim} dimensions where {len(self.axes)} are expected.", param="inputs"
            )
        return {"output": array.transpose(self.axes)}


class Reshape(Operation, frozen=True, kw_only=True):
    """Another shape for each row; one size may be -1. The first axis, the rows, stays."""

    by_rows: ClassVar[bool] = True

    shape: tuple[Annotated[int, Meta(ge=-1)], ...]

    def expects_for(self, output: Spec) -> Spec | None:
        return Spec(output.datatype, None)  # rows of any shape, as long as their sizes multiply to the same

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = inputs["input"]
        if self.shape.count(-1) > 1:
            raise ValueError("only one size of its shape may be -1")
        rows = -1 if not spec.shape else spec.shape[0]
        return {"output": Spec(spec.datatype, (rows, *self.shape))}

    def run(self, inputs: Tensors) -> Tensors:
        array = dense(inputs["input"])
        try:
            return {"output": array.reshape(len(array), *self.shape)}
        except ValueError:
            raise InvalidRequest(
                f"A row of the shape {list(array.shape[1:])} cannot become {list(self.shape)}.", param="inputs"
            ) from None


class Cast(Operation, frozen=True, kw_only=True):
    """Another datatype; numbers are cut to what it holds as numpy does, fractions towards zero."""

    by_rows: ClassVar[bool] = True

    datatype: Literal[
        "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"
    ]

    def expects_for(self, output: Spec) -> Spec | None:
        return Spec("FP32", output.shape)

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        return {"output": Spec(self.datatype, numbers("input", inputs["input"]).shape)}

    def run(self, inputs: Tensors) -> Tensors:
        with np.errstate(invalid="ignore", over="ignore"):
            return {"output": dense(inputs["input"]).astype(NUMPY[self.datatype], copy=False)}


class Concat(Operation, frozen=True, kw_only=True):
    """All inputs side by side along ``axis``, in the order in which the step lists them."""

    takes: ClassVar[tuple[str, ...]] = ()

    axis: int = -1

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        specs = [numbers(name, spec) for name, spec in inputs.items()]
        place = axis_of(specs[0], self.axis)
        shapes = [spec.shape for spec in specs]
        dtype = np.result_type(*(NUMPY[spec.datatype] for spec in specs))
        merged: list[int] = []
        assert shapes[0] is not None
        for dimension in range(len(shapes[0])):
            sizes = [shape[dimension] for shape in shapes if shape is not None and len(shape) == len(shapes[0])]
            if len(sizes) != len(shapes):
                raise ValueError("its inputs have different numbers of dimensions")
            known = {size for size in sizes if size != -1}
            if dimension == place:
                merged.append(sum(sizes) if -1 not in sizes else -1)
            elif len(known) > 1:
                raise ValueError(f"its inputs have the sizes {sorted(known)} in dimension {dimension}")
            else:
                merged.append(next(iter(known), -1))
        word = next(name for name, numpy in NUMPY.items() if numpy == dtype)
        return {"output": Spec(word, tuple(merged))}

    def is_by_rows(self, ndim: int) -> bool:
        return is_behind_rows(self.axis, ndim)

    def run(self, inputs: Tensors) -> Tensors:
        arrays = [dense(array) for array in inputs.values()]
        try:
            return {"output": np.concatenate(arrays, axis=self.axis)}
        except ValueError as error:
            raise InvalidRequest(f"The inputs cannot be joined: {error}.", param="inputs") from None


class Either(Operation, frozen=True, kw_only=True):
    """The one of its inputs that the request brings: a picture that other steps have prepared, or the numbers
    themselves.

    The pipeline's inputs that lead here alone may be left out; a request brings exactly one of them.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    chooses: ClassVar[bool] = True

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        first, *others = inputs.items()
        for name, spec in others:
            if spec[:2] != first[1][:2]:
                described = " and ".join(
                    f"{key!r} {one.datatype} {_shape_text(one.shape)}" for key, one in (first, (name, spec))
                )
                raise ValueError(f"its inputs must be of one datatype and shape, not {described}")
        return {"output": first[1]}

    def run(self, inputs: Tensors) -> Tensors:
        if len(inputs) == 1:
            return {"output": next(iter(inputs.values()))}
        got = " and ".join(map(repr, inputs)) or "none of them"
        raise InvalidRequest(
            f"The request must have exactly one of the alternative inputs of a step; got {got}.", param="inputs"
        )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "of any shape" if shape is None else str(list(shape))
