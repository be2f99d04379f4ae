"""Finds what mypyc accepts and compiles into something else: ``problems``.

mypyc says nothing about these, and the compiled module behaves differently from its source. ``generate.py`` refuses to
build a module with one of them, and ``tests/compiled`` runs the same checks without a build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

_NOT_NATIVE = re.compile(r"(Protocol|NamedTuple|TypedDict|Enum|Flag|Struct|Exception|Error)$")
"""Base classes whose subclasses mypyc leaves to Python, or whose bodies it runs as Python does."""

_LAYOUTS = {"ABC", "Generic", "Coroutine", "asyncio.Protocol", "object"} | {
    "Exception",
    "ArithmeticError",
    "LookupError",
    "RuntimeError",
    "TypeError",
    "ValueError",
}
"""Bases from elsewhere that a compiled class may have: they have no fields, or those of every exception."""

_ENDS_WITHOUT_WAITING = re.compile(r"(asyncio\.timeout\(.*|[\w.]*_lock)$")
"""Context managers whose ``__aexit__`` never waits."""

_PURE = {"class_index", "end", "find", "len", "lstrip", "max", "min", "start"}
"""What may be called in the bounds of a slice."""

_SETUP = re.compile(r"^def \w+\.__mypyc_defaults_setup\(")
_CLASS = re.compile(r"^    __mypyc_self__ :: ([\w.]+)$")
_SET = re.compile(r"^    __mypyc_self__\.(\w+) = ")


def problems(sources: Mapping[str, str], others: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the compiled modules of ``sources``; ``others`` are the interpreted ones, both as texts by
    names."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    compiled = {(module, node.name) for module, tree in trees.items() for node in _classes(tree) if _is_native(node)}
    closed = {
        (module, node.name)
        for module, tree in trees.items()
        for node in _classes(tree)
        if (module, node.name) in compiled and not _is_open(node)
    }
    names = {node.name for tree in trees.values() for node in _classes(tree)}
    looping = {(module, name) for module, tree in trees.items() for name in _looping(tree)}
    for module, tree in trees.items():
        imported = _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.to_thread":
                called = ast.unparse(node.args[0])
                if imported.get(called, (module, called)) in looping:
                    yield (
                        f"{module}: {called} runs on another thread, and its compiled loop would hold the "
                        "interpreter's lock until it ends; move it to an interpreted module."
                    )
        for node in _classes(tree):
            yield from (f"{module}: {problem}" for problem in _of_class(node))
            own = {other.name for other in _classes(tree)}
            for base in node.bases:
                is_known = _name(base) in own or imported.get(_name(base)) in compiled
                if _has_layout(node) and not is_known and ast.unparse(base).partition("[")[0] not in _LAYOUTS:
                    yield (
                        f"{module}: {node.name} is compiled and its base {_name(base)} is not; compile both, or none. "
                        "Its instances would lack the fields of the base."
                    )
        for statement in tree.body:
            if isinstance(statement, ast.AnnAssign) and _is_float_tuple(statement):
                assert isinstance(statement.target, ast.Name)
                yield (
                    f"{module}: {statement.target.id} is a Final tuple that begins with a float, which is read as "
                    "one that was not set; give its numbers names of their own."
                )
        yield from (f"{module}: {problem}" for problem in _misread(tree, names))
    for module, text in others.items():
        tree = ast.parse(text)
        imported = _imported(tree)
        for node in _classes(tree):
            for base in map(_name, node.bases):
                if imported.get(base) in closed:
                    yield f"{module}: {node.name} is interpreted and cannot inherit from a compiled {base}."


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    if any(_name(base).endswith("Struct") for base in node.bases):
        yield f"{node.name} is a struct; msgspec has to make it: move it to an interpreted module."
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    for function in functions:
        if _is_property_of_callable(function):
            yield (
                f"{node.name}.{function.name} is a property that returns a callable, which a call of it does not call; "
                "make it a method."
            )
    methods = {function.name for function in functions}
    compares = methods & {"__lt__", "__le__", "__gt__", "__ge__"}
    if _is_native(node) and compares and not methods & {"__eq__", "__hash__"}:
        yield f"{node.name} is compared and has no hash when it is compiled; define __hash__."


def _looping(tree: ast.Module) -> Iterator[str]:
    """Functions of a module with a loop of their own."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(isinstance(item, ast.For | ast.While) for item in ast.walk(node)):
            yield node.name


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Module and name of what a module imports, by the names that it has there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


def _misread(tree: ast.Module, names: Collection[str]) -> Iterator[str]:
    """Expressions that mypyc gives a type that they do not have. ``names``: the classes of all compiled modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            caught: dict[str, str] = {}
            for item in ast.walk(node):
                if isinstance(item, ast.ExceptHandler) and item.name is not None and item.type is not None:
                    kind = ast.unparse(item.type)
                    if caught.setdefault(item.name, kind) != kind and {kind, caught[item.name]} & names:
                        yield (
                            f"{node.name} names exceptions of {caught[item.name]} and of {kind} {item.name!r}, which "
                            "gets the type of the first; use two names."
                        )
        elif isinstance(node, ast.ExceptHandler | ast.Try) and _waits(_handling(node)):
            yield (
                f"line {node.lineno} waits while an exception is handled, which every other task then sees as its own; "
                "wait after the handler."
            )
        elif isinstance(node, ast.AsyncWith):
            for item in node.items:
                if not _ENDS_WITHOUT_WAITING.match(text := ast.unparse(item.context_expr)):
                    yield (
                        f"line {node.lineno} ends {text} while an exception is handled, which every other task then "
                        "sees as its own if that waits; end it after the handler."
                    )
        elif isinstance(node, ast.Slice):
            bounds = [bound for bound in (node.lower, node.upper) if bound is not None]
            calls = [item for bound in bounds for item in ast.walk(bound) if isinstance(item, ast.Call)]
            if any(_name(call.func) not in _PURE for call in calls):
                yield (
                    f"line {node.lineno} calls in a slice, [{ast.unparse(node)}], which may be evaluated twice; give "
                    "the bound a name."
                )
        elif isinstance(node, ast.BinOp | ast.Compare):
            for operand in ast.iter_child_nodes(node):
                if isinstance(operand, ast.Call) and _name(operand.func) == "sum" and len(operand.args) == 1:
                    yield (
                        f"{ast.unparse(node)} calculates with a sum that has no start, which is read as an integer; "
                        "give sum() its start: 0 or 0.0."
                    )


def dropped_defaults(sources: Mapping[str, str], operations: Iterable[str]) -> Iterator[str]:
    """Defaults in the bodies of compiled classes that no instance gets. ``operations``: lines of mypyc's ``ops.txt``."""
    kept: dict[str, set[str]] = {}
    current: set[str] | None = None
    for line in operations:
        if _SETUP.match(line):
            current = set()
        elif line.startswith("def "):
            current = None
        elif current is not None:
            if found := _CLASS.match(line):
                kept[found[1]] = current
            elif found := _SET.match(line):
                current.add(found[1])
    for module, text in sources.items():
        for node in _classes(ast.parse(text)):
            if not _is_native(node):
                continue
            for name in _defaults(node):
                if name not in kept.get(f"{module}.{node.name}", ()):
                    yield f"{module}: the default of {node.name}.{name} is dropped; set it in __init__."


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def _name(base: ast.expr) -> str:
    """The last part of a base class's name, without its type arguments."""
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _is_native(node: ast.ClassDef) -> bool:
    # asyncio.Protocol is an ordinary class.
    return not any(_NOT_NATIVE.search(_name(base)) and ast.unparse(base) != "asyncio.Protocol" for base in node.bases)


def _has_layout(node: ast.ClassDef) -> bool:
    """Whether mypyc lays out the instances of a class: also those of an exception."""
    return not any(re.search(r"(Protocol|NamedTuple|TypedDict|Enum|Flag|Struct)$", _name(b)) for b in node.bases) or (
        "asyncio.Protocol" in map(ast.unparse, node.bases)
    )


def _is_open(node: ast.ClassDef) -> bool:
    """Whether interpreted classes may inherit from a compiled one (``inferd.open_class``)."""
    return "mypyc_attr(allow_interpreted_subclasses=True)" in map(ast.unparse, node.decorator_list)


def _handling(node: ast.ExceptHandler | ast.Try) -> list[ast.stmt]:
    """The statements that run while an exception is handled."""
    return node.body if isinstance(node, ast.ExceptHandler) else node.finalbody


def _waits(statements: list[ast.stmt]) -> bool:
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
    return any(isinstance(item, waits) for statement in statements for item in ast.walk(statement))


def _defaults(node: ast.ClassDef) -> Iterator[str]:
    """Names of attributes that the body of a class sets for its instances."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and item.value is not None and isinstance(item.target, ast.Name):
            if not ast.unparse(item.annotation).startswith(("Final", "ClassVar")):
                yield item.target.id
        elif isinstance(item, ast.Assign):
            names = [target.id for target in item.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name not in ("__slots__", "__deletable__"))


def _is_property_of_callable(function: ast.FunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return "property" in decorators and "Callable" in (ast.unparse(function.returns) if function.returns else "")


def _is_float_tuple(statement: ast.AnnAssign) -> bool:
    value = statement.value
    return (
        ast.unparse(statement.annotation).startswith("Final")
        and isinstance(value, ast.Tuple)
        and bool(value.elts)
        and isinstance(value.elts[0], ast.Constant)
        and isinstance(value.elts[0].value, float)
    )
