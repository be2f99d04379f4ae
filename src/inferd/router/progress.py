"""The progress of a request for generation: its usage, latencies and finish reasons."""

from __future__ import annotations

from inferd.types import FinishReason, Output, Usage


class Progress:
    """Counts the tokens of a generated answer, and the times between them."""

    __slots__ = (
        "_last_at",
        "_num_prompt",
        "_num_tokens",
        "cached_tokens",
        "finish_reasons",
        "first_at",
        "inter_token_s",
    )

    def __init__(self) -> None:
        self.first_at: float | None = None  # of the first token
        self.inter_token_s: list[float] = []
        self.finish_reasons: dict[int, FinishReason] = {}
        self.cached_tokens = 0
        self._last_at: dict[int, float] = {}
        self._num_prompt = 0
        self._num_tokens = 0

    def note(self, output: Output, now: float) -> None:
        """Count an output that arrived at ``now``."""
        if output.prompt is not None:
            self._num_prompt = output.prompt.num_tokens
            self.cached_tokens = output.prompt.cached_tokens
        deltas, carried = output.deltas, 0
        for number, delta in enumerate(deltas):
            count = len(delta.token_ids)
            if number + 1 < len(deltas) and deltas[number + 1].index == delta.index:
                carried += count  # the time counts for all tokens of a choice together
            elif count + carried:
                self._note_tokens(delta.index, count + carried, now)
                carried = 0
            if delta.finish_reason is not None:
                self.finish_reasons[delta.index] = delta.finish_reason

    def _note_tokens(self, index: int, count: int, now: float) -> None:
        self._num_tokens += count
        if self.first_at is None:
            self.first_at = now
        last_at = self._last_at.get(index)
        if last_at is not None:
            gap = (now - last_at) / count
            self.inter_token_s.extend((gap,) * count if count > 1 else (gap,))
        self._last_at[index] = now

    @property
    def usage(self) -> Usage:
        """The usage in the outputs so far."""
        return Usage(self._num_prompt, self._num_tokens, self.cached_tokens)
