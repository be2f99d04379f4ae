"""One request from sampled tokens to text: choices, stops, log-probabilities, usage.

Knows tokens and text. Does not know the scheduler or tensors. The engine passes samples in and sends the returned
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from inferd.checkpoints.answers.parser import AnswerParser, Parts
from inferd.checkpoints.text.detokenizer import Detokenizer
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.answer_facts import AnswerFacts
from inferd.engine.answer_scoring import AnswerScoring
from inferd.engine.prepare import Prepared
from inferd.engine.sampler import Sampled
from inferd.engine.scheduling.accounting import Account
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.stop import StopBuffer
from inferd.engine.watermark import NAME as WATERMARK
from inferd.errors import InferdError, InvalidRequest
from inferd.structured.guide import Guide
from inferd.types import (
    CallDelta,
    Delta,
    DeltaKind,
    End,
    Facts,
    FinishReason,
    Output,
    PromptReport,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
    joined_calls,
)


class _Said(NamedTuple):
    """Text, reasoning or calls that another part of the answer follows."""

    text: str
    reasoning: str
    calls: tuple[CallDelta, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True, eq=False)
class Choice:
    """One answer in progress: what has been generated and not yet been sent."""

    index: int
    sequence: Sequence
    detokenizer: Detokenizer
    stops: StopBuffer
    parser: AnswerParser | None  # None: the answer is plain text
    guide: Guide | None  # None: the answer may be any text
    takes_certain: bool  # tokens that the guide leaves no choice for follow at once
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    before: list[_Said] = field(default_factory=list)  # what comes before the text, the reasoning or the calls
    kind: DeltaKind = ""  # which of the three was added last
    num_said: int = 0  # of the tokens, that came with it
    num_reasoning: int = 0  # tokens
    closing: list[int] = field(default_factory=list)  # tokens that must come next, to close the reasoning
    is_whole: bool = False  # it ended where its constraint is satisfied

    def decide(self, token_id: int, prepared: Prepared) -> int:
        """The token that follows where the model chose this one: another one where the reasoning must be closed, or the
        answer would not fit into its tokens. To be pushed next."""
        if self.closing:
            token_id = self.closing[0]
        return token_id if self.guide is None or not self.guide.must_fit else self.fit(token_id, prepared)

    def fit(self, token_id: int, prepared: Prepared) -> int:
        """The token, or another one where the answer would not fit into its tokens. To be pushed next."""
        if self.guide is None:
            return token_id
        return self.guide.fit(token_id, (prepared.sampling.max_tokens or 0) - self.sequence.num_outputs)

    def push(self, token_id: int, prepared: Prepared, max_model_len: int) -> None:
        """Add a generated token (already appended to the sequence) and decide whether the answer ends."""
        self.token_ids.append(token_id)
        if self.parser is None:
            self._take(token_id, prepared, max_model_len)
            return
        was_reasoning = self.parser.is_reasoning
        self._take(token_id, prepared, max_model_len)
        self.num_reasoning += was_reasoning or self.parser.is_reasoning
        if self.closing and self.closing[0] == token_id:
            del self.closing[0]
        else:
            self.closing.clear()
            self.close_reasoning(prepared)
        if self.finish_reason is not None:
            for parts in self.parser.finish():
                self._add(parts)

    def _take(self, token_id: int, prepared: Prepared, max_model_len: int) -> None:
        is_complete = self.guide is not None and self.guide.push(token_id)
        sampling = prepared.sampling
        count = self.sequence.num_outputs
        may_stop = count >= sampling.min_tokens
        if (may_stop or self.guide is not None) and token_id in prepared.eos_ids:
            self.is_whole = self.guide is not None
            if sampling.include_stop_str_in_output or not sampling.skip_special_tokens:
                self._say(self.detokenizer.push(token_id), may_stop=False)
            self._finish("stop", None)
            return
        if may_stop and token_id in sampling.stop_token_ids:
            if sampling.include_stop_str_in_output:
                self._say(self.detokenizer.push(token_id), may_stop=False)
            self._finish("stop", token_id)
            return
        text = self.detokenizer.push(token_id)
        if self.guide is not None and self.parser is None:
            self.guide.hear(text)
        self._say(text, may_stop)
        if is_complete and self.stops.matched is None:
            self.is_whole = True
            self._finish("stop", None)
            return
        if self.stops.matched is None and (
            count >= (sampling.max_tokens or 0) or len(self.sequence.tokens) >= max_model_len
        ):
            self._finish("length", None)

    def close_reasoning(self, prepared: Prepared) -> None:
        """Force the tokens that close the reasoning, when its budget is used up."""
        parsing = prepared.parsing
        if parsing is None or parsing.budget is None or self.parser is None:
            return
        if self.parser.is_reasoning and self.num_reasoning >= parsing.budget:
            self.closing = list(parsing.close_ids)

    def certain(self) -> int | None:
        """The only token that may follow; None: there is a choice, or the answer is over."""
        if self.guide is None or self.finish_reason is not None or self.closing:
            return None
        return self.guide.certain()

    def failure(self) -> InferdError | None:
        """Why the answer must not be sent on: its constraint cannot be computed, or its text does not satisfy it."""
        if self.guide is None or not (self.guide.is_over or self.is_whole):  # a state that failed is over
            return None
        return self.guide.failure() or (self.guide.check() if self.is_whole else None)

    def skip_sent(self) -> None:
        """Drop what has been added so far: another worker sent it before."""
        self.text, self.token_ids, self.reasoning, self.calls = [], [], [], []
        self.before, self.kind, self.num_said = [], "", 0

    def _say(self, text: str, may_stop: bool) -> None:
        if text:
            self._show(self.stops.push(text) if may_stop else self.stops.push_unchecked(text))
        if self.stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.stops.matched

    def _finish(self, reason: FinishReason, stop_reason: int | None) -> None:
        """The answer ends: text that the detokenizer and the stop buffer held back is added."""
        self._say(self.detokenizer.flush(), may_stop=True)
        if self.finish_reason is None:
            self._show(self.stops.flush())
            self.finish_reason, self.stop_reason = reason, stop_reason

    def _show(self, text: str) -> None:
        if self.parser is None:
            self.text.append(text)
        elif text:
            for parts in self.parser.feed(text):
                self._add(parts)

    def _add(self, parts: Parts) -> None:
        if self.guide is not None:
            self.guide.hear(parts.text)
            for part in parts.calls:
                self.guide.hear_call(part)
        if parts.calls:
            self._go_to("calls")
            self.calls += parts.calls
        elif parts.reasoning:
            self._go_to("reasoning")
            self.reasoning.append(parts.reasoning)
        else:
            self._go_to("text")
            self.text.append(parts.text)

    def _go_to(self, kind: DeltaKind) -> None:
        """The answer goes on with text, reasoning or calls. Tokens without a text so far belong to what comes."""
        if self.kind and self.kind != kind:
            count = self.num_said
            ids, logprobs = tuple(self.token_ids[:count]), tuple(self.logprobs[:count])
            said = _Said("".join(self.text), "".join(self.reasoning), joined_calls(self.calls), ids, logprobs)
            self.before.append(said)
            self.text, self.reasoning, self.calls = [], [], []
            del self.token_ids[:count], self.logprobs[:count]
        self.kind = kind
        self.num_said = len(self.token_ids)

    def news(self, index: int, want_logprobs: bool) -> list[Delta]:
        """The new text and tokens since the last call, as choice ``index`` of the answer."""
        deltas = [
            Delta(index, s.text, s.token_ids, s.logprobs if want_logprobs else None, None, None, s.reasoning, s.calls)
            for s in self.before
        ]
        last = Delta(
            index,
            "".join(self.text),
            tuple(self.token_ids),
            tuple(self.logprobs) if want_logprobs else None,
            self.finish_reason,
            self.stop_reason,
            "".join(self.reasoning),
            joined_calls(self.calls),
        )
        self.text, self.token_ids, self.logprobs, self.reasoning, self.calls = [], [], [], [], []
        self.before, self.kind, self.num_said = [], "", 0
        deltas.append(last)
        return deltas


@dataclass(slots=True, eq=False)
class Generation:
    """A request that runs."""

    prepared: Prepared
    tokenizer: Tokenizer
    max_model_len: int
    account: Account
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
    scoring: AnswerScoring | None = None  # of a request that scores answers
    facts: AnswerFacts | None = None  # None: the model's drift is not watched

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

    @property
    def may_begin_at_once(self) -> bool:
        """Whether certain tokens may come before anything is computed: there are no logits and no other choices that
        are computed from the prompt alone."""
        sampling = self.prepared.sampling
        return sampling.max_tokens != 0 and sampling.width == 1 and sampling.prompt_logprobs is None

    def open_choice(self, sequence: Sequence) -> Choice:
        sampling, parsing = self.prepared.sampling, self.prepared.parsing
        grammar = self.prepared.grammar
        choice = Choice(
            sequence.index,
            sequence,
            self.tokenizer.stream(
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                prompt_ids=self.prepared.prompt_ids,
                shown_ids=parsing.shown_ids if parsing is not None else frozenset(),
            ),
            StopBuffer(sampling.stop, sampling.include_stop_str_in_output),
            parsing.parser() if parsing is not None else None,
            grammar.guide(math.inf if sampling.ignore_eos else sampling.min_tokens, self.prepared.stop_ids)
            if grammar is not None
            else None,
            grammar is not None and self.prepared.may_skip_logits,
        )
        choice.close_reasoning(self.prepared)
        self.choices[sequence.index] = choice
        return choice

    def resume(self, sequence: Sequence, token_ids: Seq[int]) -> None:
        """Restore the only choice's state after these tokens had been sent: detokenizer, stop strings and counts.

        The tokens are not sent again. Raises InvalidRequest where the answer cannot have them.
        """
        choice = self.choices[sequence.index]
        for token_id in token_ids:
            if choice.finish_reason is None:
                if choice.fit(token_id, self.prepared) != token_id:
                    raise InvalidRequest(
                        f"The answer to be continued has token {token_id}, which this request does not lead to. Send "
                        "the request again.",
                        param="resumes",
                    )
                sequence.tokens.append(token_id)
                self.num_generated += 1
                choice.push(token_id, self.prepared, self.max_model_len)
        choice.skip_sent()
        self.has_reported = True
        if self.facts is not None:
            self.facts.is_whole = False

    def push(self, sequence: Sequence, sampled: Sampled) -> Choice:
        """Append a token to a sequence and add it to its choice."""
        choice = self.choices[sequence.index]
        sequence.tokens.append(sampled.token_id)
        sequence.cumulative_logprob += sampled.logprob
        self.num_generated += 1
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
            for choice in changed:
                deltas += choice.news(choice.index, want_logprobs)
        elif finished:
            for i, choice in enumerate(self._best()):
                deltas += choice.news(i, want_logprobs)
        if not deltas and not finished:
            return None
        if self.facts is not None:
            self.facts.hear(deltas)
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
            prepared.num_prompt,
            self.num_cached,
            tuple(prepared.prompt_ids) if wants_ids else None,
            tuple(self.prompt_logprobs) if wants_logprobs else None,
            self.tokenizer.decode(prepared.prompt_ids, prepared.sampling.skip_special_tokens) if wants_ids else None,
            prepared.seed if prepared.sampling.width == 1 and not prepared.sampling.use_beam_search else None,
            self.scoring.trie.scores() if self.scoring is not None else None,
            prepared.unenforced,
            WATERMARK if prepared.watermark is not None else "",
        )

    def failed(self, error: InferdError, now: float) -> Output:
        return Output.ended(self.id, self.end("failed", now, error))

    def cancelled(self, now: float) -> Output:
        return Output.ended(self.id, self.end("cancelled", now))

    def end(self, outcome: str, now: float, error: InferdError | None = None) -> End:
        """Usage counts what was computed, however the request ended. To be called after its sequences have stopped."""
        arrived = self.prepared.request.arrived_at
        num_prompt = self._num_prompt_computed if outcome != "done" else self.prepared.num_prompt

        def after(at: float | None) -> float | None:
            return None if at is None else at - arrived

        return End(
            outcome,  # type: ignore[arg-type]
            Usage(
                num_prompt,
                self.num_generated,
                min(self.num_cached, num_prompt),
                sum(choice.num_reasoning for choice in self.choices.values()),
            ),
            Timings(
                tokenized=self.prepared.tokenized_s,
                scheduled=after(self.scheduled_at),
                first_token=after(self.first_token_at),
                finished=now - arrived,
                begun=self.prepared.begun_s,
            ),
            error.to_failure() if error is not None else None,
            self.num_preemptions,
            self.account.close(now),
            facts=self._facts() if outcome == "done" else None,
        )

    def _facts(self) -> Facts | None:
        if self.facts is None or self.prepared.answers is not None:
            return None
        guide = self._best()[0].guide
        return self.facts.facts(None if guide is None else guide.num_unmatched)

    @property
    def _num_prompt_computed(self) -> int:
        """Tokens of the prompt that were computed or found in the prefix cache; all for a resumed answer."""
        num_prompt = len(self.prepared.prompt_ids)
        if self.num_generated:
            return num_prompt
        if self.scoring is not None and self.scoring.num_read:
            return self.scoring.num_read
        return min(num_prompt, max([choice.sequence.num_reached for choice in self.choices.values()], default=0))
