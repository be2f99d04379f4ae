"""The input of a request as the messages of a conversation, and the texts of parts."""

from __future__ import annotations

from typing import Any, Final

from inferd.gateway.decisions.wire import JSON, EvidenceItem, EvidencePart
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.items import TOOLS, InputItem, Part, Placed, messages_of
from inferd.gateway.generation.writer import encode
from inferd.gateway.limits import MAX_MESSAGES

MAX_JSON_BYTES: Final = 256 * 1024
MAX_JSON_DEPTH: Final = 32
MAX_JSON_VALUES: Final = 10_000


def messages_of_input(given: str | list[EvidenceItem]) -> tuple[list[JSON], list[str]]:
    """The conversation that the questions are about. Raises InvalidRequest, which names the item or part."""
    if isinstance(given, str):
        if not given:
            raise invalid("input", "input is empty; send a text or at least one item.", "missing_required_parameter")
        return [{"role": "user", "content": given}], []
    if len(given) > MAX_MESSAGES:
        raise invalid("input", f"input may have at most {MAX_MESSAGES} items, not {len(given)}.")
    for i, item in enumerate(given):
        if item.type == TOOLS:
            raise invalid(
                f"input[{i}].type",
                f"input[{i}].type is {shown(TOOLS)}, and a question has no tools; leave the item out.",
                "unsupported_content",
            )
    placed = [Placed(f"input[{i}]", _item(item, f"input[{i}]")) for i, item in enumerate(given)]
    return messages_of(None, placed)


def text_of_parts(content: str | list[EvidencePart], at: str) -> str:
    """The text of a question's instructions. Raises InvalidRequest, which names the part that has none."""
    if isinstance(content, str):
        return content
    return "\n".join([_text_of_part(part, f"{at}[{j}]") for j, part in enumerate(content)])


def _text_of_part(part: EvidencePart, at: str) -> str:
    read = _part(part, at)
    if read.type not in ("input_text", "text"):
        raise invalid(
            f"{at}.type",
            f"{at} is of type {shown(part.type)}; the models served here read parts of type input_text and input_json.",
            "unsupported_content",
        )
    if read.text is None:
        raise invalid(f"{at}.text", f"{at}.text is missing; a text part needs text.", "missing_required_parameter")
    return read.text


def _item(item: EvidenceItem, at: str) -> InputItem:
    return InputItem(
        item.type,
        item.id,
        item.role,
        _content(item.content, f"{at}.content"),
        item.call_id,
        item.name,
        item.namespace,
        item.arguments,
        item.input,
        _content(item.output, f"{at}.output"),
    )


def _content(content: str | list[EvidencePart] | None, at: str) -> str | list[Part] | None:
    if not isinstance(content, list):
        return content
    return [_part(part, f"{at}[{j}]") for j, part in enumerate(content)]


def _part(part: EvidencePart, at: str) -> Part:
    """A part as the other dialects of OpenAI have it: data in JSON is text."""
    if part.type != "input_json":
        return Part(part.type, part.text, part.refusal)
    if part.data is None:
        raise invalid(
            f"{at}.data",
            f"{at}.data is missing; an input_json part needs an object or a list of objects.",
            "missing_required_parameter",
        )
    _check_size(part.data, f"{at}.data")
    text = encode(part.data)
    if len(text) > MAX_JSON_BYTES:
        raise invalid(f"{at}.data", f"{at}.data may have at most {MAX_JSON_BYTES} bytes as JSON, not {len(text)}.")
    return Part("input_text", text.decode())


def _check_size(data: Any, at: str) -> None:
    level, depth, num_values = [data], 0, 0
    while level:
        num_values += len(level)
        lists = [one if isinstance(one, list) else list(one.values()) for one in level if isinstance(one, list | dict)]
        depth += bool(lists)
        if depth > MAX_JSON_DEPTH or num_values > MAX_JSON_VALUES:
            raise invalid(
                at,
                f"{at} may have at most {MAX_JSON_DEPTH} levels of lists and objects and {MAX_JSON_VALUES} values; "
                "send less.",
            )
        level = [value for values in lists for value in values]
