"""Every field that OpenAI and Anthropic publish of a message, a part, a call, a tool or a format is used, refused by
its name, or named in the header of ignored fields. The published schemas are the types of their own clients."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import pytest
from anthropic import types as messages
from openai.types import chat, responses, shared_params
from openai.types.responses import response_input_item_param as items
from openai.types.shared_params import response_format_json_schema as formats
from tests.gateway.fakes import Running, post, running
from typing_extensions import is_typeddict

from inferd.gateway.generation.fields import MAX_LEVELS, _decode_open

Fields = dict[str, Any]
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"p": {"type": "integer"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ITEM_RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "c", "output": "r"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
USED = {"type": "tool_result", "tool_use_id": "c", "content": "r"}


class Case(NamedTuple):
    path: str
    kind: Any  # the published type of the object
    at: str  # its name in the header
    base: Fields  # the object with what it needs
    body: Callable[[Fields], Fields]  # of a request with the object


def chat_case(kind: Any, at: str, base: Fields, body: Callable[[Fields], Fields]) -> Case:
    return Case("/v1/chat/completions", kind, at, base, lambda one: {"messages": [HI], **body(one)})


def item_case(kind: Any, base: Fields, *others: Fields, at: str = "input") -> Case:
    return Case("/v1/responses", kind, at, base, lambda one: {"input": [*others, one, HI], "store": False})


def said_by(role: str) -> Callable[[Fields], Fields]:
    """A conversation with one part of a message."""
    return lambda one: {"input": [{"role": role, "content": [one]}, HI], "store": False}


def with_field(name: str) -> Callable[[Fields], Fields]:
    """A request for a message with one more field."""
    return lambda one: {"max_tokens": 2048, "messages": [HI], name: one}


def block_case(kind: Any, base: Fields, role: str = "user", *, at: str = "messages.content") -> Case:
    before = [{"role": "assistant", "content": [USE]}] if base["type"] == "tool_result" else []
    after = [{"role": "user", "content": [USED]}] if base["type"] == "tool_use" else [HI] if role == "assistant" else []
    return Case(
        "/v1/messages",
        kind,
        at,
        base,
        lambda one: {"max_tokens": 9, "messages": [HI, *before, {"role": role, "content": [one]}, *after]},
    )


CASES: list[Case] = [
    *(
        chat_case(kind, "messages", {"role": role, "content": "said"}, lambda one: {"messages": [HI, one, HI]})
        for kind, role in (
            (chat.ChatCompletionAssistantMessageParam, "assistant"),
            (chat.ChatCompletionSystemMessageParam, "system"),
            (chat.ChatCompletionDeveloperMessageParam, "developer"),
            (chat.ChatCompletionUserMessageParam, "user"),
        )
    ),
    chat_case(chat.ChatCompletionToolMessageParam, "messages", RESULT, lambda one: {"messages": [HI, ASKED, one]}),
    chat_case(
        chat.ChatCompletionContentPartTextParam, "messages.content", {"type": "text", "text": "t"},
        lambda one: {"messages": [{"role": "user", "content": [one]}]},
    ),
    chat_case(
        chat.ChatCompletionContentPartRefusalParam, "messages.content", {"type": "refusal", "refusal": "t"},
        lambda one: {"messages": [HI, {"role": "assistant", "content": [one]}, HI]},
    ),
    chat_case(
        chat.ChatCompletionMessageFunctionToolCallParam, "messages.tool_calls", CALL,
        lambda one: {"messages": [HI, {**ASKED, "tool_calls": [one]}, RESULT]},
    ),
    chat_case(chat.ChatCompletionFunctionToolParam, "tools", TOOL, lambda one: {"tools": [one]}),
    chat_case(
        shared_params.FunctionDefinition, "tools.function", {"name": "f"},
        lambda one: {"tools": [{"type": "function", "function": one}]},
    ),
    chat_case(
        formats.JSONSchema, "response_format.json_schema", {"name": "n", "schema": SCHEMA},
        lambda one: {"response_format": {"type": "json_schema", "json_schema": one}},
    ),
    chat_case(
        chat.ChatCompletionStreamOptionsParam, "stream_options", {}, lambda one: {"stream": True, "stream_options": one}
    ),
    item_case(responses.EasyInputMessageParam, {"role": "assistant", "content": "said"}),
    item_case(items.Message, {"role": "user", "content": [{"type": "input_text", "text": "t"}]}),
    item_case(
        responses.ResponseOutputMessageParam,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
    ),
    *(
        Case(
            "/v1/responses", kind, "input.content", base,
            said_by(role),
        )
        for kind, role, base in (
            (responses.ResponseInputTextParam, "user", {"type": "input_text", "text": "t"}),
            (responses.ResponseOutputTextParam, "assistant", {"type": "output_text", "text": "t"}),
            (responses.ResponseOutputRefusalParam, "assistant", {"type": "refusal", "refusal": "t"}),
        )
    ),
    Case(
        "/v1/responses", responses.ResponseFunctionToolCallParam, "input", ITEM_CALL,
        lambda one: {"input": [HI, one, ITEM_RESULT], "store": False},
    ),
    item_case(items.FunctionCallOutput, ITEM_RESULT, ITEM_CALL),
    Case(
        "/v1/responses", responses.ResponseCustomToolCallParam, "input", CUSTOM_CALL,
        lambda one: {"input": [HI, one, CUSTOM_RESULT], "store": False},
    ),
    item_case(responses.ResponseCustomToolCallOutputParam, CUSTOM_RESULT, CUSTOM_CALL),
    item_case(
        responses.ResponseReasoningItemParam,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "summary": []},
    ),
    *(
        Case("/v1/responses", kind, "tools", base, lambda one: {"input": "hi", "tools": [one], "store": False})
        for kind, base in (
            (responses.FunctionToolParam, {"type": "function", "name": "f"}),
            (responses.CustomToolParam, {"type": "custom", "name": "f"}),
            (responses.NamespaceToolParam, {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}),
        )
    ),
    Case(
        "/v1/responses", responses.ResponseFormatTextJSONSchemaConfigParam, "text.format",
        {"type": "json_schema", "name": "n", "schema": SCHEMA},
        lambda one: {"input": "hi", "text": {"format": one}, "store": False},
    ),
    Case(
        "/v1/responses", responses.ResponseTextConfigParam, "text", {},
        lambda one: {"input": "hi", "text": one, "store": False},
    ),
    Case(
        "/v1/responses", shared_params.Reasoning, "reasoning", {},
        lambda one: {"input": "hi", "reasoning": one, "store": False},
    ),
    block_case(messages.TextBlockParam, {"type": "text", "text": "t"}),
    block_case(messages.ThinkingBlockParam, {"type": "thinking", "thinking": "t", "signature": "s"}, "assistant"),
    block_case(messages.ToolUseBlockParam, USE, "assistant"),
    block_case(messages.ToolResultBlockParam, USED),
    Case(
        "/v1/messages", messages.TextBlockParam, "system", {"type": "text", "text": "t"},
        lambda one: {"max_tokens": 9, "messages": [HI], "system": [one]},
    ),
    *(
        Case("/v1/messages", kind, at, base, with_field(at))
        for kind, at, base in (
            (messages.ThinkingConfigEnabledParam, "thinking", {"type": "enabled", "budget_tokens": 1024}),
            (messages.OutputConfigParam, "output_config", {}),
            (messages.MetadataParam, "metadata", {}),
        )
    ),
    Case(
        "/v1/messages", messages.ToolParam, "tools", {"name": "f", "input_schema": SCHEMA},
        lambda one: {"max_tokens": 9, "messages": [HI], "tools": [one]},
    ),
]  # fmt: skip

NO_OTHER_VALUE = {
    # The only value of the field in this object, which it has without it too.
    (messages.ToolParam, "type"),
    (responses.EasyInputMessageParam, "type"),
    (items.Message, "type"),
    # A name by which clients or the store know the object; no answer depends on it.
    (formats.JSONSchema, "name"),
    (messages.MetadataParam, "user_id"),
    (chat.ChatCompletionMessageFunctionToolCallParam, "id"),
    *(
        (kind, "id")
        for kind in (
            responses.ResponseOutputMessageParam,
            responses.ResponseFunctionToolCallParam,
            responses.ResponseCustomToolCallParam,
            responses.ResponseCustomToolCallOutputParam,
            responses.ResponseReasoningItemParam,
            items.FunctionCallOutput,
        )
    ),
    # Only an answer with thinking shows it.
    (messages.ThinkingConfigEnabledParam, "display"),
    # The schema is enforced whatever it says.
    (formats.JSONSchema, "strict"),
}


REFUSED = {  # each with what the error names
    (chat.ChatCompletionAssistantMessageParam, "audio"): "messages[1].audio",
    (chat.ChatCompletionAssistantMessageParam, "function_call"): "messages[1].function_call",
    (chat.ChatCompletionAssistantMessageParam, "tool_calls"): "messages[1].tool_calls[0].type",  # a call of type custom
}


def sample(kind: Any) -> Any:
    """A value of a published type, as few fields as it needs. Of several types of object it has the last one: the first
    one is often what an object without the field means."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired, Annotated):
        return sample(inner[0])
    if origin is Literal:
        return inner[-1]
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        return sample(kinds[-1 if all(map(is_typeddict, kinds)) else 0])
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {name: sample(hint) for name, hint in hints.items() if get_origin(hint) is Required}
    if kind is str:
        return "x"
    if kind is bool:
        return True
    if kind in (int, float):
        return 1
    if origin is not None and issubclass(origin, dict):
        return {"type": "object", "properties": {"q": {"type": "null"}}}
    if origin is not None and issubclass(origin, Iterable):
        return [sample(inner[0])]
    return {"x": 1}  # any object


def fields() -> Iterator[Any]:
    for case in CASES:
        for name, kind in get_type_hints(case.kind, include_extras=True).items():
            if name not in case.base and (case.kind, name) not in NO_OTHER_VALUE:
                yield pytest.param(case, name, sample(kind), id=f"{case.path} {case.kind.__name__} {case.at}.{name}")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


def asked(server: Running, case: Case, sent: Fields) -> tuple[Any, Any, Any]:
    """The reply, what the model is asked for, and what of the answer may depend on the field."""
    server.reset()
    reply = post(server, case.path, {"model": "tiny", **case.body(sent)})
    if reply.status_code != 200:
        return reply, None, None
    last = msgspec.to_builtins(server.router.last)
    if case.body(sent).get("stream"):
        told: Any = reply.text.count('"usage"')
    else:
        told = [reply.json().get(name) for name in ("tools", "text")]
    return reply, {k: v for k, v in last.items() if k not in ("id", "arrived_at", "num_bytes", "num_tokens")}, told


@pytest.mark.parametrize(("case", "name", "value"), fields())
def test_a_published_field_is_used_refused_or_listed(server: Running, case: Case, name: str, value: Any) -> None:
    plain, before, echo = asked(server, case, case.base)
    assert plain.status_code == 200, plain.text
    reply, after, told = asked(server, case, {**case.base, name: value})
    refused = REFUSED.get((case.kind, name))
    if refused is not None:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, refused)
        return
    assert reply.status_code == 200, reply.text
    listed = reply.headers.get("x-inferd-ignored-params", "").split(",")
    is_listed = any(f"{one}.".startswith(f"{case.at}.{name}.") for one in listed)
    is_used = after != before or told != echo
    assert is_listed or is_used, f"{case.at}.{name} = {value!r} is dropped without a word"


class Nested(msgspec.Struct):
    within: Nested | None = None


def test_names_are_looked_for_in_as_many_levels_as_dialects_have() -> None:
    """Each level reads what is within it again, so deeper ones would cost their depth times their size."""
    body = b'{"x":1,"within":' * 100 + b"{}" + b"}" * 100
    _, found = _decode_open(body, msgspec.json.Decoder(Nested))
    assert found == ["within." * level + "x" for level in range(MAX_LEVELS)]
