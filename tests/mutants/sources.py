"""The sources as blocks: every body of a function, a branch or a loop, by a name that survives moved lines.

The name of a block is ``file:Class.function:number``. The number counts the bodies within the function, from 0 (its own).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Set
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


class Source(NamedTuple):
    """A Python file: its text, and the modules of the package that it imports."""

    text: str
    modules: frozenset[str]


def sources() -> dict[str, Source]:
    """The modules of the package, by their paths in it."""
    texts = {file: (PACKAGE / file).read_text("utf-8") for file in modules()}
    package = {module_name(file) for file in texts}
    return {file: Source(text, frozenset(imported(text, package)) & package) for file, text in texts.items()}


def sources_of_tests(files: Iterable[str]) -> dict[str, Source]:
    """These files of tests, with what they import themselves or by modules of tests."""
    package = {module_name(file) for file in modules()}
    found: dict[str, Source] = {}
    return {file: _tested(file, package, found) for file in files}


def _tested(file: str, package: Set[str], found: dict[str, Source]) -> Source:
    if file not in found:
        text = (ROOT / file).read_text("utf-8")
        found[file] = Source(text, frozenset())  # while modules of tests that import each other are read
        names = {*imported(text, package)}
        for name in [name for name in names if _is_of_tests(name)]:
            names |= _tested(_file_of(name), package, found).modules
        found[file] = Source(text, frozenset(names & package))
    return found[file]


def imported(text: str, package: Set[str]) -> Iterator[str]:
    """The modules that are imported. ``from a import b`` imports ``a.b`` where that is a module, else ``a``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in package or _is_of_tests(whole) else node.module


def _is_of_tests(module: str) -> bool:
    return module.startswith("tests.") and (ROOT / _file_of(module)).is_file()


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"
