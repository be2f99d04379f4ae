"""Turns the messages and the system text of a request into a ``Chat`` for the model's template.

The conversation is checked as Anthropic's API checks it: it begins with the user, and each tool call has its result in
the next message. Messages of one role that follow one another are one turn. A system message within the conversation
is a part of the user's turn, in tags, because many templates take no other place for system text than the beginning.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Final

from inferd.gateway.anthropic.tools import rendered_tools
from inferd.gateway.anthropic.wire import JSON, Block, InputMessage, PromptFields
from inferd.gateway.errors import invalid, shown
from inferd.gateway.limits import MAX_MESSAGES
from inferd.types import Chat

_ROLES: Final = ("user", "assistant", "system")
_BLOCKS: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "result": ("text", "tool_reference"),
}
_KEPT_THINKING: Final = "inferd-text:"  # before the thinking of a block that was sent without its text
_UNREAD: Final = {
    "image": "Could not process image: ",
    "document": "Could not process PDF or other document: ",
}
"""The words by which Anthropic's agents know that they must ask again without a file. Without them a conversation
would be refused for ever, because the file stays in it."""
UNSIGNED: Final = "inferd-unsigned"
"""The signature of a thinking block that was sent with its text. Blocks with any other signature are read as well."""

BILLING_LINE: Final = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line for Anthropic's billing, with which Claude Code begins the system text. It differs from request to request, so
a prompt with it would share no prefix with any other."""


def chat_of(body: PromptFields) -> tuple[Chat, list[str]]:
    """The conversation, and the names of its parts that were left out. Raises InvalidRequest."""
    if not body.messages:
        raise invalid("messages", "messages is empty; send at least one message.")
    if len(body.messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages may have at most {MAX_MESSAGES} entries, not {len(body.messages)}.")
    tools, left_out = rendered_tools(body.tools)
    system, has_billing_line = _system(body)
    if has_billing_line:
        left_out.append("system.x-anthropic-billing-header")
    rendered: list[JSON] = [{"role": "system", "content": system}] if system else []
    conversation = _Conversation()
    for turn in _turns(body.messages):
        rendered += conversation.rendered(turn)
    conversation.check_answered()
    if not rendered or rendered[-1]["role"] == "system":
        raise invalid("messages", "messages has no text; send at least one message of the user.")
    if conversation.has_redacted:
        left_out.append("messages.redacted_thinking")
    if any(message.output_config for message in body.messages):
        left_out.append("messages.output_config")
    begins_answer = rendered[-1]["role"] == "assistant"
    if begins_answer and not rendered[-1]["content"]:
        rendered.pop()  # an answer that begins with nothing
        begins_answer = False
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    return Chat(
        messages=rendered,
        tools=tools,
        add_generation_prompt=not begins_answer,
        continue_final_message=begins_answer,
        template_kwargs=_template_arguments(body, thinks=thinks),
    ), left_out


def _template_arguments(body: PromptFields, *, thinks: bool) -> JSON:
    """The arguments that templates know for reasoning. Templates without reasoning use none of them."""
    arguments: JSON = {"enable_thinking": thinks, "thinking": thinks}
    effort = body.output_config.effort if body.output_config is not None else None
    return arguments if effort is None else {**arguments, "reasoning_effort": effort}


def _system(body: PromptFields) -> tuple[str, bool]:
    """The system text without the billing line, and whether it had one."""
    if body.system is None:
        return "", False
    if isinstance(body.system, str):
        texts = [body.system]
    else:
        texts = [_text_of(block, f"system[{i}]", "system") for i, block in enumerate(body.system)]
    found = BILLING_LINE.match(texts[0]) if texts else None
    if found is not None:
        texts[0] = texts[0][found.end() :]
    return "\n".join(text for text in texts if text), found is not None


class _Turn:
    """Messages of one role that follow one another: their blocks, each with its place in the request."""

    __slots__ = ("at", "blocks", "role")

    def __init__(self, role: str, at: str) -> None:
        self.role = role
        self.at = at
        self.blocks: list[tuple[str, Block]] = []

    def add(self, message: InputMessage, at: str) -> None:
        content = message.content
        if message.role == "system":
            if text := _system_text(content, at):  # it may be there for its output_config alone
                self.blocks.append((at, Block("text", text=f"<system>\n{text}\n</system>")))
        elif isinstance(content, str):
            self.blocks.append((f"{at}.content", Block("text", text=content)))
        else:
            self.blocks += [(f"{at}.content[{j}]", block) for j, block in enumerate(content)]


def _turns(messages: list[InputMessage]) -> Iterator[_Turn]:
    turn: _Turn | None = None
    for i, message in enumerate(messages):
        at, role, content = f"messages[{i}]", message.role, message.content
        if role not in _ROLES:
            raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {shown(role)}.")
        if not content and role == "user":
            raise invalid(f"{at}.content", f"{at}.content is empty; a user message needs text or a result.")
        of_turn = "assistant" if role == "assistant" else "user"
        if turn is None or turn.role != of_turn:
            if turn is not None:
                yield turn
            turn = _Turn(of_turn, at)
        turn.add(message, at)
    if turn is not None:
        yield turn


class _Conversation:
    """Renders turns in their order, and checks that calls and results belong together."""

    __slots__ = ("_awaited", "_calls_at", "_has_begun", "_seen", "has_redacted")

    def __init__(self) -> None:
        self.has_redacted = False
        self._has_begun = False
        self._seen: set[str] = set()  # ids of all calls
        self._awaited: dict[str, str] = {}  # ids of the calls of the last answer, with the names of their tools
        self._calls_at = ""

    def rendered(self, turn: _Turn) -> list[JSON]:
        if turn.role == "assistant":
            if not self._has_begun:
                raise invalid(
                    f"{turn.at}.role",
                    f"{turn.at}.role is 'assistant', but a conversation begins with a user message; put one before it.",
                )
            self.check_answered()
            return [self._assistant(turn)]
        self._has_begun = True
        return self._user(turn)

    def check_answered(self) -> None:
        """Raises InvalidRequest where a call has no result when the conversation goes on or ends."""
        if self._awaited:
            missing = next(iter(self._awaited))
            raise invalid(
                self._calls_at,
                f"{self._calls_at} has the tool_use {shown(missing)} without a tool_result in the next message; send "
                "the result, with is_error where there is none.",
            )

    def _assistant(self, turn: _Turn) -> JSON:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[JSON] = []
        for at, block in turn.blocks:
            if block.type == "thinking":
                thoughts.append(_thinking_of(block, at))
            elif block.type == "redacted_thinking":
                self.has_redacted = True
            elif block.type == "tool_use":
                calls.append(self._call(block, at))
            else:
                texts.append(_text_of(block, at, "assistant"))
        message: JSON = {"role": "assistant", "content": "\n".join(text for text in texts if text)}
        if any(thoughts):
            message["reasoning_content"] = "\n".join(text for text in thoughts if text)
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: Block, at: str) -> JSON:
        if not block.id or not block.name:
            field = "name" if block.id else "id"
            raise invalid(f"{at}.{field}", f"{at}.{field} is missing; a tool_use needs an id and a name.")
        if block.id in self._seen:
            raise invalid(f"{at}.id", f"{at}.id is {shown(block.id)}, which another tool_use has; ids must differ.")
        self._seen.add(block.id)
        self._awaited[block.id] = block.name
        self._calls_at = at
        function = {"name": block.name, "arguments": block.input or {}}
        return {"id": block.id, "type": "function", "function": function}

    def _user(self, turn: _Turn) -> list[JSON]:
        """The results, then the text of the user: templates place results directly behind their calls."""
        results: list[JSON] = []
        texts: list[str] = []
        for at, block in turn.blocks:
            if block.type == "tool_result":
                results.append(self._result(block, at))
            else:
                texts.append(_text_of(block, at, "user"))
        self.check_answered()
        return [*results, {"role": "user", "content": "\n".join(texts)}] if texts else results

    def _result(self, block: Block, at: str) -> JSON:
        name = self._awaited.pop(block.tool_use_id or "", None)
        if name is None:
            raise invalid(
                f"{at}.tool_use_id",
                f"{at}.tool_use_id is {shown(block.tool_use_id)}, but the message before has no tool_use with this id, "
                "or it has its result already; send one result for each call.",
            )
        content = block.content
        if isinstance(content, dict):
            raise invalid(f"{at}.content", f"{at}.content must be a text or a list of blocks.", "invalid_type")
        if isinstance(content, list):
            content = "\n".join([_part_of_result(part, f"{at}.content[{j}]") for j, part in enumerate(content)])
        text = content or ""
        return {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "name": name,
            "content": f"Error: {text}" if block.is_error else text,
        }


def _system_text(content: str | list[Block], at: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_text_of(block, f"{at}.content[{j}]", "system") for j, block in enumerate(content)])


def _part_of_result(part: Block, at: str) -> str:
    if part.type == "tool_reference" and part.tool_name is not None:
        return part.tool_name
    return _text_of(part, at, "result")


def _text_of(block: Block, at: str, role: str) -> str:
    """The text of a text block. Raises InvalidRequest, which names the part, for any other block."""
    if block.type != "text":
        allowed = ", ".join(_BLOCKS[role])
        raise invalid(
            f"{at}.type",
            f"{_UNREAD.get(block.type, '')}{at} is of type {shown(block.type)}; the models served here read {allowed} "
            "at this place.",
            "unsupported_content",
        )
    if block.text is None:
        raise invalid(f"{at}.text", f"{at}.text is missing; a text block needs text.", "missing_required_parameter")
    return block.text


def _thinking_of(block: Block, at: str) -> str:
    """The thinking of a block that is sent back. A block without its text has the text in its signature."""
    if block.thinking is None:
        raise invalid(f"{at}.thinking", f"{at}.thinking is missing; send the block as it came.")
    signature = block.signature or ""
    if block.thinking or not signature.startswith(_KEPT_THINKING):
        return block.thinking
    try:
        return base64.b64decode(signature.removeprefix(_KEPT_THINKING), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        raise invalid(f"{at}.signature", f"{at}.signature was changed; send the block as it came.") from None


def signature_with(thinking: str) -> str:
    """The signature of a thinking block that is sent without its text, from which the text is read again."""
    return _KEPT_THINKING + base64.b64encode(thinking.encode("utf-8")).decode("ascii")
