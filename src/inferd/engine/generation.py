"""One request from sampled tokens to text: choices, stops, log-probabilities, usage.

Knows tokens and text. Does not know the scheduler or tensors. The engine passes samples in and sends the returned
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from inferd.checkpoints.text.detokenizer import Detokenizer
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.prepare import Prepared
from inferd.engine.sampler import Sampled
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.stop import StopBuffer
from inferd.errors import InferdError
from inferd.types import (
    Delta,
    End,
    FinishReason,
    Output,
    PromptReport,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)


@dataclass(slots=True, eq=False)
class Choice:
    """One answer in progress: what has been generated and not yet been sent."""

    index: int
    sequence: Sequence
    detokenizer: Detokenizer
    stops: StopBuffer
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def push(self, token_id: int, prepared: Prepared, max_model_len: int) -> None:
        """Add a generated token (already appended to the sequence) and decide whether the answer ends."""
        sampling = prepared.sampling
        count = self.sequence.num_outputs
        self.token_ids.append(token_id)
        may_stop = count >= sampling.min_tokens
        if may_stop and token_id in prepared.eos_ids:
            if sampling.include_stop_str_in_output or not sampling.skip_special_tokens:
                self._say(self.detokenizer.push(token_id), may_stop=False)
            self._finish("stop", None)
            return
        if may_stop and token_id in sampling.stop_token_ids:
            if sampling.include_stop_str_in_output:
                self._say(self.detokenizer.push(token_id), may_stop=False)
            self._finish("stop", token_id)
            return
        self._say(self.detokenizer.push(token_id), may_stop)
        if self.stops.matched is None and (
            count >= (sampling.max_tokens or 0) or len(self.sequence.tokens) >= max_model_len
        ):
            self._finish("length", None)

    def skip_sent(self) -> None:
        """Drop what has been added so far: another worker sent it before."""
        self.text, self.token_ids = [], []

    def _say(self, text: str, may_stop: bool) -> None:
        if text:
            self.text.append(self.stops.push(text) if may_stop else self.stops.push_unchecked(text))
        if self.stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.stops.matched

    def _finish(self, reason: FinishReason, stop_reason: int | None) -> None:
        """The answer ends: text that the detokenizer and the stop buffer held back is added."""
        self._say(self.detokenizer.flush(), may_stop=True)
        if self.finish_reason is None:
            self.text.append(self.stops.flush())
            self.finish_reason, self.stop_reason = reason, stop_reason

    def news(self, index: int, want_logprobs: bool) -> Delta:
        """The new text and tokens since the last call, as choice ``index`` of the answer."""
        delta = Delta(
            index,
            "".join(self.text),
            tuple(self.token_ids),
            tuple(self.logprobs) if want_logprobs else None,
            self.finish_reason,
            self.stop_reason,
        )
        self.text, self.token_ids, self.logprobs = [], [], []
        return delta


@dataclass(slots=True, eq=False)
class Generation:
    """A request that runs."""

    prepared: Prepared
    tokenizer: Tokenizer
    max_model_len: int
    choices: dict[int, Choice] = field(default_factory=dict)
    has_forked: bool = False
    num_cached: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    # Nothing precedes the first token.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    scheduled_at: float | None = None
    first_token_at: float | None = None
    has_reported: bool = False

    @property
    def id(self) -> str:
        return self.prepared.request.id

    @property
    def is_collected(self) -> bool:
        """Whether everything is sent at the end: by request, or because the best choices are only known then."""
        sampling = self.prepared.sampling
        return not self.prepared.request.stream or sampling.use_beam_search or sampling.width > sampling.n

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices.values())

    @property
    def deadline_at(self) -> float | None:
        request = self.prepared.request
        return None if request.deadline_s is None else request.arrived_at + request.deadline_s

    def open_choice(self, sequence: Sequence) -> Choice:
        sampling = self.prepared.sampling
        choice = Choice(
            sequence.index,
            sequence,
            self.tokenizer.stream(
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                prompt_ids=self.prepared.prompt_ids,
            ),
            StopBuffer(sampling.stop, sampling.include_stop_str_in_output),
        )
        self.choices[sequence.index] = choice
        return choice

    def resume(self, sequence: Sequence, token_ids: Seq[int]) -> None:
        """Restore the only choice's state after these tokens had been sent: detokenizer, stop strings and counts.

        The tokens are not sent again.
        """
        choice = self.choices[sequence.index]
        for token_id in token_ids:
            if choice.finish_reason is None:
                sequence.tokens.append(token_id)
                self.num_generated += 1
                choice.push(token_id, self.prepared, self.max_model_len)
        choice.skip_sent()
        self.has_reported = True

    def push(self, sequence: Sequence, sampled: Sampled, now: float) -> Choice:
        """Append a token to a sequence and add it to its choice."""
        choice = self.choices[sequence.index]
        sequence.tokens.append(sampled.token_id)
        sequence.cumulative_logprob += sampled.logprob
        self.num_generated += 1
        if self.first_token_at is None:
            self.first_token_at = now
        if self.prepared.sampling.logprobs is not None:
            choice.logprobs.append(self.describe(sampled, self.prepared.sampling.logprobs))
        choice.push(sampled.token_id, self.prepared, self.max_model_len)
        return choice

    def describe(self, sampled: Sampled, num_top: int) -> TokenLogprob:
        """A sample with the strings and bytes that clients see."""
        string, raw = self.tokenizer.token_string, self.tokenizer.token_bytes
        return TokenLogprob(
            sampled.token_id,
            string(sampled.token_id),
            raw(sampled.token_id),
            sampled.logprob,
            sampled.rank,
            tuple(TopLogprob(t, string(t), raw(t), p) for t, p in sampled.top[:num_top]),
        )

    # -- what is sent -----------------------------------------------------------------------

    def news(self, changed: list[Choice], now: float) -> Output | None:
        """The output of this step: new deltas, the prompt's report once, and the end when all choices have ended."""
        finished = self.is_finished
        want_logprobs = self.prepared.sampling.logprobs is not None
        deltas: list[Delta] = []
        if not self.is_collected:
            deltas = [choice.news(choice.index, want_logprobs) for choice in changed]
        elif finished:
            deltas = [choice.news(i, want_logprobs) for i, choice in enumerate(self._best())]
        if not deltas and not finished:
            return None
        return Output(self.id, tuple(deltas), self._report(), self.end("done", now) if finished else None)

    def _best(self) -> list[Choice]:
        """The ``n`` choices to return, best first where more were generated."""
        choices = [self.choices[i] for i in sorted(self.choices)]
        sampling = self.prepared.sampling
        if len(choices) <= sampling.n:
            return choices
        choices.sort(key=lambda c: c.sequence.cumulative_logprob / max(c.sequence.num_outputs, 1), reverse=True)
        return choices[: sampling.n]

    def _report(self) -> PromptReport | None:
        if self.has_reported:
            return None
        self.has_reported = True
        prepared = self.prepared
        wants_logprobs = prepared.sampling.prompt_logprobs is not None
        wants_ids = prepared.request.return_prompt_ids or wants_logprobs
        return PromptReport(
            len(prepared.prompt_ids),
            self.num_cached,
            tuple(prepared.prompt_ids) if wants_ids else None,
            tuple(self.prompt_logprobs) if wants_logprobs else None,
            self.tokenizer.decode(prepared.prompt_ids, prepared.sampling.skip_special_tokens) if wants_ids else None,
            prepared.seed if prepared.sampling.width == 1 and not prepared.sampling.use_beam_search else None,
        )

    def failed(self, error: InferdError, now: float) -> Output:
        return Output.ended(self.id, self.end("failed", now, error))

    def cancelled(self, now: float) -> Output:
        return Output.ended(self.id, self.end("cancelled", now))

    def end(self, outcome: str, now: float, error: InferdError | None = None) -> End:
        """Usage counts what was computed, however the request ended. To be called after its sequences have stopped."""
        arrived = self.prepared.request.arrived_at
        num_prompt = self._num_prompt_computed if outcome != "done" else len(self.prepared.prompt_ids)

        def after(at: float | None) -> float | None:
            return None if at is None else at - arrived

        return End(
            outcome,  # type: ignore[arg-type]
            Usage(num_prompt, self.num_generated, min(self.num_cached, num_prompt)),
            Timings(
                tokenized=self.prepared.tokenized_s,
                scheduled=after(self.scheduled_at),
                first_token=after(self.first_token_at),
                finished=now - arrived,
            ),
            error.to_failure() if error is not None else None,
            self.num_preemptions,
        )

    @property
    def _num_prompt_computed(self) -> int:
        """Tokens of the prompt that were computed or found in the prefix cache; all for a resumed answer."""
        num_prompt = len(self.prepared.prompt_ids)
        if self.num_generated:
            return num_prompt
        return min(num_prompt, max([choice.sequence.num_reached for choice in self.choices.values()], default=0))
