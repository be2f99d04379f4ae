"""The bodies of requests and answers of Ollama's API, as structs.

Source: the API's documentation and ollama-python 0.6.3. ``None`` stands for a field that was absent or null. Unknown
fields are dropped and listed (``generation/fields.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from inferd.gateway.generation.variants import Variants
from inferd.predict.codecs.text_wire import Ignored

JSON = dict[str, Any]
DoneReason = Literal["stop", "length", "load"]
_ns = Meta(description="Nanoseconds.")
Nanoseconds = Annotated[int, _ns]

# -- requests ----------------------------------------------------------------------------------


class OllamaOptions(msgspec.Struct, frozen=True):
    """Sampling. What Ollama sets for its own engine has no effect here, and is listed where it is sent."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: Ignored = UNSET
    mirostat_eta: Ignored = UNSET
    repeat_last_n: Ignored = UNSET
    penalize_newline: Ignored = UNSET
    num_keep: Ignored = UNSET
    num_ctx: Ignored = UNSET
    num_batch: Ignored = UNSET
    num_gpu: Ignored = UNSET
    num_thread: Ignored = UNSET
    main_gpu: Ignored = UNSET
    low_vram: Ignored = UNSET
    f16_kv: Ignored = UNSET
    use_mmap: Ignored = UNSET
    use_mlock: Ignored = UNSET
    numa: Ignored = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: JSON = {}


class InputCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None


class OllamaInputMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[InputCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    variants: ClassVar[Variants] = Variants(
        "role",
        {
            "system": ("content", "images", "tool_calls"),
            "user": ("content", "images", "tool_calls"),
            "assistant": ("content", "images", "tool_calls", "thinking"),
            "tool": ("content", "images", "tool_calls", "tool_name", "tool_call_id"),
        },
    )


class Function(msgspec.Struct, frozen=True):
    name: str | None = None
    description: str | None = None
    parameters: JSON | None = None


class OllamaTool(msgspec.Struct, frozen=True):
    type: str = "function"
    function: Function | None = None


class OllamaGenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of both requests for a text."""

    model: str | None = None
    stream: bool | None = None  # null and absent mean true
    format: str | JSON | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: Ignored = UNSET


class OllamaChatRequest(OllamaGenerationFields, frozen=True, kw_only=True):
    """POST /api/chat"""

    messages: list[OllamaInputMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaGenerationFields, frozen=True, kw_only=True):
    """POST /api/generate"""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class ShowRequest(msgspec.Struct, frozen=True):
    """POST /api/show"""

    model: str | None = None
    name: str | None = None  # as older clients call it
    verbose: bool | None = None


class PullRequest(msgspec.Struct, frozen=True):
    """POST /api/pull"""

    model: str | None = None
    name: str | None = None  # as older clients call it
    stream: bool | None = None
    insecure: bool | None = None


# -- answers -----------------------------------------------------------------------------------


class CallBody(msgspec.Struct, frozen=True):
    function: CalledFunction


class TopToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class OllamaTokenLogprobBody(TopToken, frozen=True):
    top_logprobs: list[TopToken] = []


class OutputMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class OllamaTextAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer, or a line of a streamed one: of ``/api/chat`` with ``message``, of ``/api/generate`` with
    ``response`` and ``thinking``. The last line has the reason of the end, the times and the tokens.

    ``done`` is the last field, so that the end of a stream can be told by its bytes.
    """

    model: str
    created_at: str
    message: OutputMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[OllamaTokenLogprobBody] | UnsetType = UNSET
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: Nanoseconds | UnsetType = UNSET
    load_duration: Nanoseconds | UnsetType = UNSET  # until a replica took the request
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: Nanoseconds | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: Nanoseconds | UnsetType = UNSET
    done: bool


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class ModelTags(msgspec.Struct, frozen=True):
    """GET /api/tags"""

    models: list[OllamaModelEntry]


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    context_length: int


class RunningModels(msgspec.Struct, frozen=True):
    """GET /api/ps"""

    models: list[RunningModel]


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/api/show`` tells of a model."""

    modified_at: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]


class VersionAnswer(msgspec.Struct, frozen=True):
    version: str


class Progress(msgspec.Struct, frozen=True):
    """A line of the answer to ``/api/pull``."""

    status: str


chat_decoder: Final = msgspec.json.Decoder(OllamaChatRequest)
generate_decoder: Final = msgspec.json.Decoder(OllamaGenerateRequest)
show_decoder: Final = msgspec.json.Decoder(ShowRequest)
pull_decoder: Final = msgspec.json.Decoder(PullRequest)
