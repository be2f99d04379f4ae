"""The parameters in the query of a request's target.

Reading them is bounded: the parameters are counted before they are decoded, so a long query costs no more than one
look at its bytes.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from inferd.errors import InvalidRequest
from inferd.gateway.errors import invalid, printable, shown

MAX_PARAMETERS: Final = 64

T = TypeVar("T", bound=msgspec.Struct)


def query_pairs(query: str, most: int = MAX_PARAMETERS) -> list[tuple[str, str]]:
    """Names and values, in order. Raises InvalidRequest if there are more than ``most``, or they are not UTF-8."""
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=most)
    except (UnicodeDecodeError, ValueError):
        raise InvalidRequest(
            f"The query is not valid; send at most {most} parameters in UTF-8.", code="invalid_query"
        ) from None


def last_values(query: str) -> dict[str, str]:
    """The value of each name; of a name that comes several times the last one. Raises InvalidRequest."""
    return dict(query_pairs(query))


def read_query(query: str, form: type[T]) -> T:
    """The parameters as a struct; names that it lacks are left out. Raises InvalidRequest, also where a name comes
    twice."""
    found: dict[str, Any] = {}
    for name, value in query_pairs(query):
        if name in found:
            raise came_twice(name)
        found[name] = value
    return query_struct(found, form, ", ".join(form.__struct_fields__))


def query_struct(found: dict[str, Any], form: type[T], names: str) -> T:
    """``found`` as a struct. Raises InvalidRequest, which lists the ``names`` of the parameters."""
    try:
        return msgspec.convert(found, form, strict=False)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        name = at.rstrip("`")
        where = f"{name}={shown(found[name])}" if name in found else "The query"
        raise InvalidRequest(
            f"{where} is not valid: {printable(what, 200)}. Parameters are {names}.",
            param=name if name in found else None,
            code="invalid_query",
        ) from None


def came_twice(name: str) -> InvalidRequest:
    return invalid(printable(name, 64), f"The parameter {shown(name)} came twice; send it once.")
