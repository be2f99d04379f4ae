"""A sandbox for jinja templates that come with downloaded checkpoints.

Jinja's immutable sandbox keeps a template from Python's internals. This one also bounds its time and its memory: every
loop pass, call, filter and operator passes a meter of CPU time, and no value that a template makes may grow beyond a
limit. Knows nothing of chats.

The parsed template is rewritten before it is compiled: bodies of loops and macros begin with a tick, and containers
are measured when they are made. Operators and calls pass the sandbox's own hooks, and filters are wrapped. What could
grow without bound in one operation (``"x" * 10**9``, ``center``, ``replace``, ...) is estimated before it runs. Between
two ticks no operation works on more than the limit, so a render ends shortly after its time. It runs in the caller's
thread: no signals, no processes, and requests beside it go on.
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

_TICK, _CHECK = "inferd tick", "inferd check"  # filters whose names no template can spell
_REMOVED = ("urlize", "pprint", "wordwrap", "xmlattr", "filesizeformat", "random")  # no prompt needs these filters
_WHOLE = (str, list, tuple, dict)  # values that are no generators


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
            # The wall clock is cheap to read. Time waiting for a processor does not count against the template.
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


# -- sizes ---------------------------------------------------------------------------------------


def check_size(size: float) -> None:
    if size > MAX_SIZE:
        raise TemplateTooCostlyError(f"the template makes more than {MAX_SIZE:,} characters")


def _measured(value: object) -> int:
    """Size of a value with all it contains, as often as it contains it. Raises when over the limit."""
    size = 0
    pending = [value]
    while pending:
        part = pending.pop()
        size += len(part) + _NODE_SIZE * (part is not value) if isinstance(part, str) else _NODE_SIZE
        check_size(size)
        if isinstance(part, dict):
            pending += part.keys()
            pending += part.values()
        elif isinstance(part, (list, tuple, set, frozenset)):
            pending += part
    return size


def _padded(value: object, *args: object, **more: object) -> float:
    """Each line, tab or element may be filled up to the largest width."""
    widths = [one for one in (*args, *more.values()) if isinstance(one, (int, str))]
    most = max((abs(width) if isinstance(width, int) else len(width) for width in widths), default=0)
    if most > _MAX_FILL:
        raise TemplateTooCostlyError(f"the template pads to {most}, more than {_MAX_FILL}")
    size = _measured(value)
    fills = value.count("\n") + value.count("\t") + 1 if isinstance(value, str) else size / _NODE_SIZE
    return size + fills * most


def _replaced(value: object, old: object = "", new: object = "", count: object = None) -> float:
    text, old, new = str(value), str(old), str(new)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _formatted(value: object, *args: object, **more: object) -> float:
    """For ``%``, the filter ``format`` and str.format: no wide fields, and no widths that come from arguments."""
    text = str(value)
    wide = next((number for number in re.findall(r"\d+", text) if len(number) > 3), None)
    if wide is not None:
        raise TemplateTooCostlyError(f"the template's format has the number {wide[:20]}, more than 999")
    if re.search(r"%[^%a-zA-Z]*\*|\{[^{}]*\{", text):
        raise TemplateTooCostlyError("the template's format takes its width from an argument")
    return (text.count("%") + text.count("{")) * 1000 + _measured([args, more])


def _joined(separator: object, parts: object = ()) -> float:
    return len(str(separator)) * (len(parts) if isinstance(parts, _WHOLE) else 0) + _measured(parts)


def _translated(text: Any, table: Any) -> float:
    return len(text) * max((len(str(new)) for new in dict(table).values()), default=1)


def _summed(parts: object, *_: object, **__: object) -> float:
    if isinstance(parts, (list, tuple)) and not all(isinstance(part, (int, float)) for part in parts):
        raise TemplateTooCostlyError("the filter sum takes numbers")
    return 0


# The size that a result may have, by the name of a method of text or of a filter, both of which take the text first.
_RESULTS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson"), _padded),
    **dict.fromkeys(("batch", "slice"), lambda value, *counts, **more: _padded("", *counts, **more)),
    "replace": _replaced,
    "format": _formatted,
    "format_map": _formatted,
    "join": _joined,
    "translate": _translated,
    "sum": _summed,
}


def _check_result(name: str, *args: object, **more: object) -> None:
    size_of = _RESULTS.get(name)
    if size_of is not None:
        check_size(size_of(*args, **more))


# -- the environment -----------------------------------------------------------------------------


class MeteredSandbox(ImmutableSandboxedEnvironment):
    """Compile with ``from_string``, render with ``render_metered``."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("+", "*", "%", "**"))  # type: ignore[misc]

    def __init__(self, **options: Any) -> None:
        self.meter = _Meter()
        super().__init__(finalize=self._finalize, **options)
        for name in _REMOVED:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)

    def seal(self) -> None:
        """Put every filter behind the meter; call when all have been registered."""
        for name, function in list(self.filters.items()):
            self.filters[name] = self._metered(name, function)
        self.filters[_TICK] = self._tick
        self.filters[_CHECK] = self._check

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

    # -- hooks of jinja --------------------------------------------------------------------------

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
            check_size(_formatted(left, right))
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
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox has put its own function around str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = tuple(__self._collected(value) for value in args)
            _check_result(getattr(method, "__name__", ""), owner, *args, **kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, _WHOLE):
            _measured(result)
        return result

    def _finalize(self, value: object) -> str:
        if not isinstance(value, str):
            if isinstance(value, _WHOLE):
                _measured(value)
            value = str(value)
        self.meter.write(len(value))
        return value

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Filters may take the context, the evaluation context or the environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        takes_generators = name in ("join", "list", "sort", "unique", "sum", "reverse", "groupby", "batch", "slice")

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            if takes_generators and len(args) > first:
                args = (*args[:first], self._collected(args[first]), *args[first + 1 :])
            if name == "join":  # of parts by a separator, where the method of text is the other way round
                _check_result(
                    name, max(map(str, (*args[first + 1 :], *kwargs.values())), key=len, default=""), args[first]
                )
            else:
                _check_result(name, *args[first:], **kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, str):
                check_size(len(result))
            self.meter.tick()
            return result

        return metered

    def _collected(self, values: Any) -> Any:
        """A generator's values as a list, metered while they come."""
        if isinstance(values, (*_WHOLE, jinja2.Undefined)) or not isinstance(values, Iterable):
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


class _Rewriter(NodeTransformer):
    """Puts the ticks and checks into a parsed template."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, (nodes.For, nodes.Macro)):
            # Plain text in a body is written without passing the meter.
            written = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(written), _TICK), lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(_filtered(nodes.Const(0), _TICK), node.test, lineno=node.lineno)
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.List(node.nodes, lineno=node.lineno), "join")
        elif isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _filtered(node, _CHECK)
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
