"""The inputs and outputs of a model file before it is loaded, in the terms of KServe v2.

Reads only headers and tails of files. Knows the formats that describe their inputs and outputs; those of other formats
are known when the model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from inferd.errors import ModelLoadError
from inferd.registry.artifact import Artifact
from inferd.registry.onnx_file import OnnxFile, Value, check_external, read_onnx
from inferd.registry.onnx_graph import read_graph
from inferd.registry.rows import exported
from inferd.registry.rows.onnx import prove
from inferd.registry.rows.verdict import BY_NATURE, Verdict, claimed, judged
from inferd.types import TensorSpec

ANY_ROWS: Final = 65536
"""The batch limit of an artifact whose first dimension may have any size."""

ONNX_DATATYPES: Final[Mapping[str, str]] = {
    "tensor(float)": "FP32", "tensor(double)": "FP64", "tensor(float16)": "FP16", "tensor(bfloat16)": "BF16",
    "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32", "tensor(int64)": "INT64",
    "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32", "tensor(uint64)": "UINT64",
    "tensor(bool)": "BOOL", "tensor(string)": "BYTES",
}  # fmt: skip
ZIP_MAP: Final = re.compile(r"seq\(map\((string|int64),tensor\((float|double)\)\)\)")
"""How scikit-learn's converters give probabilities: a sequence of maps from class to number."""

_SCALAR_TYPES: Final[Mapping[int, str]] = {  # numbers of torch._export.serde.schema.ScalarType
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
}  # fmt: skip
_MAX_PROGRAM_BYTES: Final = 64 << 20
_TAIL_BYTES: Final = 1 << 20


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes have the batch dimension in front where there are rows; -1 stands for any size."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()  # empty: known when it is loaded
    rows: Verdict = Verdict()
    weights_bytes: int = 0

    def max_batch_size(self, declared: int | None = None) -> int:
        """Rows that may be computed together; 0: none. ``declared``: the setting ``batching.max_batch_size``."""
        return ANY_ROWS if claimed(self.rows, declared).because is not None else 0

    def not_batched(self, declared: int | None = None) -> str:
        """Why requests are computed one by one; empty when they are not."""
        found = claimed(self.rows, declared)
        return "" if found.because is not None else found.sentence

    def named_rows(self, declared: int | None = None) -> str:
        """The exporter's name of the rows, where it is the only reason for batches. Empty where there is another reason
        or none."""
        found = claimed(self.rows, declared)
        return found.sentence if found.because == "named" else ""


def read_signature(artifact: Artifact) -> Signature | None:
    """None for a format that does not describe itself. Raises ModelLoadError for an invalid file."""
    path = artifact.path
    if not isinstance(path, Path) or not path.is_file():
        return None
    try:
        match artifact.runtime:
            case "onnx":
                file = read_onnx(path)
                outside = sum(other.stat().st_size for other in check_external(path, file))
                size = max(file.weights_bytes, path.stat().st_size + outside)
                return msgspec.structs.replace(onnx_signature(path, file), weights_bytes=size)
            case "xgboost":
                return _xgboost(path)
            case "lightgbm":
                return _lightgbm(path)
            case "torch":
                return _exported(path) if artifact.platform == "pytorch_pt2" else None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.", param="source") from None
    return None


# -- ONNX --------------------------------------------------------------------------------------


def onnx_signature(path: Path, file: OnnxFile) -> Signature:
    """Raises ModelLoadError for inputs or outputs that are no tensors."""
    labels = file.class_labels
    return Signature(
        inputs=tuple(TensorSpec(value.name, onnx_datatype(value, "input"), onnx_shape(value)) for value in file.inputs),
        outputs=tuple(onnx_output(value, labels) for value in file.outputs),
        rows=onnx_rows(path, file),
    )


def onnx_rows(path: Path, file: OnnxFile) -> Verdict:
    """Whether rows may be computed together: by the shapes, the graph and the names of the first dimensions. Raises
    ModelLoadError."""
    closed = _why_closed(file.inputs, file.outputs)
    if closed:
        return Verdict(None, closed)
    firsts = [value.shape[0] for value in file.inputs]
    axes = {
        value.name: (tuple(size if isinstance(size, int) and size >= 0 else None for size in value.shape), 0)
        for value in file.inputs
    }
    found = prove(read_graph(path), axes)
    return judged(found, [first for first in firsts if isinstance(first, str)] if None not in firsts else [])


def onnx_state_rows(path: Path, states: Mapping[str, str]) -> Verdict:
    """The verdict for a model with states, each of which has its rows along its one free dimension. ``states``:
    outputs, and the inputs that they become. Inputs without a free first dimension are the same for all rows. Raises
    ModelLoadError."""
    file = read_onnx(path)
    into = set(states.values())
    axes: dict[str, tuple[tuple[int | None, ...], int | None]] = {}
    names = []
    for value in file.inputs:
        shape = tuple(size if isinstance(size, int) and size >= 0 else None for size in value.shape)
        free = [number for number, size in enumerate(shape) if size is None]
        axis = free[0] if free and (value.name in into or free[0] == 0) else None
        axes[value.name] = (shape, axis)
        if axis is not None:
            names.append(value.shape[axis])
    found = prove(read_graph(path), axes)
    places = {output: axes[name][1] for output, name in states.items() if name in axes}
    return judged(found, [name for name in names if isinstance(name, str)] if None not in names else [], places)


def _why_closed(inputs: Sequence[Value], outputs: Sequence[Value]) -> str:
    """Why a model has no batch dimension, by its shapes; empty when the shapes give no reason."""
    if not inputs:
        return "it has no inputs"
    for noun, values in (("input", inputs), ("output", outputs)):
        for value in values:
            if not value.shape and noun == "input":
                return f"the input {value.name!r} has no dimensions"
            first = value.shape[0] if value.shape else None
            if isinstance(first, int) and first >= 0:
                return f"the first dimension of the {noun} {value.name!r} is fixed at {first}; export it as a free one"
    firsts = {value.shape[0] for value in inputs}
    if len(firsts - {None}) > 1:
        return "the first dimensions of its inputs have different names"
    if any(first is not None and first in value.shape[1:] for first in firsts for value in inputs):
        return f"the dimension {next(iter(firsts - {None}))!r} occurs twice in an input"
    return ""


def onnx_datatype(value: Value, what: str) -> str:
    found = ONNX_DATATYPES.get(value.type)
    if found is None:
        raise ModelLoadError(
            f"The {what} {value.name!r} is a {value.type}, for which KServe v2 has no word. Export the model with "
            "tensors of numbers or strings.",
            param="source",
        )
    return found


def onnx_shape(value: Value) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) and size >= 0 else -1 for size in value.shape)


def onnx_output(value: Value, labels: tuple[str, ...]) -> TensorSpec:
    """An output; ``labels`` are those of the classifier that the model consists of, if it does."""
    if ZIP_MAP.fullmatch(value.type):
        return TensorSpec(value.name, "FP32", (-1, len(labels) or -1), labels=labels)
    datatype, shape = onnx_datatype(value, "output"), onnx_shape(value)
    if labels and datatype in ("FP32", "FP64") and len(shape) > 1 and shape[-1] in (-1, len(labels)):
        return TensorSpec(value.name, datatype, (*shape[:-1], len(labels)), labels=labels)
    return TensorSpec(value.name, datatype, shape)


# -- torch.export ------------------------------------------------------------------------------


# What a file that another version wrote, or that was changed, makes its reader raise.
_MALFORMED: Final = (ValueError, KeyError, TypeError, IndexError, AttributeError, NotImplementedError, RecursionError)


def _exported(path: Path) -> Signature | None:
    """The program's own list of inputs. Outputs are named by torch when it is loaded."""
    document = _program(path)
    if document is None:
        return None
    try:
        tensors = document["graph_module"]["graph"]["tensor_values"]
        inputs = tuple(_exported_spec(one, tensors[one]) for one in exported.user_inputs(document))
        return Signature(inputs=inputs, rows=_judged(document), weights_bytes=path.stat().st_size)
    except _MALFORMED:
        return None  # another version's form: it is known when it is loaded


def exported_rows(path: Path) -> Verdict:
    """Whether a program's rows may be computed together: by its shapes and its graph."""
    document = _program(path)
    try:
        return Verdict(None, "its program is not in a known form") if document is None else _judged(document)
    except _MALFORMED:
        return Verdict(None, "its program is not in a known form")


def _judged(document: Mapping[str, Any]) -> Verdict:
    closed = exported.why_closed(document)
    return Verdict(None, closed) if closed else judged(exported.prove(document), ())


def _program(path: Path) -> dict[str, Any] | None:
    """The program in the archive; None when there is none."""
    import zipfile  # most models are no archives

    try:
        with zipfile.ZipFile(path) as archive:
            name = next((one for one in archive.namelist() if one.endswith("/models/model.json")), None)
            if name is None or archive.getinfo(name).file_size > _MAX_PROGRAM_BYTES:
                return None
            document = json.loads(archive.read(name))
    except (*_MALFORMED, zipfile.BadZipFile, OSError):
        return None
    return document if isinstance(document, dict) else None


def _exported_spec(name: str, tensor: dict[str, Any]) -> TensorSpec:
    sizes = tuple(int(size["as_int"]) if "as_int" in size else -1 for size in tensor["sizes"])
    return TensorSpec(name, _SCALAR_TYPES[tensor["dtype"]], sizes)


# -- boosters ----------------------------------------------------------------------------------


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return file.read()


def _xgboost(path: Path) -> Signature | None:
    """The learner's parameters come behind the trees, in both forms of the file."""
    tail = _tail(path)
    found = re.findall(rb'num_feature(?:"\s*:\s*"|SL.{8})(\d+)', tail, re.DOTALL)
    if not found:
        return None
    return Signature(
        inputs=(TensorSpec("input-0", "FP32", (-1, int(found[-1]))),),
        rows=BY_NATURE,
        weights_bytes=path.stat().st_size,
    )


def _lightgbm(path: Path) -> Signature | None:
    with path.open("rb") as file:
        found = re.search(rb"^max_feature_idx=(\d+)$", file.read(_TAIL_BYTES), re.MULTILINE)
    if found is None:
        return None
    return Signature(
        inputs=(TensorSpec("input-0", "FP64", (-1, int(found[1]) + 1)),),
        rows=BY_NATURE,
        weights_bytes=path.stat().st_size,
    )
