"""Golden sets: requests with the answers that are expected, one JSON object a line. Read whole and checked before any is
asked.

A line has ``id`` (unique), ``request`` (a body), ``expected`` (checks that must all hold), and optionally ``path`` (the
route; else it follows from the request's fields).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from inferd.errors import InferdError, InvalidRequest
from inferd.structured.check import Validator
from inferd.types import JSON

MAX_PATTERN: Final = 1000
"""Characters of a regular expression."""

MAX_SHOWN: Final = 20
"""Problems that one message lists."""


class Numeric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Numbers with a tolerance: each may differ by ``abs`` plus ``rel`` times its size."""

    value: float | list[float]
    abs: Annotated[float, Meta(ge=0)] = 0.0
    rel: Annotated[float, Meta(ge=0)] = 0.0


class Near(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text, and how many characters may be inserted, deleted or replaced."""

    text: str
    distance: Annotated[int, Meta(ge=0)]


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Checks of an answer. At least one."""

    equals: str | None = None  # the whole text
    contains: str | list[str] | None = None  # each of them
    regex: str | None = None  # found somewhere in the text
    json_schema: JSON | None = None  # the text is a JSON value that is valid
    label: str | int | None = None  # the class, or the first rank
    numeric: Numeric | None = None  # the numbers of the answer, or the numbers in its text
    max_distance: Near | None = None


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: Annotated[str, Meta(min_length=1, max_length=256)]
    request: JSON
    expected: Expected
    path: Annotated[str, Meta(pattern="^/")] | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a golden set that was checked."""

    id: str
    line: int
    path: str  # may have {model} in it
    request: JSON
    expected: Expected


_line: Final = msgspec.json.Decoder(_Line)


def read_golden(file: Path) -> list[Case]:
    """The cases of a file. Raises InvalidRequest, which lists every line with a problem."""
    problems: list[str] = []
    cases: list[Case] = []
    first_line: dict[str, int] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"The golden set {file} cannot be read ({error.strerror}).", param="golden") from None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            case = _case(text, number)
        except (ValueError, RecursionError, InferdError) as error:
            problems.append(f"line {number}: {str(error)[:300]}")
            continue
        if case.id in first_line:
            problems.append(
                f"line {number}: the id {case.id!r} is that of line {first_line[case.id]}; give each its own"
            )
            continue
        first_line[case.id] = number
        cases.append(case)
    if problems:
        more = f"\n  and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        listed = "".join([f"\n  {one}" for one in problems[:MAX_SHOWN]])
        raise InvalidRequest(f"The golden set {file} has problems:{listed}{more}", param="golden")
    if not cases:
        raise InvalidRequest(f"The golden set {file} has no line; write one JSON object a line.", param="golden")
    return cases


def _case(text: bytes, number: int) -> Case:
    line = _line.decode(text)
    expected = line.expected
    if all(getattr(expected, name) is None for name in Expected.__struct_fields__):
        raise ValueError(f"expected has no check; give one of {', '.join(Expected.__struct_fields__)}")
    if expected.regex is not None:
        if len(expected.regex) > MAX_PATTERN:
            raise ValueError(f"expected.regex has more than {MAX_PATTERN} characters")
        try:
            re.compile(expected.regex)
        except re.error as error:
            raise ValueError(f"expected.regex is no regular expression ({error})") from None
    if expected.json_schema is not None:
        Validator(expected.json_schema)
    if line.request.get("stream"):
        raise ValueError("request.stream must be left out: a golden set compares whole answers")
    return Case(
        id=line.id, line=number, path=line.path or _path_of(line.request), request=line.request, expected=expected
    )


def _path_of(request: JSON) -> str:
    """The route that a body is for."""
    if "messages" in request:
        return "/v1/chat/completions"
    if "prompt" in request:
        return "/v1/completions"
    if "inputs" in request and isinstance(request["inputs"], list):
        return "/v2/models/{model}/infer"
    if "text_input" in request:
        return "/v2/models/{model}/generate"
    if "query" in request:
        return "/v1/rerank"
    raise ValueError("the route does not follow from the request; give it as path, such as /v1/embeddings or /classify")


def body_of(case: Case, model: str | None) -> tuple[str, JSON]:
    """The path and the body that ask a model. ``None``: the one that the case names, or the only one."""
    body: dict[str, Any] = dict(case.request)
    if "{model}" in case.path:
        name = model or str(body.pop("model", ""))
        return case.path.replace("{model}", name), body
    if model is not None:
        body["model"] = model
    return case.path, body
