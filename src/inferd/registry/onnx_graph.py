"""The nodes of an ONNX file, read without onnx or onnxruntime: operators, attributes, shapes and small constants.

Weights are never read, only their shapes. The memory of this reader is bounded by the file's own size.
The messages: onnx/onnx.proto.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from inferd.registry.onnx_file import ELEMENTS, read_mapped
from inferd.registry.wire import Field, Malformed, Wire, signed

MAX_ITEMS: Final = 64
"""Elements of a constant whose values are kept: shapes, axes, scales."""

_MAX_DEPTH: Final = 16
_MAX_RANK: Final = 64

Numbers = tuple[int | float, ...]


class Tensor(msgspec.Struct, frozen=True):
    """A constant: its shape (None: not known), and its elements when they are few numbers."""

    dims: tuple[int, ...] | None
    items: Numbers | None = None
    type: str = ""  # as onnxruntime calls it: float, int64


class Attribute(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a node's attribute; fields of other kinds than its own are empty."""

    number: int | float | None = None
    numbers: Numbers = ()
    text: str = ""
    tensor: Tensor | None = None
    graph: Graph | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One operator. An empty name of an input or output means that it is left out."""

    operator: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes in an order in which they can be computed."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]  # also those that a constant stands for
    outputs: tuple[str, ...]


class OnnxGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The main graph, and the version of each domain of operators ("": ONNX's own)."""

    graph: Graph
    versions: Mapping[str, int]
    functions: frozenset[tuple[str, str]]  # domains and names of operators that the file itself defines


def read_graph(path: Path) -> OnnxGraph:
    """The graph. Raises ModelLoadError for a file that is no complete ONNX model."""
    return read_mapped(path, lambda data: _Reader(data).model())


class _Reader(Wire):
    def model(self) -> OnnxGraph:
        versions: dict[str, int] = {}
        functions = set()
        graph: Graph | None = None
        for field in self.fields(0, len(self.data)):
            match field.number:
                case 7:
                    graph = self._graph(field, 0)
                case 8:
                    domain, version = "", 0
                    for sub in self.fields(field.begin, field.end):
                        if sub.number == 1:
                            domain = self.text(sub)
                        elif sub.number == 2:
                            version = sub.value
                    versions[_own(domain)] = version
                case 25:
                    functions.add((_own(self.named(field, 10)), self.named(field, 1)))
        if graph is None:
            raise Malformed("it has no graph")
        return OnnxGraph(graph=graph, versions=versions, functions=frozenset(functions))

    def _graph(self, field: Field, depth: int) -> Graph:
        if depth > _MAX_DEPTH:
            raise Malformed("its graphs are nested too deeply")
        nodes, inputs, outputs = [], [], []
        constants: dict[str, Tensor] = {}
        for sub in self.fields(field.begin, field.end):
            match sub.number:
                case 1:
                    nodes.append(self._node(sub, depth))
                case 5:
                    name, tensor = self._tensor(sub)
                    constants[name] = tensor
                case 11:
                    inputs.append(self.named(sub, 1))
                case 12:
                    outputs.append(self.named(sub, 1))
                case 15:
                    for part in self.fields(sub.begin, sub.end):
                        if part.number == 1:
                            constants[self.named(part, 8)] = Tensor(None)
        return Graph(nodes=tuple(nodes), constants=constants, inputs=tuple(inputs), outputs=tuple(outputs))

    def _node(self, field: Field, depth: int) -> Node:
        operator, domain, name = "", "", ""
        inputs, outputs = [], []
        attributes: dict[str, Attribute] = {}
        for sub in self.fields(field.begin, field.end):
            match sub.number:
                case 1:
                    inputs.append(self.text(sub))
                case 2:
                    outputs.append(self.text(sub))
                case 3:
                    name = self.text(sub)
                case 4:
                    operator = self.text(sub)
                case 5:
                    key, attribute = self._attribute(sub, depth)
                    attributes[key] = attribute
                case 7:
                    domain = self.text(sub)
        return Node(
            operator=operator,
            domain=_own(domain),
            name=name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            attributes=attributes,
        )

    def _attribute(self, field: Field, depth: int) -> tuple[str, Attribute]:
        name, text = "", ""
        number: int | float | None = None
        numbers: list[int | float] = []
        tensor: Tensor | None = None
        graph: Graph | None = None
        for sub in self.fields(field.begin, field.end):
            match sub.number:
                case 1:
                    name = self.text(sub)
                case 2:
                    number = self._float(sub)
                case 3:
                    number = signed(sub.value)
                case 4:
                    text = self.raw(sub)[:256].decode("utf-8", "replace")
                case 5:
                    tensor = self._tensor(sub)[1]
                case 6:
                    graph = self._graph(sub, depth + 1)
                case 7:
                    numbers += self._floats(sub, MAX_ITEMS + 1 - len(numbers))
                case 8:
                    for value in self.varints(sub):
                        if len(numbers) > MAX_ITEMS:
                            break
                        numbers.append(signed(value))
                case 22 | 23 if tensor is None:
                    tensor = Tensor(None)
        return name, Attribute(number=number, numbers=tuple(numbers), text=text, tensor=tensor, graph=graph)

    # -- numbers ----------------------------------------------------------------------------

    def _float(self, field: Field) -> float:
        if field.wire != 5:
            raise Malformed("a number is missing")
        value: float = struct.unpack("<f", self.data[field.begin : field.end])[0]
        return value

    def _floats(self, field: Field, count: int) -> Sequence[float]:
        if field.wire == 5:
            return (self._float(field),)
        return self._unpacked(self.raw(field)[: 4 * max(count, 0)], "f", 4)

    def _tensor(self, field: Field) -> tuple[str, Tensor]:
        name, kind = "", 0
        dims: list[int] = []
        parts: list[Field] = []
        for sub in self.fields(field.begin, field.end):
            match sub.number:
                case 1:
                    for value in self.varints(sub):
                        if len(dims) >= _MAX_RANK:
                            raise Malformed(f"a tensor has more than {_MAX_RANK} dimensions")
                        dims.append(signed(value))
                case 2:
                    kind = sub.value
                case 8:
                    name = self.text(sub)
                case 4 | 5 | 7 | 9 | 10 if len(parts) <= MAX_ITEMS:
                    parts.append(sub)
        if any(size < 0 for size in dims):
            raise Malformed(f"the tensor {name!r} has a negative dimension")
        word = ELEMENTS.get(kind, "?")
        items = self._items(word, parts) if math.prod(dims) <= MAX_ITEMS else None
        if items is not None and len(items) != math.prod(dims):
            items = None  # kept in another file, or not of this kind
        return name, Tensor(tuple(dims), items, word)

    def _items(self, word: str, parts: Sequence[Field]) -> Numbers | None:
        form = _FORMS.get(word)
        if form is None:
            return None
        found: list[int | float] = []
        for part in parts:
            if part.number == 9:
                found += self._unpacked(self.raw(part), *form)
            elif part.number in (5, 7):
                found += [signed(value) for value in self.varints(part)]
            elif part.number == 4:
                found += self._floats(part, MAX_ITEMS)
            elif part.wire == 2:  # doubles
                found += self._unpacked(self.raw(part), "d", 8)
        return tuple(found)

    @staticmethod
    def _unpacked(raw: bytes, letter: str, size: int) -> Sequence[int | float]:
        if len(raw) % size:
            raise Malformed("a constant is cut off")
        return struct.unpack(f"<{len(raw) // size}{letter}", raw)


_FORMS: Final[Mapping[str, tuple[str, int]]] = {
    "float": ("f", 4), "double": ("d", 8), "int8": ("b", 1), "uint8": ("B", 1), "int16": ("h", 2), "uint16": ("H", 2),
    "int32": ("i", 4), "uint32": ("I", 4), "int64": ("q", 8), "uint64": ("Q", 8), "bool": ("?", 1),
}  # fmt: skip


def _own(domain: str) -> str:
    """ONNX's own domain has two names."""
    return "" if domain == "ai.onnx" else domain
