"""The stream of one request's outputs, from the router to one reader.

Waiting outputs of a worker are merged into one, so that a slow reader costs bounded memory. A relayed answer is
buffered up to ``HIGH_WATER_BYTES``; then its source is paused. Every stream has exactly one last item, the one with
``end``. This module does not know queues or replicas.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from inferd.types import Delta, End, FinishReason, Output, PromptReport, Relayed, TokenLogprob, Usage

HIGH_WATER_BYTES = 64 * 1024  # of a relayed answer, or of several predictions, before their source is paused

Item = Output | Relayed
Sink = Callable[[Item], None]


class Stream:
    """An asynchronous iterator of items, or a source for a sink that is called with each item.

    The router calls ``push`` and ``relay``. ``on_close`` is called when the reader closes the stream before its end.
    ``on_pause`` is called with True when the reader wants no more items for now, and with False when it does again.
    With ``is_whole`` the reader gets the outputs of an answer as one item at the end, so that the answer can be
    computed again from its beginning until then.
    """

    __slots__ = (
        "_answers",
        "_held",
        "_is_output_first",
        "_is_prompt_sent",
        "_on_close",
        "_on_over",
        "_on_pause",
        "_pending",
        "_relayed",
        "_relayed_bytes",
        "_sink",
        "_waiter",
        "end",
        "is_closed",
        "is_paused",
        "is_whole",
        "progress",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        on_close: Callable[[], None],
        on_pause: Callable[[bool], None] | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.request_id = request_id
        self.progress = Progress()
        self.is_closed = False
        self.is_paused = False
        self.is_whole = is_whole
        self.end: End | None = None
        self._held: Output | _Merged | None = None  # with is_whole: the answer so far
        self._is_prompt_sent = False
        self._on_close = on_close
        self._on_pause = on_pause
        self._on_over: Callable[[], None] | None = None
        self._pending: Output | _Merged | None = None
        self._answers: deque[Output] = deque()  # after the pending output: of requests with several predictions
        self._relayed: list[Relayed] = []
        self._relayed_bytes = 0
        self._is_output_first = False  # the pending output arrived before the relayed items
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- the router's side ------------------------------------------------------------------

    def push(self, output: Output, now: float) -> None:
        """Add an output that arrived at ``now``. Nothing may follow an output with ``end``."""
        assert self.end is None, f"request {self.request_id} ended twice"
        self.progress.note(output, now)
        if output.end is not None:
            self._ended(output.end)
        elif self.is_closed:
            return  # the reader has gone; the end is still passed on, with the usage
        if self.is_whole:
            shown = self._hold(output)
            if shown is None:
                return
            output = shown
        if self._sink is not None:
            self._sink(output)
            return
        if self._pending is None:
            self._pending = output
        elif output.prediction is not None or self._answers or self._holds_prediction:
            self._answers.append(output)  # predictions are never merged
            self._relayed_bytes += _size(output)
            if self._relayed_bytes > HIGH_WATER_BYTES:
                self.pause()
        else:
            self._pending = _joined_outputs(self._pending, output)
        self._wake()

    def _hold(self, output: Output) -> Output | None:
        """The part of an output that an ``is_whole`` stream passes on: the first prompt report at once, the rest with
        the end; None: nothing."""
        prompt = None if self._is_prompt_sent else output.prompt
        self._is_prompt_sent = self._is_prompt_sent or prompt is not None
        answer = Output(output.request_id, output.deltas, None, output.end)
        self._held = held = answer if self._held is None else _joined_outputs(self._held, answer)
        if output.end is None:
            return None if prompt is None else Output(output.request_id, (), prompt)
        self._held = None
        whole = held.output() if isinstance(held, _Merged) else held
        return Output(whole.request_id, whole.deltas, prompt, whole.end)

    def restart(self) -> None:
        """Discard the answer so far, of which the reader has got nothing: it is computed again from its beginning."""
        assert self.is_whole, "the reader has already got a part of the answer"
        self._held = None
        self.progress = Progress()

    def relay(self, item: Relayed, now: float) -> None:
        """Add a piece of a relayed answer that arrived at ``now``. Nothing may follow an item with ``end``."""
        assert self.end is None, f"request {self.request_id} ended twice"
        progress = self.progress
        progress.has_output = True
        if progress.first_at is None and item.data:
            progress.first_at = now
        if item.end is not None:
            self._ended(item.end)
        elif self.is_closed:
            return
        if self._sink is not None:
            self._sink(item)
            return
        if not self._relayed:
            self._is_output_first = self._pending is not None
        self._relayed.append(item)
        self._relayed_bytes += len(item.data)
        if self._relayed_bytes > HIGH_WATER_BYTES:
            self.pause()
        self._wake()

    def _ended(self, end: End) -> None:
        self.end = end
        self.drop_callbacks()
        tell, self._on_over = self._on_over, None
        if tell is not None:
            tell()

    def drop_callbacks(self) -> None:
        """Drop the callbacks, which refer back to this stream: a reference cycle would delay freeing."""
        self._on_close, self._on_pause = _nothing, None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _holds_prediction(self) -> bool:
        return isinstance(self._pending, Output) and self._pending.prediction is not None

    @property
    def is_over(self) -> bool:
        """Whether the last item was pushed."""
        return self.end is not None

    def when_over(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once when the request has ended and its usage is known. Only before the end."""
        assert self.end is None, "the request has already ended"
        self._on_over = tell

    # -- the reader's side ------------------------------------------------------------------

    def attach(self, sink: Sink) -> None:
        """Call ``sink`` with every item from now on, first with those that wait."""
        self._sink = sink
        while (item := self._take()) is not None:
            sink(item)

    def pause(self) -> None:
        """Ask the source to stop, because the reader is slow. Idempotent. Items may still arrive."""
        if not self.is_paused:
            self.is_paused = True
            if self._on_pause is not None:
                self._on_pause(True)

    def resume(self) -> None:
        """Ask the source to continue after ``pause``. Idempotent."""
        if self.is_paused:
            self.is_paused = False
            if self._on_pause is not None and self.end is None:
                self._on_pause(False)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Item:
        while (item := self._take()) is None:
            if self.end is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return item

    def _take(self) -> Item | None:
        """The next waiting item; None: there is none.

        A stream has both kinds of items where the request was retried at a replica of the other kind. Then relayed
        items may follow a worker's prompt report, or an output may end relayed items.
        """
        if self._relayed and not (self._is_output_first and self._pending is not None):
            item = self._relayed[0] if len(self._relayed) == 1 else _joined(self._relayed)
            self._relayed.clear()
            self._relayed_bytes = 0
            self.resume()
            return item
        pending, self._pending = self._pending, None
        if self._answers:
            following = self._pending = self._answers.popleft()
            self._relayed_bytes -= _size(following)
            if not self._answers:
                self.resume()
        return pending.output() if isinstance(pending, _Merged) else pending

    def close(self) -> None:
        """Cancel the request if it has not ended. Idempotent. The last item still follows."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.end is None:
            self._pending = self._held = None
            self._answers.clear()
            self._relayed.clear()
            self._relayed_bytes = 0
            self._on_close()


def _nothing() -> None:
    pass


def _joined_outputs(first: Output | _Merged, second: Output) -> _Merged:
    if isinstance(first, _Merged):
        first.add(second)
        return first
    return _Merged(first, second)


def _size(output: Output) -> int:
    return len(output.prediction.body) if output.prediction is not None else 0


def _joined(items: list[Relayed]) -> Relayed:
    """Several pieces as one. Only the first can have a head, only the last an end."""
    return Relayed(items[0].request_id, items[0].head, b"".join([item.data for item in items]), items[-1].end)


class Progress:
    """The outputs of a request so far: times in seconds of the monotonic clock, token counts, finish reasons."""

    __slots__ = (
        "_last_at",
        "_num_prompt",
        "_num_tokens",
        "cached_tokens",
        "finish_reasons",
        "first_at",
        "has_output",
        "inter_token_s",
    )

    def __init__(self) -> None:
        self.has_output = False
        self.first_at: float | None = None
        self.inter_token_s: list[float] = []
        self.finish_reasons: dict[int, FinishReason] = {}
        self.cached_tokens = 0
        self._last_at: dict[int, float] = {}
        self._num_prompt = 0
        self._num_tokens = 0

    def note(self, output: Output, now: float) -> None:
        """Count an output that arrived at ``now``."""
        if output.prediction is not None:
            self.has_output = True
        if output.prompt is not None:
            self._num_prompt = output.prompt.num_tokens
            self.cached_tokens = output.prompt.cached_tokens
        for delta in output.deltas:
            self.has_output = True
            count = len(delta.token_ids)
            if count:
                self._num_tokens += count
                if self.first_at is None:
                    self.first_at = now
                last_at = self._last_at.get(delta.index)
                if last_at is not None:
                    gap = (now - last_at) / count
                    self.inter_token_s.extend((gap,) * count if count > 1 else (gap,))
                self._last_at[delta.index] = now
            if delta.finish_reason is not None:
                self.finish_reasons[delta.index] = delta.finish_reason

    @property
    def usage(self) -> Usage:
        """The usage by the outputs seen so far, for a request whose worker can no longer report it."""
        return Usage(self._num_prompt, self._num_tokens, self.cached_tokens)


class _Merged:
    """Several waiting outputs, merged in the order of their arrival."""

    __slots__ = ("_choices", "_end", "_prompt", "_request_id")

    def __init__(self, first: Output, second: Output) -> None:
        self._request_id = first.request_id
        self._prompt: PromptReport | None = None
        self._end: End | None = None
        self._choices: dict[int, _Choice] = {}
        self.add(first)
        self.add(second)

    def add(self, output: Output) -> None:
        """Append an output."""
        if output.prompt is not None:
            self._prompt = output.prompt
        if output.end is not None:
            self._end = output.end
        for delta in output.deltas:
            choice = self._choices.get(delta.index)
            if choice is None:
                choice = self._choices[delta.index] = _Choice()
            choice.add(delta)

    def output(self) -> Output:
        """The merged output."""
        deltas = tuple(choice.delta(index) for index, choice in self._choices.items())
        return Output(self._request_id, deltas, self._prompt, self._end)


class _Choice:
    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta of the same choice."""
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def delta(self, index: int) -> Delta:
        """The merged delta of the choice with this index."""
        logprobs = tuple(self.logprobs) if self.logprobs is not None else None
        return Delta(index, "".join(self.texts), tuple(self.token_ids), logprobs, self.finish_reason, self.stop_reason)
