"""Writes the items of a response: as the events of a stream, and as the output of the whole response.

Both come from one pass over the parts of the answer, so that the response at the end of a stream equals the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

import msgspec
from msgspec import UNSET

from inferd import clock
from inferd.errors import InferdError
from inferd.gateway.call import DONE, Call
from inferd.gateway.errors import MAX_MESSAGE_CHARS, kind_of, known_error, printable
from inferd.gateway.generation.items import encrypted
from inferd.gateway.generation.logprobs import finite
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.responses.custom import InputText
from inferd.gateway.responses.tools import OwnTool
from inferd.gateway.responses.wire import (
    ArgumentsDone,
    ArgumentsPiece,
    Completed,
    ContentPart,
    Created,
    CustomCallItem,
    CustomDone,
    CustomPiece,
    Event,
    Failed,
    FunctionCallItem,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    ItemStatus,
    Logprob,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    Queued,
    ReasoningDone,
    ReasoningItem,
    ReasoningPiece,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    StreamEvent,
    TextDone,
    TextPiece,
    TopLogprob,
)
from inferd.types import CallDelta, Delta, ModelInfo, Output, TokenLogprob, Usage

STREAM_FORM: Final = StreamForm(DONE, b": waiting for the first token\n\n", always_beats=True)

DIVIDED_CHARS: Final = 16
"""Characters of a piece of text in the events of a background response. Its last piece may have fewer."""


class Shape:
    """The facts of one response that its request determines."""

    __slots__ = ("id", "keeps_encrypted", "tools", "top", "unfinished")

    def __init__(
        self, unfinished: ResponseObject, tools: dict[str, OwnTool], *, top: int | None, keeps_encrypted: bool
    ) -> None:
        self.unfinished = unfinished  # the response before its first item
        self.id = unfinished.id
        self.tools = tools  # by the names that the model uses
        self.top = top  # alternatives of each token's log-probability; None: there are no log-probabilities
        self.keeps_encrypted = keeps_encrypted

    def note_model(self, info: ModelInfo | None) -> None:
        """Note the model's own sampling, which counts where the request names none. It is known once the model has
        answered."""
        given = self.unfinished
        if info is not None:
            temperature = info.temperature if given.temperature is None else given.temperature
            top_p = info.top_p if given.top_p is None else given.top_p
            self.unfinished = msgspec.structs.replace(given, temperature=temperature, top_p=top_p)


class OutputWriter:
    """Events of a streamed response, and the response that they make."""

    __slots__ = (
        "_begun",
        "_call",
        "_divides",
        "_held",
        "_input",
        "_items",
        "_kind",
        "_logprobs",
        "_open",
        "_pending",
        "_pieces",
        "_reason",
        "_sequence",
        "_shape",
        "_streams",
        "_unique",
        "failure",
        "response",
    )

    def __init__(self, call: Call, shape: Shape, *, streams: bool = True) -> None:
        self._call = call
        self._shape = shape
        self._streams = streams  # False: no events are written
        self._divides = shape.unfinished.background  # the text at fixed places, so that a second computation does too
        self._held = ""  # the open item's text that has no event yet
        self._unique = shape.id.removeprefix("resp_")
        self._sequence = 0
        self._begun = False
        self._items: list[OutputItem] = []  # that are done
        self._kind = ""  # of the open item: text, reasoning, function or custom; empty: none is open
        self._open: FunctionCallItem | CustomCallItem | None = None  # the open item, if it is a call
        self._pieces: list[str] = []  # of the open item's text
        self._logprobs: list[Logprob] = []  # of the open item's text
        self._pending: list[Logprob] = []  # of tokens whose text has not come yet
        self._input = InputText()
        self._reason: str | None = None
        self.response: ResponseObject | None = None
        """The whole response; None: it is not over."""
        self.failure: InferdError | None = None
        """Why it failed, where it did."""

    # -- as the writer of a stream ----------------------------------------------------------

    def write(self, number: int, output: Output) -> bytes:
        frames: list[bytes] = []
        self._begin(frames)
        for delta in output.deltas:
            self._write_delta(delta, frames)
        return b"".join(frames)

    def whole(self, usage: Usage | None) -> ResponseObject:
        """The response after the last output."""
        self.ending(usage)
        assert self.response is not None, "it is over"
        return self.response

    def ending(self, usage: Usage | None) -> bytes:
        frames: list[bytes] = []
        self._begin(frames)
        is_cut = self._reason == "length"
        self._close(frames, "incomplete" if is_cut else "completed")
        if not is_cut and not any(
            isinstance(item, MessageItem | FunctionCallItem | CustomCallItem) for item in self._items
        ):
            self._open_text(frames)  # clients expect a message, also an empty one
            self._close(frames, "completed")
        self._call.finish_reasons = ("length" if is_cut else "stop",)
        self.response = msgspec.structs.replace(
            self._shape.unfinished,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(clock.wall()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=usage_of(usage or Usage()),
        )
        end = Incomplete if is_cut else Completed
        if self._streams:
            frames.append(self._event(end(sequence_number=self._next(), response=self.response)))
            frames.append(DONE)
        return b"".join(frames)

    def failed(self, error: InferdError) -> bytes:
        """The frames of a failure, after which nothing follows."""
        self._call.note_error(error)
        self.failure = error
        frames: list[bytes] = []
        self._begin(frames)
        self._close(frames, "incomplete")
        usage = self._call.usage_so_far
        self.response = failed_response(self._shape.unfinished, self._items, error, usage)
        if self._streams:
            frames.append(self._event(Failed(sequence_number=self._next(), response=self.response)))
        return b"".join(frames)

    def instead(self, frames: bytes, error: InferdError) -> bytes:
        """The last frames of a complete response, with a failure in the place of its end."""
        self._call.note_error(error)
        assert self.response is not None, "it was complete"
        failed = failed_response(self._shape.unfinished, self.response.output, error, self._call.usage_so_far)
        last = self._sequence - 1
        before = frames.removesuffix(DONE).rfind(b"\n\n", 0, -2)  # the end of the frame before the last event
        return frames[: before + 2 if before >= 0 else 0] + self._event(Failed(sequence_number=last, response=failed))

    # -- items ------------------------------------------------------------------------------

    def _begin(self, frames: list[bytes]) -> None:
        if self._begun:
            return
        self._begun = True
        if self._streams:
            unfinished = self._shape.unfinished
            first = first_frames(unfinished)
            frames += first
            self._sequence = len(first)
            frames.append(self._event(InProgress(sequence_number=self._next(), response=unfinished)))

    def _write_delta(self, delta: Delta, frames: list[bytes]) -> None:
        if delta.logprobs is not None and self._shape.top is not None:
            self._pending += logprobs_of(delta.logprobs, self._shape.top)
        if delta.reasoning:
            self._pending.clear()
            if self._kind != "reasoning":
                self._open_reasoning(frames)
            self._add(delta.reasoning, frames)
        if delta.text:
            if self._kind != "text":
                self._open_text(frames)
            self._add(delta.text, frames)
        for part in delta.calls:
            self._pending.clear()
            self._write_call(part, frames)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason

    def _write_call(self, part: CallDelta, frames: list[bytes]) -> None:
        if part.name is not None:
            self._open_call(part.name, frames)
        if part.arguments:
            piece = self._input.feed(part.arguments) if self._kind == "custom" else part.arguments
            if piece:
                self._add(piece, frames)

    def _open_reasoning(self, frames: list[bytes]) -> None:
        self._close(frames, "completed")
        self._kind = "reasoning"
        if self._streams:
            self._added(ReasoningItem(id=self._id("rs"), status="in_progress", content=[]), frames)
            self._part_added(ReasoningText(""), frames)

    def _open_text(self, frames: list[bytes]) -> None:
        self._close(frames, "completed")
        self._kind = "text"
        if self._streams:
            self._added(MessageItem(id=self._id("msg"), status="in_progress", content=[]), frames)
            self._part_added(OutputText(""), frames)

    def _open_call(self, name: str, frames: list[bytes]) -> None:
        self._close(frames, "completed")
        tool = self._shape.tools.get(name, OwnTool("function", name, None))
        call_id, namespace = self._id("call"), UNSET if tool.namespace is None else tool.namespace
        self._kind = tool.kind
        if tool.kind == "custom":
            self._input = InputText()
            self._open = CustomCallItem(
                id=self._id("ctc"),
                status="in_progress",
                call_id=call_id,
                name=tool.name,
                namespace=namespace,
                input="",
            )
        else:
            self._open = FunctionCallItem(
                id=self._id("fc"),
                status="in_progress",
                call_id=call_id,
                name=tool.name,
                namespace=namespace,
                arguments="",
            )
        if self._streams:
            self._added(self._open, frames)

    def _add(self, piece: str, frames: list[bytes]) -> None:
        """Add a piece to the open item's text."""
        self._pieces.append(piece)
        logprobs: list[Logprob] = []
        if self._kind == "text" and self._pending:
            logprobs, self._pending = self._pending, []
            self._logprobs += logprobs
        if not self._streams:
            return
        if not self._divides:
            frames.append(self._delta(piece, logprobs))
            return
        held = self._held + piece
        end = len(held) - len(held) % DIVIDED_CHARS
        frames += [self._delta(held[at : at + DIVIDED_CHARS], []) for at in range(0, end, DIVIDED_CHARS)]
        self._held = held[end:]

    def _release(self, frames: list[bytes]) -> None:
        """The event of the open item's last characters."""
        if self._held:
            frames.append(self._delta(self._held, []))
            self._held = ""

    def _delta(self, piece: str, logprobs: list[Logprob]) -> bytes:
        sequence, index = self._next(), len(self._items)
        event: Event
        match self._kind:
            case "text":
                event = TextPiece(
                    sequence_number=sequence,
                    item_id=self._id("msg"),
                    output_index=index,
                    delta=piece,
                    logprobs=logprobs,
                )
            case "reasoning":
                event = ReasoningPiece(
                    sequence_number=sequence, item_id=self._id("rs"), output_index=index, delta=piece
                )
            case "custom":
                event = CustomPiece(sequence_number=sequence, item_id=self._id("ctc"), output_index=index, delta=piece)
            case _:
                event = ArgumentsPiece(
                    sequence_number=sequence, item_id=self._id("fc"), output_index=index, delta=piece
                )
        return self._event(event)

    def _close(self, frames: list[bytes], status: ItemStatus) -> None:
        """Finish the open item, if there is one."""
        match self._kind:
            case "":
                return
            case "text":
                self._close_text(frames, status)
            case "reasoning":
                self._close_reasoning(frames, status)
            case _:
                self._close_call(frames, status)
        self._kind = ""
        self._pieces, self._logprobs = [], []

    def _close_text(self, frames: list[bytes], status: ItemStatus) -> None:
        self._release(frames)
        text = OutputText("".join(self._pieces), logprobs=self._logprobs)
        item = MessageItem(id=self._id("msg"), status=status, content=[text])
        if self._streams:
            done = TextDone(
                sequence_number=self._next(),
                item_id=item.id,
                output_index=len(self._items),
                text=text.text,
                logprobs=text.logprobs,
            )
            frames.append(self._event(done))
            self._part_done(item.id, text, frames)
        self._done(item, frames)

    def _close_reasoning(self, frames: list[bytes], status: ItemStatus) -> None:
        self._release(frames)
        text = "".join(self._pieces)
        item = ReasoningItem(
            id=self._id("rs"),
            status=status,
            content=[ReasoningText(text)],
            encrypted_content=encrypted(text) if self._shape.keeps_encrypted else UNSET,
        )
        if self._streams:
            done = ReasoningDone(
                sequence_number=self._next(), item_id=item.id, output_index=len(self._items), text=text
            )
            frames.append(self._event(done))
            self._part_done(item.id, ReasoningText(text), frames)
        self._done(item, frames)

    def _close_call(self, frames: list[bytes], status: ItemStatus) -> None:
        opened = self._open
        assert opened is not None, "a call is open"
        self._open = None
        if isinstance(opened, CustomCallItem):
            rest = self._input.end()
        else:
            rest = "" if self._pieces or status == "incomplete" else "{}"  # no text is an object without members
        if rest:
            self._add(rest, frames)
        self._release(frames)
        text = "".join(self._pieces)
        item: FunctionCallItem | CustomCallItem
        event: Event
        if isinstance(opened, CustomCallItem):
            item = msgspec.structs.replace(opened, status=status, input=text)
        else:
            item = msgspec.structs.replace(opened, status=status, arguments=text)
        if self._streams:
            sequence, index = self._next(), len(self._items)
            if isinstance(item, CustomCallItem):
                event = CustomDone(sequence_number=sequence, item_id=item.id, output_index=index, input=text)
            else:
                event = ArgumentsDone(
                    sequence_number=sequence, item_id=item.id, output_index=index, name=item.name, arguments=text
                )
            frames.append(self._event(event))
        self._done(item, frames)

    # -- events -----------------------------------------------------------------------------

    def _id(self, prefix: str) -> str:
        """The id of the open item."""
        return f"{prefix}_{self._unique}{len(self._items):02x}"

    def _next(self) -> int:
        sequence = self._sequence
        self._sequence = sequence + 1
        return sequence

    def _event(self, event: Event) -> bytes:
        return event_frame(event)

    def _added(self, item: OutputItem, frames: list[bytes]) -> None:
        event = ItemAdded(sequence_number=self._next(), output_index=len(self._items), item=item)
        frames.append(self._event(event))

    def _part_added(self, part: ContentPart, frames: list[bytes]) -> None:
        item_id = self._id("rs" if isinstance(part, ReasoningText) else "msg")
        event = PartAdded(sequence_number=self._next(), item_id=item_id, output_index=len(self._items), part=part)
        frames.append(self._event(event))

    def _part_done(self, item_id: str, part: ContentPart, frames: list[bytes]) -> None:
        event = PartDone(sequence_number=self._next(), item_id=item_id, output_index=len(self._items), part=part)
        frames.append(self._event(event))

    def _done(self, item: OutputItem, frames: list[bytes]) -> None:
        if self._streams:
            event = ItemDone(sequence_number=self._next(), output_index=len(self._items), item=item)
            frames.append(self._event(event))
        self._items.append(item)


_NAMES: Final = {kind: str(kind.__struct_config__.tag).encode() for kind in get_args(StreamEvent)}


def event_frame(event: Event) -> bytes:
    """An event as a frame of a stream."""
    return b"event: %b\ndata: %b\n\n" % (_NAMES[type(event)], encode(event))


def first_frames(unfinished: ResponseObject) -> list[bytes]:
    """The events of a response before it is computed: a background response is queued first."""
    if not unfinished.background:
        return [event_frame(Created(sequence_number=0, response=unfinished))]
    queued = msgspec.structs.replace(unfinished, status="queued")
    return [
        event_frame(Created(sequence_number=0, response=queued)),
        event_frame(Queued(sequence_number=1, response=queued)),
    ]


def failed_response(
    unfinished: ResponseObject, items: list[OutputItem], error: InferdError, usage: Usage | None
) -> ResponseObject:
    """The response of a request that failed."""
    error = known_error(error)
    code = _CODES.get(error.kind, "invalid_prompt" if kind_of(error).status < 500 else "server_error")
    return msgspec.structs.replace(
        unfinished,
        status="failed",
        error=ResponseFailure(code, printable(error.message, MAX_MESSAGE_CHARS)),
        output=items,
        usage=None if usage is None else usage_of(usage),
    )


_CODES: Final = {
    "quota_exceeded": "rate_limit_exceeded",
    "context_length_exceeded": "context_length_exceeded",
}
"""Codes of failures by the kind of the error."""


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def logprobs_of(items: Sequence[TokenLogprob], top: int) -> list[Logprob]:
    return [
        Logprob(
            item.token,
            finite(item.logprob),
            list(item.raw),
            [TopLogprob(one.token, finite(one.logprob), list(one.raw)) for one in item.top[:top]],
        )
        for item in items
    ]
