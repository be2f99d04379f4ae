"""Golden sets: requests whose right answers are known, one JSON object per line. Pure.

    {"path": "/v1/chat/completions", "request": {"messages": [...], "max_tokens": 8}, "contains": "Paris"}
    {"path": "/classify", "request": {"input": "a great film"}, "label": "positive"}
    {"path": "/v2/models/MODEL/infer", "request": {"inputs": [...]}, "equals": {"outputs": [...]}}

An item expects one or more of three things. ``contains``: texts that are somewhere in the answer's text. ``equals``:
the answer's whole text, without blanks around it, or values as the answer has them, within a tolerance; fields that are
left out may have any value. ``label``: the answer's first class. The field ``model`` of a request, and MODEL in a path,
are filled in where the set is run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from inferd.compare.answers import Answer, Label, Text, Tolerance, compare
from inferd.compare.reading import answer_of_json, is_form
from inferd.errors import ConfigError
from inferd.types import JSON

MAX_ITEMS: Final = 10_000
DEFAULT_TOLERANCE: Final = Tolerance()


class GoldenItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request and what its answer must be."""

    path: str  # of the route that is asked
    request: JSON  # the body, which names no model
    name: str = ""  # for reports; empty: the number of its line
    contains: str | list[str] | None = None
    equals: Any = None
    label: str | None = None


_decoder: Final = msgspec.json.Decoder(GoldenItem)
_NAMED_MODEL: Final = re.compile(r"(?P<before>/v[12]/models/)(?!MODEL(?:[/:]|$))(?P<name>[^/:]+)(?:/versions/[^/]*)?")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.(?P<at>\w+)`)?$", re.DOTALL)


def read_golden(text: str, source: str) -> list[GoldenItem]:
    """The items of a golden set. ``source`` names it in errors. Raises ConfigError, with the line and the remedy."""
    found: list[GoldenItem] = []
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            item = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{place}: {problem_of_line(error, GoldenItem)}.") from None
        if problem := path_problem(item.path):
            raise ConfigError(f"{place}: {problem}.")
        if item.contains is None and item.equals is None and item.label is None:
            raise ConfigError(f"{place}: nothing is expected; add contains, equals or label.")
        if item.request.get("stream"):
            raise ConfigError(f"{place}: request.stream is true; leave it out, answers are compared whole.")
        same = lines.setdefault(msgspec.json.encode((item.path, item.request), order="deterministic"), number)
        if same != number:
            raise ConfigError(f"{place}: the request is that of line {same}; leave one of the two out.")
        if len(found) == MAX_ITEMS:
            raise ConfigError(f"{place}: a golden set has at most {MAX_ITEMS:,} items; split it.")
        found.append(msgspec.structs.replace(item, name=item.name or str(number)))
    if not found:
        raise ConfigError(f"{source}: the golden set is empty; write one item per line.")
    return found


def path_problem(path: str) -> str:
    """What is wrong with the path of a line, without a period; empty: nothing."""
    if not path.startswith("/"):
        return f"path is {path[:64]!r}; write the route's path: /v1/chat/completions"
    named = _NAMED_MODEL.match(path)
    if named is None:
        return ""
    return (
        f"path names the model {named['name'][:64]!r}; write {named['before']}MODEL{path[named.end() :][:64]}, where the "
        "model that is asked is filled in"
    )


def problem_of_line(error: msgspec.DecodeError, form: type[msgspec.Struct]) -> str:
    """What is wrong with a line that has not the form ``form``, and what may stand there; without a period."""
    unknown = _UNKNOWN.match(str(error))
    if unknown is None:
        return f"{error}; write a JSON object with {', '.join(form.__struct_fields__)}, as far as the case needs them"
    name, at = unknown["name"], unknown["at"]
    fields = _fields_of(form, at) if at else form.__struct_fields__
    close = difflib.get_close_matches(name, fields, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else "leave it out."
    return f"the field {name[:64]!r}{f' of {at}' if at else ''} is unknown; {remedy} There are {', '.join(fields)}"


def _fields_of(form: type[msgspec.Struct], name: str) -> Sequence[str]:
    """The fields of the object that is a field of a line."""
    line = msgspec.inspect.type_info(form)
    assert isinstance(line, msgspec.inspect.StructType)
    found = next(field.type for field in line.fields if field.name == name)
    kinds = found.types if isinstance(found, msgspec.inspect.UnionType) else (found,)
    return next([field.name for field in kind.fields] for kind in kinds if isinstance(kind, msgspec.inspect.StructType))


def unmet(item: GoldenItem, answer: Answer, tolerance: Tolerance = DEFAULT_TOLERANCE) -> str | None:
    """Why an answer is not the expected one, in a sentence; None: it is."""
    texts = [part.value for part in answer if isinstance(part, Text)]
    wanted: Sequence[str] = [item.contains] if isinstance(item.contains, str) else item.contains or ()
    for word in wanted:
        if not any(word in text for text in texts):
            return f"The answer does not contain {word[:64]!r}: {_shown(texts)}."
    if item.label is not None:
        words = [part.value for part in answer if isinstance(part, Label) and not is_form(part)]
        first = words[0].partition("\n")[0] if words else ""
        if first != item.label:
            return f"The label is {first[:64]!r}, and {item.label[:64]!r} was expected."
    if isinstance(item.equals, str):
        if not texts or texts[0].strip() != item.equals.strip():
            return f"The text is {_shown(texts)}, and {item.equals[:64]!r} was expected."
    elif item.equals is not None:
        expected = answer_of_json(item.equals)
        names = {part.name for part in expected}
        found = tuple([part for part in answer if part.name in names])
        difference = next(iter(compare(expected, found, tolerance).differences), None)
        if difference is not None:
            at = "" if difference.position is None else f" at {difference.position}"
            return f"{difference.part}{at} is {difference.other!r}, and {difference.one!r} was expected."
    return None


def question(item: GoldenItem, model: str | None) -> tuple[str, JSON]:
    """The path and the body that ask a model. None: the one that the item names, or the server's only one."""
    body: dict[str, Any] = dict(item.request)
    if "MODEL" in item.path:
        name = model or str(body.pop("model", "MODEL"))
        return item.path.replace("MODEL", name), body
    if model is not None:
        body["model"] = model
    return item.path, body


def _shown(texts: Sequence[str]) -> str:
    return repr(texts[0][:64]) if texts else "no text"
