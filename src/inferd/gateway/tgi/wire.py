"""The bodies of requests and answers of text-generation-inference, as structs.

Source: its OpenAPI document (3.3) and huggingface_hub's types. ``None`` stands for a field that was absent or null.
Unknown fields are dropped and listed (``generation/fields.py``).
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class GrammarField(msgspec.Struct, frozen=True):
    type: str
    value: Any


class Parameters(msgspec.Struct, frozen=True):
    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: int | None = None
    best_of: int | None = None
    grammar: GrammarField | None = None
    watermark: bool | None = None
    adapter_id: str | None = None


class TgiGenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate and /generate_stream"""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None  # of /generate; /generate_stream is always a stream
    model: str | None = None  # of this server; absent: the only one that writes texts


class Token(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float
    special: bool


class PrefillToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float | None  # null for the first one


class TgiDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to POST /generate"""

    generated_text: str
    details: TgiDetails | None = None


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    input_length: int
    seed: int | None


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed answer: one token. The last one has the whole text."""

    index: int  # from 1
    token: Token
    top_tokens: list[Token] = []
    generated_text: str | None = None
    details: StreamDetails | None = None


class TgiInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /info"""

    model_id: str
    model_dtype: str
    model_sha: None = None
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int  # that the replicas compute together; more of them wait
    max_best_of: int = 1
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int = 1
    validation_workers: int = 1
    router: str = "inferd"
    version: str
    sha: None = None
    docker_label: None = None


class TgiError(msgspec.Struct, frozen=True):
    """The body of an error answer."""

    error: str
    error_type: Literal["validation", "overloaded", "generation"]


generate_decoder: Final = msgspec.json.Decoder(TgiGenerateRequest)
