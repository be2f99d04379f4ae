"""The inputs and outputs of a Python class, from its attributes or from the annotations of ``predict``.

``inputs = {"x": "FP32[-1, 64]"}`` declares; without it every parameter of ``predict`` is an input, its datatype from
the annotation: ``NDArray[np.float32]`` (any shape), ``Annotated[NDArray[np.float32], (-1, 64)]``, ``str``, ``int``,
``float``, ``bool``, ``bytes`` (one value, passed as such) and lists of these. A parameter without an annotation is an
FP32 array.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from inferd.errors import InternalError, ModelLoadError
from inferd.predict.contract import NUMPY, Array, Tensors, datatype_of
from inferd.types import TensorSpec

Given = Literal["array", "scalar", "list"]

_DECLARED: Final = re.compile(r"\s*(?P<datatype>[A-Za-z]+\d*)\s*(?:\[(?P<shape>[-\d,\s]*)\])?\s*")
_SCALARS: Final[dict[object, str]] = {str: "BYTES", bytes: "BYTES", int: "INT64", float: "FP64", bool: "BOOL"}
_PARAMETERS: Final = "parameters"


class Place(msgspec.Struct, frozen=True):
    """One input or output, with the form in which the class takes or returns it."""

    spec: TensorSpec
    given: Given = "array"
    is_text: bool = False  # str, not bytes
    is_any_rank: bool = False


class Signature:
    """Of one class: its contract's parts, and the way from tensors to arguments and from answers to tensors."""

    def __init__(
        self,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        max_batch_size: int,
        *,
        takes_parameters: bool,
        whole: str = "",
    ) -> None:
        self.inputs = tuple(place.spec for place in inputs)
        self.outputs = tuple(place.spec for place in outputs)
        self.any_rank = tuple(place.spec.name for place in inputs if place.is_any_rank)
        self.max_batch_size = max_batch_size
        self._inputs = {place.spec.name: place for place in inputs}
        self._outputs = {place.spec.name: place for place in outputs}
        self._takes_parameters = takes_parameters
        self._whole = whole  # the one parameter that takes all inputs as a dict

    def named(self, inputs: Tensors) -> dict[str, object]:
        """The inputs in the form that the class takes."""
        return {name: _given(self._inputs[name], array) for name, array in inputs.items()}

    def arguments(self, inputs: Tensors, parameters: Mapping[str, object]) -> dict[str, object]:
        """The arguments of one call of ``predict``."""
        named = self.named(inputs)
        arguments: dict[str, object] = {self._whole: named} if self._whole else named
        if self._takes_parameters:
            arguments[_PARAMETERS] = dict(parameters)
        return arguments

    def outputs_of(self, answer: object) -> dict[str, Array]:
        """An answer as named arrays, in the declared datatypes. Raises InternalError for any other object."""
        names = list(self._outputs)
        if isinstance(answer, Mapping):
            parts = {str(name): value for name, value in answer.items()}
        elif isinstance(answer, tuple) and len(names) == len(answer) > 1:
            parts = dict(zip(names, answer, strict=True))
        else:
            parts = {names[0] if len(names) == 1 else "output": answer}
        missing = [name for name in names if name not in parts]
        if missing:
            raise InternalError(
                f"The model's answer lacks the outputs {', '.join(missing)}; it has {', '.join(parts)}."
            )
        return {name: _converted(name, value, self._outputs.get(name)) for name, value in parts.items()}


def read_signature(model: object, source: str) -> Signature:
    """Raises ModelLoadError for a declaration that cannot be understood."""
    predict = getattr(model, "predict", None)
    if not callable(predict):
        raise ModelLoadError(
            f"{type(model).__name__} has no method predict; a model is a class with predict, and load where there is "
            "something to load.",
            param="source",
        )
    hints = _hints(predict)
    parameters = [
        parameter
        for parameter in inspect.signature(predict).parameters.values()
        if parameter.name != _PARAMETERS and parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    takes_parameters = _PARAMETERS in inspect.signature(predict).parameters
    declared = getattr(model, "inputs", None)
    whole = ""
    if declared is not None:
        inputs = _declared(declared, "inputs", source)
        names = {place.spec.name for place in inputs}
        single = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        has_keywords = len(single) < len(parameters)
        if len(single) == 1 and single[0].name not in names:
            whole = single[0].name
        elif not has_keywords and {p.name for p in single} != names:
            raise ModelLoadError(
                f"{source}: inputs declares {', '.join(sorted(names))}, but predict takes "
                f"{', '.join(p.name for p in single) or 'nothing'}. Give them the same names, or let predict take one "
                "parameter, a dict of all inputs.",
                param="source",
            )
    else:
        inputs = [_annotated(parameter, hints.get(parameter.name), source) for parameter in parameters]
    has_outputs = getattr(model, "outputs", None)
    outputs = _declared(has_outputs, "outputs", source) if has_outputs is not None else _returned(hints.get("return"))
    max_batch_size = getattr(model, "max_batch_size", 0)
    if not isinstance(max_batch_size, int) or max_batch_size < 0:
        raise ModelLoadError(
            f"{source}: max_batch_size is {max_batch_size!r}; expected a number of rows.", param="source"
        )
    return Signature(inputs, outputs, max_batch_size, takes_parameters=takes_parameters, whole=whole)


def _hints(function: object) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # names that exist only for type checkers
        return {}


# -- declarations ------------------------------------------------------------------------------


def _declared(declared: object, what: str, source: str) -> list[Place]:
    if isinstance(declared, Mapping):
        return [_one(str(name), value, what, source) for name, value in declared.items()]
    if isinstance(declared, Sequence) and all(isinstance(spec, TensorSpec) for spec in declared):
        return [Place(spec) for spec in declared]
    raise ModelLoadError(
        f"{source}: {what} is {declared!r}; expected a dict such as {{'x': 'FP32[-1, 64]'}}.", param="source"
    )


def _one(name: str, value: object, what: str, source: str) -> Place:
    shape: tuple[int, ...] | None = None
    kind: object = value
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], tuple | list):
        kind, shape = value[0], tuple(int(size) for size in value[1])
    elif isinstance(value, str):
        found = _DECLARED.fullmatch(value)
        if found is not None:
            kind = found["datatype"].upper()
            if found["shape"] is not None:
                shape = tuple(int(size) for size in found["shape"].split(",") if size.strip())
    datatype = kind if isinstance(kind, str) and kind in NUMPY else _datatype(kind)
    if datatype is None or any(size < -1 or size == 0 for size in shape or ()):
        raise ModelLoadError(
            f"{source}: {what} says that {name} is {value!r}; expected one of {', '.join(NUMPY)} with a shape, such as "
            "'FP32[-1, 64]' (-1: any size).",
            param="source",
        )
    return Place(TensorSpec(name, datatype, (-1,) if shape is None else shape), is_any_rank=shape is None)


def _datatype(kind: object) -> str | None:
    if kind in _SCALARS:
        return _SCALARS[kind]
    try:
        return datatype_of(np.dtype(kind))  # type: ignore[call-overload]
    except (TypeError, KeyError):
        return None


def _annotated(parameter: inspect.Parameter, hint: object, source: str) -> Place:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        raise ModelLoadError(
            f"{source}: predict takes **{parameter.name}, so its inputs cannot be known. Declare them: "
            "inputs = {'x': 'FP32[-1, 64]'}.",
            param="source",
        )
    place = _hinted(parameter.name, hint)
    if place is None:
        raise ModelLoadError(
            f"{source}: the parameter {parameter.name} of predict is annotated with {hint!r}, which stands for no "
            "tensor. Use NDArray[np.float32], str, int, float, bool, bytes or lists of these, or declare inputs.",
            param="source",
        )
    if parameter.default is not inspect.Parameter.empty:
        return msgspec.structs.replace(place, spec=msgspec.structs.replace(place.spec, is_optional=True))
    return place


def _hinted(name: str, hint: object) -> Place | None:
    if hint is None or hint is np.ndarray:
        return Place(TensorSpec(name, "FP32", (-1,)), is_any_rank=True)
    if typing.get_origin(hint) is Annotated:
        base, *extras = typing.get_args(hint)
        place = _hinted(name, base)
        shape = next((extra for extra in extras if isinstance(extra, tuple)), None)
        if place is None or shape is None:
            return place
        return Place(TensorSpec(name, place.spec.datatype, shape), place.given, place.is_text)
    if hint in _SCALARS:
        return Place(TensorSpec(name, _SCALARS[hint], (1,)), "scalar", hint is str)
    if typing.get_origin(hint) in (list, Sequence) and typing.get_args(hint)[0] in _SCALARS:
        element = typing.get_args(hint)[0]
        return Place(TensorSpec(name, _SCALARS[element], (-1,)), "list", element is str)
    if typing.get_origin(hint) is np.ndarray:
        element = typing.get_args(typing.get_args(hint)[1])
        datatype = _datatype(element[0]) if element else None
        return None if datatype is None else Place(TensorSpec(name, datatype, (-1,)), is_any_rank=True)
    optional = [part for part in typing.get_args(hint) if part is not type(None)]
    if type(None) in typing.get_args(hint) and len(optional) == 1:
        return _hinted(name, optional[0])
    return None


def _returned(hint: object) -> list[Place]:
    """One output called ``output`` if the annotation describes it; otherwise the outputs are those of the answers."""
    if typing.get_origin(hint) in (
        typing.get_origin(typing.Iterator[int]),
        typing.get_origin(typing.AsyncIterator[int]),
    ):
        hint = typing.get_args(hint)[0]
    place = None if hint is None or hint is np.ndarray else _hinted("output", hint)
    return [] if place is None else [place]


# -- values ------------------------------------------------------------------------------------


def _given(place: Place, array: Array) -> object:
    if place.given == "array":
        return array
    values = array.ravel().tolist()
    if place.is_text:
        values = [value.decode() if isinstance(value, bytes) else value for value in values]
    return values[0] if place.given == "scalar" else values


def _converted(name: str, value: object, place: Place | None) -> Array:
    """A value of an answer as an array; texts as bytes."""
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype.kind in "US" or array.dtype == np.object_:
        made = np.empty(array.size, np.object_)
        for at, part in enumerate(array.ravel().tolist()):
            if not isinstance(part, str | bytes):
                raise InternalError(f"The output {name!r} holds a {type(part).__name__}; expected numbers or texts.")
            made[at] = part.encode() if isinstance(part, str) else part
        array = made.reshape(array.shape)
    if not array.ndim:
        array = array.reshape(1)
    if place is not None and place.spec.datatype != "BF16" and array.dtype != NUMPY[place.spec.datatype]:
        if (array.dtype == np.object_) != (place.spec.datatype == "BYTES"):
            raise InternalError(f"The output {name!r} was declared as {place.spec.datatype} and holds {array.dtype}.")
        array = array.astype(NUMPY[place.spec.datatype])
    return array
