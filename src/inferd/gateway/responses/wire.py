"""The bodies of requests, answers and events of the Responses API, as structs.

Knows the type of every field; ``items``, ``tools`` and ``form`` check what they mean. ``None`` stands for a field that
was absent or null. Unknown fields are dropped and listed (``generation/fields.py``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from inferd.gateway.generation.items import JSON, InputItem, InputTool
from inferd.gateway.generation.variants import Variants
from inferd.predict.codecs.text_wire import Ignored

_refused = Meta(description="Not supported: any value but null is refused with 400.")
Refused = Annotated[Raw | UnsetType, _refused]

# -- requests ----------------------------------------------------------------------------------


class TextFormat(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: JSON | bool | None = None
    strict: bool | None = None
    variants: ClassVar[Variants] = Variants(
        "type", {"text": (), "json_object": (), "json_schema": ("name", "description", "schema", "strict")}
    )


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ConversationRef(msgspec.Struct, frozen=True):
    id: str


class StreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: Ignored = UNSET


class ToolChoice(msgspec.Struct, frozen=True):
    """A tool that must be called, or the tools that may be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ToolChoice] | None = None
    variants: ClassVar[Variants] = Variants(
        "type",
        {
            "function": ("name", "namespace"),
            "custom": ("name", "namespace"),
            "namespace": ("name",),
            "allowed_tools": ("mode", "tools"),
        },
    )


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that determine a prompt."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    tools: list[InputTool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: str | None = None


class InputTokensRequest(PromptFields, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens"""

    personality: Ignored = UNSET


class ResponsesRequest(PromptFields, frozen=True, kw_only=True):
    """POST /v1/responses"""

    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    fit: bool | None = None  # the constrained answer is complete within max_output_tokens
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    prompt: Refused = UNSET
    access_programs: Ignored = UNSET
    background_options: Ignored = UNSET
    context_management: Ignored = UNSET
    image: Ignored = UNSET
    moderation: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    prompt_cache_retention: Ignored = UNSET


class SentItems(msgspec.Struct, frozen=True):
    """The items of a request as the client sent them, of which the stored ones are made."""

    input: str | list[JSON] | None = None


class SentChoice(msgspec.Struct, frozen=True):
    """The ``tool_choice`` of a request as the client sent it, with the keys without effect."""

    tool_choice: str | JSON | None = None


responses_decoder: Final = msgspec.json.Decoder(ResponsesRequest)
input_tokens_decoder: Final = msgspec.json.Decoder(InputTokensRequest)
sent_items_decoder: Final = msgspec.json.Decoder(SentItems)
sent_choice_decoder: Final = msgspec.json.Decoder(SentChoice)
item_decoder: Final = msgspec.json.Decoder(InputItem)

# -- answers -----------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: list[JSON] = []
    logprobs: list[Logprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


ContentPart = OutputText | ReasoningText


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    id: str
    status: ItemStatus
    summary: list[JSON] = []
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call", tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, tag="response", tag_field="object"):
    """A response, with the fields of its request."""

    id: str
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    conversation: ConversationRef | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: JSON
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: JSON
    tool_choice: str | JSON
    tools: list[JSON]
    top_logprobs: int
    top_p: float | None
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class InputTokens(msgspec.Struct, frozen=True, tag="response.input_tokens", tag_field="object"):
    input_tokens: int


# -- events ------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed response. Its name is its ``type``."""

    sequence_number: int


class Created(Event, frozen=True, kw_only=True, tag="response.created", tag_field="type"):
    response: ResponseObject


class Queued(Event, frozen=True, kw_only=True, tag="response.queued", tag_field="type"):
    response: ResponseObject


class InProgress(Event, frozen=True, kw_only=True, tag="response.in_progress", tag_field="type"):
    response: ResponseObject


class Completed(Event, frozen=True, kw_only=True, tag="response.completed", tag_field="type"):
    response: ResponseObject


class Incomplete(Event, frozen=True, kw_only=True, tag="response.incomplete", tag_field="type"):
    response: ResponseObject


class Failed(Event, frozen=True, kw_only=True, tag="response.failed", tag_field="type"):
    response: ResponseObject


class ItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added", tag_field="type"):
    output_index: int
    item: OutputItem


class ItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done", tag_field="type"):
    output_index: int
    item: OutputItem


class OfItem(Event, frozen=True, kw_only=True):
    """An event of one item."""

    item_id: str
    output_index: int


class OfPart(OfItem, frozen=True, kw_only=True):
    """An event of one part of an item's content."""

    content_index: int = 0


class PartAdded(OfPart, frozen=True, kw_only=True, tag="response.content_part.added", tag_field="type"):
    part: ContentPart


class PartDone(OfPart, frozen=True, kw_only=True, tag="response.content_part.done", tag_field="type"):
    part: ContentPart


class TextPiece(OfPart, frozen=True, kw_only=True, tag="response.output_text.delta", tag_field="type"):
    delta: str
    logprobs: list[Logprob] = []


class TextDone(OfPart, frozen=True, kw_only=True, tag="response.output_text.done", tag_field="type"):
    text: str
    logprobs: list[Logprob] = []


class ReasoningPiece(OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta", tag_field="type"):
    delta: str


class ReasoningDone(OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done", tag_field="type"):
    text: str


class ArgumentsPiece(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta", tag_field="type"):
    delta: str


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done", tag_field="type"):
    name: str
    arguments: str


class CustomPiece(OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta", tag_field="type"):
    delta: str


class CustomDone(OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done", tag_field="type"):
    input: str


StreamEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextPiece
    | TextDone
    | ReasoningPiece
    | ReasoningDone
    | ArgumentsPiece
    | ArgumentsDone
    | CustomPiece
    | CustomDone
)
"""One event of a streamed response, whose name is its ``type``."""
