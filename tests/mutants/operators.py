"""Small wrong changes to a module, one at a time: what a tired author could have written.

Left out is what has no one right value or changes nothing that a program does: texts (of errors, logs, documentation), annotations,
module constants (most tune something), flags of the operating system, time limits, whether the very moment of a limit is
within it, and ``strict`` of ``zip``, which like ``assert`` holds for what the caller ensures.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.mutants.sources import Function, bodies

_COMPARED: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_COMPUTED: Final[dict[type[ast.operator], str]] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_QUIET: Final = re.compile(r"^(_log|log|logging|logger|warnings|click|console|print|warn)\b")
_NOW: Final = re.compile(r"\bnow\b|\bclock\.")
_TIMES: Final = re.compile(r"(?i)timeout|_s\b|_ms\b|sleep|deadline|delay|interval|patience")


class Change(NamedTuple):
    """``text`` instead of ``original``, which stands in ``file`` from ``start`` to ``end`` (characters).

    ``block``: where, as ``sources`` names it.
    """

    file: str
    block: str
    line: int
    start: int
    end: int
    original: str
    text: str
    what: str


def changes(file: str, source: str) -> list[Change]:
    """Every change to a module, in the order of its text."""
    tree = ast.parse(source)
    written = _Written(source)
    found = []
    for block, statements in bodies(tree, file):
        for statement in statements:
            for node, text, what in _of_statement(statement, written):
                start, end = written.place(node)
                if source[start:end] != text:
                    found.append(Change(file, block, node.lineno, start, end, source[start:end], text, what))
    return sorted(set(found), key=lambda change: (change.start, change.end, change.text))


def applied(change: Change, source: str) -> str:
    return source[: change.start] + change.text + source[change.end :]


class _Written:
    """A module's text, and where in it a node stands: the parser counts lines, and bytes within them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The characters from where to where."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.place(node)
        return self._source[start:end]

    def operand(self, node: ast.expr) -> str:
        """In brackets where another operator beside it could bind more tightly."""
        is_one = isinstance(node, ast.Name | ast.Constant | ast.Attribute | ast.Call | ast.Subscript)
        return self.text(node) if is_one else f"({self.text(node)})"


Found = tuple[ast.expr | ast.stmt, str, str]


def _of_statement(statement: ast.stmt, written: _Written) -> Iterator[Found]:
    """Changes to a statement itself and its expressions, not to the blocks that it holds."""
    if isinstance(statement, ast.ClassDef | Function | ast.Import | ast.ImportFrom | ast.Assert | ast.Raise):
        return
    if isinstance(statement, ast.Expr) and _QUIET.match(written.text(statement)):
        return
    if isinstance(statement, ast.Continue):
        yield statement, "break", "break for continue"
    elif isinstance(statement, ast.Break):
        yield statement, "continue", "continue for break"
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield statement, "pass", "a call left out"
    elif isinstance(statement, ast.AugAssign) and type(statement.op) in (ast.Add, ast.Sub):
        yield statement, "pass", "an addition left out"
    elif isinstance(statement, ast.If | ast.While):
        yield statement.test, f"(not ({written.text(statement.test)}))", "a condition turned round"
    for field, value in ast.iter_fields(statement):
        if field == "annotation":
            continue
        for node in value if isinstance(value, list) else (value,):
            if isinstance(node, ast.expr):
                yield from _of_expression(node, written)
            elif isinstance(node, ast.withitem):
                yield from _of_expression(node.context_expr, written)


def _of_expression(node: ast.AST, written: _Written) -> Iterator[Found]:
    if isinstance(node, ast.JoinedStr | ast.Lambda) or not isinstance(node, ast.expr | ast.comprehension | ast.keyword):
        return
    if isinstance(node, ast.keyword) and node.arg is not None and _TIMES.search(node.arg):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict" and ast.unparse(node.value) == "True":
        return
    if isinstance(node, ast.expr):
        yield from _of_node(node, written)
    for child in ast.iter_child_nodes(node):
        yield from _of_expression(child, written)


def _of_node(node: ast.expr, written: _Written) -> Iterator[Found]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if not (
            isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and _NOW.search(ast.unparse(node))
        ):
            yield node, f"{written.operand(left)} {_COMPARED[type(op)]} {written.operand(right)}", "another comparison"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, f"({word.join(map(written.operand, values))})", "and for or, or for and"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, written.operand(operand), "a not left out"
        case ast.BinOp(left=left, op=op, right=right) if (
            type(op) in _COMPUTED and not _is_no_number(left) and not _is_no_number(right)
        ):
            yield node, f"({written.operand(left)} {_COMPUTED[type(op)]} {written.operand(right)})", "another operation"
        case ast.Call(func=ast.Name(id=name) as called) if name in _CALLED:
            yield called, _CALLED[name], f"{_CALLED[name]} for {name}"
        case ast.Constant(value=bool() as value):
            yield node, str(not value), "the other truth"
        case ast.Constant(value=int() as value):
            yield node, str(value + 1), "one more"


def _is_no_number(node: ast.expr) -> bool:
    """A text, or flags of the operating system: of most, a test would have to be that system to see whether they count."""
    match node:
        case ast.JoinedStr() | ast.Constant(value=str() | bytes()):
            return True
        case ast.Attribute(attr=name):
            return name.isupper()
    return False
