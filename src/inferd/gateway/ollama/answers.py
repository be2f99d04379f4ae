"""Writes answers: as the lines of a stream, or as one object."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import UNSET

from inferd import clock
from inferd.errors import InferdError, InternalError
from inferd.gateway.call import LINES_TYPE, Call
from inferd.gateway.generation.fields import ignored_names
from inferd.gateway.generation.logprobs import finite
from inferd.gateway.generation.requests import Choice, Collected, error_frame
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.ollama.wire import (
    CallBody,
    CalledFunction,
    DoneReason,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaTextAnswer,
    OllamaTokenLogprobBody,
    OutputMessage,
    TopToken,
)
from inferd.gateway.upstream import ModelStatus
from inferd.types import CallDelta, Delta, FinishReason, Output, Timings, TokenLogprob, TopLogprob, Usage

_ENDING: Final = b'"done":true}\n'


class Part(msgspec.Struct, frozen=True):
    """What one line, or a whole answer, has of a text."""

    text: str = ""
    thinking: str = ""
    calls: list[CallBody] = []
    logprobs: Sequence[TokenLogprob] = ()


class Reply:
    """The form of an answer, as its request asks for it."""

    __slots__ = ("_body", "_model", "_shows_thinking", "fingerprint")

    def __init__(self, body: OllamaChatRequest | OllamaGenerateRequest, model: ModelStatus) -> None:
        self._body = body
        self._model = model.name
        self._shows_thinking = body.think is not False
        self.fingerprint: str | None = None

    @property
    def stream_form(self) -> StreamForm:
        return StreamForm(_ENDING, self.line(Part()), content_type=LINES_TYPE)

    def cache_fields(self) -> tuple[msgspec.Struct, bytes]:
        unused = dict.fromkeys(ignored_names(type(self._body)), UNSET)
        return msgspec.structs.replace(self._body, model=None, **unused), b""

    def writer(self, call: Call) -> _LineWriter:
        return _LineWriter(call, self)

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        (only,) = collected
        (choice,) = only.choices
        part = Part("".join(choice.texts), "".join(choice.reasoning), calls_of(choice), choice.logprobs)
        timings = only.end.timings if only.end is not None else Timings()
        return encode(_ended(self._answer(part), call, choice.finish_reason, call.usage_so_far, timings))

    def loaded(self) -> bytes:
        """The whole answer to a request without a prompt."""
        return encode(msgspec.structs.replace(self._answer(Part()), done_reason="load", done=True))

    def line(self, part: Part) -> bytes:
        """A line before the last one."""
        return encode(self._answer(part)) + b"\n"

    def last_line(self, call: Call, reason: FinishReason | None, usage: Usage | None, timings: Timings) -> bytes:
        return encode(_ended(self._answer(Part()), call, reason, usage, timings)) + b"\n"

    def _answer(self, part: Part) -> OllamaTextAnswer:
        thinking = part.thinking if part.thinking and self._shows_thinking else UNSET
        is_chat = isinstance(self._body, OllamaChatRequest)
        top = self._body.top_logprobs or 0
        return OllamaTextAnswer(
            model=self._model,
            created_at=datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            message=OutputMessage("assistant", part.text, thinking, part.calls or UNSET) if is_chat else UNSET,
            response=UNSET if is_chat else part.text,
            thinking=UNSET if is_chat else thinking,
            logprobs=[_logprob(item, top) for item in part.logprobs] if part.logprobs else UNSET,
            done=False,
        )


class _LineWriter:
    """Lines of a streamed answer. A call is written when it is whole, because its arguments are an object."""

    __slots__ = ("_call", "_name", "_pieces", "_reason", "_reply", "_timings")

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._name: str | None = None  # of the call whose arguments come
        self._pieces: list[str] = []
        self._reason: FinishReason | None = None
        self._timings = Timings()

    def write(self, number: int, output: Output) -> bytes:
        lines: list[bytes] = []
        for delta in output.deltas:
            self._write_delta(delta, lines)
        if output.end is not None:
            self._timings = output.end.timings
        return b"".join(lines)

    def ending(self, usage: Usage | None) -> bytes:
        return self._reply.last_line(self._call, self._reason, usage, self._timings)

    def failed(self, error: InferdError) -> bytes:
        return error_frame(self._call, error)

    def _write_delta(self, delta: Delta, lines: list[bytes]) -> None:
        if delta.text or delta.reasoning or delta.logprobs:
            self._end_call(lines, is_cut=False)
            lines.append(self._reply.line(Part(delta.text, delta.reasoning, [], delta.logprobs or ())))
        for part in delta.calls:
            self._take(part, lines)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            self._end_call(lines, is_cut=delta.finish_reason == "length" or delta.stop_reason is not None)

    def _take(self, part: CallDelta, lines: list[bytes]) -> None:
        if part.name is not None:
            self._end_call(lines, is_cut=False)
            self._name = part.name
        self._pieces.append(part.arguments)

    def _end_call(self, lines: list[bytes], *, is_cut: bool) -> None:
        name, arguments = self._name, "".join(self._pieces)
        if name is None:
            return
        self._name = None
        self._pieces.clear()
        called = _called(name, arguments, is_cut=is_cut)
        if called is not None:
            lines.append(self._reply.line(Part(calls=[called])))


def calls_of(choice: Choice) -> list[CallBody]:
    """The calls of a whole answer. A call in which the answer was cut off is left out: its arguments are no object."""
    is_cut = choice.finish_reason == "length" or choice.stop_reason is not None
    last = len(choice.calls) - 1
    found = [
        _called(one.name, "".join(one.arguments), is_cut=is_cut and i == last) for i, one in enumerate(choice.calls)
    ]
    return [called for called in found if called is not None]


def _called(name: str, arguments: str, *, is_cut: bool) -> CallBody | None:
    """None: the answer was cut off in the call. Raises InternalError for other arguments that are no object: the worker
    promises one."""
    try:
        decoded = msgspec.json.decode(arguments if arguments or is_cut else "{}")
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict):
        return CallBody(CalledFunction(name, decoded))
    if is_cut:
        return None
    raise InternalError("The arguments of a tool call are not a JSON object; the log has the details.")


def _ended(
    answer: OllamaTextAnswer, call: Call, reason: FinishReason | None, usage: Usage | None, timings: Timings
) -> OllamaTextAnswer:
    """The answer with its end: the reason, which is recorded in the call, the times and the tokens. A stage that was
    never reached took no time."""
    done_reason: DoneReason = "length" if reason == "length" else "stop"
    call.finish_reasons = (done_reason,)
    dispatched = timings.dispatched or 0.0
    scheduled = timings.scheduled or dispatched
    first = timings.first_token or scheduled
    counted = usage or Usage()
    return msgspec.structs.replace(
        answer,
        done_reason=done_reason,
        total_duration=_nanoseconds(clock.now() - call.started_at),
        load_duration=_nanoseconds(dispatched),
        prompt_eval_count=counted.prompt_tokens,
        prompt_eval_duration=_nanoseconds(first - scheduled),
        eval_count=counted.completion_tokens,
        eval_duration=_nanoseconds((timings.finished or first) - first),
        done=True,
    )


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _logprob(item: TokenLogprob, top: int) -> OllamaTokenLogprobBody:
    return OllamaTokenLogprobBody(
        item.token, finite(item.logprob), list(item.raw), [_top_token(other) for other in item.top[:top]]
    )


def _top_token(item: TopLogprob) -> TopToken:
    return TopToken(item.token, finite(item.logprob), list(item.raw))
