"""The bodies of requests and answers in the OpenAI dialect, with vLLM's additional fields, as structs.

Knows the type of every field. ``sampling``, ``messages``, ``chat`` and ``completions`` check limits. ``None`` stands
for a field that was absent or null.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from inferd.gateway.generation.variants import Variants
from inferd.predict.codecs.text_wire import Ignored

JSON = dict[str, Any]

# -- requests ----------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = UNSET


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """The schema of ``response_format``. It is always enforced, whatever ``strict`` says."""

    name: str | None = None
    description: Ignored = UNSET
    schema: JSON | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: JSON | bool | None = None  # of json_object, as in llama.cpp
    value: str | JSON | bool | None = None  # of json, json_object or regex, as huggingface_hub writes them
    structures: list[JSON] | None = None  # of structural_tag, as in vLLM
    triggers: list[str] | None = None
    format: JSON | None = None
    variants: ClassVar[Variants] = Variants(
        "type",
        {
            "text": (),
            "json_object": ("schema", "value"),
            "json": ("value",),
            "regex": ("value",),
            "json_schema": ("json_schema",),
            "structural_tag": ("structures", "triggers", "format"),
        },
    )


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's constraints; at most one may be given."""

    json: str | JSON | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or GBNF
    json_object: bool | None = None
    structural_tag: str | JSON | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is one way to constrain, and none to fall back to


_refused = Meta(description="Not supported: any value but null, false or empty is refused with 400.")
Refused = Annotated[Raw | UnsetType, _refused]


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # sampling: names and meanings are those of ``inferd.types.SamplingParams``
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    watermark: bool | None = None  # inferd's own: true asks for the model's watermark
    # the request
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JSON | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | JSON | None = None
    grammar: str | None = None  # llama.cpp's: GBNF, or Lark
    fit: bool | None = None  # the constrained answer is complete within max_tokens
    # harmless to ignore
    guided_decoding_backend: Ignored = UNSET
    user: Ignored = UNSET
    safety_identifier: Ignored = UNSET
    metadata: Ignored = UNSET
    store: Ignored = UNSET
    service_tier: Ignored = UNSET
    prompt_cache_key: Ignored = UNSET
    prompt_cache_retention: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    prediction: Ignored = UNSET
    verbosity: Ignored = UNSET
    session_id: Ignored = UNSET
    stream_interval: Ignored = UNSET
    mm_processor_kwargs: Ignored = UNSET
    media_io_kwargs: Ignored = UNSET
    # would change the answer, and are not supported
    logits_processors: Refused = UNSET
    logprob_token_ids: Refused = UNSET
    kv_transfer_params: Refused = UNSET
    vllm_xargs: Refused = UNSET
    repetition_detection: Refused = UNSET
    watermarking: Refused = UNSET
    return_token_offsets: Refused = UNSET
    return_prompt_text: Refused = UNSET
    moderation: Refused = UNSET


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    variants: ClassVar[Variants] = Variants(
        "type", {"text": ("text",), "input_text": ("text",), "output_text": ("text",), "refusal": ("refusal",)}
    )


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str | JSON | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall | None = None
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    # would change the answer, and are not supported
    function_call: Refused = UNSET
    audio: Refused = UNSET
    prefix: Refused = UNSET
    partial: Refused = UNSET


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: FunctionDefinition | None = None


class ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    type: str
    function: ChosenFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    mode: str
    tools: list[ChosenTool]


class ToolChoice(msgspec.Struct, frozen=True):
    """A tool that must be called, or the tools that may be."""

    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None
    variants: ClassVar[Variants] = Variants("type", {"function": ("function",), "allowed_tools": ("allowed_tools",)})


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[JSON] | None = None
    chat_template: str | None = None
    chat_template_kwargs: JSON | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None  # vLLM's: false leaves the reasoning out of the answer
    thinking_token_budget: int | None = None  # vLLM's: the most tokens of reasoning
    modalities: list[str] | None = None
    function_call: str | JSON | None = None
    functions: Refused = UNSET
    audio: Refused = UNSET
    web_search_options: Refused = UNSET
    echo: Refused = UNSET


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    reasoning_effort: Ignored = UNSET
    include_reasoning: Ignored = UNSET
    thinking_token_budget: Refused = UNSET
    suffix: Refused = UNSET
    prompt_embeds: Refused = UNSET


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[JSON] | None = None
    chat_template: str | None = None
    chat_template_kwargs: JSON | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


def _names(kind: object, *wires: type[GenerationFields]) -> dict[type[GenerationFields], tuple[str, ...]]:
    return {wire: tuple(f.name for f in msgspec.structs.fields(wire) if f.type == kind) for wire in wires}


IGNORED: Final = _names(Ignored, ChatRequest, CompletionRequest)
REFUSED: Final = _names(Refused, ChatRequest, CompletionRequest)

chat_decoder: Final = msgspec.json.Decoder(ChatRequest)
completion_decoder: Final = msgspec.json.Decoder(CompletionRequest)
tokenize_decoder: Final = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeRequest)

# -- responses ---------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprobBody(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprobBody]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprobBody]
    refusal: None = None


class FunctionCallBody(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCallBody
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # as DeepSeek and SGLang name it
    reasoning: str | UnsetType = UNSET  # as vLLM names it


WireFinishReason = Literal["stop", "length", "tool_calls"]


class PromptLogprobBody(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprobBody] | None]


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    finish_reason: WireFinishReason | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str | None
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET  # in the first part of a call
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    id: str | UnsetType  # in the first part of a call
    type: Literal["function"] | UnsetType
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: WireFinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, or one event of a streamed one (then ``usage`` may be null or absent)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inferd"
    root: str
    parent: str | None = None
    max_model_len: int | None
    ready: bool  # as KServe v1 asks for it at the same place
    tasks: tuple[str, ...] | None  # what it can be asked for: generate, embed, classify, ...; None: not known yet
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
