"""The net behind the masks: an independent validator that reads a whole structured answer.

A mask and this validator share no code. An answer that fails here is a defect of inferd and must never be delivered as
a success.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn

from inferd.answer_form import JSON, TaggedText
from inferd.errors import InvalidRequest
from inferd.structured.schema import limits, validation
from inferd.structured.schema.refusal import pointer

LONGEST_NUMBER = 4_000  # characters; a longer number is no number of an answer that masks have bounded


class Validator:
    """Checks the text of an answer against a schema that ``normalise`` has accepted. Both choose the same draft."""

    def __init__(self, schema: JSON | bool) -> None:
        self._validator = validation.validator(schema, validation.draft_of(schema, "schema"))

    def errors(self, text: str) -> str | None:
        """Why the text is not one JSON value that is valid against the schema; ``None`` where it is.

        The sentence names places and keywords and quotes nothing of the answer, so that it may go into a log.
        """
        try:
            value = _read(text)
        except _NotJSON as error:
            return str(error)
        except RecursionError:
            return "the JSON is nested too deeply to be read"
        problem = next(self._validator.iter_errors(value), None)
        if problem is None:
            return None
        place, keyword = pointer(problem.instance_path), pointer(problem.schema_path)
        return f"the value at '{place}' does not match '{keyword}' of the schema"


class TaggedValidator:
    """Checks the structures in a text, each a JSON value between two fixed texts."""

    def __init__(self, tags: TaggedText) -> None:
        self._triggers = tags.triggers
        self._structures = [(each.begin, each.end, Validator(each.schema)) for each in tags.structures]

    def errors(self, text: str) -> str | None:
        """Why a structure of the text is not valid; ``None`` where all are."""
        at = 0
        while (found := self._next(text, at)) is not None:
            start, trigger = found
            problem: str | None = "no structure begins where a trigger occurs"
            for begin, end, validator in self._structures:
                if begin.startswith(trigger) and text.startswith(begin, start):
                    after, problem = _structure(text, start + len(begin), end, validator)
                    if problem is None:
                        at = after
                        break
            if problem is not None:
                return problem
        return None

    def _next(self, text: str, at: int) -> tuple[int, str] | None:
        """The trigger that is complete first, and where it begins."""
        places = [(place + len(each), place, each) for each in self._triggers if (place := text.find(each, at)) >= 0]
        return min(places)[1:] if places else None


def _structure(text: str, at: int, end: str, validator: Validator) -> tuple[int, str | None]:
    """Where the structure ends whose JSON text begins at a place, and why it is not valid."""
    problem = "a structure is not closed"
    for close in _ends(text, at, end):
        found = validator.errors(text[at:close])
        if found is None:
            return close + len(end), None
        problem = found
    return at, problem


def _ends(text: str, at: int, end: str) -> Iterator[int]:
    """Where the JSON text may end: behind its last character, or, where ``end`` could be the rest of a number, before
    each place of it."""
    if end[:1] and end[0] in "0123456789.eE+-":
        close = text.find(end, at)
        while 0 <= close < at + LONGEST_NUMBER:
            yield close
            close = text.find(end, close + 1)
    else:
        try:
            _, close = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if text.startswith(end, close):
            yield close


def readable(schema: JSON | bool) -> Validator | None:
    """A validator of a schema that masks may not enforce; None: it is too large, or no schema that it can read."""
    try:
        limits.check(schema, "schema")
        return Validator(schema)
    except (InvalidRequest, ValueError, RecursionError):
        return None


class _NotJSON(ValueError):
    """The text is not JSON as RFC 8259 and I-JSON (RFC 7493) define it."""


def _read(text: str) -> Any:
    """The value of a JSON text. Numbers keep their exact value; duplicate keys, NaN and Infinity are refused."""
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_fraction, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise _NotJSON(f"the text is not JSON at character {error.pos}: {error.msg}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotJSON("an object has the same key twice")
    return members


def _constant(name: str) -> NoReturn:
    raise _NotJSON(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    _check_length(digits)
    return int(digits)


def _fraction(digits: str) -> Decimal:
    _check_length(digits)
    return Decimal(digits)


def _check_length(digits: str) -> None:
    if len(digits) > LONGEST_NUMBER:
        raise _NotJSON(f"a number has {len(digits)} characters; at most {LONGEST_NUMBER} are read")
