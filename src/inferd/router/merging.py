"""Merges outputs of one request, so that a slow reader costs bounded memory."""

from __future__ import annotations

from inferd.types import (
    CallDelta,
    Delta,
    DeltaKind,
    End,
    FinishReason,
    Output,
    PromptReport,
    Relayed,
    TokenLogprob,
    joined_calls,
)


class MergedOutput:
    """Waiting outputs, merged in the order of their arrival."""

    __slots__ = ("_choices", "_end", "_prompt", "_request_id")

    def __init__(self, first: Output, second: Output) -> None:
        self._request_id = first.request_id
        self._prompt: PromptReport | None = None
        self._end: End | None = None
        self._choices: dict[int, list[_Part]] = {}
        self.add(first)
        self.add(second)

    def add(self, output: Output) -> None:
        if output.prompt is not None:
            self._prompt = output.prompt
        if output.end is not None:
            self._end = output.end
        for delta in output.deltas:
            parts = self._choices.setdefault(delta.index, [])
            if not parts or not parts[-1].takes(delta.kind):
                parts.append(_Part())
            parts[-1].add(delta)

    def output(self) -> Output:
        """The outputs as one."""
        deltas = tuple(part.delta(index) for index, parts in self._choices.items() for part in parts)
        return Output(self._request_id, deltas, self._prompt, self._end)


def joined(first: Output | MergedOutput, second: Output) -> MergedOutput:
    """Two outputs of one request, the second after the first."""
    if isinstance(first, MergedOutput):
        first.add(second)
        return first
    return MergedOutput(first, second)


def joined_pieces(items: list[Relayed]) -> Relayed:
    """Several pieces of a relayed answer as one. Only the first can have a head, only the last an end."""
    if len(items) == 1:
        return items[0]
    return Relayed(items[0].request_id, items[0].head, b"".join([item.data for item in items]), items[-1].end)


class _Part:
    """A part of a choice: text, reasoning or calls."""

    __slots__ = ("calls", "finish_reason", "kind", "logprobs", "reasoning", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.kind: DeltaKind = ""
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallDelta] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def takes(self, kind: DeltaKind) -> bool:
        return not kind or not self.kind or kind == self.kind

    def add(self, delta: Delta) -> None:
        self.kind = self.kind or delta.kind
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.calls.extend(delta.calls)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def delta(self, index: int) -> Delta:
        logprobs = tuple(self.logprobs) if self.logprobs is not None else None
        return Delta(
            index,
            "".join(self.texts),
            tuple(self.token_ids),
            logprobs,
            self.finish_reason,
            self.stop_reason,
            "".join(self.reasoning),
            joined_calls(self.calls),
        )
