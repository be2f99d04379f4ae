"""OpenAI's items, of which Responses and Decisions have their input, and the messages of a conversation made of them.

Reasoning, text and calls that follow one another are one message of the assistant. The results of its calls stand
directly behind it, in the order of the calls, as templates expect them. Messages of the user that follow one another
are one message. System text at the beginning is one message with the instructions. Later system text is a part of the
user's message, in tags, because many templates take no other place for it than the beginning.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from inferd.gateway.body.embedded import EmbeddedJson
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.variants import Variants
from inferd.gateway.limits import MAX_MESSAGES

JSON = dict[str, Any]

INPUT: Final = "input"
"""The one argument of the function that stands for a custom tool."""

_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXTS: Final = ("input_text", "output_text", "text")
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")
TOOLS: Final = "additional_tools"
"""The type of an item that brings tools."""

_UPDATE: Final = "configuration_update"
"""The type of an item that tells the effort from there on, as Codex does. It has no effect: the request tells it."""

_TYPES: Final = ("message", "reasoning", *_CALLS, *_RESULTS, TOOLS, _UPDATE)
ITEM_VARIANTS: Final = Variants(
    "type",
    {
        "message": ("id", "role", "content"),
        "reasoning": ("id", "content", "encrypted_content", "summary"),
        "function_call": ("id", "call_id", "name", "namespace", "arguments"),
        "custom_tool_call": ("id", "call_id", "name", "namespace", "input"),
        "function_call_output": ("id", "call_id", "output"),
        "custom_tool_call_output": ("id", "call_id", "output"),
        "item_reference": ("id",),
        TOOLS: ("id", "role", "tools"),
        _UPDATE: ("id",),
    },
    "message",
)
PART_VARIANTS: Final = Variants(
    "type",
    {
        **dict.fromkeys((*_TEXTS, "reasoning_text", "summary_text"), ("text",)),
        "refusal": ("refusal",),
        "input_json": ("data",),
    },
)
_KEPT_REASONING: Final = "inferd-text:"  # before the text of reasoning in ``encrypted_content``
_NO_RESULT: Final = (
    "send its function_call_output or custom_tool_call_output, with a text that says so where there is no result."
)
NO_COMPACTION: Final = (
    "This server compacts no conversations; ask the model for a summary in a message, and go on from it. Codex does so "
    "where the name of its model provider is not OpenAI."
)
_COMPACTIONS: Final = ("compaction", "compaction_trigger")


class Part(msgspec.Struct, frozen=True):
    """One part of a content: input_text, output_text, text, refusal, reasoning_text or summary_text."""

    type: str
    text: str | None = None
    refusal: str | None = None
    variants: ClassVar[Variants] = PART_VARIANTS


class InputItem(msgspec.Struct, frozen=True):
    """One item of a conversation. Without a ``type`` it is a message, or a reference where it has an ``id`` alone."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    encrypted_content: str | None = None
    summary: list[Part] | None = None
    tools: list[InputTool] | None = None  # of additional_tools
    variants: ClassVar[Variants] = ITEM_VARIANTS


class ToolFormat(msgspec.Struct, frozen=True):
    """The form of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None
    variants: ClassVar[Variants] = Variants("type", {"text": (), "grammar": ("syntax", "definition")})


class InputTool(msgspec.Struct, frozen=True):
    """A tool: function, custom or namespace. Tools of other types are those of OpenAI's servers."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: list[InputTool] | None = None
    variants: ClassVar[Variants] = Variants(
        "type",
        {
            "function": ("name", "description", "parameters", "strict"),
            "custom": ("name", "description", "format"),
            "namespace": ("name", "description", "tools"),
        },
    )


class Placed(NamedTuple):
    """An item with its place in the request."""

    at: str
    item: InputItem
    raw: bytes = b""  # as it is stored; empty: the request brings it


def messages_of(instructions: str | None, items: Sequence[Placed]) -> tuple[list[JSON], list[str]]:
    """The messages of a conversation, and the names of its parts that were left out. Raises InvalidRequest."""
    if not items:
        raise invalid("input", "input is empty; send a text or at least one item.", "missing_required_parameter")
    if len(items) > MAX_MESSAGES:
        raise invalid("input", f"A conversation may have at most {MAX_MESSAGES} items, not {len(items)}.")
    conversation = _Conversation(instructions, items)
    for placed in items:
        conversation.take(placed)
    messages = conversation.ended()
    if not messages:
        raise invalid("input", "input has no message; send a text or an item of type message.")
    return messages, conversation.left_out


class _Conversation:
    """Collects messages from items, and checks that calls and results belong together."""

    __slots__ = (
        "_awaited",
        "_calls",
        "_embedded",
        "_messages",
        "_reasoning",
        "_results",
        "_system",
        "_texts",
        "_user",
        "left_out",
    )

    def __init__(self, instructions: str | None, items: Sequence[Placed]) -> None:
        self.left_out: list[str] = []
        self._messages: list[JSON] = []
        self._system: list[str] | None = [instructions] if instructions else []  # None: the beginning is over
        self._user: list[str] = []
        self._reasoning: list[str] = []  # with _texts and _calls: of the message of the assistant that is open
        self._texts: list[str] | None = None  # None: no message of the assistant is open
        self._calls: list[JSON] = []
        self._awaited: set[str] = set()  # ids of all calls
        self._results = _results_of(items)
        self._embedded = EmbeddedJson()

    def take(self, placed: Placed) -> None:
        at, item, _ = placed
        kind = kind_of(item)
        if kind in _RESULTS:
            if item.call_id not in self._awaited:
                raise invalid(
                    f"{at}.call_id",
                    f"{at}.call_id is {shown(item.call_id)}, but no call before it has this id; send the call too.",
                )
            self._close_assistant()
        elif kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._open_assistant()
            self._reasoning.append(self._thought(item, at))
        elif kind in _CALLS:
            self._open_assistant()
            self._calls.append(self._call(item, kind, at))
        elif kind == _UPDATE:
            self.left_out.append(f"input.{_UPDATE}")
        elif kind != TOOLS:  # whose tools the dialect takes
            remedy = f" {NO_COMPACTION}" if kind in _COMPACTIONS else ""
            raise invalid(
                f"{at}.type",
                f"{at}.type is {shown(kind)}; the models served here read items of type {', '.join(_TYPES)}.{remedy}",
                "unsupported_content",
            )

    def ended(self) -> list[JSON]:
        self._close_assistant()
        self._close_user()
        self._close_system()
        return self._messages

    def _message(self, item: InputItem, at: str) -> None:
        role = item.role
        if role not in _ROLES:
            raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {shown(role)}.")
        if item.content is None:
            raise invalid(
                f"{at}.content", f"{at}.content is missing; a message needs it.", "missing_required_parameter"
            )
        text = _text_of(item.content, f"{at}.content", role)
        if role == "assistant":
            self._open_assistant()
            assert self._texts is not None
            self._texts.append(text)
            return
        self._close_assistant()
        if role == "user":
            self._close_system()
            self._user.append(text)
        elif self._system is not None:
            self._system.append(text)
        else:
            self._user.append(f"<system>\n{text}\n</system>")

    def _thought(self, item: InputItem, at: str) -> str:
        """The text of reasoning that is sent back. It is in ``encrypted_content`` where clients send no content."""
        kept = item.encrypted_content
        if kept and not kept.startswith(_KEPT_REASONING):
            self.left_out.append("input.encrypted_content")
            kept = None
        if item.summary:
            self.left_out.append("input.summary")
        if item.content:
            return _text_of(item.content, f"{at}.content", "reasoning")
        if not kept:
            return ""
        try:
            return base64.b64decode(kept.removeprefix(_KEPT_REASONING), validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            raise invalid(
                f"{at}.encrypted_content", f"{at}.encrypted_content was changed; send the item as it came."
            ) from None

    def _call(self, item: InputItem, kind: str, at: str) -> JSON:
        if not item.call_id or not item.name:
            field = "name" if item.call_id else "call_id"
            raise invalid(
                f"{at}.{field}",
                f"{at}.{field} is missing; a call needs a call_id and a name.",
                "missing_required_parameter",
            )
        if item.call_id in self._awaited:
            raise invalid(
                f"{at}.call_id", f"{at}.call_id is {shown(item.call_id)}, which another call has; ids must differ."
            )
        if item.call_id not in self._results:
            raise invalid(
                "input", f"The call {shown(item.call_id)} of {at} has no output; {_NO_RESULT}", "missing_tool_output"
            )
        self._awaited.add(item.call_id)
        if kind == "custom_tool_call":
            arguments: str | JSON = {INPUT: item.input or ""}
        else:
            arguments = self._embedded.arguments(item.arguments or "{}")
        function = {"name": flat_name(item.name, item.namespace), "arguments": arguments}
        return {"id": item.call_id, "type": "function", "function": function}

    # -- messages ---------------------------------------------------------------------------

    def _open_assistant(self) -> None:
        if self._texts is None:
            self._close_user()
            self._close_system()
            self._texts = []

    def _close_assistant(self) -> None:
        if self._texts is None:
            return
        message: JSON = {"role": "assistant", "content": "\n".join(text for text in self._texts if text)}
        if any(self._reasoning):
            message["reasoning_content"] = "\n".join(text for text in self._reasoning if text)
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(message)
        for call in self._calls:
            result = self._results[call["id"]]
            content = _text_of(result.item.output or "", f"{result.at}.output", "tool")
            self._messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
            )
        self._texts, self._reasoning, self._calls = None, [], []

    def _close_user(self) -> None:
        if self._user:
            self._messages.append({"role": "user", "content": "\n".join(self._user)})
            self._user = []

    def _close_system(self) -> None:
        if self._system:
            self._messages.insert(0, {"role": "system", "content": "\n\n".join(self._system)})
        self._system = None


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a tool for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def kind_of(item: InputItem) -> str:
    """The type of an item, also of one that leaves it out."""
    if item.type is not None:
        return item.type
    return "item_reference" if item.role is None and item.id is not None else "message"


def _results_of(items: Sequence[Placed]) -> dict[str, Placed]:
    """The results of calls, by the ids of the calls. Raises InvalidRequest."""
    results: dict[str, Placed] = {}
    for placed in items:
        at, item, _ = placed
        if item.type not in _RESULTS:
            continue
        if not item.call_id or item.output is None:
            field = "output" if item.call_id else "call_id"
            raise invalid(
                f"{at}.{field}",
                f"{at}.{field} is missing; the output of a call needs a call_id and an output.",
                "missing_required_parameter",
            )
        if item.call_id in results:
            raise invalid(
                f"{at}.call_id",
                f"{at}.call_id is {shown(item.call_id)}, whose output {results[item.call_id].at} has already; send one "
                "output for each call.",
            )
        results[item.call_id] = placed
    return results


def _text_of(content: str | list[Part], at: str, role: str) -> str:
    """The text of a content. Raises InvalidRequest, which names the part, for a part that is no text."""
    if isinstance(content, str):
        return content
    return "\n".join([_part(part, f"{at}[{j}]", role) for j, part in enumerate(content)])


def _part(part: Part, at: str, role: str) -> str:
    if part.type == "refusal" and role == "assistant":
        return part.refusal or ""
    if part.type in (("reasoning_text",) if role == "reasoning" else _TEXTS):
        if part.text is None:
            raise invalid(f"{at}.text", f"{at}.text is missing; a text part needs text.", "missing_required_parameter")
        return part.text
    raise invalid(
        f"{at}.type",
        f"{at} is of type {shown(part.type)}; the models served here read text parts only.",
        "unsupported_content",
    )


def encrypted(reasoning: str) -> str:
    """``encrypted_content`` of reasoning, from which its text is read again."""
    return _KEPT_REASONING + base64.b64encode(reasoning.encode("utf-8")).decode("ascii")
