"""The notation that a checkpoint's ``response_template`` declares, in ``tokenizer_config.json``.

The object describes regions of an answer by the texts around them, as transformers 5.13 introduced it. Regions that
are written by fixed texts and a name become a description here; a region that needs a general expression does not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from inferd.checkpoints.answers.format import Arguments, Calls, Envelope, Name, Parameters, Part, Reasoning, Text

JSON = dict[str, Any]

_REASONING: Final = ("thinking", "reasoning_content", "reasoning")
_GROUP: Final = re.compile(r"\(\?P<(\w+)>(?:\[[^\]]*\]|[^()\[\]])*\)")
_SPACE: Final = re.compile(r"(?:\\s|\\n|\n| )[*+?]*")
_WHOLE: Final = re.compile(r"\{([\w.]+)\}")


class Unsupported(Exception):
    """The template declares a region that has no description here."""


def read_response_template(folder: Path) -> JSON | None:
    """The template in a checkpoint's folder; None: it has none."""
    path = folder / "tokenizer_config.json"
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None  # the reader of the tokenizer reports what is wrong with the file
    found = settings.get("response_template")
    return found if isinstance(found, dict) else None


def notation_in(template: JSON) -> tuple[Reasoning | None, Calls | None]:
    """How the template writes reasoning and calls. Raises Unsupported, with the field."""
    fields = template.get("fields")
    if not isinstance(fields, dict) or template.get("version", 1) != 1:
        raise Unsupported("the response_template has no fields of version 1")
    reasoning = next((_reasoning(fields[name], name) for name in _REASONING if name in fields), None)
    calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else None
    return reasoning, calls


def _reasoning(field: JSON, name: str) -> Reasoning:
    begin, end = _fixed(field, "open"), _fixed(field, "close")
    if begin is None or end is None:
        raise Unsupported(f"the field {name} has no fixed texts around it")
    return Reasoning(begin, end)


def _calls(field: JSON) -> Calls:
    opening, closing = _parts(field, "open"), _parts(field, "close")
    if not opening:
        raise Unsupported("the field tool_calls has no text before it")
    content = field.get("content", "text")
    if content == "json":
        if field.get("content_args"):
            raise Unsupported("the field tool_calls has JSON of a dialect")
        body = _json_body(field, has_name=Name() in opening)
    elif content == "xml-inline" and Name() in opening:
        body = _parameters(field.get("content_args") or {})
    else:
        raise Unsupported(f"the field tool_calls has content of the form {content!r}")
    if field.get("transform_each"):
        begin, end = _joined(opening), _joined(closing)
        return Calls((body,), begin=begin, separator=", ", end=end, is_list=True)
    return Calls((*opening, body, *closing))


def _json_body(field: JSON, *, has_name: bool) -> Part:
    transform = field.get("transform")
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if has_name:
        if isinstance(function, dict) and function.get("arguments") == "{content}":
            return Arguments()
        raise Unsupported("the field tool_calls puts a name to something other than its content")
    if function in (None, "{content}"):
        return Envelope()
    if not isinstance(function, dict):
        raise Unsupported("the field tool_calls has a transform without a function")
    keys: list[str] = []
    for name in ("name", "arguments"):
        found = _WHOLE.fullmatch(str(function.get(name)))
        key = None if found is None else found[1].removeprefix("content.")
        if key is None or "." in key or key == "content":
            raise Unsupported(f"the field tool_calls takes {name} from no key of its content")
        keys.append(key)
    return Envelope(tuple(keys), keys[0], keys[1])


def _parameters(arguments: JSON) -> Parameters:
    if set(arguments) - {"tag_pattern", "value_parser"} or not isinstance(arguments.get("tag_pattern"), str):
        raise Unsupported("the field tool_calls has tags that are not one pattern")
    pattern = arguments["tag_pattern"]
    groups = list(_GROUP.finditer(pattern))
    if [group[1] for group in groups] != ["key", "value"]:
        raise Unsupported("the field tool_calls has tags without a key and a value")
    key, value = groups
    texts = [_text(pattern[: key.start()]), _text(pattern[key.end() : value.start()]), _text(pattern[value.end() :])]
    if not all(text.strip() for text in texts):
        raise Unsupported("the field tool_calls has tags without fixed texts around the value")
    return Parameters(*texts)


def _parts(field: JSON, side: str) -> tuple[Part, ...]:
    """The texts of one side of a region, and the place of the name among them."""
    fixed = _fixed(field, side)
    if fixed is not None:
        return (Text(fixed),)
    pattern = field.get(f"{side}_pattern")
    if pattern is None:
        return ()
    parts: list[Part] = []
    at = 0
    for group in _GROUP.finditer(pattern):
        if group[1] != "name":
            raise Unsupported(f"the field tool_calls reads {group[1]!r} from the text around it")
        parts += [Text(_text(pattern[at : group.start()])), Name()]
        at = group.end()
    parts.append(Text(_text(pattern[at:])))
    return tuple(part for part in parts if part != Text(""))


def _fixed(field: JSON, side: str) -> str | None:
    found = field.get(side)
    return found[0] if isinstance(found, list) and found else found if isinstance(found, str) else None


def _joined(parts: tuple[Part, ...]) -> str:
    if not all(isinstance(part, Text) for part in parts):
        raise Unsupported("the field tool_calls has a list of calls and one name")
    return "".join(part.text for part in parts if isinstance(part, Text))


def _text(pattern: str) -> str:
    """The text that a simple expression stands for; its white space is one line break or what it names."""
    text, at = "", 0
    while at < len(pattern):
        space = _SPACE.match(pattern, at)
        if space is not None:
            text += "\n" if "\\" in space[0] or "\n" in space[0] else " "
            at = space.end()
        elif pattern[at] == "\\" and at + 1 < len(pattern) and not pattern[at + 1].isalnum():
            text += pattern[at + 1]
            at += 2
        elif pattern[at] in "\\()[]{}*+?.|^$":
            raise Unsupported(f"the expression {pattern!r} stands for more than one text")
        else:
            text += pattern[at]
            at += 1
    return text
