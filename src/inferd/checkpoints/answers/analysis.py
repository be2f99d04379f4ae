"""The notation that a chat template renders, found by comparing conversations.

The template renders the same conversation with and without a call, with a second call, with a second argument and with
reasoning. What differs shows where the name, the arguments and the identifier stand, and the texts between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from inferd.checkpoints.answers.format import (
    Arguments,
    Calls,
    Envelope,
    Id,
    Keywords,
    Name,
    Parameters,
    Part,
    Reasoning,
    Text,
)
from inferd.errors import InvalidRequest
from inferd.types import JSON, Chat

Render = Callable[[Chat], str]

TOOL: Final = "zq_tool"
_KEY: Final = "zq_key"
_NUMBER_KEY: Final = "zq_number"
_CONTENT: Final = "Zqcontent\u03b6"
_REASON: Final = "Zqreason\u03b6"
_QUESTION: Final[JSON] = {"role": "user", "content": "Zqquestion"}
TOOLS: Final[list[JSON]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "A tool",
            "parameters": {
                "type": "object",
                "properties": {
                    _KEY: {"type": "string", "description": "A text"},
                    _NUMBER_KEY: {"type": "integer", "description": "A number"},
                },
                "required": [_KEY],
            },
        },
    }
]
# A text is compared in units, so that no tag is cut in two.
_UNIT: Final = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]|\s+|\w+|.", re.DOTALL)
_TAG: Final = r"(?:<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\])"
_TAG_BEFORE: Final = re.compile(rf"({_TAG})(\s*)\Z")
_TAG_AFTER: Final = re.compile(rf"(\s*)({_TAG})(\s*)")
_SIDES: Final = re.compile(r"[^a-z]|start|begin|open|end|close")


def call(number: int, arguments: JSON) -> JSON:
    """A synthetic call of the synthetic tool, as a message of the history has it."""
    function = {"name": TOOL, "arguments": arguments}
    return {"id": f"zqid0000{number}", "type": "function", "function": function}


def conversation(calls: Sequence[JSON] = (), *, content: str = "", reasoning: str = "") -> Chat:
    """A conversation whose last message is an answer with these parts."""
    answer: JSON = {"role": "assistant", "content": content}
    if calls:
        answer["tool_calls"] = list(calls)
    if reasoning:
        answer["reasoning_content"] = reasoning
    return Chat(messages=[_QUESTION, answer], tools=TOOLS, add_generation_prompt=False)


class Answer(NamedTuple):
    """The text that a template renders for a conversation's last message, up to the end of its turn."""

    text: str
    opened: str  # what the prompt before it has that belongs to the answer's beginning, or to no answer


def answer_of(render: Render, chat: Chat, ends: Sequence[str] = ()) -> Answer | None:
    """The last message as the template renders it; None: it cannot."""
    try:
        whole = render(chat)
        opened = render(Chat(messages=chat.messages[:-1], tools=chat.tools))
        closed = render(conversation(content=_CONTENT))
    except InvalidRequest:
        return None
    shared = _common_start(whole, opened)
    if not whole.startswith(opened.rstrip()):  # the prompt of an answer has a header of its own
        shared = max(shared, _common_start(whole, closed), key=len)
    text = whole[len(shared) :]
    # Instructions to the model may stand before the answer's header, which is then not in the common beginning.
    header = next((opened[at:] for at in _starts_of_units(opened) if text.startswith(opened[at:])), "")
    if header.strip():
        text, shared = text[len(header) :], header
    end = closed[closed.rindex(_CONTENT) + len(_CONTENT) :] if _CONTENT in closed else ""
    text = text[: len(text) - len(_common_end(text, end))]
    for stop in ends:
        text = text.partition(stop)[0]
    return Answer(text, shared)


def call_text(render: Render, calls: Sequence[JSON], reasoning: Reasoning | None, ends: Sequence[str]) -> str | None:
    """Calls as the template renders them, without the tags of empty reasoning before them; None: it cannot."""
    answer = answer_of(render, conversation(calls), ends)
    if answer is None or reasoning is None:
        return None if answer is None else answer.text
    closed, tag, rest = answer.text.rpartition(reasoning.end.strip())
    return rest.lstrip() if tag and closed.strip() in ("", reasoning.begin.strip()) else answer.text


def calls_of(render: Render, reasoning: Reasoning | None, ends: Sequence[str] = ()) -> Calls | None:
    """How the template writes calls; None: it writes none that can be recognised.

    ``reasoning``: the tags that stand around reasoning, which may be empty. ``ends``: texts of the tokens that end an
    answer.
    """

    def rendered(*calls: JSON) -> str | None:
        return call_text(render, calls, reasoning, ends)

    arguments = {_KEY: "zqvalue"}
    one = rendered(call(1, arguments))
    if one is None or TOOL not in one:
        return None
    found = _json_call(one, arguments)
    if found is None:
        more = rendered(call(1, {**arguments, _NUMBER_KEY: 7}))
        found = _keyword_call(one, more) or _parameter_call(one, more)
    if found is None:
        return None
    parts, begin, end = found
    before, after = one[:begin], one[end:]
    two = rendered(call(1, arguments), call(2, arguments))
    between = None if two is None else _between(two, one[:begin], one[begin:end])
    if between is None:  # the template renders at most one call
        return _made(parts, "", before.lstrip(), after.rstrip(), "", "")
    parts, between = _numbered(parts, before, between)
    call_begin = _common_end(before, between)
    call_end = _common_start(after, between)
    if len(call_begin) + len(call_end) > len(between):
        call_end = call_end[: len(between) - len(call_begin)]
    separator = between[len(call_end) : len(between) - len(call_begin)]
    section_begin = before[: len(before) - len(call_begin)]
    if not section_begin.strip():
        section_begin = ""
    return _made(parts, section_begin, call_begin, call_end, separator, after[len(call_end) :])


def reasoning_of(render: Render) -> Reasoning | None:
    """The tags between which the template writes reasoning."""
    for chat in (
        conversation(content=_CONTENT, reasoning=_REASON),
        conversation([call(1, {_KEY: "zqvalue"})], reasoning=_REASON),
    ):
        try:
            text = render(chat)
        except InvalidRequest:
            continue
        if text.count(_REASON) != 1:
            continue
        before, after = text.split(_REASON)
        begin, end = _TAG_BEFORE.search(before), _TAG_AFTER.match(after)
        if begin is not None and end is not None and _side(begin[1]) == _side(end[2]):
            return Reasoning(begin[0], end[0])
    return None


def _side(tag: str) -> str:
    return _SIDES.sub("", tag.lower())


# -- one call ----------------------------------------------------------------------------------

_Found = tuple[tuple[Part, ...], int, int]
"""The parts from the first to the last of a name, an identifier and the arguments, and their place in the text."""


def _json_call(text: str, arguments: JSON) -> _Found | None:
    """A call whose arguments are JSON."""
    for begin, end, value in reversed(_objects(text)):
        envelope = _envelope(value, arguments)
        if envelope is not None:
            return (envelope,), begin, end
    span = next(((begin, end) for begin, end, value in _objects(text) if value == arguments), None)
    at = -1 if span is None else text.rfind(TOOL, 0, span[0])
    if span is None or at < 0:
        return None
    marker = "zqid00001"
    number = text.find(marker, 0, span[0])
    parts: list[Part] = []
    begin = at
    if 0 <= number < at:
        begin = number
        parts += [Id(), Text(text[number + len(marker) : at])]
    parts.append(Name())
    middle = text[at + len(TOOL) : span[0]]
    before, found, after = middle.partition(marker)
    parts += [Text(before), Id(), Text(after)] if found else [Text(middle)]
    parts.append(Arguments())
    return tuple(part for part in parts if part != Text("")), begin, span[1]


def _objects(text: str) -> list[tuple[int, int, JSON]]:
    """Every JSON object in the text, the outer before the inner."""
    decoder = json.JSONDecoder()
    found: list[tuple[int, int, JSON]] = []
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        found.append((match.start(), end, value))
    return found


def _envelope(value: JSON, arguments: JSON) -> Envelope | None:
    name = next((key for key, inner in value.items() if inner == TOOL), None)
    key = next((key for key, inner in value.items() if _is_arguments(inner, arguments)), None)
    if name is None or key is None:
        return None
    return Envelope(tuple(value), name, key, isinstance(value[key], str))


def _is_arguments(value: Any, arguments: JSON) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return bool(value == arguments)


def _keyword_call(one: str, two: str | None) -> _Found | None:
    """A call that writes its arguments as keyword arguments of Python."""
    first = rf"{TOOL}\({_KEY}=[\"']zqvalue[\"']"
    alone = re.search(rf"{first}\)", one)
    found = None if two is None else re.search(rf"{first}(?P<separator>,\s*){_NUMBER_KEY}=7\)", two)
    if alone is None or found is None:
        return None
    return (Name(), Text("("), Keywords(found["separator"]), Text(")")), alone.start(), alone.end()


def _parameter_call(one: str, two: str | None) -> _Found | None:
    """A call that writes its arguments without quotes."""
    if two is None:
        return None
    pattern = rf"{TOOL}(?P<head>.*?){_KEY}(?P<key>.*?)zqvalue(?P<next>.*?){_NUMBER_KEY}(?P<other>.*?)7(?P<end>.*)"
    found = re.search(pattern, two, re.DOTALL)
    alone = re.search(rf"{TOOL}(?P<head>.*?){_KEY}(?P<key>.*?)zqvalue(?P<end>.*)", one, re.DOTALL)
    if found is None or alone is None or not found["key"].strip() or found["key"].strip()[-1:] == '"':
        return None
    before_key = _common_end(found["head"], found["next"])
    after_value = found["next"][: len(found["next"]) - len(before_key)]
    if not before_key.strip() or not after_value.strip() or not alone["end"].startswith(after_value):
        return None
    head = found["head"][: len(found["head"]) - len(before_key)]
    other = "" if found["other"] == found["key"] else found["other"]
    parameters = Parameters(before_key, found["key"], after_value, other)
    parts: tuple[Part, ...] = (Name(), Text(head), parameters) if head else (Name(), parameters)
    return parts, alone.start(), alone.start("end") + len(after_value)


# -- several calls -----------------------------------------------------------------------------


def _between(two: str, before: str, unit: str) -> str | None:
    """The text between two calls; None: the text has only one."""
    second = unit.replace("zqid00001", "zqid00002")
    begin = two.find(unit)
    if begin < 0:
        return None
    begin += len(unit)
    at = two.find(second, begin)
    if at < 0:
        # The identifiers are numbers that the template gives: only the digits before the second call may differ.
        pattern = re.sub(r"\d+", r"\\d+", re.escape(second))
        found = re.search(pattern, two[begin:])
        if found is None:
            return None
        at = begin + found.start()
    return two[begin:at]


def _numbered(parts: tuple[Part, ...], before: str, between: str) -> tuple[tuple[Part, ...], str]:
    """Replace the number of a call, ``name:0``, by an identifier."""
    changed: list[Part] = []
    for part in parts:
        number = re.fullmatch(r"(\D*\W)(\d+)(\D+)", part.text) if isinstance(part, Text) else None
        if number is None:
            changed.append(part)
        else:
            changed += [Text(number[1]), Id("[0-9]{1,4}"), Text(number[3])]
    return tuple(changed), between


def _made(
    parts: tuple[Part, ...], section_begin: str, call_begin: str, call_end: str, separator: str, section_end: str
) -> Calls:
    opening, closing = section_begin.rstrip(), section_end.strip()
    if separator.strip() == "," and opening.endswith("[") and closing.startswith("]"):
        opening, closing = opening[:-1].strip(), closing[1:].strip()
        written = (Text(call_begin.strip()), *parts, Text(call_end.strip()))
        kept = tuple(part for part in written if part != Text(""))
        return Calls(kept, begin=opening, separator=", ", end=closing, is_list=True)
    if not section_begin:
        call_begin = call_begin.lstrip()
    written = (Text(call_begin), *parts, Text(call_end))
    kept = tuple(part for part in written if not (isinstance(part, Text) and not part.text.strip()))
    return Calls(kept, begin=section_begin.lstrip(), separator=separator, end=section_end.rstrip())


def _starts_of_units(text: str) -> list[int]:
    """Where the last units of a text begin, the earliest first."""
    return [unit.start() for unit in _UNIT.finditer(text, max(0, len(text) - 256))]


def _common_start(one: str, two: str) -> str:
    """The longest common beginning, in whole units."""
    length = 0
    for a, b in zip(_UNIT.finditer(one), _UNIT.finditer(two), strict=False):
        if a[0] != b[0]:
            break
        length = a.end()
    return one[:length]


def _common_end(one: str, two: str) -> str:
    """The longest common end, in whole units."""
    length = 0
    for a, b in zip(reversed(_UNIT.findall(one)), reversed(_UNIT.findall(two)), strict=False):
        if a != b:
            break
        length += len(a)
    return one[len(one) - length :]
