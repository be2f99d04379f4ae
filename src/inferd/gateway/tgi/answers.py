"""Writes answers: as one event for each token, or as one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from inferd.errors import InferdError
from inferd.gateway.call import Call
from inferd.gateway.generation.logprobs import finite
from inferd.gateway.generation.requests import Collected, error_frame
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.tgi.wire import (
    FinishReason,
    Generated,
    Parameters,
    PrefillToken,
    StreamDetails,
    StreamEvent,
    TgiDetails,
    TgiGenerateRequest,
    Token,
)
from inferd.gateway.upstream import ModelStatus
from inferd.types import Delta, Output, PromptReport, TokenLogprob, TopLogprob, Usage

_END: Final = b": end\n\n"  # a comment, by which a complete stream is told
STREAM_FORM: Final = StreamForm(_END, b": waiting\n\n")
_NO_PARAMETERS: Final = Parameters()


class Reply:
    """The form of an answer, as its request asks for it."""

    __slots__ = ("_body", "_in_list", "eos", "fingerprint", "parameters", "prefix")

    def __init__(self, body: TgiGenerateRequest, model: ModelStatus, *, in_list: bool = False) -> None:
        """``in_list``: a whole answer is the only element of a list."""
        self._body = body
        self._in_list = in_list
        self.parameters = body.parameters or _NO_PARAMETERS
        self.prefix = body.inputs if self.parameters.return_full_text else ""
        self.eos = frozenset(model.info.eos_token_ids) if model.info is not None else frozenset()
        self.fingerprint: str | None = None

    @property
    def stream_form(self) -> StreamForm:
        return STREAM_FORM

    def cache_fields(self) -> tuple[msgspec.Struct, bytes]:
        return msgspec.structs.replace(self._body, model=None, stream=None), b"list" if self._in_list else b""

    def writer(self, call: Call) -> _TokenWriter:
        return _TokenWriter(call, self)

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        (only,) = collected
        (choice,) = only.choices
        text = self.prefix + "".join(choice.texts)
        reason = reason_of(call, choice.finish_reason, choice.stop_reason)
        details = None
        if self.parameters.details or self.parameters.decoder_input_details:
            usage = call.usage_so_far or Usage()
            top = self.parameters.top_n_tokens or 0
            details = TgiDetails(
                finish_reason=reason,
                generated_tokens=usage.completion_tokens,
                seed=seed_of(only.prompt),
                prefill=_prefill_of(only.prompt),
                tokens=[self.token(item, item.token) for item in choice.logprobs],
                top_tokens=[self.top(item) for item in choice.logprobs] if top else None,
            )
        answer = Generated(text, details)
        return encode([answer] if self._in_list else answer)

    def token(self, item: TokenLogprob | TopLogprob, text: str) -> Token:
        return Token(item.token_id, text, finite(item.logprob), item.token_id in self.eos)

    def top(self, item: TokenLogprob) -> list[Token]:
        return [self.token(other, other.token) for other in item.top[: self.parameters.top_n_tokens or 0]]


class _TokenWriter:
    """Events of a streamed answer. The last token's event waits for the end, because it has the whole text."""

    __slots__ = ("_call", "_held", "_index", "_pieces", "_prompt", "_reason", "_reply")

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._index = 0
        self._held: StreamEvent | None = None
        self._pieces: list[str] = []
        self._prompt: PromptReport | None = None
        self._reason: FinishReason = "eos_token"

    def write(self, number: int, output: Output) -> bytes:
        if output.prompt is not None:
            self._prompt = output.prompt
        frames: list[bytes] = []
        for delta in output.deltas:
            self._take(delta, frames)
        return b"".join(frames)

    def ending(self, usage: Usage | None) -> bytes:
        counted = usage or Usage()
        details = StreamDetails(
            finish_reason=self._reason,
            generated_tokens=counted.completion_tokens,
            input_length=counted.prompt_tokens,
            seed=seed_of(self._prompt),
        )
        held, text = self._held, self._reply.prefix + "".join(self._pieces)
        if held is None:  # an answer without a token
            held = StreamEvent(index=1, token=Token(min(self._reply.eos, default=0), "", 0.0, True))
        return _event(msgspec.structs.replace(held, generated_text=text, details=details)) + _END

    def failed(self, error: InferdError) -> bytes:
        return error_frame(self._call, error)

    def _take(self, delta: Delta, frames: list[bytes]) -> None:
        items = delta.logprobs or ()
        texts = [item.token for item in items]
        if "".join(texts) != delta.text:  # a part of a character, or of a stop sequence, waited for its rest
            texts = [""] * (len(items) - 1) + [delta.text] if items else []
        for item, text in zip(items, texts, strict=True):
            self._hold(StreamEvent(index=self._index + 1, token=self._reply.token(item, text)), frames)
            top = self._reply.top(item)
            if top and self._held is not None:
                self._held = msgspec.structs.replace(self._held, top_tokens=top)
        if delta.text:
            self._pieces.append(delta.text)
            if not items and self._held is not None:
                token = msgspec.structs.replace(self._held.token, text=self._held.token.text + delta.text)
                self._held = msgspec.structs.replace(self._held, token=token)
        if delta.finish_reason is not None:
            self._reason = reason_of(self._call, delta.finish_reason, delta.stop_reason)

    def _hold(self, event: StreamEvent, frames: list[bytes]) -> None:
        if self._held is not None:
            frames.append(_event(self._held))
        self._held = event
        self._index += 1


def reason_of(call: Call, reason: str | None, stopped_by: int | str | None) -> FinishReason:
    """Why an answer ended. Recorded in the call."""
    found: FinishReason = "length" if reason == "length" else "stop_sequence" if stopped_by is not None else "eos_token"
    call.finish_reasons = (found,)
    return found


def seed_of(prompt: PromptReport | None) -> int | None:
    return None if prompt is None else prompt.seed


def _prefill_of(prompt: PromptReport | None) -> list[PrefillToken]:
    if prompt is None or prompt.logprobs is None:
        return []
    first = prompt.token_ids[0] if prompt.token_ids else 0
    return [
        PrefillToken(first, "", None) if item is None else PrefillToken(item.token_id, item.token, finite(item.logprob))
        for item in prompt.logprobs
    ]


def _event(event: StreamEvent) -> bytes:
    return b"data: %b\n\n" % encode(event)
