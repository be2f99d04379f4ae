"""Turns a request's messages and tools into a ``Chat`` for the model's template, and checks them before the queue."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from inferd.errors import InvalidRequest
from inferd.gateway.body.embedded import EmbeddedJson
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.fields import is_given
from inferd.gateway.limits import MAX_MESSAGES, MAX_TOOLS, check_arguments_schema
from inferd.gateway.openai.tools import check_function
from inferd.gateway.openai.wire import JSON, ChatMessage, ChatRequest, ContentPart, TokenizeRequest, Tool, ToolCall
from inferd.types import Chat

_REMEDY: Final = 'Send the call as {"type": "function", "function": {"name": ..., "arguments": ...}}.'
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
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


_REMEDIES: Final[dict[str, str]] = {  # for the keys of a message that would change the answer
    "function_call": "Send the call in 'tool_calls'.",
    "audio": "The models served here read text only; send the text in 'content'.",
    "prefix": "Set 'continue_final_message' of the request to continue the last message.",
    "partial": "Set 'continue_final_message' of the request to continue the last message.",
}


def chat_of(
    body: ChatRequest | TokenizeRequest,
    messages: list[ChatMessage],
    *,
    default_special_tokens: bool,
    template_kwargs: JSON | None = None,
) -> tuple[Chat, list[str]]:
    """The conversation in the form that the worker's template renders, and the names of keys that have no effect where
    they stand. Raises InvalidRequest.

    ``template_kwargs``: variables of the template that the request's own ``chat_template_kwargs`` replace.
    """
    if not messages:
        raise invalid("messages", "messages is empty; send at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages may have at most {MAX_MESSAGES} entries, not {len(messages)}.")
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
    _check_results(messages)
    embedded = EmbeddedJson()
    left_out = list(dict.fromkeys([name for message in messages for name in _left_out(message)]))
    chat = Chat(
        messages=[_message(message, f"messages[{i}]", embedded) for i, message in enumerate(messages)],
        tools=_tools(body.tools),
        add_generation_prompt=True if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        template_kwargs={**(template_kwargs or {}), **kwargs},
        add_special_tokens=default_special_tokens if special is None else special,
    )
    return chat, left_out


def _left_out(message: ChatMessage) -> Iterator[str]:
    """The names of keys that other messages have, and that have no effect in this one."""
    if message.refusal and message.role != "assistant":
        yield "messages.refusal"
    if message.reasoning is not None and message.reasoning_content not in (None, "", message.reasoning):
        yield "messages.reasoning_content"


def _message(message: ChatMessage, at: str, embedded: EmbeddedJson) -> JSON:
    role = message.role
    if role not in _ROLES:
        raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {shown(role)}.")
    for name, remedy in _REMEDIES.items():
        if is_given(getattr(message, name)):
            raise invalid(f"{at}.{name}", f"{at}.{name} is not supported. {remedy}", "unsupported_parameter")
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
            _call(call, f"{at}.tool_calls[{j}]", embedded) for j, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    return rendered


def _call(call: ToolCall, at: str, embedded: EmbeddedJson) -> JSON:
    check_function(call.type, at, _REMEDY)
    function = call.function
    if function is None:
        raise invalid(
            f"{at}.function",
            f"{at}.function is missing; a call needs the name and the arguments of a function.",
            "missing_required_parameter",
        )
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": function.name, "arguments": _arguments(function.arguments, embedded)},
    }


def _check_results(messages: list[ChatMessage]) -> None:
    """Refuse results of tools that no call before them asks for: a template would render them as results of another
    call, or not at all. A result or a call without an id belongs to any of the others."""
    ids: Counter[str | None] | None = None  # of the calls that the next results answer; None: there are none
    for i, message in enumerate(messages):
        if message.role != "tool":
            ids = Counter(call.id for call in message.tool_calls) if message.tool_calls else None
        elif ids is None:
            raise invalid(
                f"messages[{i}].role",
                f"messages[{i}] is the result of a tool, but no assistant message with tool_calls stands before it. "
                "Add that message.",
            )
        else:
            name = message.tool_call_id
            answered = [one for one in (list(ids) if name is None else (name, None)) if ids[one]]
            if not answered:
                raise invalid(
                    f"messages[{i}].tool_call_id",
                    f"messages[{i}].tool_call_id is {shown(name)}, but no call of the assistant message before it has "
                    "that id, or the call has its result already. Send one result for each call, with its id.",
                )
            ids[answered[0]] -= 1


def _content(message: ChatMessage, at: str) -> str:
    """The text of a message. A refusal beside the content is its last part."""
    content, role = message.content, message.role
    if content is None and role != "assistant":
        raise invalid(f"{at}.content", f"{at}.content is missing; a {role} message needs text.")
    if isinstance(content, list):
        content = "\n".join(_part(part, role, f"{at}.content[{j}]") for j, part in enumerate(content))
    if message.refusal and role == "assistant":
        return f"{content}\n{message.refusal}" if content else message.refusal
    return content or ""


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


def _arguments(arguments: str | JSON | None, embedded: EmbeddedJson) -> str | JSON:
    if arguments is None:
        return {}
    return embedded.arguments(arguments) if isinstance(arguments, str) else arguments


def _tools(tools: list[Tool] | None) -> list[JSON] | None:
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools may have at most {MAX_TOOLS} entries, not {len(tools)}.")
    rendered: list[JSON] = []
    places: dict[str, int] = {}
    for i, tool in enumerate(tools):
        check_function(tool.type, f"tools[{i}]")
        function = tool.function
        if function is None or not function.name:
            raise InvalidRequest(
                f"tools[{i}].function needs a name; add it.",
                param=f"tools[{i}].function.name",
                code="missing_required_parameter",
            )
        name = function.name
        if _TOOL_NAME.fullmatch(name) is None:
            raise invalid(
                f"tools[{i}].function.name",
                f"tools[{i}].function.name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -, not {shown(name)}.",
            )
        if places.setdefault(name, i) != i:
            raise invalid(
                f"tools[{i}].function.name",
                f"tools[{i}].function.name is {shown(name)}, which tools[{places[name]}] has; names must differ.",
            )
        check_arguments_schema(f"tools[{i}].function.parameters", function.parameters)
        spec: JSON = {"name": name}
        if function.description is not None:
            spec["description"] = function.description
        spec["parameters"] = (
            function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
        )
        if function.strict is not None:
            spec["strict"] = function.strict
        rendered.append({"type": "function", "function": spec})
    return rendered
