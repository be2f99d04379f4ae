"""The proof over a program of torch.export: torch's operators as the rules of this package.

The program is the JSON of the archive, which gives the shape of each tensor in symbols. Nothing is known of the result
of an operator without a rule, unless all its inputs are constants. Each node is visited once. The operators:
https://docs.pytorch.org/docs/stable/torch.compiler_ir.html.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from inferd.registry.rows import elementwise, products, reductions, shapes
from inferd.registry.rows.value import (
    ONE,
    ROWS,
    Fixed,
    Inner,
    Mixed,
    MixedRowsError,
    Places,
    Rows,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    axis_of,
    dims_of,
    made,
    operators,
    place,
    quotient,
    times,
    worst,
)

_TARGET: Final = re.compile(r"torch\.ops\.aten\.(\w+)(?:\.\w+)?")
_MAX_EXPRESSION: Final = 512
_MAX_TENSORS: Final = 64  # outputs of one node

# Each element from the elements at its place.
_BY_ELEMENT: Final = operators(
    """
    __and__ __or__ __xor__ _to_copy abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clone contiguous cos cosh detach div elu
    eq erf erfc exp exp2 expand_as expm1 float_power floor floor_divide fmod full_like ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp lift_fresh_copy log log10 log1p log2
    log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish
    mul nan_to_num ne neg ones_like pow prelu reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign
    silu sin sinh softplus softshrink softsign sqrt square sub tan tanh threshold to trunc type_as where xlogy
    zeros_like
    """
)
_REDUCTIONS: Final = operators(
    """
    all amax amin any argmax argmin count_nonzero logsumexp max mean median min norm nansum prod std sum var
    linalg_vector_norm
    """
)
_ALONG: Final = {"softmax": "normalises over the rows", "log_softmax": "normalises over the rows"} | dict.fromkeys(
    ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), "sums from row to row"
)
_ORDERS: Final = frozenset({"argsort", "sort", "topk"})
_SPACES: Final = re.compile(
    r"(?:conv(?:_transpose)?|max_pool|avg_pool|adaptive_avg_pool|adaptive_max_pool|upsample_\w+?)([123])d"
)
_FILLED: Final = frozenset({"empty", "full", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "zeros"})
_STATES: Final = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}


def prove(document: Mapping[str, Any]) -> dict[str, Value]:
    """The values of the program's outputs. ``document``: models/model.json of the archive. Raises KeyError, TypeError,
    ValueError, IndexError or AttributeError for one that is malformed."""
    module = document["graph_module"]
    names = user_inputs(document)
    proof = _Proof(module["graph"], names)
    specs = module["signature"]["output_specs"]
    outputs = [spec["user_output"]["arg"]["as_tensor"]["name"] for spec in specs if "user_output" in spec]
    found = proof.run(names)
    if len(outputs) != len(specs):
        kept = Mixed("it keeps a state between calls", is_certain=True)
        return dict.fromkeys(outputs, kept)
    missing = Mixed("an output is made by no node", is_certain=False)
    described = {name: found.get(name, missing) for name in outputs}
    return {name: worst((proof.broken, value)) or value for name, value in described.items()}


def user_inputs(document: Mapping[str, Any]) -> list[str]:
    """The tensors that a request brings."""
    specs = document["graph_module"]["signature"]["input_specs"]
    return [str(spec["user_input"]["arg"]["as_tensor"]["name"]) for spec in specs if "user_input" in spec]


def why_closed(document: Mapping[str, Any]) -> str:
    """Why a program has no batch dimension, by its shapes; empty when the shapes give no reason."""
    tensors = document["graph_module"]["graph"]["tensor_values"]
    names = user_inputs(document)
    for name in names:
        sizes = tensors[name]["sizes"]
        if not sizes:
            return f"the input {name!r} has no dimensions"
        if "as_int" in sizes[0]:
            fixed = f"the first dimension of the input {name!r} is fixed at {int(sizes[0]['as_int'])}"
            return f"{fixed}; export it as a free one"
    if not names:
        return "it has no inputs"
    return "" if row_symbol(document["graph_module"]["graph"], names) else "the first dimensions of its inputs differ"


class _Sizes:
    """Sizes of tensors out of the program's expressions. ``rows``: the symbol of the number of rows."""

    def __init__(self, graph: Mapping[str, Any], rows: str) -> None:
        self.symbols = Symbols()
        self._rows = rows
        self._tensors: Mapping[str, Any] = graph["tensor_values"]
        self._integers: Mapping[str, Any] = graph.get("sym_int_values", {})
        self._named: dict[str, Size] = {}

    def tensor(self, name: str) -> tuple[Size, ...]:
        return tuple(self.of(size) for size in self._tensors[name]["sizes"])

    def of(self, described: Mapping[str, Any]) -> Size:
        """A number that is given as an integer, by an expression or by a name."""
        if "as_int" in described:
            return Size(int(described["as_int"]))
        if "as_name" in described:
            return self.of(self._integers[described["as_name"]])
        text = str(described["as_expr"]["expr_str"])
        if len(text) > _MAX_EXPRESSION:
            raise UnknownRuleError("has a size that is too long")
        return self._expression(ast.parse(text, mode="eval").body, text)

    def _expression(self, tree: ast.expr, whole: str) -> Size:
        match tree:
            case ast.Constant(value=int(number)):
                return Size(number)
            case ast.Name(id=name):
                return self._symbol(name)
            case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
                return self._symbol(name)
            case ast.Call(func=ast.Name(id="Integer"), args=[inner]):
                return self._expression(inner, whole)
            case ast.Call(func=ast.Name(id="Mul"), args=parts):
                return times(*[self._expression(part, whole) for part in parts])
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return times(self._expression(left, whole), self._expression(right, whole))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if self._rows in names:
            raise UnknownRuleError("computes with the number of rows")
        return self.symbols.number(("expression", ast.dump(tree)))

    def _symbol(self, name: str) -> Size:
        if name == self._rows:
            return ROWS
        if name not in self._named:
            self._named[name] = self.symbols.size()
        return self._named[name]


def row_symbol(graph: Mapping[str, Any], names: Sequence[str]) -> str:
    """The symbol with which the shapes of all these inputs begin; empty where there is none."""
    found = set()
    for name in names:
        sizes = graph["tensor_values"][name]["sizes"]
        text = sizes[0].get("as_expr", {}).get("expr_str", "") if sizes else ""
        matched = re.fullmatch(r"(?:Symbol\(')?([A-Za-z_]\w*)(?:'[^()]*\))?", str(text))
        found.add(matched[1] if matched else "")
    return found.pop() if len(found) == 1 else ""


class _Node:
    """A node of the program, its arguments by their names."""

    def __init__(self, node: Mapping[str, Any], sizes: _Sizes, scope: Mapping[str, Value]) -> None:
        self.sizes = sizes
        matched = _TARGET.fullmatch(str(node["target"]))
        self.operator = matched[1] if matched else ""
        self.called = f"{str(node['target']).removeprefix('torch.ops.')[:100]} {str(node.get('name', ''))[:100]!r}"
        self._arguments: dict[str, Mapping[str, Any]] = {one["name"]: one["arg"] for one in node["inputs"]}
        self._scope = scope
        # These return numbers computed from a tensor's elements, and not from its shape.
        self.tells_numbers = not self.operator.startswith("sym_") and any(
            key.startswith("as_sym") for one in node["outputs"] for key in one
        )
        self.outputs = [name for one in node["outputs"] for name in _tensor_names(one)]

    @property
    def is_in_place(self) -> bool:
        return self.operator.endswith("_") and not self.operator.endswith("__")

    def tensors(self) -> list[Value]:
        """All tensors that it is given."""
        names = [name for argument in self._arguments.values() for name in _tensor_names(argument)]
        return [self._scope.get(name, _NOTHING) for name in names]

    def listed(self, name: str) -> list[Value | None]:
        """A list of tensors, some of which may be left out."""
        argument = self._arguments[name]
        if "as_optional_tensors" in argument:
            names = [
                one["as_tensor"]["name"] if "as_tensor" in one else None for one in argument["as_optional_tensors"]
            ]
            return [None if one is None else self._scope.get(one, _NOTHING) for one in names]
        return [self._scope.get(one, _NOTHING) for one in _tensor_names(argument)]

    def tensor(self, name: str) -> Value:
        found = self.maybe(name)
        if found is None:
            raise UnknownRuleError(f"has no tensor {name!r}")
        return found

    def maybe(self, name: str) -> Value | None:
        names = _tensor_names(self._arguments.get(name, {}))
        return self._scope.get(names[0], _NOTHING) if names else None

    @property
    def first(self) -> Value:
        """The first tensor among the arguments, by any name."""
        given = self.tensors()
        if not given:
            raise UnknownRuleError("is given no tensor")
        return given[0]

    def fixed(self, *names: str) -> None:
        """Raises UnknownRuleError for parameters that depend on rows."""
        for name in names:
            if not isinstance(self.maybe(name), Fixed | None):
                raise UnknownRuleError("takes its weights from the rows")

    def size(self, name: str) -> Size | None:
        """An integer; None when it is left out."""
        argument = self._arguments.get(name, {})
        if "as_int" in argument:
            return Size(int(argument["as_int"]))
        return self.sizes.of(argument["as_sym_int"]) if "as_sym_int" in argument else None

    def integer(self, name: str, otherwise: int) -> int:
        size = self.size(name)
        if size is None:
            return otherwise
        if size.number is None:
            raise UnknownRuleError("has parameters that are computed")
        return size.number

    def integers(self, name: str) -> tuple[int, ...] | None:
        argument = self._arguments.get(name, {})
        if "as_int" in argument:
            return (int(argument["as_int"]),)
        if "as_ints" in argument:
            return tuple(int(one) for one in argument["as_ints"])
        if "as_sym_ints" in argument:
            raise UnknownRuleError("has parameters that are computed")
        return None

    def number(self, name: str) -> float:
        """A real number; 0 when it is left out."""
        argument = self._arguments.get(name, {})
        return float(argument.get("as_float", argument.get("as_int", 0)))

    def flag(self, name: str) -> bool:
        return bool(self._arguments.get(name, {}).get("as_bool", False))

    def text(self, name: str) -> str:
        return str(self._arguments.get(name, {}).get("as_string", ""))

    def check_numbers(self, *but: str) -> None:
        """Raises UnknownRuleError where an argument, but for some, is computed from the number of rows."""
        for name, argument in self._arguments.items():
            if name in but:
                continue
            if "as_sym_float" in argument or "as_sym_bool" in argument:
                raise UnknownRuleError("computes with a number that depends on sizes")
            described = argument.get("as_sym_ints", ())
            parts = [argument["as_sym_int"]] if "as_sym_int" in argument else described
            if any(self.sizes.of(part).rows for part in parts):
                raise UnknownRuleError("computes with the number of rows")

    def shape(self, number: int = 0) -> tuple[Size, ...]:
        """The shape of an output in the program."""
        return self.sizes.tensor(self.outputs[number])

    def made(self, axis: int | None) -> list[Value]:
        """All outputs, with the rows along one axis."""
        return [made(self.shape(number), axis) for number in range(len(self.outputs))]


_NOTHING: Final = Mixed("a tensor is made by no node", is_certain=False)


def _tensor_names(argument: Mapping[str, Any]) -> list[str]:
    if "as_tensor" in argument:
        return [str(argument["as_tensor"]["name"])]
    if "as_tensors" in argument:
        return [str(one["name"]) for one in argument["as_tensors"][:_MAX_TENSORS]]
    if "as_optional_tensors" in argument:
        return [str(one["as_tensor"]["name"]) for one in argument["as_optional_tensors"] if "as_tensor" in one]
    if "as_optional_tensor" in argument:
        return _tensor_names(argument["as_optional_tensor"])
    return []


class _Proof:
    def __init__(self, graph: Mapping[str, Any], names: Sequence[str]) -> None:
        self._graph = graph
        self._sizes = _Sizes(graph, row_symbol(graph, names))
        self.broken: Mixed | None = None  # a tensor was changed in place, and so were all tensors that share its memory

    def run(self, names: Sequence[str]) -> Mapping[str, Value]:
        """The values of all tensors."""
        scope: dict[str, Value] = {}
        for one in self._graph["inputs"]:
            for name in _tensor_names(one):
                try:
                    scope[name] = made(self._sizes.tensor(name), 0 if name in names else None)
                except UnknownRuleError as error:
                    scope[name] = Mixed(f"the input {name!r} {error}", is_certain=False)
        for node in self._graph["nodes"]:
            at = _Node(node, self._sizes, scope)
            found = self._outputs(at)
            if at.is_in_place and at.outputs:
                self._change(at, found[0])
            if at.tells_numbers and any(isinstance(value, Rows) for value in at.tensors()):
                described = f"{at.called} decides for all rows by what is in one"
                self.broken = worst((self.broken, Mixed(described, is_certain=True)))
            scope.update(zip(at.outputs, found, strict=True))
        return scope

    def _change(self, at: _Node, found: Value) -> None:
        """Apply a change in place. Other tensors may share the memory, so a change to another value makes every output
        of the program unknown (``broken``)."""
        before = at.first
        same = isinstance(found, Rows) and isinstance(before, Rows) and found == before
        if not same:
            reason = found.reason if isinstance(found, Mixed) else f"{at.called} changes a constant"
            changed = Mixed(reason, is_certain=isinstance(found, Mixed) and found.is_certain)
            self.broken = worst((self.broken, changed))

    def _outputs(self, at: _Node) -> list[Value]:
        count = len(at.outputs)
        mixed = worst(at.tensors())
        if mixed is not None:
            return [mixed] * count
        try:
            found = self._ruled(at)
            for number, value in enumerate(found):
                if isinstance(value, Rows):  # the program's own shape also shows which dimension has the rows
                    made([ONE if size.rows == 0 else ROWS for size in at.shape(number)], value.axis)
            return found
        except MixedRowsError as error:
            return [Mixed(f"{at.called} {error}", is_certain=True)] * count
        except UnknownRuleError as error:
            return [Mixed(f"{at.called} {error}", is_certain=False)] * count
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return [Mixed(f"{at.called} does not fit its operator's definition", is_certain=False)] * count

    def _ruled(self, at: _Node) -> list[Value]:
        if not at.outputs:
            return []
        name = at.operator.removesuffix("_") if at.is_in_place else at.operator
        rule = _RULES.get(name) or (_spatial if _SPACES.fullmatch(name) else None)
        if name not in _OF_PLACES and any(isinstance(value, Places) for value in at.tensors()):
            raise UnknownRuleError("computes with the numbers of the rows")
        if rule not in _OF_INNER and any(isinstance(value, Inner) for value in at.tensors()):
            raise UnknownRuleError("takes rows that are joined with the dimensions before them")
        if rule is not None:
            return rule(at)
        if name and all(isinstance(value, Fixed) for value in at.tensors()) and not name.startswith(_RANDOM):
            at.check_numbers()
            return at.made(None)
        raise UnknownRuleError("is not known to keep rows apart")


_RANDOM: Final = ("rand", "bernoulli", "multinomial", "normal", "uniform", "native_dropout", "poisson")
# Operators that may take the numbers of rows.
_OF_PLACES: Final = frozenset(
    {"_to_copy", "alias", "clone", "contiguous", "detach", "expand", "index", "slice", "to", "unsqueeze"}
)
Rule = Callable[[_Node], list[Value]]


# -- elements ------------------------------------------------------------------------------------


def _by_element(at: _Node) -> list[Value]:
    at.check_numbers()
    given = at.tensors()
    if len(given) == 1 and isinstance(given[0], Places):
        return [given[0]]
    found = elementwise.broadcast(given, at.sizes.symbols)
    return [found] if isinstance(found, Inner) else at.made(axis_of(found))


def _bucketize(at: _Node) -> list[Value]:
    """Each element is compared with all boundaries."""
    at.fixed("boundaries")
    return at.made(axis_of(at.tensor("self")))


def _dropout(at: _Node) -> list[Value]:
    if at.flag("train"):
        raise UnknownRuleError("draws random numbers")
    return [at.tensor("input")]


def _filled(at: _Node) -> list[Value]:
    """The same number everywhere."""
    at.check_numbers("size")
    dims = at.shape()
    return at.made(next((number for number, size in enumerate(dims) if size.rows), None))


def _arange(at: _Node) -> list[Value]:
    dims = at.shape()
    if dims == (ROWS,):
        if at.size("end") != ROWS or at.integer("start", 0) != 0 or at.integer("step", 1) != 1:
            raise UnknownRuleError("computes with the number of rows")
        return [Places(dims, 0)]
    at.check_numbers()
    return at.made(None)


# -- shapes --------------------------------------------------------------------------------------


def _view(at: _Node) -> list[Value]:
    return [shapes.reshape(at.first, at.shape(), at.sizes.symbols)]


def _expand(at: _Node) -> list[Value]:
    value = at.first
    found = shapes.expand(value, at.shape(), at.sizes.symbols)
    if isinstance(value, Places):
        return [Places(dims_of(found), axis_of(found) or 0)]
    return [found]


def _unsqueeze(at: _Node) -> list[Value]:
    value = at.first
    found = shapes.unsqueeze(value, (at.integer("dim", 0),))
    if isinstance(value, Places):
        return [Places(dims_of(found), axis_of(found) or 0)]
    return [found]


def _squeeze(at: _Node) -> list[Value]:
    """Only dimensions of 1 are dropped. The rows stay, because their number is free."""
    dims = dims_of(at.first)
    axes = at.integers("dim")
    if axes is None:
        return [shapes.squeeze(at.first, None)]
    return [shapes.squeeze(at.first, [axis for axis in axes if dims[place(axis, len(dims))] == ONE])]


def _transpose(at: _Node) -> list[Value]:
    rank = len(dims_of(at.first))
    if at.operator == "t" or rank < 2:
        return [shapes.transpose(at.first, None)]
    one, other = place(at.integer("dim0", 0), rank), place(at.integer("dim1", 1), rank)
    order = list(range(rank))
    order[one], order[other] = order[other], order[one]
    return [shapes.transpose(at.first, order)]


def _dropped(at: _Node) -> list[Value]:
    """One index of an axis, or each index as an output of its own. The axis is dropped."""
    at.check_numbers()
    axis, dim = axis_of(at.first), place(at.integer("dim", 0), len(dims_of(at.first)))
    if axis == dim:
        raise MixedRowsError("picks single rows")
    return at.made(axis if axis is None or axis < dim else axis - 1)


def _slice(at: _Node) -> list[Value]:
    dims = dims_of(at.first)
    dim = place(at.integer("dim", 0), len(dims))
    if at.shape() == dims and (at.size("start") or Size(0)) == Size(0) and at.integer("step", 1) == 1:
        end = at.size("end")
        if end is None or end == dims[dim] or (end.number is not None and end.number >= 1 << 62):
            return [at.first]
    at.check_numbers()
    if dim == axis_of(at.first) or isinstance(at.first, Places):
        raise MixedRowsError("takes a slice of the rows")
    return at.made(axis_of(at.first))


def _along_dim(at: _Node) -> list[Value]:
    """Elements move along one axis alone: parts of it, elements chosen from it, its order turned."""
    at.check_numbers()
    dims = at.integers("dims") if at.operator in ("flip", "roll") else (at.integer("dim", 0),)
    if not dims or any(place(dim, len(dims_of(at.first))) == axis_of(at.first) for dim in dims):
        raise MixedRowsError("moves rows")
    if any(isinstance(value, Rows) for value in at.tensors()[1:]):
        raise UnknownRuleError("takes its parameters from the rows")
    return at.made(axis_of(at.first))


def _cat(at: _Node) -> list[Value]:
    given = [value for value in at.tensors() if not (isinstance(value, Fixed) and value.dims == (Size(0),))]
    return at.made(axis_of(shapes.concat(given, at.integer("dim", 0), at.sizes.symbols)))


def _stack(at: _Node) -> list[Value]:
    dim = place(at.integer("dim", 0), len(at.shape()))
    grown = [shapes.unsqueeze(value, (dim,)) for value in at.tensors()]
    return at.made(axis_of(shapes.concat(grown, dim, at.sizes.symbols)))


def _repeat(at: _Node) -> list[Value]:
    value, dims = at.first, at.shape()
    grown = shapes.unsqueeze(value, range(len(dims) - len(dims_of(value))))
    counts = [quotient(to, has) for to, has in zip(dims, dims_of(grown), strict=True)]
    if None in counts:
        raise UnknownRuleError("repeats by a number that is not known")
    return [shapes.tile(grown, [count for count in counts if count is not None])]


def _pad(at: _Node) -> list[Value]:
    at.check_numbers()
    pads = at.integers("pad") or ()
    rank, axis = len(dims_of(at.first)), axis_of(at.first)
    padded = {rank - 1 - number // 2 for number, count in enumerate(pads) if count}
    if axis in padded:
        raise MixedRowsError("adds padding to the rows")
    return at.made(axis)


def _triangle(at: _Node) -> list[Value]:
    at.check_numbers()
    return [reductions.along(at.first, (-1, -2), "takes a triangle of the rows")]


# -- indices -------------------------------------------------------------------------------------


def _embedding(at: _Node) -> list[Value]:
    at.fixed("weight")
    return at.made(axis_of(shapes.gather(at.tensor("weight"), at.tensor("indices"), 0)))


def _gather(at: _Node) -> list[Value]:
    index, dim = at.tensor("index"), at.integer("dim", 0)
    value, chosen = at.first, dims_of(index)
    axis = axis_of(value)
    if axis is not None and axis == axis_of(index) and axis != place(dim, len(chosen)):
        if dims_of(value)[axis] != chosen[axis]:
            raise UnknownRuleError("picks from another number of rows")
        return at.made(axis)
    return [shapes.gather_elements(value, index, dim)]


def _index(at: _Node) -> list[Value]:
    """Indices of the leading dimensions, broadcast together. Rows are indexed by their own numbers alone."""
    value, indices = at.tensor("self"), at.listed("indices")
    given = [index for index in indices if index is not None]
    if not given or len(given) != len(indices) or any(isinstance(index, Mixed) for index in given):
        raise UnknownRuleError("indexes some dimensions and not others")
    places = [number for number, index in enumerate(given) if isinstance(index, Places)]
    # The numbers of the rows may stand where the rows lie, and nowhere else.
    if isinstance(value, Places) or places not in ([], [axis_of(value)]):
        raise UnknownRuleError("computes with the numbers of the rows")
    bare = [Rows(index.dims, index.axis) if isinstance(index, Places) else index for index in given]
    axis = axis_of(elementwise.broadcast(bare, at.sizes.symbols))
    if isinstance(value, Rows) and value.axis < len(given):
        if not places or dims_of(value)[value.axis] != ROWS:
            raise MixedRowsError("picks single rows")
        return at.made(axis)
    if isinstance(value, Rows):
        if axis is not None:
            raise MixedRowsError("picks for each row from all rows")
        return at.made(value.axis - len(given) + len(elementwise.broadcast_dims(bare, at.sizes.symbols)[0]))
    return at.made(axis)


# -- reductions ----------------------------------------------------------------------------------


def _reduce(at: _Node) -> list[Value]:
    at.check_numbers()
    given = at.tensors()
    if len(given) > 1:  # the larger of two tensors
        return _by_element(at)
    axes = at.integers("dim")
    found = reductions.reduce(at.first, axes or None, keeps_dims=at.flag("keepdim"))
    return at.made(axis_of(found))


def _along(at: _Node) -> list[Value]:
    at.check_numbers()
    name = at.operator.removeprefix("_")
    return [reductions.along(at.first, (at.integer("dim", -1),), _ALONG.get(name, "looks along the rows"))] * len(
        at.outputs
    )


def _order(at: _Node) -> list[Value]:
    at.check_numbers()
    reductions.along(at.first, (at.integer("dim", -1),), "orders the rows")
    return at.made(axis_of(at.first))


def _last_norm(at: _Node) -> list[Value]:
    at.check_numbers()
    at.fixed("weight", "bias")
    count = len(at.integers("normalized_shape") or (0,))
    return [reductions.norm(at.first, range(-count, 0))]


def _space_norm(at: _Node) -> list[Value]:
    at.check_numbers()
    at.fixed("weight", "bias", "running_mean", "running_var")
    return [reductions.norm(at.first, range(1, len(dims_of(at.first))))]


def _batch_norm(at: _Node) -> list[Value]:
    if at.flag("training"):
        raise MixedRowsError("normalises over the rows, as in training")
    at.fixed("weight", "bias", "running_mean", "running_var")
    return [products.per_channel(at.first, ())]


# -- products ------------------------------------------------------------------------------------


def _linear(at: _Node) -> list[Value]:
    at.fixed("weight", "bias")
    if axis_of(at.first) == len(dims_of(at.first)) - 1:
        raise MixedRowsError("sums over the rows")
    if isinstance(at.first, Inner):
        return [Inner(at.shape(), at.first.axis, at.first.outer)]
    return at.made(axis_of(at.first))


def _matmul(at: _Node) -> list[Value]:
    one, other = at.tensors()
    return at.made(axis_of(products.matmul(one, other, at.sizes.symbols)))


def _addmm(at: _Node) -> list[Value]:
    at.check_numbers()
    bias, one, other = at.tensors()
    product = products.matmul(one, other, at.sizes.symbols)
    return at.made(axis_of(elementwise.broadcast((bias, product), at.sizes.symbols)))


def _einsum(at: _Node) -> list[Value]:
    return at.made(axis_of(products.einsum(at.text("equation"), at.tensors(), at.sizes.symbols)))


def _spatial(at: _Node) -> list[Value]:
    """Convolutions, pools and their like over [batch, channels, space...]."""
    matched = _SPACES.fullmatch(at.operator.removesuffix("_"))
    rank = int(matched[1]) + 2 if matched is not None else len(dims_of(at.first))
    if len(dims_of(at.first)) != rank:
        raise UnknownRuleError("has no batch in its input")
    at.check_numbers("output_size")
    at.fixed("weight", "bias")
    if axis_of(at.first) not in (0, None):
        raise MixedRowsError("moves a window along the rows")
    return at.made(axis_of(at.first))


def _attention(at: _Node) -> list[Value]:
    """softmax(query x key) x value over the last two dimensions; the others are batches."""
    at.check_numbers()
    if at.number("dropout_p"):
        raise UnknownRuleError("draws random numbers")
    query, key, value = at.tensor("query"), at.tensor("key"), at.tensor("value")
    rank = len(dims_of(query))
    given = [query, key, value, *([mask] if (mask := at.maybe("attn_mask")) is not None else [])]
    axes = [(one, axis_of(one)) for one in given if axis_of(one) is not None]
    if any(axis is not None and axis >= len(dims_of(one)) - 2 for one, axis in axes):
        raise MixedRowsError("attends from row to row")
    batches = [made(dims_of(one)[:-2], axis_of(one)) for one in given]
    found = elementwise.broadcast(batches, at.sizes.symbols)
    if len(dims_of(found)) != rank - 2:
        raise UnknownRuleError("attends over tensors of different ranks")
    return at.made(axis_of(found))


def _recurrent(at: _Node) -> list[Value]:
    """torch's LSTM, GRU and RNN: outputs, and the last states [layers, batch, hidden]."""
    at.check_numbers()
    value, axis = at.tensor("input"), axis_of(at.tensor("input"))
    if at.flag("train") and at.number("dropout"):
        raise UnknownRuleError("draws random numbers")
    if len(dims_of(value)) != 3:
        raise UnknownRuleError("has no batch in its input")
    batch = 0 if at.flag("batch_first") else 1
    states = at.listed("hx")
    if axis is None or any(not isinstance(one, Fixed) for one in at.listed("params")):
        raise UnknownRuleError("takes its weights from the rows")
    if axis != batch:
        raise MixedRowsError("carries its state from row to row: time lies along that dimension")
    for state in states:
        if state is None or axis_of(state) != 1 or dims_of(state)[1] != dims_of(value)[batch]:
            raise UnknownRuleError("begins with states of another number of rows")
    whole = made(at.shape(), batch)
    return [whole, *[made(at.shape(number), 1) for number in range(1, len(at.outputs))]]


_OF_INNER: Final = frozenset({_by_element, _dropout, _linear, _view})
"""Rules that keep rows that lie within their axis, or take them apart."""

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_BY_ELEMENT, _by_element),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys((*_ALONG, "_softmax", "_log_softmax"), _along),
    **dict.fromkeys(_ORDERS, _order),
    **dict.fromkeys(_FILLED, _filled),
    **dict.fromkeys(_STATES, _recurrent),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _view),
    **dict.fromkeys(("select", "unbind"), _dropped),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "narrow", "index_select", "flip", "roll"), _along_dim),
    **dict.fromkeys(("layer_norm", "rms_norm"), _last_norm),
    **dict.fromkeys(("group_norm", "instance_norm"), _space_norm),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("transpose", "t"), _transpose),
    "arange": _arange,
    "batch_norm": _batch_norm,
    "bucketize": _bucketize,
    "cat": _cat,
    "dropout": _dropout,
    "einsum": _einsum,
    "embedding": _embedding,
    "expand": _expand,
    "feature_dropout": _dropout,
    "gather": _gather,
    "index": _index,
    "linear": _linear,
    "permute": lambda at: [shapes.transpose(at.first, at.integers("dims") or ())],
    "pixel_shuffle": _spatial,
    "pixel_unshuffle": _spatial,
    "repeat": _repeat,
    "scaled_dot_product_attention": _attention,
    "slice": _slice,
    "squeeze": _squeeze,
    "stack": _stack,
    "unsqueeze": _unsqueeze,
}
