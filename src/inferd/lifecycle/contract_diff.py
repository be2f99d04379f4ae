"""The inputs and outputs of a model's version, and how two versions differ, in words. Pure, but for ``contract_of``.

A difference breaks clients where a request that was valid may be refused, or where an answer has another form: every
change of an output, and an input that is new, gone, of another datatype or narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.lifecycle.stages import Change
from inferd.registry.artifact import recognise
from inferd.registry.signature import read_signature
from inferd.types import TensorSpec

MAX_TENSORS: Final = 1024
_DATATYPES: Final = frozenset(
    [
        "BOOL",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "FP16",
        "BF16",
        "FP32",
        "FP64",
        "BYTES",
    ]
)


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """What a version takes and gives. None: it is not known before the model is loaded."""

    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, object] = {}


class _Metadata(msgspec.Struct):
    """What counts of GET /v2/models/{model}."""

    inputs: list[_Tensor] | None = None
    outputs: list[_Tensor] | None = None


def contract_of(path: Path, *, allow_pickle: bool = False) -> Contract:
    """The contract that a model's file describes. Formats without a description have an empty one. Raises
    ModelLoadError for a file that is no model or is damaged."""
    signature = read_signature(recognise(str(path), allow_pickle=allow_pickle))
    if signature is None:
        return Contract()
    return Contract(inputs=signature.inputs, outputs=signature.outputs or None)


def read_contract(data: bytes, field: str = "contract") -> Contract:
    """The contract in a JSON document with ``inputs`` and ``outputs`` as in KServe v2's metadata of a model, as
    ``GET /v2/models/NAME`` gives it. Raises InvalidRequest."""
    try:
        found = msgspec.json.decode(data, type=_Metadata)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"{field} is no model metadata of KServe v2 ({error}); save the answer of GET /v2/models/NAME.",
            param=field,
            code="registry_contract",
        ) from None
    return Contract(inputs=_specs(found.inputs, f"{field}.inputs"), outputs=_specs(found.outputs, f"{field}.outputs"))


def _specs(tensors: Sequence[_Tensor] | None, field: str) -> tuple[TensorSpec, ...] | None:
    if tensors is None:
        return None
    names = [one.name for one in tensors]
    for one in tensors:
        problem = ""
        if one.datatype not in _DATATYPES:
            problem = f"has the unknown datatype {one.datatype[:32]!r}"
        elif names.count(one.name) > 1:
            problem = "occurs twice"
        elif any(size < -1 for size in one.shape):
            problem = f"has a size below -1 in {one.shape}"
        if problem or len(tensors) > MAX_TENSORS:
            problem = problem or f"is one of more than {MAX_TENSORS} tensors"
            raise InvalidRequest(
                f"{field}: the tensor {one.name[:64]!r} {problem}; correct it.", param=field, code="registry_contract"
            )
    return tuple(TensorSpec(one.name, one.datatype, tuple(one.shape), labels=_labels(one)) for one in tensors)


def _labels(tensor: _Tensor) -> tuple[str, ...]:
    labels = tensor.parameters.get("labels")
    return tuple(map(str, labels)) if isinstance(labels, list) else ()


def difference(old: Contract, new: Contract, base: int | None = None) -> Change:
    """How ``new`` differs from ``old``, the contract of the version ``base``."""
    words: list[str] = []
    breaks: list[str] = []
    if old.inputs is not None and new.inputs is not None:
        _compare("input", old.inputs, new.inputs, words, breaks, _input_breaks)
    unknown = ""
    if old.outputs is None or new.outputs is None:
        which = "its own" if new.outputs is None else f"version {base}'s"
        unknown = f"{which} outputs are not known before it is loaded"
    else:
        _compare("output", old.outputs, new.outputs, words, breaks, lambda one, other: True)
    return Change(base=base, words=tuple(words), breaks=tuple(breaks), unknown=unknown)


def _compare(
    noun: str,
    old: Sequence[TensorSpec],
    new: Sequence[TensorSpec],
    words: list[str],
    breaks: list[str],
    is_break: Callable[[TensorSpec, TensorSpec], bool],
) -> None:
    before: Mapping[str, TensorSpec] = {one.name: one for one in old}
    after: Mapping[str, TensorSpec] = {one.name: one for one in new}
    for name, spec in before.items():
        other = after.get(name)
        if other is None:
            words.append(f"the {noun} {name!r} is gone")
            breaks.append(words[-1])
            continue
        found = [f"the {noun} {name!r} {sentence}" for sentence in _differences(spec, other)]
        words += found
        if is_break(spec, other):
            breaks += found
    for name, spec in after.items():
        if name not in before:
            words.append(f"the {noun} {name!r} is new")
            if noun == "output" or not spec.is_optional:
                breaks.append(words[-1])


def _input_breaks(old: TensorSpec, new: TensorSpec) -> bool:
    """Whether an input takes less than before."""
    if old.datatype != new.datatype or len(old.shape) != len(new.shape):
        return True
    if any(size not in (-1, before) for before, size in zip(old.shape, new.shape, strict=True)):
        return True
    return old.is_optional and not new.is_optional


def _differences(old: TensorSpec, new: TensorSpec) -> Iterator[str]:
    if old.datatype != new.datatype:
        yield f"is {new.datatype} instead of {old.datatype}"
    if old.shape != new.shape:
        yield f"has the shape {list(new.shape)} instead of {list(old.shape)}"
    if old.is_optional != new.is_optional:
        yield f"is {'optional' if new.is_optional else 'required'}, and was not"
    if old.labels != new.labels:
        yield f"has {_listed(new.labels)} instead of {_listed(old.labels)}"


def _listed(labels: Sequence[str]) -> str:
    if not labels:
        return "no labels"
    shown = ", ".join(label[:32] for label in labels[:8])
    return f"the labels {shown}{', ...' if len(labels) > 8 else ''}"
