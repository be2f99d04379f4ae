"""Regular expressions of the configuration: the forms of its own texts, and the cost of an operator's expression.

The cost is bounded before the expression is used on texts of clients.

Python's ``re`` backtracks. A pattern is accepted only if every repetition has a bound, and the product of all choices
and of the longest match is at most ``MAX_COST``. That product bounds the steps from one position of a text, so the time
of a search is linear in the text.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, Final

ADDRESS: Final = r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]*):[0-9]{1,5}$"
BASE_URL: Final = r"^https?://[^/\s]+"
DEVICE: Final = r"^(auto|cpu|cuda(:[0-9]+)?)$"
DIGEST: Final = r"^(tree-)?sha256:[0-9a-f]{64}$"
STEP_NAME: Final = r"^[\w-]*$"
VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
VERSION: Final = r"^[1-9][0-9]{0,17}$"

IN_WORDS: Final[Mapping[str, str]] = {
    ADDRESS: "HOST:PORT such as 0.0.0.0:8001",
    BASE_URL: "a URL such as https://host/v1",
    DEVICE: "auto, cpu, cuda or cuda:N",
    DIGEST: "a digest such as tree-sha256: and 64 hexadecimal digits",
    STEP_NAME: "a word of letters, digits, - and _",
    VARIABLE: "the name of an environment variable",
    VERSION: "a text of a whole number above 0, of at most 18 digits",
}
"""What a text of each pattern is."""

MAX_WIDTH: Final = 256
"""Characters of the longest match."""

MAX_COST: Final = 1024
"""Choices times characters of the longest match: the steps from one position of a text."""


def problem_of(pattern: str) -> str | None:
    """Why a pattern of the operator cannot be used; None: it can."""
    try:
        tree = _parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is not a regular expression ({error})"
    try:
        width, choices = _cost(tree)
    except _Unsafe as unsafe:
        return str(unsafe)
    if width == 0:
        return "it matches the empty text"
    if width > MAX_WIDTH:
        return f"a match may have {width} characters, and at most {MAX_WIDTH} are allowed; bound its repetitions"
    if width * choices > MAX_COST:
        return (
            f"its cost is {width * choices} ({choices} choices, {width} characters), and at most {MAX_COST} is "
            "allowed; use fewer or narrower repetitions and alternatives"
        )
    return None


class _Unsafe(Exception):
    """A construct whose cost has no bound."""


def _parse(pattern: str) -> Any:
    return importlib.import_module("re._parser").parse(pattern)  # the parse tree has no public name


def _cost(tree: Any) -> tuple[int, int]:
    """The characters of the longest match, and the number of ways to match at one position. Raises _Unsafe."""
    width, choices = 0, 1
    for operation, argument in tree:
        name = str(operation)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            more, ways = 1, 1
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, body = argument
            if int(most) > MAX_WIDTH:
                raise _Unsafe(f"it has a repetition without a bound, or above {MAX_WIDTH}; write {{1,40}} for +")
            inner, inner_ways = _cost(body)
            more = int(most) * inner
            ways = sum(min(inner_ways**count, MAX_COST + 1) for count in range(int(least), int(most) + 1))
        elif name == "SUBPATTERN":
            more, ways = _cost(argument[3])
        elif name == "BRANCH":
            costs = [_cost(branch) for branch in argument[1]]
            more, ways = max(cost[0] for cost in costs), sum(cost[1] for cost in costs)
        elif name == "AT" and str(argument) in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
            more, ways = 0, 1
        else:
            raise _Unsafe(
                "it has a back-reference, a look-around, an anchor other than \\b, or another construct that "
                "is not supported"
            )
        width, choices = width + more, min(choices * max(ways, 1), 10**9)
    return width, choices
