"""The parts of an answer, from the bodies of dialects and from generated choices. Pure.

Answers of dialects are read by their structure and not by their route: an object with a ``label`` is a class, entries
with an ``index`` and a score are a ranking, entries with a ``datatype`` are tensors; every other text is a text, and
numbers are numbers. What differs between two runs of one model is left out (``_NEVER``).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from inferd.compare.answers import Answer, Label, Numbers, Part, Text
from inferd.compare.tensors import (
    UnreadableAnswer,
    binary_outputs,
    flattened,
    grpc_outputs,
    listed_part,
    numbers_of,
)

_NEVER: Final = frozenset(
    (
        "completed_at",
        "created",
        "created_at",
        "id",
        "meta",
        "model",
        "model_name",
        "model_version",
        "object",
        "parameters",
        "previous_response_id",
        "service_tier",
        "system_fingerprint",
        "timings",
        "usage",
    )
)
"""Fields of answers that say nothing of what the model computed."""

_FORM: Final = frozenset(("finish_reason", "name", "role", "status", "stop_reason", "type"))
_SCORES: Final = ("relevance_score", "score")
_BASE64: Final = frozenset(("embedding", "base64", "data"))  # fields that may hold numbers of 32 bits as base64


def is_form(label: Label) -> bool:
    """Whether a label is a field that every answer of the dialect has, and not a class that a model chose."""
    return label.name.rpartition(".")[2] in _FORM


class ChoiceText(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a generated answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments of its tool calls
    finish_reason: str = ""


def answer_of_choices(choices: Sequence[ChoiceText]) -> Answer:
    """The parts of a generated answer."""
    found: list[Part] = []
    for index, choice in enumerate(choices):
        place = f"choices[{index}]"
        found.append(Text(f"{place}.text", choice.text))
        if choice.reasoning:
            found.append(Text(f"{place}.reasoning", choice.reasoning))
        for number, (name, arguments) in enumerate(choice.calls):
            found.append(Label(f"{place}.calls[{number}].name", name))
            found.append(Text(f"{place}.calls[{number}].arguments", arguments))
        found.append(Label(f"{place}.finish_reason", choice.finish_reason))
    return tuple(found)


def answer_of_body(
    body: bytes, *, header_bytes: int = -1, is_grpc: bool = False, labels: Mapping[str, Sequence[str]] = {}
) -> Answer:
    """The parts of a body.

    ``header_bytes``: length of the JSON part of KServe v2's binary form; -1: all of it is JSON. ``is_grpc``: it is a
    ``ModelInferResponse``. ``labels``: the classes along the last dimension of tensors, by their names; of such a
    tensor the best class of each row is a part, and not the numbers. Raises UnreadableAnswer.
    """
    if is_grpc:
        parts = grpc_outputs(body)
    elif header_bytes >= 0:
        parts = binary_outputs(body, header_bytes)
    else:
        try:
            return answer_of_json(msgspec.json.decode(body), labels=labels)
        except msgspec.DecodeError as error:
            raise UnreadableAnswer(f"The answer is not JSON: {error}") from None
        except RecursionError:
            raise UnreadableAnswer("The answer's lists and objects are nested too deeply.") from None
    return tuple([_labelled(part, labels) for part in parts])


def answer_of_json(value: Any, *, labels: Mapping[str, Sequence[str]] = {}) -> Answer:
    """The parts of a decoded body. ``labels``: see ``answer_of_body``."""
    return tuple([_labelled(part, labels) for part in _parts("", value)])


def _parts(place: str, value: Any) -> Iterator[Part]:
    match value:
        case {"label": str(label)}:
            yield Label(f"{place}.label".lstrip("."), label)
        case {"name": str(name), "datatype": str(datatype), "shape": list(shape), "data": list(data)}:
            yield listed_part(name, datatype, tuple(shape), data)
        case dict():
            for name, entry in value.items():
                if name in _NEVER:
                    continue
                at = f"{place}.{name}" if place else name
                if isinstance(entry, str):
                    yield _of_text(at, name, entry)
                else:
                    yield from _parts(at, entry)
        case [_, *_] if all(_is_class(entry) for entry in value):
            yield Label(f"{place}[0].label", max(value, key=lambda entry: entry["score"])["label"])
        case [_, *_] if all(_is_ranked(entry) for entry in value):
            yield _ranking(place, value)
        case list():
            yield from _of_list(place, value)
        case bool() | None:
            yield Label(place, str(value).lower())
        case int() | float():
            yield Numbers(place, (value,))
        case str():
            yield Text(place, value)


def _of_list(place: str, value: list[Any]) -> Iterator[Part]:
    flat = flattened(value)
    kinds = {type(entry) for entry in flat}
    if kinds <= {int, float} and flat:
        yield Numbers(place, flat, _shape(value), kinds == {int})
    elif kinds == {str} and len(flat) > 1:
        yield Label(place, "\n".join(flat))
    else:
        for index, entry in enumerate(value):
            yield from _parts(f"{place}[{index}]", entry)


def _shape(value: Any) -> tuple[int, ...]:
    """The lengths along the first entries; lists of other lengths differ in their number of values."""
    found: list[int] = []
    while isinstance(value, list):
        found.append(len(value))
        value = value[0] if value else None
    return tuple(found)


def _is_class(entry: Any) -> bool:
    """Whether an entry of a list is a class and its score."""
    return isinstance(entry, dict) and isinstance(entry.get("label"), str) and _is_number(entry.get("score"))


def _is_ranked(entry: Any) -> bool:
    """Whether an entry of a list is an index and its score."""
    has_score = isinstance(entry, dict) and any(_is_number(entry.get(name)) for name in _SCORES)
    return has_score and _is_number(entry.get("index"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ranking(place: str, entries: list[Any]) -> Numbers:
    """Indices and scores, in the order of the indices: with equal scores the order of a ranking is by chance."""
    found: list[float] = []
    for entry in sorted(entries, key=lambda entry: entry["index"]):
        found += (entry["index"], next(entry[name] for name in _SCORES if _is_number(entry.get(name))))
    return Numbers(place or "ranking", found, (len(entries), 2))


def _of_text(place: str, name: str, value: str) -> Part:
    if name in _FORM:
        return Label(place, value)
    if name in _BASE64:
        try:
            data = base64.b64decode(value, validate=True)
        except ValueError:
            return Text(place, value)
        if data and len(data) % 4 == 0:
            return Numbers(place, numbers := numbers_of("FP32", data), (len(numbers),))
    return Text(place, value)


def _labelled(part: Part, labels: Mapping[str, Sequence[str]]) -> Part:
    """The best class of each row, for a tensor of classes."""
    if not isinstance(part, Numbers) or part.is_exact:
        return part
    words = labels.get(part.name)
    if not words or not part.values or len(part.values) % len(words):
        return part
    width = len(words)
    rows = [part.values[start : start + width] for start in range(0, len(part.values), width)]
    return Label(part.name, "\n".join([words[max(range(width), key=row.__getitem__)] for row in rows]))
