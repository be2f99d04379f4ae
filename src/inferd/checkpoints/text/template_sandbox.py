"""A sandbox for jinja templates that come with downloaded checkpoints.

Jinja's immutable sandbox keeps a template from Python's internals. This one also keeps it from taking
the machine: every loop pass, call, filter and operator passes a meter of CPU time, and no value that a
template makes may grow beyond a limit. Knows nothing of chats.

How: the parsed template is rewritten before it is compiled, so that loop and macro bodies begin with a
tick and the places where values are made (literals, ``~``) check what they made. Operators and calls
are checked through the sandbox's own hooks, filters are wrapped. Operations that could grow without
bound in one go (``"x" * 10**9``, ``center``, ``replace``, ...) are estimated before they run. Between
two ticks no single operation works on more than the limit, so a render is over shortly after its time
is. It runs in the caller's thread: no signals, no processes.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SIZE = 4_000_000  # characters of one value
_MAX_WRITTEN = 16_000_000  # of all that is written in a render, into captured blocks too
MAX_SECONDS = 1.0  # CPU time of a render
_NODE_SIZE = 64  # what an element of a container counts as
_MAX_FILL = 1_000  # widths and counts that pad text
_MAX_BITS = 1 << 16  # of an integer power

_TICK, _CHECK, _CONCAT = "inferd tick", "inferd check", "inferd concat"  # no template can spell these


class TemplateTooCostlyError(SecurityError):
    """The template asked for more time or memory than a prompt may take."""


class _Meter(threading.local):
    """What the render in this thread has used. Outside a render (compiling) only sizes are checked."""

    def __init__(self) -> None:
        self.until: float | None = None
        self.cpu_until = 0.0
        self.written = 0

    def start(self) -> None:
        self.until = time.monotonic() + MAX_SECONDS
        self.cpu_until = time.thread_time() + MAX_SECONDS
        self.written = 0

    def stop(self) -> None:
        self.until = None

    def tick(self) -> None:
        if self.until is not None and time.monotonic() > self.until:
            # The wall clock is cheap to ask; waiting for a processor is not the template's fault.
            left = self.cpu_until - time.thread_time()
            if left <= 0:
                raise TemplateTooCostlyError(f"the template ran longer than {MAX_SECONDS:g} s")
            self.until = time.monotonic() + left

    def write(self, size: int) -> None:
        self.tick()
        if self.until is not None:
            self.written += size
        check_size(size)
        if self.written > _MAX_WRITTEN:
            raise TemplateTooCostlyError(f"the template writes more than {_MAX_WRITTEN:,} characters")


def check_size(size: float) -> None:
    if size > MAX_SIZE:
        raise TemplateTooCostlyError(f"the template makes more than {MAX_SIZE:,} characters")


def _measured(value: object) -> int:
    """Size of a value with all it contains, as often as it contains it. Raises when over the limit."""
    if isinstance(value, str):
        size = len(value)
        check_size(size)
        return size
    size = 0
    pending = [value]
    while pending:
        part = pending.pop()
        size += len(part) + _NODE_SIZE if isinstance(part, str) else _NODE_SIZE
        check_size(size)
        if isinstance(part, dict):
            pending += part.keys()
            pending += part.values()
        elif isinstance(part, (list, tuple, set, frozenset)):
            pending += part
    return size


def _check_width(*widths: object) -> None:
    for width in widths:
        if isinstance(width, int) and abs(width) > _MAX_FILL:
            raise TemplateTooCostlyError(f"the template pads to {width}, more than {_MAX_FILL}")


def _check_replace(text: object, old: object = "", new: object = "", *_: object) -> None:
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_indent(text: object, width: object = 4, *_: object) -> None:
    _check_width(width)
    each = width if isinstance(width, int) else len(str(width))
    check_size(len(str(text)) + (str(text).count("\n") + 1) * each)


def _check_pad(text: object, *args: object) -> None:
    _check_width(*args)


def _check_expandtabs(text: object, size: object = 8, *_: object) -> None:
    _check_width(size)
    check_size(str(text).count("\t") * (size if isinstance(size, int) else 8) + len(str(text)))


def _check_format(text: object, *args: object) -> None:
    """Widths in format strings, for ``%``, ``format`` and str.format."""
    for width in re.findall(r"\d+", str(text)):
        if len(width) > 3:
            raise TemplateTooCostlyError(f"the template's format has the number {width[:20]}, more than 999")
    if re.search(r"%[^%a-zA-Z]*\*|\{[^{}]*\{", str(text)):
        raise TemplateTooCostlyError("the template's format takes its width from an argument")
    check_size((str(text).count("%") + str(text).count("{")) * 1000 + _measured(list(args)))


def _check_join(separator: object, parts: object = (), *_: object) -> None:
    count = len(parts) if isinstance(parts, (str, list, tuple, dict)) else 0
    check_size(len(str(separator)) * count + _measured(parts))


def _check_tojson(value: object, *args: object) -> None:
    _check_width(*args)
    _measured(value)


def _check_sum(parts: object, *_: object) -> None:
    if isinstance(parts, (list, tuple)) and not all(isinstance(p, (int, float)) for p in parts):
        raise TemplateTooCostlyError("the filter sum takes numbers")


_METHODS: dict[str, Callable[..., None]] = {
    "center": _check_pad,
    "ljust": _check_pad,
    "rjust": _check_pad,
    "zfill": _check_pad,
    "expandtabs": _check_expandtabs,
    "replace": _check_replace,
    "join": _check_join,
    "format": _check_format,
    "format_map": _check_format,
    "translate": lambda text, table: check_size(
        len(text) * max((len(str(v)) for v in dict(table).values()), default=1)
    ),
}
_FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_pad,
    "indent": _check_indent,
    "replace": _check_replace,
    "format": _check_format,
    "batch": lambda parts, count, *_: _check_width(count),
    "slice": lambda parts, count, *_: _check_width(count),
    "tojson": _check_tojson,
    "sum": _check_sum,
    "truncate": lambda text, *args: None,
}
# Never needed in a prompt, and costly to bound.
_REMOVED_FILTERS = ("urlize", "pprint", "wordwrap", "xmlattr", "filesizeformat", "random")
_LAZY_INPUT = ("join", "list", "sort", "unique", "sum", "reverse", "groupby", "batch", "slice")


class MeteredSandbox(ImmutableSandboxedEnvironment):
    """Compile with ``from_string``, render with ``render``."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("+", "*", "%", "**"))  # type: ignore[misc]

    def __init__(self, **options: Any) -> None:
        self.meter = _Meter()
        super().__init__(finalize=self._finalize, **options)
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)

    def seal(self) -> None:
        """Put every filter behind the meter; call when all have been registered."""
        for name, function in list(self.filters.items()):
            self.filters[name] = self._metered(name, function)
        self.filters[_TICK] = self._tick
        self.filters[_CHECK] = self._check
        self.filters[_CONCAT] = self._concat

    def render_metered(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The rendered text. Raises TemplateTooCostlyError, and whatever the template's own errors are."""
        self.meter.start()
        chunks: list[str] = []
        size = 0
        try:
            for chunk in template.generate(variables):
                size += len(chunk)
                self.meter.tick()
                check_size(size)
                chunks.append(chunk)
        finally:
            self.meter.stop()
        return "".join(chunks)

    # -- hooks of jinja -----------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        result = _Rewriter().visit(tree)
        assert isinstance(result, nodes.Template)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.tick()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    check_size(_measured(sequence) * max(times, 0))
        elif operator == "**":
            if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
                raise TemplateTooCostlyError("the operator ** takes numbers")
            if isinstance(left, int) and left.bit_length() * abs(right) > _MAX_BITS:
                raise TemplateTooCostlyError("the template computes a number of too many digits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "+" and isinstance(left, (list, tuple)):
            check_size(_measured(left) + _measured(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str):
            check_size(len(result))
        elif isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise TemplateTooCostlyError("the template computes a number of too many digits")
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.tick()
        # The sandbox has put its own function around str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check = _METHODS.get(getattr(method, "__name__", ""))
            if check is not None:
                args = tuple(
                    list(a) if not isinstance(a, (str, int, float, list, tuple, dict, type(None))) else a for a in args
                )
                check(owner, *args, *kwargs.values())
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, list, tuple, dict)):
            _measured(result)
        return result

    def _finalize(self, value: object) -> str:
        if not isinstance(value, str):
            if isinstance(value, (list, tuple, dict)):
                _measured(value)
            value = str(value)
        self.meter.write(len(value))
        return value

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = _FILTERS.get(name)
        # Filters may take the context, the evaluation context or the environment before the value.
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            if name in _LAZY_INPUT and len(args) > skipped and not isinstance(args[skipped], (str, list, tuple, dict)):
                args = (*args[:skipped], self._collect(args[skipped]), *args[skipped + 1 :])
            if name == "join":
                separator = args[skipped + 1] if len(args) > skipped + 1 else kwargs.get("d", "")
                _check_join(separator, args[skipped])
            elif check is not None:
                check(*args[skipped:], *kwargs.values())
            result = function(*args, **kwargs)
            if isinstance(result, str):
                check_size(len(result))
            self.meter.tick()
            return result

        return metered

    def _collect(self, values: Any) -> Any:
        """A generator's values, metered while they come."""
        if not isinstance(values, Iterable) or isinstance(values, jinja2.Undefined):
            return values
        found: list[Any] = []
        for value in values:
            self.meter.tick()
            found.append(value)
            check_size(len(found) * _NODE_SIZE)
        return found

    @jinja2.pass_context
    def _tick(self, context: Context, cost: int) -> bool:
        self.meter.write(cost)
        return True

    @jinja2.pass_context
    def _check(self, context: Context, value: Any) -> Any:
        self.meter.tick()
        _measured(value)
        return value

    @jinja2.pass_context
    def _concat(self, context: Context, parts: list[Any]) -> str:
        self.meter.tick()
        _measured(parts)
        return "".join(map(str, parts))


class _Rewriter(NodeTransformer):
    """Puts the ticks and checks into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(_static_size(node.body)), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_tick(0), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(_static_size(node.body)), lineno=node.lineno))
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _checked(node) if not all(isinstance(item, nodes.Const) for item in node.items) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        constant = node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items)
        return node if constant else _checked(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _checked(node) if not all(isinstance(pair.value, nodes.Const) for pair in node.items) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _CONCAT, [], [], None, None, lineno=node.lineno)


def _tick(cost: int) -> nodes.Filter:
    return nodes.Filter(nodes.Const(cost), _TICK, [], [], None, None)


def _checked(node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, _CHECK, [], [], None, None, lineno=node.lineno)


def _static_size(body: list[nodes.Node]) -> int:
    """Characters of plain text in a body, which are written without passing the meter."""
    return sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))
