"""Golden sets for ``inferd evaluate``, read whole and checked before anything is asked.

A line has the form that rollouts read (``compare/golden.py``), and may have more: checks that take longer than a
gateway's turn allows. The path may be left out where it follows from the request's fields.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from inferd.compare.golden import GoldenItem, path_problem, problem_of_line
from inferd.errors import InferdError, InvalidRequest
from inferd.structured.check import Validator
from inferd.types import JSON

MAX_PATTERN: Final = 1000
"""Characters of a regular expression."""

MAX_SHOWN: Final = 20
"""Problems that one message lists."""

CHECKS: Final = ("contains", "equals", "label", "regex", "json_schema", "numeric", "max_distance")


class Numeric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Numbers with a tolerance: each may differ by ``abs`` plus ``rel`` times its size."""

    value: float | list[float]
    abs: Annotated[float, Meta(ge=0)] = 0.0
    rel: Annotated[float, Meta(ge=0)] = 0.0


class Near(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text, and how many characters may be inserted, deleted or replaced."""

    text: str
    distance: Annotated[int, Meta(ge=0)]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    request: JSON
    path: str | None = None
    name: Annotated[str, Meta(max_length=256)] = ""
    contains: str | list[str] | None = None
    equals: Any = None
    label: str | None = None
    regex: Annotated[str, Meta(max_length=MAX_PATTERN)] | None = None  # found somewhere in the text
    json_schema: JSON | None = None  # the text is one JSON value that is valid
    numeric: Numeric | None = None  # the numbers of the answer's tensors, or those in its text
    max_distance: Near | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a golden set that was checked."""

    line: int
    item: GoldenItem  # its name, path and request, and the checks that rollouts have as well
    regex: str | None = None
    json_schema: JSON | None = None
    numeric: Numeric | None = None
    max_distance: Near | None = None


_line: Final = msgspec.json.Decoder(_Line)


def read_golden(file: Path) -> list[Case]:
    """The cases of a file. Raises InvalidRequest, which lists every line with a problem."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"The golden set {file} cannot be read ({error.strerror}).", param="golden") from None
    problems: list[str] = []
    cases: list[Case] = []
    names: dict[str, int] = {}
    requests: dict[bytes, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            case = _case(text, number)
        except msgspec.DecodeError as error:
            problems.append(f"line {number}: {problem_of_line(error, _Line)}")
            continue
        except (ValueError, RecursionError, InferdError) as error:
            problems.append(f"line {number}: {str(error)[:300]}")
            continue
        request = msgspec.json.encode((case.item.path, case.item.request), order="deterministic")
        same_name, same_request = names.setdefault(case.item.name, number), requests.setdefault(request, number)
        if same_name != number:
            problems.append(f"line {number}: the name {case.item.name!r} is that of line {same_name}; give it its own")
        elif same_request != number:
            problems.append(f"line {number}: the request is that of line {same_request}; leave one of the two out")
        cases.append(case)
    if problems:
        more = f"\n  and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        listed = "".join([f"\n  {one}" for one in problems[:MAX_SHOWN]])
        raise InvalidRequest(f"The golden set {file} has problems:{listed}{more}", param="golden")
    if not cases:
        raise InvalidRequest(f"The golden set {file} is empty; write one JSON object a line.", param="golden")
    return cases


def _case(text: bytes, number: int) -> Case:
    line = _line.decode(text)
    if all(getattr(line, name) is None for name in CHECKS):
        raise ValueError(f"nothing is expected; add one of {', '.join(CHECKS)}")
    if line.regex is not None:
        try:
            re.compile(line.regex)
        except re.error as error:
            raise ValueError(f"regex is no regular expression ({error})") from None
    if line.json_schema is not None:
        Validator(line.json_schema)
    if line.request.get("stream"):
        raise ValueError("request.stream is true; leave it out, answers are compared whole")
    path = line.path or _path_of(line.request)
    if problem := path_problem(path):
        raise ValueError(problem)
    item = GoldenItem(
        path=path,
        request=line.request,
        name=line.name or str(number),
        contains=line.contains,
        equals=line.equals,
        label=line.label,
    )
    return Case(
        line=number,
        item=item,
        regex=line.regex,
        json_schema=line.json_schema,
        numeric=line.numeric,
        max_distance=line.max_distance,
    )


def _path_of(request: JSON) -> str:
    """The route that a body is for."""
    if "messages" in request:
        return "/v1/chat/completions"
    if "prompt" in request:
        return "/v1/completions"
    if isinstance(request.get("inputs"), list):
        return "/v2/models/MODEL/infer"
    if "query" in request:
        return "/v1/rerank"
    raise ValueError("the route does not follow from the request; add path, such as /v1/embeddings or /classify")
