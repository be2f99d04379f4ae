"""The bodies of requests and answers of the Messages API, as structs.

Knows the type of every field; ``prompt``, ``tools`` and ``messages`` check what they mean. ``None`` stands for a field
that was absent or null. Unknown fields are dropped and listed (``generation/fields.py``). ``cache_control`` is
one of them everywhere: it never changes a prompt.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from inferd.gateway.generation.variants import Variants
from inferd.predict.codecs.text_wire import Ignored

JSON = dict[str, Any]
_refused = Meta(description="Not supported: any value but null is refused with 400.")
Refused = Annotated[Raw | UnsetType, _refused]

# -- requests ----------------------------------------------------------------------------------


class Block(msgspec.Struct, frozen=True):
    """One block of a message's content: text, thinking, redacted_thinking, tool_use or tool_result; in a result also
    tool_reference."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: JSON | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | JSON | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    variants: ClassVar[Variants] = Variants(
        "type",
        {
            "text": ("text",),
            "thinking": ("thinking", "signature"),
            "redacted_thinking": (),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id", "content", "is_error"),
            "tool_reference": ("tool_name",),
        },
    )


class InputMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Block]
    output_config: JSON | None = None  # of a system message: the effort from there on


class InputTool(msgspec.Struct, frozen=True):
    """A tool of the client. ``type`` names a tool of Anthropic's servers if it is not ``custom``."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: JSON | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None
    variants: ClassVar[Variants] = Variants(
        "type",
        {
            "auto": ("disable_parallel_tool_use",),
            "any": ("disable_parallel_tool_use",),
            "tool": ("name", "disable_parallel_tool_use"),
            "none": (),
        },
    )


class Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None
    variants: ClassVar[Variants] = Variants(
        "type",
        {
            "enabled": ("budget_tokens", "display"),
            "adaptive": ("display",),
            "between_tools": ("display",),
            "disabled": (),
        },
    )


class OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: JSON | bool | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that determine a prompt."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as older clients name output_config.format
    thread: Refused = UNSET
    cache_control: Ignored = UNSET
    mcp_servers: Ignored = UNSET
    context_management: Ignored = UNSET
    speed: Ignored = UNSET
    user_profile_id: Ignored = UNSET
    workspace_id: Ignored = UNSET


class CountTokensRequest(PromptFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens"""


class MessagesRequest(PromptFields, frozen=True, kw_only=True):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    fit: bool | None = None  # the constrained answer is complete within max_tokens
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    compaction: Refused = UNSET
    container: Ignored = UNSET
    diagnostics: Ignored = UNSET
    inference_geo: Ignored = UNSET
    service_tier: Ignored = UNSET


messages_decoder: Final = msgspec.json.Decoder(MessagesRequest)
count_decoder: Final = msgspec.json.Decoder(CountTokensRequest)

# -- answers -----------------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` are those that were computed. With those read from the cache they are the whole prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: Raw


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """A whole answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta", tag_field="type"):
    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


BlockPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    index: int
    delta: BlockPart


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """The last event of a complete answer."""


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    """Sent while the first token is awaited."""


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
"""One event of a streamed answer, whose name is its ``type``."""


class Hello(msgspec.Struct, frozen=True):
    """The answer to a client that asks whether there is a server at this address."""

    message: str = "hello"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    """A model as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessagesErrorCode(msgspec.Struct, frozen=True):
    error_code: str | None  # the code of this error in all dialects
    field: str | None  # of the request


class MessagesErrorDetail(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    kind: str
    message: str
    details: MessagesErrorCode


class MessagesError(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    error: MessagesErrorDetail
    request_id: str
