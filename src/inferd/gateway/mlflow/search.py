"""Filters and orders of MLflow's searches: ``name='churn' AND tags.`inferd.stage` = 'production'``.

The grammar is the part of MLflow's (mlflow/utils/search_utils.py) that compares names, tags, runs, sources and numbers
of versions, joined by AND. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

from inferd.errors import InvalidRequest
from inferd.gateway.errors import shown

MAX_FILTER: Final = 10_000  # characters

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'])*'|"(?:[^"])*")|(?P<key>[A-Za-z_]\w*(?:\.(?:`[^`]+`|"[^"]+"|[\w.]+))?)"""
    r"""|(?P<number>\d+)|(?P<sign>!=|<=|>=|=|<|>|\(|\)|,))""",
    re.ASCII,
)
_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}

_IS_PROMPT: Final = "tags.mlflow.prompt.is_prompt"

Entity = Literal["model", "version"]
_TEXTS: Final[dict[Entity, tuple[str, ...]]] = {"model": ("name",), "version": ("name", "run_id", "source_path")}
_ORDERS: Final[dict[Entity, tuple[str, ...]]] = {
    "model": ("name", "creation_timestamp", "last_updated_timestamp"),
    "version": ("name", "version_number", "creation_timestamp", "last_updated_timestamp"),
}


class Condition(NamedTuple):
    """One comparison. ``key`` is a field, or a tag behind ``tags.``."""

    key: str
    operator: str  # =, !=, <, <=, >, >=, LIKE, ILIKE, IN
    values: tuple[str, ...]


class Order(NamedTuple):
    key: str
    is_descending: bool


def read_filter(text: str, entity: Entity) -> list[Condition]:
    """The conditions of a filter, which must all hold. Raises InvalidRequest that says what is possible."""
    if len(text) > MAX_FILTER:
        raise _refused(f"filter may have {MAX_FILTER} characters.")
    words, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise _refused(f"filter cannot be read from {shown(text[at:].strip())} on.")
        words.append((match.lastgroup or "", match[0].strip()))
        at = match.end()
    found: list[Condition] = []
    while words:
        if found:
            kind, word = words.pop(0)
            if (kind, word.upper()) != ("key", "AND"):
                raise _refused(f"filter joins comparisons with AND, not with {shown(word)}.")
        found.append(_condition(words, entity))
    return found


def holds(condition: Condition, fields: dict[str, str], tags: dict[str, str]) -> bool:
    """Whether a condition holds. A tag that is not there fulfils none, as in MLflow, whose client also asks that models
    are no prompts."""
    key, operator, values = condition
    if key == _IS_PROMPT:
        tags = {"mlflow.prompt.is_prompt": "false", **tags}
    value = tags.get(key.removeprefix("tags.")) if key.startswith("tags.") else fields.get(key)
    if value is None:
        return False
    match operator:
        case "IN":
            return value in values
        case "LIKE" | "ILIKE":
            flags = re.DOTALL | (re.IGNORECASE if operator == "ILIKE" else 0)
            pattern = "".join({"%": ".*", "_": "."}.get(letter, re.escape(letter)) for letter in _simple(values[0]))
            return re.fullmatch(pattern, value, flags) is not None
        case _ if key == "version_number":
            return _NUMBERS[operator](int(value), int(values[0]))
        case _:
            return _TEXT_OPERATORS[operator](value, values[0])


def read_orders(texts: Sequence[str], entity: Entity) -> list[Order]:
    """The orders of a search, the most important first. Raises InvalidRequest."""
    found = []
    for text in texts:
        key, _, direction = text.strip().partition(" ")
        if key not in _ORDERS[entity] or direction.strip().upper() not in ("", "ASC", "DESC"):
            raise _refused(f"order_by {shown(text)} is not {', '.join(_ORDERS[entity])}, with ASC or DESC.", "order_by")
        found.append(Order(key, direction.strip().upper() == "DESC"))
    return found


_TEXT_OPERATORS: Final[dict[str, Callable[[str, str], bool]]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def _condition(words: list[tuple[str, str]], entity: Entity) -> Condition:
    kind, word = words.pop(0) if words else ("", "its end")
    if kind != "key":
        raise _refused(f"filter needs a name to compare, and has {shown(word)}.")
    key = _key(word, entity)
    kind, operator = words.pop(0) if words else ("", "its end")
    operator = operator.upper()
    is_number = key == "version_number"
    allowed = (
        tuple(_NUMBERS) if is_number else ("=", "!=", "LIKE", "ILIKE", *(("IN",) if key in ("name", "run_id") else ()))
    )
    if operator not in allowed or (kind == "key") != operator.isalpha():
        raise _refused(f"filter compares {key} with {', '.join(allowed)}, not with {shown(operator)}.")
    if operator == "IN":
        return Condition(key, operator, _list(words))
    kind, value = words.pop(0) if words else ("", "its end")
    if kind != ("number" if is_number else "text"):
        wanted = "a number" if is_number else "a text in quotes"
        raise _refused(f"filter compares {key} with {wanted}, not with {shown(value)}.")
    return Condition(key, operator, (value if is_number else value[1:-1],))


def _list(words: list[tuple[str, str]]) -> tuple[str, ...]:
    values = []
    sign = "("
    while words and words[0] == ("sign", sign):
        words.pop(0)
        if not words or words[0][0] != "text":
            break
        values.append(words.pop(0)[1][1:-1])
        sign = ","
    if not values or not words or words.pop(0) != ("sign", ")"):
        raise _refused("filter needs texts in parentheses after IN: run_id IN ('a', 'b').")
    return tuple(values)


def _key(word: str, entity: Entity) -> str:
    for prefix in ("tags.", "tag."):
        if word.startswith(prefix):
            return "tags." + word.removeprefix(prefix).strip('`"')
    known = (*_TEXTS[entity], *(("version_number",) if entity == "version" else ()))
    if word not in known:
        raise _refused(f"filter compares {', '.join(known)} and tags.NAME, not {shown(word)}.")
    return word


def _simple(pattern: str) -> str:
    """Runs of % match no more than one, and would make the search slow."""
    return re.sub("%+", "%", pattern)


def _refused(sentence: str, param: str = "filter") -> InvalidRequest:
    return InvalidRequest(sentence, param=param, code="mlflow_parameter")
