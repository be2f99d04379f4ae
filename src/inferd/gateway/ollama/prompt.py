"""Turns the messages and tools of a request, or its prompt and system text, into a prompt for the model's template."""

from __future__ import annotations

from typing import Final

from inferd.answer_form import ToolUse
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.limits import MAX_MESSAGES, MAX_TOOLS, check_arguments_schema
from inferd.gateway.ollama.form import template_arguments
from inferd.gateway.ollama.wire import JSON, OllamaChatRequest, OllamaGenerateRequest, OllamaInputMessage, OllamaTool
from inferd.types import Chat, TextPrompt

MAX_NAME_CHARS: Final = 128
_ROLES: Final = ("system", "user", "assistant", "tool")
_REFUSED: Final = {
    "suffix": "Put the whole text before the gap into 'prompt'.",
    "template": "The model's own template is used; set another one in the server's configuration.",
    "context": "Send the earlier turns as 'messages' to /api/chat.",
    "images": "The models served here read text; leave it out.",
}


def chat_of(body: OllamaChatRequest) -> tuple[Chat, ToolUse | None, list[str]]:
    """The conversation, the calls that its answer may have, and the names of what was left out. Raises
    InvalidRequest."""
    messages = body.messages or []
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages may have at most {MAX_MESSAGES} entries, not {len(messages)}.")
    tools, left_out = _rendered_tools(body.tools)
    conversation = _Conversation()
    rendered = [conversation.rendered(message, f"messages[{i}]") for i, message in enumerate(messages)]
    # Ollama continues an answer that the last message begins.
    begins_answer = rendered[-1]["role"] == "assistant" and "tool_calls" not in rendered[-1]
    if begins_answer and not rendered[-1]["content"]:
        rendered.pop()
        begins_answer = False
        if not rendered:
            raise invalid("messages", "messages has no message with text; send at least one.")
    chat = Chat(
        messages=rendered,
        tools=tools,
        add_generation_prompt=not begins_answer,
        continue_final_message=begins_answer,
        template_kwargs=template_arguments(body.think),
    )
    return chat, ToolUse() if tools else None, left_out


def prompt_of(body: OllamaGenerateRequest) -> Chat | TextPrompt:
    """The prompt of a request for a text: through the model's template, or unchanged where it is ``raw``. Raises
    InvalidRequest."""
    for name, remedy in _REFUSED.items():
        if getattr(body, name):
            raise invalid(name, f"{name} is not supported. {remedy}", "unsupported_parameter")
    text = body.prompt or ""
    if body.raw:
        if body.system:
            raise invalid("system", "system has no place in a raw prompt; write it into 'prompt', or set raw to false.")
        return TextPrompt(text=text)
    messages: list[JSON] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": text})
    return Chat(messages=messages, template_kwargs=template_arguments(body.think), at="prompt")


class _Conversation:
    """Renders messages in their order, and gives each result the id of its call: Ollama's have none."""

    __slots__ = ("_awaited", "_num_calls")

    def __init__(self) -> None:
        self._awaited: list[tuple[str, str]] = []  # id and name of the calls without a result
        self._num_calls = 0

    def rendered(self, message: OllamaInputMessage, at: str) -> JSON:
        role = message.role
        if role not in _ROLES:
            raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {shown(role)}.")
        if message.images:
            raise invalid(
                f"{at}.images",
                f"{at}.images has images; the models served here read text. Leave it out.",
                "unsupported_content",
            )
        if message.tool_calls and role != "assistant":
            raise invalid(
                f"{at}.tool_calls", f"{at}.tool_calls is only allowed in assistant messages, not in {role} messages."
            )
        rendered: JSON = {"role": role, "content": message.content or ""}
        if role == "tool":
            rendered["tool_call_id"], rendered["name"] = self._answered(message, at)
            return rendered
        self._awaited = []
        if role == "assistant":
            if message.thinking:
                rendered["reasoning_content"] = message.thinking
            if message.tool_calls:
                rendered["tool_calls"] = [
                    self._call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
                ]
        return rendered

    def _call(self, given: str | None, name: str, arguments: JSON) -> JSON:
        call_id = given or f"call_{self._num_calls}"
        self._num_calls += 1
        self._awaited.append((call_id, name))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _answered(self, message: OllamaInputMessage, at: str) -> tuple[str, str]:
        """The id and the name of the call that a message has the result of."""
        given, name = message.tool_call_id, message.tool_name
        for position, (call_id, called) in enumerate(self._awaited):
            if given == call_id if given else name in (None, "", called):
                return self._awaited.pop(position)
        what = f"tool_call_id is {shown(given)}" if given else f"tool_name is {shown(name)}"
        raise invalid(
            f"{at}.{'tool_call_id' if given else 'tool_name'}",
            f"{at} is the result of a tool whose {what}, but the assistant message before it has no such call without "
            "a result. Send that message, and one result for each of its calls.",
        )


def _rendered_tools(tools: list[OllamaTool] | None) -> tuple[list[JSON] | None, list[str]]:
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools may have at most {MAX_TOOLS} entries, not {len(tools)}.")
    rendered: list[JSON] = []
    left_out: list[str] = []
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            left_out.append(f"tools.{printable(tool.type)}")
            continue
        at, function = f"tools[{i}].function", tool.function
        if function is None or not function.name or len(function.name) > MAX_NAME_CHARS:
            raise invalid(f"{at}.name", f"{at}.name must have 1 to {MAX_NAME_CHARS} characters.")
        if function.name in names:
            raise invalid(
                f"{at}.name", f"{at}.name is {shown(function.name)}, which another tool has; names must differ."
            )
        names.add(function.name)
        parameters = _without_nulls(function.parameters)
        check_arguments_schema(f"{at}.parameters", parameters)
        spec: JSON = {"name": function.name}
        if function.description is not None:
            spec["description"] = function.description
        spec["parameters"] = parameters or {"type": "object", "properties": {}}
        rendered.append({"type": "function", "function": spec})
    return rendered or None, left_out


def _without_nulls(schema: JSON | None) -> JSON | None:
    """The schema without its members that are null at the top: ollama-python sends every member that it knows."""
    return None if schema is None else {name: value for name, value in schema.items() if value is not None}
