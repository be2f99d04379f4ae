"""Writes the blocks of an answer: as the events of a stream, or as the content of a whole message."""

from __future__ import annotations

import os
from typing import Final

import msgspec
from msgspec import UNSET, Raw

from inferd.errors import InferdError, InternalError
from inferd.gateway.anthropic.prompt import UNSIGNED, signature_with
from inferd.gateway.anthropic.wire import (
    BlockDelta,
    BlockPart,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputDelta,
    Message,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageUsage,
    OutputTokensDetails,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from inferd.gateway.call import Call
from inferd.gateway.generation.requests import Choice, CollectedText, error_frame
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.types import CallDelta, Delta, Output, Usage

_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
STREAM_FORM: Final = StreamForm(_STOP, b'event: ping\ndata: {"type":"ping"}\n\n', always_beats=True)
_NO_INPUT: Final = Raw(b"{}")


class Ending:
    """Why an answer ended: facts of its last part and of its request."""

    __slots__ = ("has_calls", "max_tokens", "reason", "sequence")

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.has_calls = False
        self.reason: str | None = None
        self.sequence: str | None = None

    def take(self, reason: str, stopped_by: int | str | None) -> None:
        self.reason = reason
        self.sequence = stopped_by if isinstance(stopped_by, str) else None

    def fields(self, usage: Usage) -> MessageEnd:
        """``stop_reason`` and ``stop_sequence``."""
        return MessageEnd(self._stop_reason(usage), self.sequence)

    def _stop_reason(self, usage: Usage) -> StopReason:
        if self.reason == "length":
            ran_out = usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if ran_out else "max_tokens"
        if self.sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.has_calls else "end_turn"


def usage_of(usage: Usage) -> MessageUsage:
    """A usage in Anthropic's form, in which the tokens of the prompt are divided."""
    details = OutputTokensDetails(usage.reasoning_tokens) if usage.reasoning_tokens else UNSET
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=details,
    )


def call_id() -> str:
    return f"toolu_{os.urandom(12).hex()}"


def content_of(choice: Choice, *, shows_thinking: bool) -> list[ContentBlock]:
    """The content of a whole message. A call in which the answer was cut off is left out: its arguments are no object.

    Raises InternalError for any other call whose arguments are no object: the worker promises one.
    """
    content: list[ContentBlock] = []
    is_cut = choice.finish_reason == "length" or choice.stop_reason is not None
    for part in choice.parts:
        if isinstance(part, CollectedText):
            text = "".join(part.pieces)
            if not part.is_reasoning:
                content.append(TextBlock(text))
            elif shows_thinking:
                content.append(ThinkingBlock(text, UNSIGNED))
            else:
                content.append(ThinkingBlock("", signature_with(text)))
            continue
        is_last = is_cut and part is choice.calls[-1]
        arguments = _object_of("".join(part.arguments), is_cut=is_last)
        if arguments is not None:
            content.append(ToolUseBlock(call_id(), part.name, arguments))
        elif not is_last:
            raise InternalError("The arguments of a tool call are not a JSON object; the log has the details.")
    return content


def _object_of(arguments: str, *, is_cut: bool) -> Raw | None:
    """A call's arguments as a JSON object; None: they are none. No text is an object without members, unless the answer
    was cut off."""
    try:
        decoded = msgspec.json.decode(arguments if arguments or is_cut else "{}")
    except msgspec.DecodeError:
        return None
    return Raw(msgspec.json.encode(decoded)) if isinstance(decoded, dict) else None


class MessageWriter:
    """Events of a streamed message."""

    __slots__ = ("_begun", "_call", "_ending", "_hidden", "_id", "_index", "_kind", "_model", "_shows_thinking")

    def __init__(self, call: Call, message_id: str, model: str, ending: Ending, *, shows_thinking: bool) -> None:
        self._call = call
        self._id = message_id
        self._model = model
        self._ending = ending
        self._shows_thinking = shows_thinking
        self._begun = False
        self._index = -1  # of the block that was opened last
        self._kind = ""  # of the open block: text, thinking or tool_use; empty: none is open
        self._hidden: list[str] = []  # thinking of the open block that is not shown

    def write(self, number: int, output: Output) -> bytes:
        frames: list[bytes] = []
        if not self._begun:
            self._begun = True
            report = output.prompt
            known = Usage() if report is None else Usage(report.num_tokens, 0, report.cached_tokens)
            message = Message(id=self._id, model=self._model, content=[], stop_reason=None, usage=usage_of(known))
            frames.append(_event(b"message_start", MessageStart(message)))
        for delta in output.deltas:
            self._write_delta(delta, frames)
        return b"".join(frames)

    def ending(self, usage: Usage | None) -> bytes:
        frames: list[bytes] = []
        self._close(frames)
        end = self._ending.fields(usage or Usage())
        self._call.finish_reasons = (end.stop_reason,) if end.stop_reason is not None else ()
        frames.append(_event(b"message_delta", MessageDelta(end, usage_of(usage or Usage()))))
        frames.append(_STOP)
        return b"".join(frames)

    def failed(self, error: InferdError) -> bytes:
        return error_frame(self._call, error)

    def _write_delta(self, delta: Delta, frames: list[bytes]) -> None:
        if delta.reasoning:
            if self._kind != "thinking":
                self._open("thinking", ThinkingBlock("", ""), frames)
            if self._shows_thinking:
                self._part(ThinkingDelta(delta.reasoning), frames)
            else:
                self._hidden.append(delta.reasoning)
        if delta.text:
            if self._kind != "text":
                self._open("text", TextBlock(""), frames)
            self._part(TextDelta(delta.text), frames)
        for part in delta.calls:
            self._write_call(part, frames)
        if delta.finish_reason is not None:
            self._ending.take(delta.finish_reason, delta.stop_reason)

    def _write_call(self, part: CallDelta, frames: list[bytes]) -> None:
        if part.name is not None:
            self._ending.has_calls = True
            self._open("tool_use", ToolUseBlock(call_id(), part.name, _NO_INPUT), frames)
        if part.arguments:
            self._part(InputDelta(part.arguments), frames)

    def _open(self, kind: str, block: ContentBlock, frames: list[bytes]) -> None:
        self._close(frames)
        self._kind = kind
        self._index += 1
        frames.append(_event(b"content_block_start", BlockStart(self._index, block)))

    def _part(self, part: BlockPart, frames: list[bytes]) -> None:
        frames.append(_event(b"content_block_delta", BlockDelta(self._index, part)))

    def _close(self, frames: list[bytes]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            signature = UNSIGNED if self._shows_thinking else signature_with("".join(self._hidden))
            self._part(SignatureDelta(signature), frames)
            self._hidden.clear()
        self._kind = ""
        frames.append(_event(b"content_block_stop", BlockStop(self._index)))


def _event(name: bytes, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, encode(data))
