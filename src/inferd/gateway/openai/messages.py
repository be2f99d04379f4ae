"""Turns a request's messages and tools into a ``Chat`` for the model's template, and checks them before the queue."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.gateway.errors import invalid, shown
from inferd.gateway.openai.wire import JSON, ChatMessage, ChatRequest, ContentPart, TokenizeRequest, Tool
from inferd.types import Chat

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_MAX_MESSAGES: Final = 16_384
_MAX_TOOLS: Final = 512
_RESERVED: Final = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "raise_exception",
        "strftime_now",
        "add_special_tokens",
    ]
)


def chat_of(body: ChatRequest | TokenizeRequest, messages: list[ChatMessage], *, default_special_tokens: bool) -> Chat:
    """The conversation in the form that the worker's template renders. Raises InvalidRequest."""
    if not messages:
        raise invalid("messages", "messages is empty; send at least one message.")
    if len(messages) > _MAX_MESSAGES:
        raise invalid("messages", f"messages may have at most {_MAX_MESSAGES} entries, not {len(messages)}.")
    if body.chat_template is not None:
        raise invalid(
            "chat_template",
            "A chat_template in a request is refused, as templates are code; set the model's chat_template in the "
            "server's configuration.",
            "unsupported_parameter",
        )
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name in _RESERVED:
            raise invalid(f"chat_template_kwargs.{name}", f"chat_template_kwargs may not set {name!r}; it is reserved.")
    add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message:
        if add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false.",
            )
        add_generation_prompt = False
    special = body.add_special_tokens
    return Chat(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=_tools(body.tools),
        add_generation_prompt=True if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        template_kwargs=kwargs,
        add_special_tokens=default_special_tokens if special is None else special,
    )


def _message(message: ChatMessage, at: str) -> JSON:
    role = message.role
    if role not in _ROLES:
        raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {shown(role)}.")
    rendered: JSON = {"role": "system" if role == "developer" else role, "content": _content(message, at)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise invalid(
                f"{at}.tool_calls", f"{at}.tool_calls is only allowed in assistant messages, not in {role} messages."
            )
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    return rendered


def _content(message: ChatMessage, at: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise invalid(f"{at}.content", f"{at}.content is missing; a {message.role} message needs text.")
        return ""
    return "\n".join(_part(part, message.role, f"{at}.content[{j}]") for j, part in enumerate(content))


def _part(part: ContentPart | str, role: str, at: str) -> str:
    if isinstance(part, str):
        return part
    if part.type in _TEXT_PARTS:
        if part.text is None:
            raise invalid(f"{at}.text", f"{at}.text is missing; a text part needs text.", "missing_required_parameter")
        return part.text
    if part.type == "refusal" and role == "assistant":
        return part.refusal or ""
    raise invalid(
        f"{at}.type",
        f"{at} is of type {shown(part.type)}; the models served here read text parts only.",
        "unsupported_content",
    )


def _arguments(arguments: str | JSON | None) -> str | JSON:
    """A call's arguments as an object, which templates expect. Text that is not a JSON object stays unchanged."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments.encode("utf-8"))
        except (msgspec.DecodeError, ValueError, RecursionError):
            return arguments
        return decoded if isinstance(decoded, dict) else arguments
    return arguments


def _tools(tools: list[Tool] | None) -> list[JSON] | None:
    if not tools:
        return None
    if len(tools) > _MAX_TOOLS:
        raise invalid("tools", f"tools may have at most {_MAX_TOOLS} entries, not {len(tools)}.")
    rendered: list[JSON] = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(
                f"tools[{i}].type",
                f"tools[{i}].type must be 'function', not {shown(tool.type)}.",
                "unsupported_parameter",
            )
        function = tool.function
        if function is None or not function.name:
            raise InvalidRequest(
                f"tools[{i}].function needs a name; add it.",
                param=f"tools[{i}].function.name",
                code="missing_required_parameter",
            )
        spec: JSON = {"name": function.name}
        if function.description is not None:
            spec["description"] = function.description
        spec["parameters"] = (
            function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
        )
        if function.strict is not None:
            spec["strict"] = function.strict
        rendered.append({"type": "function", "function": spec})
    return rendered
