"""From a regular expression to one that matches where a text ends in the beginning of a match.

The beginnings of the matches of AB are those of A, and the matches of A followed by beginnings of B. So the expression
follows from the parse tree, one construct after another. What looks ahead behind the end of the text counts as met.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

_parser: Any = importlib.import_module("re._parser")  # the parse tree has no public name
_compiler: Any = importlib.import_module("re._compiler")
_constants: Any = importlib.import_module("re._constants")


def beginning_of(pattern: str) -> re.Pattern[str]:
    """Matches from a place of a text to its end, where some text that follows makes it a match of the pattern. At the
    end itself it matches the empty text. For patterns without back-references."""
    tree = _parser.parse(pattern)
    items = [*_begun(list(tree)), (_constants.AT, _constants.AT_END_STRING)]
    found: re.Pattern[str] = _compiler.compile(_parser.SubPattern(tree.state, items), tree.state.flags)
    return found


def _begun(items: list[Any]) -> list[Any]:
    """Items that match every beginning of what the items match, the empty and the whole one too."""
    if not items:
        return []
    first, rest = items[0], items[1:]
    if not rest:
        return _begun_item(*first)
    return [_one_of([first, *_begun(rest)], _begun_item(*first))]


def _begun_item(operation: Any, argument: Any) -> list[Any]:
    name = str(operation)
    if name in ("AT", "ASSERT", "ASSERT_NOT"):
        return []
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        _, most, body = argument
        fewer = most if most is _constants.MAXREPEAT else most - 1
        return [(_constants.MAX_REPEAT, (0, fewer, body)), *_begun(list(body))] if most else []
    if name == "SUBPATTERN":
        _, added, removed, body = argument
        return [(_constants.SUBPATTERN, (None, added, removed, _sub(_begun(list(body)))))]
    if name == "BRANCH":
        return [_one_of(*(_begun(list(branch)) for branch in argument[1]))]
    return [_one_of([(operation, argument)], [])]


def _one_of(*branches: list[Any]) -> Any:
    return (_constants.BRANCH, (None, [_sub(branch) for branch in branches]))


def _sub(items: list[Any]) -> Any:
    return _parser.SubPattern(_parser.State(), items)
