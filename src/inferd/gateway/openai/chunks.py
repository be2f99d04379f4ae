"""The frames of a streamed answer in OpenAI's dialect, as server-sent events.

Every frame is ``data: {json}`` and an empty line. The parts that are equal in all frames of a choice are encoded once;
for each token only the text is encoded.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from inferd.gateway.call import DONE
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.openai.wire import (
    IGNORED,
    CompletionTokensDetails,
    GenerationFields,
    PromptTokensDetails,
    UsageBody,
)
from inferd.types import Delta, Output, Usage

STREAM_FORM: Final = StreamForm(DONE, b": the model is loading\n\n")
_NO_USAGE: Final = b"]}\n\n"
_NULL_USAGE: Final = b'],"usage":null}\n\n'


def cache_fields(body: GenerationFields) -> tuple[msgspec.Struct, bytes]:
    """As ``Reply.cache_fields``. Fields that do not change the answer are left out."""
    neutral = dict.fromkeys(IGNORED[type(body)], UNSET)
    streamed = bool(body.stream) and body.stream_options is not None
    return (
        msgspec.structs.replace(body, model=None, request_id=None, **neutral),
        encode(body.stream_options) if streamed else b"",
    )


class ChunkEnvelope:
    """The parts of a chunk around its choices: id, model and usage."""

    __slots__ = ("_completion_tokens", "_continuous", "_include_usage", "_prompt_tokens", "head", "tail")

    def __init__(
        self,
        kind: bytes,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str | None,
        *,
        include_usage: bool,
        continuous: bool,
    ) -> None:
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            encode(response_id),
            kind,
            created,
            encode(model),
            encode(fingerprint),
        )
        self._include_usage = include_usage
        self._continuous = continuous
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self.tail = _NULL_USAGE if include_usage else _NO_USAGE

    def note(self, number: int, output: Output) -> None:
        """Count the tokens of an output, for clients that want the usage in every frame."""
        if not self._continuous:
            return
        if output.prompt is not None:
            self._prompt_tokens[number] = output.prompt.num_tokens
        self._completion_tokens += sum(len(delta.token_ids) for delta in output.deltas)
        usage = Usage(sum(self._prompt_tokens.values()), self._completion_tokens)
        self.tail = b'],"usage":%b}\n\n' % encode(usage_body(usage))

    def ending(self, usage: Usage | None) -> bytes:
        """The frames after the end of the last choice."""
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":%b}\n\n' % encode(usage_body(usage or Usage())) + DONE


def usage_body(usage: Usage) -> UsageBody:
    """A usage in OpenAI's form."""
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(usage.reasoning_tokens) if usage.reasoning_tokens else UNSET,
    )


def end_fields(delta: Delta) -> tuple[bytes, bytes]:
    """``finish_reason`` and ``stop_reason`` as JSON. Both are null for a failed choice, which an error event
    follows."""
    if delta.finish_reason is None or delta.finish_reason in ("error", "cancelled"):
        return b"null", b"null"
    return encode(delta.finish_reason), encode(delta.stop_reason)
