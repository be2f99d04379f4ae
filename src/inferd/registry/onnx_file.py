"""The header of an ONNX file, read without onnx or onnxruntime: inputs, outputs, and references to other files.

Walks the protobuf's fields within the bounds of the file and never reads a weight. Knows the few fields of
``onnx.proto3`` that are needed here and skips the others. References to other files are checked before a file is
opened.

The wire format: https://protobuf.dev/programming-guides/encoding/; the messages: onnx/onnx.proto.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from inferd.errors import ModelLoadError
from inferd.registry.wire import Field, Malformed, Wire, signed

T = TypeVar("T")


class Value(msgspec.Struct, frozen=True):
    """An input or output of the graph. ``type`` is in onnxruntime's words: tensor(float),
    seq(map(int64,tensor(float)))."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]  # a name or None for a dimension of any size


class External(msgspec.Struct, frozen=True):
    """A weight that is kept in another file."""

    tensor: str
    location: str
    offset: int = 0
    length: int = 0  # 0: not given


class OnnxFile(msgspec.Struct, frozen=True, kw_only=True):
    """What can be known of a model before it is loaded."""

    inputs: tuple[Value, ...]  # those that a request must bring
    outputs: tuple[Value, ...]
    external: tuple[External, ...]
    num_parameters: int
    weights_bytes: int  # of all initializers, in this file and outside
    heavy_ops: int  # convolutions, recurrences and products: what several threads are good for
    class_labels: tuple[str, ...]  # of the one classifier among its nodes
    domains: tuple[str, ...]  # of the operators, other than ONNX's own


ELEMENTS: Final[Mapping[int, str]] = {
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "double", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz", 21: "uint4", 22: "int4",
}  # fmt: skip
_BITS: Final[Mapping[int, int]] = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 8: 0, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
    17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4,
}  # fmt: skip
_HEAVY: Final = frozenset(
    {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "FusedConv", "LSTM", "GRU", "RNN", "Attention"}
)
_MAX_DEPTH: Final = 32

_Message = Literal["model", "graph", "node", "attribute", "function", "training", "sparse", "tensor"]
# Which fields hold messages that hold tensors or nodes.
_BELOW: Final[Mapping[_Message, Mapping[int, _Message]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}


def read_onnx(path: Path) -> OnnxFile:
    """The header of the file. Raises ModelLoadError for a file that is no complete ONNX model."""
    return read_mapped(path, lambda data: _Reader(data).model())


def read_mapped(path: Path, read: Callable[[mmap.mmap], T]) -> T:
    """What ``read`` makes of the mapped file. Raises ModelLoadError for a file that is no complete ONNX model."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(data)
    except (Malformed, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"{path} is not a complete ONNX model ({error}); export or copy it again.", param="source"
        ) from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"{path} cannot be read: {error}.", param="source") from None


class _Reader(Wire):
    """One pass over a mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        super().__init__(data)
        self._external: list[External] = []
        self._parameters = 0
        self._bits = 0
        self._heavy = 0
        self._labels: set[tuple[str, ...]] = set()
        self._domains: set[str] = set()

    def model(self) -> OnnxFile:
        size = len(self.data)
        graph = [field for field in self.fields(0, size) if field.number == 7]
        if len(graph) != 1:
            raise Malformed(f"it has {len(graph)} graphs instead of one")
        self._walk("model", 0, size, 0, is_weight=False)
        inputs, outputs, initialized = [], [], set()
        for field in self.fields(graph[0].begin, graph[0].end):
            if field.number == 11:
                inputs.append(self._value(field))
            elif field.number == 12:
                outputs.append(self._value(field))
            elif field.number == 5:
                initialized.add(self.named(field, 8))
            elif field.number == 15:
                initialized |= {self.named(sub, 8) for sub in self.fields(field.begin, field.end) if sub.number == 1}
        labels = next(iter(self._labels)) if len(self._labels) == 1 else ()
        return OnnxFile(
            inputs=tuple(value for value in inputs if value.name not in initialized),
            outputs=tuple(outputs),
            external=tuple(self._external),
            num_parameters=self._parameters,
            weights_bytes=self._bits // 8,
            heavy_ops=self._heavy,
            class_labels=labels,
            domains=tuple(sorted(self._domains)),
        )

    # -- messages ---------------------------------------------------------------------------

    def _walk(self, message: _Message, begin: int, end: int, depth: int, *, is_weight: bool) -> None:
        if depth > _MAX_DEPTH:
            raise Malformed("its graphs are nested too deeply")
        if message == "tensor":
            self._tensor(begin, end, is_weight=is_weight)
            return
        below = _BELOW[message]
        if message == "node":
            self._node(begin, end)
        for field in self.fields(begin, end):
            inner = below.get(field.number)
            if inner is not None:
                if field.wire != 2:
                    raise Malformed("a message is missing")
                is_inner_weight = message == "graph" or (is_weight and message == "sparse")
                self._walk(inner, field.begin, field.end, depth + 1, is_weight=is_inner_weight)

    def _node(self, begin: int, end: int) -> None:
        operator, domain, labels = "", "", None
        for field in self.fields(begin, end):
            if field.number == 4:
                operator = self.text(field)
            elif field.number == 7:
                domain = self.text(field)
            elif field.number == 5 and labels is None:
                labels = self._class_labels(field)
        self._heavy += operator in _HEAVY
        if domain not in ("", "ai.onnx"):
            self._domains.add(domain)
        if labels is not None:
            self._labels.add(labels)

    def _class_labels(self, attribute: Field) -> tuple[str, ...] | None:
        """A classifier's labels, where this is the attribute that holds them."""
        found: list[str] = []
        name = ""
        for field in self.fields(attribute.begin, attribute.end):
            if field.number == 1:
                name = self.text(field)
                if not name.startswith("classlabels_"):
                    return None
            elif field.number == 9:
                found.append(self.text(field))
            elif field.number == 8:
                found += [str(signed(value)) for value in self.varints(field)]
        return tuple(found) if name and found else None

    def _tensor(self, begin: int, end: int, *, is_weight: bool) -> None:
        name, kind, is_external, count = "", 0, False, 1
        entries: dict[str, str] = {}
        for field in self.fields(begin, end):
            match field.number:
                case 1:
                    for value in self.varints(field):
                        count *= value
                case 2:
                    kind = field.value
                case 8:
                    name = self.text(field)
                case 13:
                    pair = {sub.number: self.text(sub) for sub in self.fields(field.begin, field.end)}
                    entries[pair.get(1, "")] = pair.get(2, "")
                case 14:
                    is_external = field.value == 1
        if is_weight:
            self._parameters += count
            self._bits += count * _BITS.get(kind, 8)
        # A search for the key alone, or for the entries alone, finds both here.
        if is_external or entries:
            numbers = [entries.get(key, "0") or "0" for key in ("offset", "length")]
            if not all(number.isascii() and number.isdecimal() and len(number) < 19 for number in numbers):
                raise Malformed(f"the place of the external tensor {name!r} is no number")
            self._external.append(External(name, entries.get("location", ""), int(numbers[0]), int(numbers[1])))

    def _value(self, field: Field) -> Value:
        name, kind = "", "tensor()"
        shape: tuple[int | str | None, ...] = ()
        for sub in self.fields(field.begin, field.end):
            if sub.number == 1:
                name = self.text(sub)
            elif sub.number == 2:
                kind, shape = self._type(sub, 0)
        return Value(name, kind, shape)

    def _type(self, field: Field, depth: int) -> tuple[str, tuple[int | str | None, ...]]:
        """A TypeProto in onnxruntime's names, with the shape of a tensor."""
        if depth > 8:
            raise Malformed("a type is nested too deeply")
        for sub in self.fields(field.begin, field.end):
            match sub.number:
                case 1:
                    return self._tensor_type(sub)
                case 4 | 9:
                    inner = next((one for one in self.fields(sub.begin, sub.end) if one.number == 1), None)
                    word = "seq" if sub.number == 4 else "optional"
                    return f"{word}({self._type(inner, depth + 1)[0] if inner else ''})", ()
                case 5:
                    parts = {one.number: one for one in self.fields(sub.begin, sub.end)}
                    key = ELEMENTS.get(parts[1].value, "?") if 1 in parts else "?"
                    return f"map({key},{self._type(parts[2], depth + 1)[0] if 2 in parts else ''})", ()
                case 8:
                    return "sparse_tensor()", ()
        return "tensor()", ()

    def _tensor_type(self, field: Field) -> tuple[str, tuple[int | str | None, ...]]:
        element, shape = "?", []
        for sub in self.fields(field.begin, field.end):
            if sub.number == 1:
                element = ELEMENTS.get(sub.value, "?")
            elif sub.number == 2:
                for dim in self.fields(sub.begin, sub.end):
                    size: int | str | None = None
                    for part in self.fields(dim.begin, dim.end):
                        size = signed(part.value) if part.number == 1 else self.text(part)
                    shape.append(size)
        return f"tensor({element})", tuple(shape)


def check_external(path: Path, model: OnnxFile) -> tuple[Path, ...]:
    """The other files that hold the model's weights. Raises ModelLoadError for one that is outside the model's
    folder, by its name or by a link, that is no ordinary file, or that is shorter than the model says."""
    folder = path.parent.resolve()
    found: dict[str, int] = {}
    for one in model.external:
        found[one.location] = max(found.get(one.location, 0), one.offset + one.length)
    files = []
    for location, size in found.items():
        inside = folder / location
        if (
            not location
            or "\x00" in location
            or "\\" in location
            or location.startswith("/")
            or ".." in Path(location).parts
            or inside.resolve() != inside
        ):
            raise ModelLoadError(
                f"{path} refers to weights outside its folder ({location[:200]!r}), which inferd never opens. External "
                "data must lie beside the model, without '..', absolute paths or links.",
                param="source",
            )
        try:
            status = os.stat(inside)
        except OSError:
            raise ModelLoadError(
                f"{path} keeps weights in {location!r}, which is not beside it; copy that file there too.",
                param="source",
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{path} keeps weights in {location!r}, which is no file.", param="source")
        if status.st_size < size:
            raise ModelLoadError(
                f"{inside} has {status.st_size} bytes, but {path.name} refers to {size} of them; copy it again.",
                param="source",
            )
        files.append(inside)
    return tuple(files)
