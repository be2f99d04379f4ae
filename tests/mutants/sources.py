"""The sources as blocks: every body of a function, a branch or a loop, by a name that survives moved lines.

The name of a block is ``file:Class.function:number``. The number counts the bodies within the function, from 0 (its own).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "src" / "inferd"
BUILD: Final = ROOT / "build" / "mutants"

# Kernels in Triton's language are read by its compiler, and are not Python's.
LEFT_OUT: Final = ("native/triton/kernels/",)

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BODIES: Final = ("body", "orelse", "finalbody")


def modules() -> list[str]:
    """Every module as a path relative to the package, sorted."""
    found = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sorted(name for name in found if not name.startswith(LEFT_OUT))


def room_of(file: str) -> str:
    """The first part of a module's path."""
    return file.partition("/")[0].removesuffix(".py")


def module_name(file: str) -> str:
    return ".".join(("inferd", *file.removesuffix(".py").removesuffix("/__init__").split("/"))).removesuffix(
        ".__init__"
    )


def bodies(tree: ast.Module, file: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Every block's name and its statements, outermost first."""
    yield from _in_scope(tree.body, f"{file}:", [])


def _in_scope(statements: list[ast.stmt], file: str, names: list[str]) -> Iterator[tuple[str, list[ast.stmt]]]:
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            yield from _in_scope(statement.body, file, [*names, statement.name])
        elif isinstance(statement, Function):
            path = [*names, statement.name]
            yield from _in_function(statement.body, file, path, iter(range(10_000)).__next__)
        else:
            for nested in _nested(statement):
                yield from _in_scope(nested, file, names)


def _in_function(
    statements: list[ast.stmt], file: str, path: list[str], number: Callable[[], int]
) -> Iterator[tuple[str, list[ast.stmt]]]:
    yield f"{file}{'.'.join(path)}:{number()}", statements
    for statement in statements:
        if isinstance(statement, ast.ClassDef | Function):
            yield from _in_scope([statement], file, path)
            continue
        for nested in _nested(statement):
            yield from _in_function(nested, file, path, number)


def _nested(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in _BODIES:
        nested = getattr(statement, field, None)
        if isinstance(nested, list) and nested and isinstance(nested[0], ast.stmt):
            yield nested
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


class Tested(NamedTuple):
    """A file of tests: its text, and the modules of the package that it imports, itself or by modules of tests."""

    text: str
    modules: frozenset[str]


def tested(files: Iterable[str]) -> dict[str, Tested]:
    found: dict[str, Tested] = {}
    return {file: _tested(file, found) for file in files}


def _tested(file: str, found: dict[str, Tested]) -> Tested:
    if file not in found:
        text = (ROOT / file).read_text("utf-8")
        found[file] = Tested(text, frozenset())  # while modules of tests that import each other are read
        names = set(_imports(ast.parse(text)))
        for name in [name for name in names if name.startswith("tests.")]:
            helper = name.replace(".", "/") + ".py"
            if (ROOT / helper).is_file():
                names |= _tested(helper, found).modules
        found[file] = Tested(text, frozenset(name for name in names if name.startswith("inferd")))
    return found[file]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
