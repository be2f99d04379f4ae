"""The proof over an ONNX graph: its operators, with their attributes and versions, as the rules of this package.

Nothing is known of the result of an operator without a rule, unless all its inputs are constants. The work is bounded
by the size of the file: each node is visited once, and the description of a value has a bounded length. The operators:
https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from inferd.registry.onnx_file import ELEMENTS
from inferd.registry.onnx_graph import MAX_ITEMS, Graph, Node, OnnxGraph, Tensor
from inferd.registry.rows import elementwise, products, recurrent, reductions, shapes, tables
from inferd.registry.rows.value import (
    ONE,
    ROWS,
    Fixed,
    Inner,
    Mixed,
    MixedRowsError,
    Rows,
    Size,
    Symbols,
    UnknownRuleError,
    UnreadError,
    Value,
    axis_of,
    dims_of,
    made,
    numbers_of,
    operators,
    place,
    plain,
    sizes,
    supposed,
    times,
    worst,
)

_END: Final = 1 << 31  # exporters write such a number for "to the end"
_MOST: Final = 1 << 63
_MAX_DEPTH: Final = 16
_MAX_REASON: Final = 500  # characters

# Each element from the elements at its place.
_BY_ELEMENT: Final = operators(
    """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Cos
    Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
    LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign
    Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Xor StringConcat RegexFullMatch Clip
    """
)
_MICROSOFT_BY_ELEMENT: Final = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
_ON_ITEMS: Final[Mapping[str, elementwise.Operation]] = {
    "Add": elementwise.add,
    "Sub": elementwise.sub,
    "Mul": elementwise.mul,
    "Div": elementwise.div,
    "Min": elementwise.least,
    "Max": elementwise.most,
    "Equal": elementwise.equal,
    "Mod": elementwise.mod,
}
_REDUCTIONS: Final = operators(
    """
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare
    """
)
# Reductions whose axes became an input, and the version from which on.
_AXES_INPUT_SINCE: Final = {"ReduceSum": 13}
_RANDOM: Final = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_GATES: Final = {"LSTM": 2, "GRU": 1, "RNN": 1}


def prove(model: OnnxGraph, axes: Mapping[str, tuple[tuple[int | None, ...], int | None]]) -> dict[str, Value]:
    """The values of the graph's outputs.

    ``axes``: for each input that a request brings its shape, None for a dimension of any size, and the axis of its
    rows, None for an input that is the same for all requests of a batch.
    """
    proof = _Proof(model)
    scope: dict[str, Value] = {}
    for name, (shape, axis) in axes.items():
        dims = [
            ROWS if number == axis else proof.symbols.size() if size is None or size < 0 else Size(size)
            for number, size in enumerate(shape)
        ]
        scope[name] = made(dims, axis)
    return dict(zip(model.graph.outputs, proof.graph(model.graph, scope, 0), strict=True))


class _Node:
    """A node and the values of its inputs."""

    def __init__(self, node: Node, values: Sequence[Value | None], version: int, symbols: Symbols) -> None:
        self.node = node
        self.values = values
        self.version = version  # of its domain
        self.symbols = symbols

    def value(self, number: int) -> Value:
        found = self.maybe(number)
        if found is None:
            raise UnknownRuleError("has too few inputs")
        return found

    def maybe(self, number: int) -> Value | None:
        return self.values[number] if number < len(self.values) else None

    def given(self) -> list[Value]:
        return [value for value in self.values if value is not None]

    def integer(self, name: str, otherwise: int) -> int:
        found = self.node.attributes.get(name)
        return int(found.number) if found is not None and found.number is not None else otherwise

    def integers(self, name: str) -> tuple[int, ...] | None:
        found = self.node.attributes.get(name)
        return None if found is None else tuple(int(number) for number in found.numbers)

    def text(self, name: str, otherwise: str = "") -> str:
        found = self.node.attributes.get(name)
        return otherwise if found is None or not found.text else found.text

    def fixed(self, number: int) -> Fixed | None:
        """A parameter: an input that must be the same for all rows."""
        found = self.maybe(number)
        if found is None or isinstance(found, Fixed):
            return found
        raise UnknownRuleError("takes its parameters from the rows")

    def numbers(self, number: int) -> tuple[int, ...] | None:
        """The integers of a parameter; None when it is left out. Raises UnknownRuleError when they are not known."""
        found = self.fixed(number)
        if found is None:
            return None
        known = numbers_of(found)
        if known is None:
            raise UnknownRuleError("has parameters that are computed")
        return known

    def sizes(self, number: int) -> tuple[Size, ...]:
        """The sizes of a parameter, known or not; None when it is left out."""
        found = self.fixed(number)
        if found is None or found.items is None:
            raise UnknownRuleError("has a shape that is computed")
        return found.items


class _Proof:
    def __init__(self, model: OnnxGraph) -> None:
        self.symbols = Symbols()
        self._versions = model.versions
        self._functions = model.functions

    def graph(self, graph: Graph, outside: Mapping[str, Value], depth: int) -> list[Value]:
        """The values of a graph's outputs. ``outside``: those of the inputs and of the graphs around it."""
        scope = {**outside, **{name: self._constant(tensor) for name, tensor in graph.constants.items()}}
        for node in graph.nodes:
            for name, value in zip(node.outputs, self._outputs(node, scope, depth), strict=False):
                if name:
                    scope[name] = value
        missing = Mixed("an output of the graph is made by no node", is_certain=False)
        return [scope.get(name, missing) for name in graph.outputs]

    def _constant(self, tensor: Tensor) -> Fixed:
        if tensor.dims is None:
            return Fixed(None)
        items = None if tensor.items is None else tuple(_item(item, self.symbols) for item in tensor.items)
        return Fixed(sizes(tensor.dims), items)

    def _outputs(self, node: Node, scope: Mapping[str, Value], depth: int) -> Sequence[Value]:
        """The outputs of one node; unknown values where no rule applies."""
        count = len(node.outputs)
        values: list[Value | None] = []
        for name in node.inputs:
            value = scope.get(name) if name else None
            if name and value is None:
                value = Mixed(f"the input {name!r} of {_called(node)} is made by no node", is_certain=False)
            values.append(value)
        mixed = worst(values)
        if mixed is not None:
            return self._after(mixed, node, values, scope, depth)
        try:
            found = self._ruled(node, values, scope, depth)
        except MixedRowsError as error:
            return [Mixed(f"{_called(node)} {error}", is_certain=True)] * count
        except UnknownRuleError as error:
            is_unread = isinstance(error, UnreadError)
            guess = None if is_unread else supposed(values, self.symbols)
            unknown = Mixed(f"{_called(node)} {error}", is_certain=False, refutes_name=is_unread, supposed=guess)
            return [unknown] * count
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return [Mixed(f"{_called(node)} does not fit its operator's definition", is_certain=False)] * count
        missing = Mixed(f"{_called(node)} has an output of which nothing is known", is_certain=False)
        return [*found, *[missing] * (count - len(found))]

    def _after(
        self, mixed: Mixed, node: Node, values: Sequence[Value | None], scope: Mapping[str, Value], depth: int
    ) -> Sequence[Value]:
        """The outputs of a node after a node without a rule. The node's own rule is applied as if the earlier operators
        did not move the rows, so an operator that carries data along the rows is still found."""
        count = len(node.outputs)
        if mixed.is_certain or mixed.refutes_name:
            return [mixed] * count
        before = [value.supposed if isinstance(value, Mixed) else value for value in values]
        if any(is_given and value is None for is_given, value in zip(node.inputs, before, strict=True)):
            return [msgspec.structs.replace(mixed, supposed=None)] * count
        try:
            found = self._ruled(node, before, scope, depth)
        except MixedRowsError as error:
            reason = f"{_called(node)} {error}, unless what comes before it moves them: {mixed.reason}"
            return [Mixed(reason[:_MAX_REASON], is_certain=False, refutes_name=True)] * count
        except UnreadError as error:
            return [Mixed(f"{_called(node)} {error}", is_certain=False, refutes_name=True)] * count
        except UnknownRuleError:
            return [msgspec.structs.replace(mixed, supposed=supposed(before, self.symbols))] * count
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return [msgspec.structs.replace(mixed, supposed=None)] * count
        after: list[Value] = []
        for value in [*found, *[mixed] * (count - len(found))][:count]:
            guess = value.supposed if isinstance(value, Mixed) else value
            is_worse = isinstance(value, Mixed) and (value.is_certain or value.refutes_name)
            after.append(value if is_worse else msgspec.structs.replace(mixed, supposed=guess))
        return after

    def _ruled(
        self, node: Node, values: Sequence[Value | None], scope: Mapping[str, Value], depth: int
    ) -> Sequence[Value]:
        at = _Node(node, values, self._versions.get(node.domain, 0), self.symbols)
        if (node.domain, node.operator) in self._functions:
            raise UnreadError("is an operator of the file's own, whose definition is not read")
        if node.operator == "If" and not node.domain:
            return self._branches(at, scope, depth)
        rule = _RULES.get(node.domain, {}).get(node.operator)
        if rule not in _OF_INNER and any(isinstance(value, Inner) for value in at.given()):
            raise UnknownRuleError("takes rows that are joined with the dimensions before them")
        if rule is not None:
            return rule(at)
        has_graph = any(attribute.graph is not None for attribute in node.attributes.values())
        if all(isinstance(value, Fixed) for value in at.given()) and not has_graph and node.operator not in _RANDOM:
            plain(*at.given())
            return [Fixed(None)] * len(node.outputs)
        if has_graph:
            raise UnreadError("has a graph of its own, which is not known to keep rows apart")
        raise UnknownRuleError(
            "draws random numbers" if node.operator in _RANDOM else "is not known to keep rows apart"
        )

    def _branches(self, at: _Node, scope: Mapping[str, Value], depth: int) -> Sequence[Value]:
        """A branch that is chosen for all rows together: both branches must keep the rows on the same axis."""
        if depth >= _MAX_DEPTH:
            raise UnreadError("is nested too deeply to be read")
        if not isinstance(at.value(0), Fixed):
            raise MixedRowsError("decides for all rows by what is in one")
        found: list[list[Value]] = []
        condition = numbers_of(at.value(0))
        plain(at.value(0))
        taken: tuple[str, ...] = ("then_branch", "else_branch")
        if condition is not None and len(condition) == 1:
            taken = taken[:1] if condition[0] else taken[1:]
        for name in taken:
            attribute = at.node.attributes.get(name)
            if attribute is None or attribute.graph is None:
                raise UnknownRuleError("has no branches")
            found.append(self.graph(attribute.graph, scope, depth + 1))
        return [self._either(pair) for pair in zip(*found, strict=True)]

    def _either(self, values: Sequence[Value]) -> Value:
        """The value of an output that is one of several values."""
        mixed = worst(values)
        if mixed is not None or all(value == values[0] for value in values):
            return mixed or values[0]
        plain(*values)
        if any(isinstance(value, Inner) for value in values):
            raise UnknownRuleError("has branches that differ")
        known = [value.dims for value in values if not isinstance(value, Mixed)]
        ranks = {None if dims is None else len(dims) for dims in known}
        axes = {axis_of(value) for value in values}
        if axes == {None} and (None in ranks or len(ranks) > 1):
            return Fixed(None)
        if len(ranks) > 1 or len(axes) > 1:
            raise UnknownRuleError("has branches that differ")
        dims = [
            options[0] if len(set(options)) == 1 else self.symbols.size()
            for options in zip(*[dims for dims in known if dims is not None], strict=True)
        ]
        return made(dims, axes.pop())


def _called(node: Node) -> str:
    """The node's name for messages, shortened, because names come from the file."""
    domain = f"{node.domain}." if node.domain else ""
    name = f" {node.name!r}" if node.name else ""
    return f"{domain}{node.operator}{name}"[:200]


# -- rules -------------------------------------------------------------------------------------

Rule = Callable[[_Node], Sequence[Value]]


def _by_element(at: _Node) -> Sequence[Value]:
    operation = _ON_ITEMS.get(at.node.operator)
    if operation is not None and len(at.values) == 2 and at.version >= 7:
        return [elementwise.on_items(at.given(), operation, at.symbols)]
    if at.node.operator in _ON_ITEMS and at.version < 7 and at.integer("broadcast", 0):
        raise UnknownRuleError("is of a version whose broadcasting is not known")
    return [elementwise.broadcast(at.given(), at.symbols)]


def _same(at: _Node) -> Sequence[Value]:
    return [at.value(0)]


def _cast(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    if not isinstance(value, Fixed) or value.items is None:
        return [value]
    if ELEMENTS.get(at.integer("to", 0)) not in ("int32", "int64", "float", "double"):
        return [elementwise.broadcast([value], at.symbols)]  # other numbers than these may be cut
    kept = [
        item if item.number is not None or at.symbols.is_size(item) else elementwise.opaque(at.symbols, "cast", item)
        for item in value.items
    ]
    return [Fixed(value.dims, tuple(kept))]


def _like_first(at: _Node) -> Sequence[Value]:
    """Each element depends on the element at its place in the first input. The second input of CastLike only gives a
    type."""
    return [elementwise.broadcast([at.value(0)], at.symbols)]


def _dropout(at: _Node) -> Sequence[Value]:
    training = at.fixed(2)
    if training is not None and numbers_of(training) != (0,):
        raise UnknownRuleError("draws random numbers")
    return [at.value(0)] * len(at.node.outputs)


def _constant(at: _Node) -> Sequence[Value]:
    attributes = at.node.attributes
    proof_items: Sequence[int | float] | None = None
    dims: tuple[int, ...] | None = None
    if "value" in attributes and attributes["value"].tensor is not None:
        tensor = attributes["value"].tensor
        dims, proof_items = tensor.dims, tensor.items
    elif "value_ints" in attributes or "value_floats" in attributes:
        proof_items = (attributes.get("value_ints") or attributes["value_floats"]).numbers
        if len(proof_items) > MAX_ITEMS:
            return [Fixed(None)]
        dims = (len(proof_items),)
    elif "value_int" in attributes or "value_float" in attributes:
        number = (attributes.get("value_int") or attributes["value_float"]).number
        dims, proof_items = (), () if number is None else (number,)
    if dims is None:
        return [Fixed(None)]
    return [Fixed(sizes(dims), None if proof_items is None else tuple(_item(one, at.symbols) for one in proof_items))]


def _item(item: float, symbols: Symbols) -> Size:
    if abs(item) <= _MOST and int(item) == item:
        return Size(int(item))
    return symbols.number(("constant", repr(item)))


def _shape(at: _Node) -> Sequence[Value]:
    dims = dims_of(at.value(0))
    begin, end = at.integer("start", 0), at.integer("end", len(dims))
    found = dims[begin:end]
    return [Fixed((Size(len(found)),), found)]


def _size(at: _Node) -> Sequence[Value]:
    dims = dims_of(at.value(0))
    return [Fixed((), (times(*dims),))]


def _constant_of_shape(at: _Node) -> Sequence[Value]:
    shape = at.fixed(0)
    if shape is not None and shape.items is None and not shape.counts_rows:
        return [Fixed(None)]
    dims = at.sizes(0)
    axis = next((number for number, size in enumerate(dims) if size.rows), None)
    if any(size.factor < 0 for size in dims):
        raise UnknownRuleError("has a negative size")
    attribute = at.node.attributes.get("value")
    one = attribute.tensor.items if attribute is not None and attribute.tensor is not None else (0,)
    count = dims[0].number if len(dims) == 1 else None
    if one is not None and len(one) == 1 and count is not None and count <= MAX_ITEMS:
        return [Fixed(dims, (_item(one[0], at.symbols),) * count)]
    return [made(dims, axis)]


def _reshape(at: _Node) -> Sequence[Value]:
    target = sizes(at.integers("shape") or ()) if at.version < 5 else at.sizes(1)
    return [shapes.reshape(at.value(0), target, at.symbols, zero_copies=not at.integer("allowzero", 0))]


def _flatten(at: _Node) -> Sequence[Value]:
    dims = dims_of(at.value(0))
    axis = at.integer("axis", 1)
    axis = len(dims) if axis == len(dims) else place(axis, len(dims))
    return [shapes.reshape(at.value(0), (times(*dims[:axis]), times(*dims[axis:])), at.symbols)]


def _axes(at: _Node, since: int = 13) -> tuple[int, ...] | None:
    """Axes that are an attribute before a version, and an input from then on."""
    return at.integers("axes") if at.version < since else at.numbers(1)


def _split(at: _Node) -> Sequence[Value]:
    given_number = at.integers("split") if at.version < 13 else None
    parts = sizes(given_number) if given_number is not None else None
    if at.version >= 13 and at.maybe(1) is not None:
        parts = at.sizes(1)
    return shapes.split(at.value(0), at.integer("axis", 0), parts, len(at.node.outputs), at.symbols)


def _slice(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    if at.version < 10:
        starts = sizes(at.integers("starts") or ())
        ends = sizes(at.integers("ends") or ())
        axes = at.integers("axes")
        steps: tuple[int, ...] | None = None
    else:
        starts, ends = at.sizes(1), at.sizes(2)
        axes, steps = at.numbers(3), at.numbers(4)
    dims = dims_of(value)
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise UnknownRuleError("has parameters of different lengths")
    changed, lengths = [], []
    for begin, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        at_axis = place(axis, len(dims))
        first, last, size = begin.number, end.number, dims[at_axis].number
        if first == 0 and step == 1 and (end == dims[at_axis] or (last is not None and last >= _END - 1)):
            continue  # all of it
        if begin.rows or end.rows:
            raise UnknownRuleError("computes with the number of rows")
        if isinstance(value, Fixed) and value.items is not None and len(starts) == 1 and None not in (first, last):
            return [shapes.slice_items(value, at_axis, slice(first, last, step))]
        known = size is not None and first is not None and last is not None and step != 0
        count = Size(len(range(size or 0)[first:last:step])) if known else at.symbols.size()
        changed.append(at_axis)
        lengths.append(count)
    if not changed:
        return [value]
    return [shapes.keeps(value, changed, lengths, "takes a slice of the rows")]


def _pad(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    rank = len(dims_of(value))
    axis = axis_of(value)
    plain(at.fixed(2))  # the value of the padding
    pads: Sequence[Size] = sizes(at.integers("pads") or ()) if at.version < 11 else ()
    axes: tuple[int, ...] | None = None
    if at.version >= 11:
        parameter = at.fixed(1)
        plain(parameter)
        axes = at.numbers(3)
        if parameter is None or parameter.items is None:
            raise UnknownRuleError("has padding that is computed")
        pads = parameter.items
    places = range(rank) if axes is None else [place(one, rank) for one in axes]
    if len(pads) != 2 * len(places):
        raise UnknownRuleError("has padding that does not fit its input")
    changed, lengths = [], []
    for number, one in enumerate(places):
        before, after = pads[number], pads[number + len(places)]
        if before.number == 0 and after.number == 0:
            continue
        if one == axis and (before.number is None or after.number is None):
            raise UnknownRuleError("has padding that is computed")
        size, total = dims_of(value)[one].number, (before.number, after.number)
        known = None if size is None or None in total else size + (total[0] or 0) + (total[1] or 0)
        changed.append(one)
        lengths.append(at.symbols.size() if known is None else Size(known))
    return [shapes.keeps(value, changed, lengths, "adds padding to the rows")]


def _depth_to_space(at: _Node) -> Sequence[Value]:
    is_inverse = at.node.operator == "SpaceToDepth"
    return [shapes.depth_to_space(at.value(0), at.integer("blocksize", 0), is_inverse=is_inverse)]


def _resize(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    dims, axis = dims_of(value), axis_of(value)
    plain(value)
    if at.text("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise UnknownRuleError("crops its input")
    if at.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnknownRuleError("stretches all dimensions as it does one")
    first = 2 if at.node.operator == "Resize" and at.version >= 11 else 1
    scales, wanted = at.fixed(first), at.fixed(first + 1) if first == 2 else None
    axes = at.integers("axes") or tuple(range(len(dims)))
    plain(scales)
    if wanted is not None:
        targets = at.sizes(first + 1)
        grown = {place(one, len(dims)): size for one, size in zip(axes, targets, strict=False)}
        stays = {one for one, size in grown.items() if size == dims[one]}
    else:
        factors = None if scales is None else scales.items
        if (at.version < 9 and at.node.operator == "Upsample") or factors is None:
            factors = ()
        grown = {place(one, len(dims)): at.symbols.size() for one, _ in zip(axes, factors, strict=False)}
        stays = {place(one, len(dims)) for one, factor in zip(axes, factors, strict=False) if factor == ONE}
        if axis is not None and not factors:
            raise UnknownRuleError("has scales that are computed")
    changed = [one for one in grown if one not in stays]
    if any(grown[one].rows for one in changed):
        raise UnknownRuleError("computes with the number of rows")
    lengths = [grown[one] if grown[one].number is not None else at.symbols.size() for one in changed]
    return [shapes.keeps(value, changed, lengths, "stretches the rows")]


def _range(at: _Node) -> Sequence[Value]:
    bounds = [at.fixed(number) for number in range(3)]
    plain(*bounds)
    known = [numbers_of(bound) for bound in bounds]
    if all(one is not None and len(one) == 1 for one in known):
        begin, end, step = [one[0] for one in known if one is not None]
        if step and len(range(begin, end, step)) <= MAX_ITEMS:
            items = sizes(range(begin, end, step))
            return [Fixed((Size(len(items)),), items)]
    return [Fixed((at.symbols.size(),))]


def _one_hot(at: _Node) -> Sequence[Value]:
    indices = at.value(0)
    plain(indices, at.fixed(1), at.fixed(2))
    dims = list(dims_of(indices))
    at_axis = place(at.integer("axis", -1), len(dims) + 1)
    depth = numbers_of(at.value(1))
    dims.insert(at_axis, Size(depth[0]) if depth else at.symbols.size())
    axis = axis_of(indices)
    return [made(dims, None if axis is None else axis + (at_axis <= axis))]


def _trilu(at: _Node) -> Sequence[Value]:
    plain(at.fixed(1))
    return [reductions.along(at.value(0), (-1, -2), "takes a triangle of the rows")]


# -- reductions and norms ------------------------------------------------------------------------


def _reduce(at: _Node) -> Sequence[Value]:
    since = _AXES_INPUT_SINCE.get(at.node.operator, 18)
    value = at.value(0)
    axes = _axes(at, since)
    if not axes:
        if at.version >= since and at.integer("noop_with_empty_axes", 0):
            return [value]
        axes = None
    keeps_dims = bool(at.integer("keepdims", 1))
    is_product = at.node.operator == "ReduceProd" and len(dims_of(value)) == 1
    if is_product and isinstance(value, Fixed) and value.items is not None:
        return [Fixed((ONE,) if keeps_dims else (), (times(*value.items),))]
    return [reductions.reduce(value, axes, keeps_dims=keeps_dims)]


def _arg(at: _Node) -> Sequence[Value]:
    axis = at.integer("axis", 0)
    return [reductions.reduce(at.value(0), (axis,), keeps_dims=bool(at.integer("keepdims", 1)))]


def _softmax(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    rank = len(dims_of(value))
    if at.version >= 13:
        axes: Sequence[int] = (at.integer("axis", -1),)
    else:  # over all dimensions from the axis on
        axes = range(place(at.integer("axis", 1), rank), rank)
    return [reductions.norm(value, axes)]


def _cumulative(at: _Node) -> Sequence[Value]:
    axis = at.numbers(1)
    if axis is None or len(axis) != 1:
        raise UnknownRuleError("has an axis that is computed")
    return [reductions.along(at.value(0), axis, "sums from row to row")]


def _top(at: _Node) -> Sequence[Value]:
    if at.version >= 10:
        count = at.fixed(1)
        plain(count)
        known = numbers_of(count)
        size = Size(known[0]) if known else at.symbols.size()
    else:
        size = Size(at.integer("k", 1))
    return [reductions.best(at.value(0), at.integer("axis", -1), size)] * 2


def _layer_norm(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    plain(*at.given())
    if any(not isinstance(other, Fixed) for other in at.given()[1:]):
        raise UnknownRuleError("takes its weights from the rows")
    rank = len(dims_of(value))
    axes = range(place(at.integer("axis", -1), rank), rank)
    found = reductions.norm(value, axes)
    means = reductions.reduce(value, axes, keeps_dims=True)
    return [found, means, means][: len(at.node.outputs)]


def _skip_layer_norm(at: _Node) -> Sequence[Value]:
    """onnxruntime's: the sum of two tensors, and of a bias, normalised along the last axis."""
    plain(*at.given())
    total = elementwise.broadcast([at.value(0), at.value(1)], at.symbols)
    if any(not isinstance(other, Fixed) for other in at.given()[2:]):
        raise UnknownRuleError("takes its weights from the rows")
    found = reductions.norm(total, (-1,))
    unknown = Mixed(f"{_called(at.node)} gives its statistics", is_certain=False)
    return [found, unknown, unknown, total][: len(at.node.outputs)]


def _variance_norm(at: _Node) -> Sequence[Value]:
    axes = at.integers("axes") or (0, 2, 3)
    return [reductions.norm(at.value(0), axes)]


def _over_space(at: _Node) -> Sequence[Value]:
    """Norms over everything behind the first axis, or behind the channels."""
    value = at.value(0)
    plain(*at.given())
    if any(not isinstance(other, Fixed) for other in at.given()[1:]):
        raise UnknownRuleError("takes its weights from the rows")
    return [reductions.norm(value, range(1, len(dims_of(value))))]


def _batch_norm(at: _Node) -> Sequence[Value]:
    is_training = at.integer("training_mode", 0) or sum(map(bool, at.node.outputs)) > 1
    if is_training or (at.version < 7 and not at.integer("is_test", 0)):
        raise MixedRowsError("normalises over the rows, as in training")
    return [products.per_channel(at.value(0), at.values[1:])]


# -- products ------------------------------------------------------------------------------------


def _matmul(at: _Node) -> Sequence[Value]:
    return [products.matmul(at.value(0), at.value(1), at.symbols)]


def _fused_matmul(at: _Node) -> Sequence[Value]:
    if any(at.integer(name, 0) for name in ("transA", "transB", "transBatchA", "transBatchB")):
        raise UnknownRuleError("turns its inputs")
    return _matmul(at)


def _matmul_integer(at: _Node) -> Sequence[Value]:
    _scalars(at, (2, 3))
    return _matmul(at)


def _qlinear_matmul(at: _Node) -> Sequence[Value]:
    _scalars(at, (1, 2, 4, 5, 6, 7))
    return [products.matmul(at.value(0), at.value(3), at.symbols)]


def _gemm(at: _Node) -> Sequence[Value]:
    turns = (bool(at.integer("transA", 0)), bool(at.integer("transB", 0)))
    return [products.gemm(at.value(0), at.value(1), at.maybe(2), at.symbols, turns_one=turns[0], turns_other=turns[1])]


def _window(at: _Node, weight: Value | None) -> products.Window:
    """The attributes of a convolution or pool."""
    kernel = at.integers("kernel_shape")
    if kernel is None and weight is not None and _has_dims(weight):
        known = [size.number for size in dims_of(weight)[2:]]
        kernel = tuple(number for number in known if number is not None)
    padding = at.text("auto_pad", "NOTSET")
    return products.Window(
        kernel=kernel or (),
        strides=at.integers("strides") or (),
        pads=() if padding == "VALID" else at.integers("pads") or (),
        dilations=at.integers("dilations") or (),
        is_same=padding.startswith("SAME"),
        is_open=bool(at.integer("ceil_mode", 0)) or at.node.operator == "ConvTranspose",
    )


def _conv(at: _Node) -> Sequence[Value]:
    for number in range(2, len(at.values)):
        plain(at.fixed(number))
    return _convolved(at, at.value(1))


def _qlinear_conv(at: _Node) -> Sequence[Value]:
    for number in (1, 2, 4, 5, 6, 7, 8):
        plain(at.fixed(number))
    return _convolved(at, at.value(3))


def _convolved(at: _Node, weight: Value) -> Sequence[Value]:
    is_known = at.node.operator != "ConvTranspose" and _has_dims(weight)
    channels = dims_of(weight)[0] if is_known else at.symbols.size()
    return [products.convolution(at.value(0), weight, channels, _window(at, weight), at.symbols)]


def _has_dims(value: Value) -> bool:
    return not isinstance(value, Mixed) and bool(value.dims)


def _pool(at: _Node) -> Sequence[Value]:
    found = products.convolution(at.value(0), None, None, _window(at, None), at.symbols)
    if len(at.node.outputs) > 1:  # the places of the largest elements, counted over the whole tensor
        places = Mixed(f"{_called(at.node)} gives places in the whole batch", is_certain=False)
        return [found, places]
    return [found]


def _global_pool(at: _Node) -> Sequence[Value]:
    value = at.value(0)
    rank = len(dims_of(value))
    return [reductions.reduce(value, range(2, rank), keeps_dims=True)]


def _quantise(at: _Node) -> Sequence[Value]:
    """With one scale, or one for each place of an axis."""
    value = at.value(0)
    plain(*at.given())
    scale = at.fixed(1)
    at.fixed(2)
    if scale is None or scale.dims is None:
        raise UnknownRuleError("has a scale of unknown shape")
    if scale.dims and scale.dims != (ONE,):
        rank = len(dims_of(value))
        if len(scale.dims) > 1 or place(at.integer("axis", 1), rank) == axis_of(value):
            raise UnknownRuleError("has scales along the rows")
    return [elementwise.broadcast([value], at.symbols)]


def _dynamic_quantise(at: _Node) -> Sequence[Value]:
    if isinstance(at.value(0), Rows):
        raise MixedRowsError("scales all rows by the largest number of any of them")
    plain(*at.given())
    if any(not isinstance(value, Fixed) for value in at.given()):
        raise UnknownRuleError("takes its parameters from the rows")
    return [Fixed(None)] * len(at.node.outputs)


def _scalars(at: _Node, numbers: Sequence[int]) -> None:
    """Raises UnknownRuleError for parameters that depend on rows."""
    for number in numbers:
        plain(at.fixed(number))


# -- recurrent layers ----------------------------------------------------------------------------


def _recurrent(at: _Node) -> Sequence[Value]:
    kind = at.node.operator
    directions = 2 if at.text("direction", "forward") == "bidirectional" else 1
    given_number = at.integer("hidden_size", 0)
    hidden = Size(given_number) if given_number else recurrent.hidden_size(at.maybe(2), at.symbols)
    states = [at.maybe(number) for number in ((5, 6) if kind == "LSTM" else (5,))]
    whole, last = recurrent.recurrent(
        at.value(0),
        [at.maybe(1), at.maybe(2), at.maybe(3), at.maybe(7)],
        at.maybe(4),
        states,
        hidden=hidden,
        directions=directions,
        batch_first=bool(at.integer("layout", 0)),
        kind=kind,
    )
    return [whole, *[last] * _GATES[kind]]


# -- the table --------------------------------------------------------------------------------


def _scores(at: _Node) -> Sequence[Value]:
    return [tables.scores(at.value(0), at.symbols)]


_OF_INNER: Final = frozenset({_by_element, _reshape, _same, _dropout, _shape, _size, _gemm})
"""Rules that keep rows that lie within their axis, or take them apart."""

_RULES: Final[Mapping[str, Mapping[str, Rule]]] = {  # by domain
    "": {
        **dict.fromkeys(_BY_ELEMENT, _by_element),
        **dict.fromkeys(_REDUCTIONS, _reduce),
        **dict.fromkeys(_GATES, _recurrent),
        **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
        **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), _global_pool),
        **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
        **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
        **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose"), _conv),
        **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantise),
        **dict.fromkeys(("Resize", "Upsample"), _resize),
        **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm),
        "BatchNormalization": _batch_norm,
        "Cast": _cast,
        "CastLike": _like_first,
        "Concat": lambda at: [shapes.concat(at.given(), at.integer("axis", 1), at.symbols)],
        "Constant": _constant,
        "ConstantOfShape": _constant_of_shape,
        "CumProd": _cumulative,
        "CumSum": _cumulative,
        "DepthToSpace": _depth_to_space,
        "Dropout": _dropout,
        "DynamicQuantizeLinear": _dynamic_quantise,
        "Einsum": lambda at: [products.einsum(at.text("equation"), at.given(), at.symbols)],
        "Expand": lambda at: [shapes.expand(at.value(0), at.sizes(1), at.symbols)],
        "Flatten": _flatten,
        "Gather": lambda at: [shapes.gather(at.value(0), at.value(1), at.integer("axis", 0))],
        "GatherElements": lambda at: [shapes.gather_elements(at.value(0), at.value(1), at.integer("axis", 0))],
        "GatherND": lambda at: [shapes.gather_nd(at.value(0), at.value(1), at.integer("batch_dims", 0))],
        "Gemm": _gemm,
        "GroupNormalization": _over_space,
        "Identity": _same,
        "InstanceNormalization": _over_space,
        "LRN": lambda at: [reductions.norm(at.value(0), (1,))],
        "LpNormalization": lambda at: [reductions.norm(at.value(0), (at.integer("axis", -1),))],
        "MatMul": _matmul,
        "MatMulInteger": _matmul_integer,
        "MeanVarianceNormalization": _variance_norm,
        "OneHot": _one_hot,
        "Pad": _pad,
        "QLinearConv": _qlinear_conv,
        "QLinearMatMul": _qlinear_matmul,
        "Range": _range,
        "Reshape": _reshape,
        "ScatterElements": lambda at: [
            shapes.scatter_elements(at.value(0), at.value(1), at.value(2), at.integer("axis", 0))
        ],
        "Shape": _shape,
        "Size": _size,
        "Slice": _slice,
        "SpaceToDepth": _depth_to_space,
        "Split": _split,
        "Squeeze": lambda at: [shapes.squeeze(at.value(0), _axes(at) or None)],  # no axes: all dimensions of 1
        "Tile": lambda at: [shapes.tile(at.value(0), at.sizes(1))],
        "TfIdfVectorizer": _scores,
        "TopK": _top,
        "Transpose": lambda at: [shapes.transpose(at.value(0), at.integers("perm"))],
        "Trilu": _trilu,
        "Unsqueeze": lambda at: [shapes.unsqueeze(at.value(0), _axes(at) or ())],
        "Where": lambda at: [elementwise.choose(at.value(0), at.value(1), at.value(2), at.symbols)],
    },
    "com.microsoft": {
        **dict.fromkeys(_MICROSOFT_BY_ELEMENT, _by_element),
        "DynamicQuantizeLSTM": _dynamic_quantise,
        "DynamicQuantizeMatMul": _dynamic_quantise,
        "FusedConv": _conv,
        "FusedMatMul": _fused_matmul,
        "SkipLayerNormalization": _skip_layer_norm,
    },
    "ai.onnx.ml": {
        **dict.fromkeys(tables.BY_ELEMENT, _like_first),
        **dict.fromkeys(tables.BY_ROW, lambda at: [tables.by_row(at.value(0))]),
        **dict.fromkeys(tables.REGRESSORS, _scores),
        **dict.fromkeys(tables.CLASSIFIERS, lambda at: [tables.labels(at.value(0)), *_scores(at)]),
        "ArrayFeatureExtractor": lambda at: [tables.extracted(at.value(0), at.value(1))],
        "FeatureVectorizer": lambda at: [tables.joined(at.given(), at.symbols)],
        "OneHotEncoder": lambda at: [tables.encoded(at.value(0), at.symbols)],
        "ZipMap": lambda at: [tables.labels(at.value(0))],  # a map for each row
    },
}
