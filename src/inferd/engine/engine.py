"""The LLM engine: a backend whose step is schedule, speculate, run, commit, sample.

Owns a request in the worker from ``add`` to its end. Every method except ``prepare``, ``tokenize`` and ``detokenize``
belongs to the loop thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from inferd import clock, ends
from inferd.backend import FOR_EVER, Wait
from inferd.checkpoints.text.tokenizer import Owner
from inferd.engine.answer_facts import AnswerFacts
from inferd.engine.answer_scoring import AnswerScoring
from inferd.engine.beam_search import BeamSearch
from inferd.engine.generation import Choice, Generation
from inferd.engine.hand_over.link import EngineLink
from inferd.engine.masks import MaskMaker
from inferd.engine.native_decoder import Layers
from inferd.engine.paused_step import MOST_BEFORE, PausedStep
from inferd.engine.prepare import Prepared, Preparer
from inferd.engine.runner import Runner
from inferd.engine.sampler import Drawn, Sampled, Sampler, SampleRow
from inferd.engine.scheduling.accounting import Account, Ledger
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler, Slice, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.speculation import Speculation
from inferd.engine.step_clock import StepClock
from inferd.errors import InferdError, InvalidRequest, Overloaded
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import LoadedAdapter
from inferd.native.masks import RowMasks
from inferd.structured.guide import INVALID_ANSWER, Guide
from inferd.types import (
    AdapterState,
    AdapterUse,
    Chat,
    GenerateRequest,
    Handed,
    Link,
    ModelInfo,
    Output,
    StepStats,
    TextPrompt,
)

_MOST_CERTAIN = 64  # tokens that are appended to a sequence at once because nothing else may follow
_PROMPT_LOGITS_ROWS = 64  # rows of prompt logits held at a time: 64 x 151,936 x 4 bytes = 39 MB


class Engine:
    """Implements ``inferd.backend.PreparingBackend`` for generative models."""

    def __init__(
        self,
        *,
        info: ModelInfo,
        preparer: Preparer,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        speculation: Speculation | None = None,
        facts: bool = False,
    ) -> None:
        """``facts``: ends have facts, as the model's drift is watched."""
        self._info = info
        self._preparer = preparer
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._speculation = speculation
        self._has_facts = facts
        self._generations: dict[str, Generation] = {}
        self._beams: dict[str, BeamSearch] = {}
        self._scorings: dict[str, AnswerScoring] = {}
        self._guides: dict[Sequence, Guide] = {}  # of the constrained answers
        self._mask_maker = MaskMaker(preparer.vocabulary)
        self._num_invalid = 0  # of the step under way: answers that do not satisfy their schema
        self._num_unmatched = 0  # of it: calls that do not match a schema that is not enforced
        self._cancelled: list[Generation] = []  # their ends are sent with the next step
        # Continuations of answers that were already complete; their ends are sent with the next step.
        self._completed: list[Generation] = []
        self._with_deadline: set[str] = set()
        self._next_deadline = math.inf  # none of them is due before
        self._current: Step | None = None  # the step being computed
        self._has_arrived: Callable[[], bool] | None = None  # None: steps do not pause
        self._paused: PausedStep | None = None
        self._outputs: list[Output] = []  # of the step so far; outputs left over from a failed step come first
        self._clock = StepClock()
        self._ledger = Ledger()
        self.link: EngineLink | None = None  # None: it takes part in no hand-over

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pool(self) -> BlockPool:
        return self._scheduler.pool

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of work that makes later steps shorter; False where there is none."""
        return self._runner.cache.touch_more() > 0

    def open_link(
        self, link: Link, run_on_loop: Callable[[Callable[[], None]], None], report: Callable[[Handed], None]
    ) -> None:
        """Take part in hand-overs from now on, as ``HandsOver`` says. Called before the first step."""
        self.link = EngineLink(link, self._scheduler, self._runner.contents(), self._info.fingerprint, report)
        if link.role != "prefill":
            self.link.listen(run_on_loop)

    # -- any thread -------------------------------------------------------------------------

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
        return self._preparer.prepare(request, wait=wait)

    def tokenize(
        self, prompt: Chat | TextPrompt, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]:
        ids = self._preparer.tokenize(prompt, Owner(tenant))
        return ids, [self._preparer.tokenizer.token_string(i) for i in ids] if want_strings else None

    def set_adapters(self, wanted: Mapping[str, str]) -> dict[str, AdapterState]:
        """Load and unload adapters until they are those of ``wanted`` (name -> source); their states."""
        adapters = self._preparer.adapters
        return {} if adapters is None else adapters.apply(wanted)

    def detokenize(self, token_ids: list[int]) -> str:
        size = self._info.vocab_size
        bad = next((t for t in token_ids if not 0 <= t < size), None)
        if bad is not None:
            raise InvalidRequest(f"tokens contains id {bad}, but this model's ids are 0 to {size - 1}.", param="tokens")
        return self._preparer.tokenizer.decode(token_ids, skip_special_tokens=False)

    # -- the loop thread --------------------------------------------------------------------

    def add(self, work: Prepared, now: float) -> None:
        prepared = work
        request, sampling = prepared.request, prepared.sampling
        if request.id in self._generations:
            raise ends.duplicate(request.id)
        account = Account(self._ledger, request.arrived_at + prepared.tokenized_s)
        generation = Generation(prepared, self._preparer.tokenizer, self._info.max_model_len, account)
        if self._has_facts:
            parsing = prepared.parsing
            generation.facts = AnswerFacts(has_tools=parsing is not None and parsing.tools is not None)
        if generation.deadline_at is not None and generation.deadline_at <= now:
            raise ends.too_late(request, has_begun=False)
        root = Sequence(
            request_id=request.id,
            index=0,
            prompt_ids=prepared.prompt_ids,
            sampling=sampling,
            seed=prepared.seed,
            salt=prepared.salt,
            adapter=prepared.adapter,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
            arrived_at=request.arrived_at,
            # Logits of every prompt token are requested, so every token must be computed.
            use_cache=(sampling.prompt_logprobs is None or request.resumes is not None) and not request.is_copy,
            is_copy=request.is_copy,
            account=account,
        )
        choice = self._open_choice(generation, root)
        self._generations[request.id] = generation
        if request.resumes is not None:
            try:
                generation.resume(root, request.resumes.token_ids)
                failure = choice.failure()
                if failure is not None:
                    raise failure
            except InferdError:
                self._end_generation(generation)
                raise
            if choice.finish_reason is not None:  # the answer is complete; only its end was not sent
                self._completed.append(generation)
                return
        failure = self._append_certain(generation, choice) if generation.may_begin_at_once else None
        if failure is not None:
            self._num_invalid += failure.code == INVALID_ANSWER
            self._end_generation(generation)
            raise failure
        if generation.deadline_at is not None:
            self._with_deadline.add(request.id)
            self._next_deadline = min(self._next_deadline, generation.deadline_at)
        if sampling.use_beam_search and sampling.max_tokens:
            self._beams[request.id] = BeamSearch(prepared, root, self._scheduler)
        if prepared.answers is not None:
            scoring = AnswerScoring(prepared.answers, root, self._scheduler, prepared.eos_ids)
            self._scorings[request.id] = generation.scoring = scoring
        self._scheduler.add(root)
        if self.link is not None:
            self.link.arrive(request, root)

    def cancel(self, request_id: str) -> None:
        generation = self._generations.get(request_id)
        if generation is not None:
            self._end_generation(generation)
            self._cancelled.append(generation)

    def due(self, now: float) -> float | None:
        has_work = self._scheduler.has_work or (self.link is not None and self.link.has_blocks_to_give)
        return now if self._cancelled or self._completed or has_work else None

    def pause_steps_when(self, has_arrived: Callable[[], bool]) -> None:
        if self._runner.can_pause:
            self._has_arrived = has_arrived
            self._scheduler.may_pause = True

    def step(self, now: float) -> tuple[list[Output], StepStats | None]:
        self._clock = StepClock()
        self._outputs += self._expire(now) + self._end_cancelled(now)
        if self._paused is not None:
            return self._step_beside(self._paused, now)
        self._current = step = self._scheduler.schedule()
        if self.link is not None and not step.slices:
            self.link.make_room(now)
        if self._scheduler.dropped:
            self._end_dropped(now)
        if step.slices:
            with torch.inference_mode():
                self._compute(step, now)
        return self._end_step(step)

    def _step_beside(self, paused: PausedStep, now: float) -> tuple[list[Output], StepStats | None]:
        """Compute first tokens that are due before the rest of a step that has paused; else go on with it."""
        first = self._scheduler.schedule_before(paused.step) if paused.num_before < MOST_BEFORE else Step()
        with torch.inference_mode():
            if first.slices:
                self._current = first
                paused.num_before += 1
                self._compute(first, now, before=paused)
                return self._end_step(first)
            self._current = paused.step
            self._clock = paused.clock
            self._clock.resume()
            self._go_on(paused, now, clock.now())
        return self._end_step(paused.step, paused)

    def _end_step(self, step: Step, paused: PausedStep | None = None) -> tuple[list[Output], StepStats | None]:
        """``paused``: the step, where it had paused."""
        self._current = None
        if self._paused is not None and self._paused.step is step:
            return self._take_outputs(), None
        step_s = 0.0 if paused is None else paused.seconds
        return self._take_outputs(), self._stats(step, step_s)

    def _compute(self, step: Step, now: float, before: PausedStep | None = None) -> None:
        """``before``: a step that has paused, and that the computed one precedes."""
        began = clock.now()
        self._mark_scheduled(step, now)
        if before is None:
            self._add_guesses(step)
            batch = self._prepare(step)
            layers = self._pausable(step, batch)
            if layers is not None:
                self._go_on(PausedStep(step, layers, self._clock), now, began)
                return
        else:
            batch = self._prepare(step)
        self._ledger.begin(step, now)
        hidden = self._runner.compute(batch)
        self._clock.lap("forward")
        # A token's time is when it has been computed, not when the step began.
        self._finish(step, hidden, lambda: now + clock.now() - began)
        self._record_cost(step, clock.now() - began, has_guesses=before is None)

    def _pausable(self, step: Step, batch: FlatBatch) -> Layers | None:
        """The step's layers, where it may pause."""
        if self._has_arrived is None or self.link is not None or not self._scheduler.is_pausable(step):
            return None
        return self._runner.begin(batch)

    def _go_on(self, paused: PausedStep, now: float, began: float) -> None:
        """Compute the rest of a step, until it pauses. ``began``: when ``now`` was."""
        assert self._has_arrived is not None
        step = paused.step
        self._ledger.begin(step, now, paused.seconds)
        hidden = paused.layers.advance(self._has_arrived)
        self._clock.lap("forward")
        if hidden is None:
            computed_s = clock.now() - began
            paused.seconds += computed_s
            self._ledger.pause(computed_s)
            self._paused = paused
            return
        self._paused = None
        self._finish(step, hidden, lambda: now + clock.now() - began)
        computed_s = clock.now() - began
        before_s, paused.seconds = paused.seconds, paused.seconds + computed_s
        self._record_cost(step, computed_s, before_s, has_guesses=not paused.num_before)

    def _finish(self, step: Step, hidden: Tensor, read_clock: Callable[[], float]) -> None:
        """What follows the layers: commit, score, sample."""
        self._commit(step)
        self._score_prompts(step, hidden)
        self._extend_sequences(step, hidden, read_clock)
        if self._scorings:
            self._score_answers(step, hidden, read_clock)

    def abort_step(self, error: Exception, now: float) -> list[Output]:
        """``step`` raised: end the requests that were in it and keep the others. Outputs from before the error are
        returned too."""
        step, self._current = self._current, None
        self._ledger.drop()
        if self._paused is not None and (step is None or step is self._paused.step):
            self._paused = None
        failure = error if isinstance(error, InferdError) else ends.model_failed()
        ids = {part.sequence.request_id for part in step.slices} if step is not None else set(self._generations)
        outputs = self._take_outputs() + self._end_cancelled(now)
        for request_id in sorted(ids & self._generations.keys()):
            generation = self._generations[request_id]
            self._end_generation(generation)
            outputs.append(generation.failed(failure, now))
        return outputs

    def halt(self, now: float) -> list[Output]:
        for request_id in tuple(self._generations):
            self.cancel(request_id)
        return self._take_outputs() + self._end_cancelled(now)

    def close(self) -> None:
        for generation in list(self._generations.values()):
            self._end_generation(generation)
        self._preparer.close()
        self._runner.close()

    # -- parts of the step ------------------------------------------------------------------

    def _end_cancelled(self, now: float) -> list[Output]:
        cancelled, self._cancelled = self._cancelled, []
        completed, self._completed = self._completed, []
        outputs = [generation.cancelled(now) for generation in cancelled]
        for generation in completed:
            if self._generations.get(generation.id) is generation:
                self._end_generation(generation)
                outputs.append(_all_news(generation, now))
        return outputs

    def _expire(self, now: float) -> list[Output]:
        expired: list[Output] = []
        if now < self._next_deadline:
            return expired
        self._next_deadline = math.inf
        for generation in [self._generations[request_id] for request_id in self._with_deadline]:
            deadline_at = generation.deadline_at
            assert deadline_at is not None
            if deadline_at <= now:
                self._end_generation(generation)
                has_begun = generation.scheduled_at is not None
                error = ends.too_late(generation.prepared.request, has_begun=has_begun)
                expired.append(generation.failed(error, now))
            else:
                self._next_deadline = min(self._next_deadline, deadline_at)
        return expired

    def _end_dropped(self, now: float) -> None:
        """End the copies of requests that the scheduler has dropped for lack of memory or of a slot."""
        dropped, self._scheduler.dropped = self._scheduler.dropped, {}
        for request_id in dropped:
            generation = self._generations.get(request_id)
            if generation is not None:
                self._fail(generation, Overloaded("A copy takes no memory from requests.", code="copy_dropped"), now)

    def _mark_scheduled(self, step: Step, now: float) -> None:
        for part in step.slices:
            generation = self._generations[part.sequence.request_id]
            if generation.scheduled_at is None:
                generation.scheduled_at = now
                generation.num_cached = part.sequence.num_cached
                if self.link is not None:  # what another worker computed for it was not cached
                    generation.num_cached -= self.link.scheduled(part.sequence)
        self._clock.lap("schedule")

    def _add_guesses(self, step: Step) -> None:
        if self._speculation is not None:
            self._speculation.extend(step, self._guides)
        self._clock.lap("speculate")

    def _prepare(self, step: Step) -> FlatBatch:
        """The step as arrays; only the hidden states of its ``_output_rows`` are needed."""
        batch = self._runner.prepare(step, _output_rows(step))
        self._clock.lap("batch")
        return batch

    def _commit(self, step: Step) -> None:
        self._scheduler.commit(step)
        if self.link is not None:
            self.link.give_computed()
        self._clock.lap("schedule")

    def _record_cost(self, step: Step, seconds: float, before_s: float = 0.0, *, has_guesses: bool) -> None:
        """``before_s``: of the step's parts before its last pause. ``has_guesses``: guesses were made for the step, and
        the time since then is its own."""
        self._clock.lap("text")
        self._scheduler.record_cost(step, before_s + seconds)
        self._ledger.commit(seconds)
        if self._speculation is not None and has_guesses:
            self._speculation.record_step()

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _score_prompts(self, step: Step, hidden: Tensor) -> None:
        """Log-probabilities of prompt tokens, for requests that want them. Row p predicts token p + 1."""
        row = 0
        for part in step.slices:
            sequence, sampling = part.sequence, part.sequence.sampling
            generation = self._generations[sequence.request_id]
            known = generation.prompt_logprobs
            if (
                sampling.prompt_logprobs is not None
                and generation.prepared.request.resumes is None  # sent before, with the first part
                and len(known) < sequence.num_prompt
            ):
                first = len(known) - 1  # position whose logits are wanted next
                last = min(part.start + part.count, sequence.num_prompt - 1)
                for at in range(first, last, _PROMPT_LOGITS_ROWS):
                    end = min(at + _PROMPT_LOGITS_ROWS, last)
                    logits = self._runner.logits(hidden, [row + p - part.start for p in range(at, end)])
                    scored = self._sampler.prompt_logprobs(
                        logits, sequence.tokens[at + 1 : end + 1], sampling.prompt_logprobs
                    )
                    known += [generation.describe(s, sampling.prompt_logprobs) for s in scored]
            row += part.count

    def _score_answers(self, step: Step, hidden: Tensor, read_clock: Callable[[], float]) -> None:
        """Log-probabilities of the answers that requests score, and the next parts of these answers."""
        computed: list[tuple[Slice, AnswerScoring]] = []
        rows: list[int] = []
        tokens: list[list[int]] = []  # of each row: those that are wanted
        places: list[tuple[AnswerScoring, Sequence, int]] = []
        row = 0
        for part in step.slices:
            scoring = self._scorings.get(part.sequence.request_id)
            if scoring is not None:
                computed.append((part, scoring))
                for at, wanted in scoring.wanted(part):
                    rows.append(row + at - part.start)
                    tokens.append(wanted)
                    places.append((scoring, part.sequence, at))
            row += part.count
        failed: dict[str, InferdError] = {}
        for first in range(0, len(rows), _PROMPT_LOGITS_ROWS):
            chosen = slice(first, first + _PROMPT_LOGITS_ROWS)
            logits = self._runner.logits(hidden, rows[chosen])
            found = self._sampler.logprobs(logits, tokens[chosen])
            for (scoring, sequence, at), logprobs in zip(places[chosen], found, strict=True):
                if isinstance(logprobs, InferdError):
                    failed[sequence.request_id] = logprobs
                else:
                    scoring.record(sequence, at, logprobs)
        self._clock.lap("logits")
        for part, scoring in computed:
            if part.catches_up and part.sequence.request_id not in failed:
                scoring.advance(part.sequence)
        now = read_clock()
        for request_id in dict.fromkeys(part.sequence.request_id for part, _ in computed):
            generation = self._generations[request_id]
            if request_id in failed:
                self._end_generation(generation)
                self._outputs.append(generation.failed(failed[request_id], now))
            elif self._scorings[request_id].is_done:
                self._outputs.append(self._finish_unsampled(generation, now))

    def _extend_sequences(self, step: Step, hidden: Tensor, read_clock: Callable[[], float]) -> None:
        """Sample every sequence that has caught up, and collect the outputs."""
        rows: list[int] = []  # of hidden; a sequence with guesses has one row more than guesses
        plain: list[Slice] = []
        plain_rows: list[int] = []  # their places in ``rows``
        beams: list[tuple[int, Sequence]] = []
        scored: list[Generation] = []  # nothing to generate: max_tokens is 0
        at = 0
        for part in step.slices:
            at += part.count
            sequence = part.sequence
            if not part.catches_up or sequence.request_id in self._scorings:
                continue
            generation = self._generations[sequence.request_id]
            if sequence.sampling.max_tokens == 0:
                scored.append(generation)
                continue
            if sequence.request_id in self._beams:
                beams.append((len(rows), sequence))
                rows.append(at - 1)
                continue
            first = len(rows)
            rows += range(at - 1 - len(part.draft), at)
            plain.append(part)
            for child in self._fork(part, generation):
                rows.append(at - 1)
                plain.append(Slice(child, at - 1, 1))
            plain_rows += range(first, len(rows))
        logits = self._runner.logits(hidden, rows) if rows else hidden
        self._clock.lap("logits")
        now = read_clock()
        for generation in scored:
            self._outputs.append(self._finish_unsampled(generation, now))
        if not rows:
            return
        changed: dict[str, list[Choice]] = {}
        if plain:
            self._sample(plain, logits[plain_rows] if beams else logits, changed, now)
        for row, sequence in beams:
            self._extend_beam(sequence, logits[row : row + 1], now)
        for request_id, choices in changed.items():
            changed_one = self._generations.get(request_id)
            if changed_one is None:
                continue
            if changed_one.is_finished:
                self._end_generation(changed_one)
            output = changed_one.news(choices, now)
            if output is not None:
                self._outputs.append(output)

    def _fork(self, part: Slice, generation: Generation) -> list[Sequence]:
        """Once the prompt of a request with several choices is computed, the other choices share it."""
        sampling = generation.prepared.sampling
        if generation.has_forked or sampling.use_beam_search or sampling.width == 1:
            return []
        generation.has_forked = True
        children = [self._scheduler.fork(part.sequence, index) for index in range(1, sampling.width)]
        for child in children:
            self._open_choice(generation, child)
        return [child for child in children if child.is_running]

    def _sample(self, parts: Seq[Slice], logits: Tensor, changed: dict[str, list[Choice]], now: float) -> None:
        """Draw a token for each of the slices' rows, and append to each sequence the tokens that follow.

        Tokens are drawn without the grammars' masks; inside of a text of JSON, without those that end answers. A drawn
        token that a constraint forbids is drawn again under its mask. The row after a guessed token counts only where
        that token was drawn before it. A draw depends on nothing but the tokens before it, so these are the tokens that
        single steps would have given.
        """
        rows = [
            self._sample_row(part.sequence, part.draft[:count])
            for part in parts
            for count in range(len(part.draft) + 1)
        ]
        drawn = self._sampler.draw(logits, rows, self._unended(parts) if self._guides else None)
        self._clock.lap("sample")
        unsure: list[_Unsure] = []
        first = 0
        for part in parts:
            num_right = self._append_drawn(part, drawn, first, 0, changed, now)
            if num_right is not None:
                unsure.append(_Unsure(part, first, num_right, self._guides[part.sequence]))
            first += 1 + len(part.draft)
        while unsure:
            unsure = self._append_again(unsure, drawn, changed, now)

    def _unended(self, parts: Seq[Slice]) -> RowMasks | None:
        """The mask of the rows whose answers cannot end, as far as their guides know without a mask."""
        goes_on: list[bool] = []
        for part in parts:
            guide = self._guides.get(part.sequence)
            goes_on += [False] * (1 + len(part.draft)) if guide is None else guide.goes_on(part.draft)
        return self._mask_maker.unended(goes_on)

    def _append_again(
        self, unsure: Seq[_Unsure], drawn: Drawn, changed: dict[str, list[Choice]], now: float
    ) -> list[_Unsure]:
        """Draw the next token of these sequences again where it is forbidden, and go on. Returns those that are left.

        A token that ends answers, where the answer must go on, is first drawn again from all others: that needs no
        mask of the grammar, and many models would end answers that a form makes longer.
        """
        self._clock.lap("text")
        rows = [one.first + one.num_right for one in unsure]
        guides = [
            None if one.guide.ends_too_early(drawn.token_id(row)) else one.guide
            for one, row in zip(unsure, rows, strict=True)
        ]
        masks = self._mask_maker.compute(guides)
        self._ledger.wait_for_masks(self._clock.lap("masks"))
        drawn.apply(rows, masks, ["unended" if guide is None else "masked" for guide in guides])
        self._clock.lap("sample")
        rest: list[_Unsure] = []
        for one, guide in zip(unsure, guides, strict=True):
            num_right = self._append_drawn(
                one.part, drawn, one.first, one.num_right, changed, now, is_masked=guide is not None
            )
            if num_right is not None:
                rest.append(one._replace(num_right=num_right))
        return rest

    def _sample_row(self, sequence: Sequence, tentative: Seq[int]) -> SampleRow:
        """How a sequence is sampled after guessed tokens."""
        prepared = self._generations[sequence.request_id].prepared
        said = sequence.output_ids
        said += tentative
        return SampleRow(
            sequence.sampling,
            prepared.prompt_ids,
            said,
            sequence.seed,
            sequence.index,
            prepared.stop_ids if prepared.grammar is None else frozenset(),  # its masks leave them out
            prepared.bad_words,
            prepared.watermark,
        )

    def _append_drawn(
        self,
        part: Slice,
        drawn: Drawn,
        first: int,
        num_right: int,
        changed: dict[str, list[Choice]],
        now: float,
        *,
        is_masked: bool = False,
    ) -> int | None:
        """Append drawn tokens to a sequence, up to the first that differs from the guess.

        ``first``: the row of ``drawn`` before the guesses. ``num_right``: the guesses that were drawn and appended
        before. Returns None, or the number of such guesses before a token that may be forbidden. ``is_masked``: the
        first token is allowed.
        """
        sequence = part.sequence
        generation = self._generations.get(sequence.request_id)
        if generation is None:  # a sibling failed just now
            return None
        choice = generation.choices[sequence.index]
        guide, was_wrong = choice.guide, False
        while choice.finish_reason is None:  # it is not, where all of the answer was certain
            row = first + num_right
            sampled = drawn.results[row]
            if isinstance(sampled, InferdError):
                # A mask that took too much work is empty, so that no token could be drawn.
                failure = None if guide is None else guide.failure()
                self._fail(generation, failure or sampled, now)
                return None
            if guide is not None and not is_masked and not guide.vouches_for(sampled.token_id):
                return num_right
            is_masked = False
            token_id = choice.decide(sampled.token_id, generation.prepared)
            if token_id != sampled.token_id:
                sampled = drawn.scored(row, token_id)
            generation.push(sequence, sampled)
            failure = choice.failure()
            if failure is not None:
                self._fail(generation, failure, now)
                return None
            if num_right == len(part.draft):
                break
            if token_id != part.draft[num_right]:
                was_wrong = True
                break
            num_right += 1
        failure = self._append_certain(generation, choice)
        if failure is not None:
            self._fail(generation, failure, now)
            return None
        if generation.first_token_at is None:
            generation.first_token_at = now
        changed.setdefault(generation.id, []).append(choice)
        if part.draft:
            self._scheduler.accept_guesses(part, num_right)
            generation.account.num_accepted += num_right
            if self._speculation is not None:
                self._speculation.record_outcome(part, num_right, was_wrong)
        if choice.finish_reason is not None:
            generation.num_preemptions += sequence.num_preemptions
            self._remove_sequence(sequence)
        return None

    def _append_certain(self, generation: Generation, choice: Choice) -> InferdError | None:
        """Append the tokens that the answer's form leaves no choice for. They need no logits, so the next step computes
        them as it computes a prompt. Returns why the answer cannot go on."""
        if not choice.takes_certain or (token_id := choice.certain()) is None:
            return None
        sequence = choice.sequence
        for _ in range(_MOST_CERTAIN):
            generation.push(sequence, Sampled(choice.decide(token_id, generation.prepared)))
            if sequence.account is not None:
                sequence.account.num_accepted += 1
            failure = choice.failure()
            if failure is not None:
                return failure
            following = choice.certain()
            if following is None:
                break
            token_id = following
        return None

    def _fail(self, generation: Generation, error: InferdError, now: float) -> None:
        self._num_invalid += error.code == INVALID_ANSWER
        self._end_generation(generation)
        self._outputs.append(generation.failed(error, now))

    def _finish_unsampled(self, generation: Generation, now: float) -> Output:
        for choice in generation.choices.values():
            choice.finish_reason = "length"
        self._end_generation(generation)
        return _all_news(generation, now)

    # -- beam search ------------------------------------------------------------------------

    def _extend_beam(self, sequence: Sequence, logits: Tensor, now: float) -> None:
        beams, generation = self._beams[sequence.request_id], self._generations[sequence.request_id]
        (best,) = self._sampler.prompt_logprobs(logits, [0], beams.candidates_per_beam)
        num_extended = beams.extend(sequence, list(best.top))
        if not num_extended:
            return
        generation.first_token_at = generation.first_token_at or now
        generation.num_generated += num_extended
        if beams.is_done:
            self._end_generation(generation)
            beams.play_best(generation)
            self._outputs.append(_all_news(generation, now))

    # -- books ------------------------------------------------------------------------------

    def _open_choice(self, generation: Generation, sequence: Sequence) -> Choice:
        choice = generation.open_choice(sequence)
        if choice.guide is not None:
            self._guides[sequence] = choice.guide
        return choice

    def _remove_sequence(self, sequence: Sequence) -> None:
        self._guides.pop(sequence, None)
        self._scheduler.remove(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)

    def _end_generation(self, generation: Generation) -> None:
        """End a request: its sequences leave the scheduler and their blocks are free at once."""
        if self._paused is not None and self._paused.holds(generation.id):
            self._paused = None  # its blocks may be given away: the other requests compute the same tokens again
        if self.link is not None:
            self.link.end(generation.id)
        for choice in generation.choices.values():
            generation.num_preemptions += choice.sequence.num_preemptions if choice.finish_reason is None else 0
            self._remove_sequence(choice.sequence)
        beams = self._beams.pop(generation.id, None)
        if beams is not None:
            beams.close()
        scoring = self._scorings.pop(generation.id, None)
        if scoring is not None:
            scoring.close()
            generation.num_preemptions += scoring.num_preemptions
        if self._generations.pop(generation.id, None) is not None:
            guides = [choice.guide for choice in generation.choices.values() if choice.guide is not None]
            self._num_unmatched += sum(guide.num_unmatched for guide in guides)
        self._with_deadline.discard(generation.id)
        self._sampler.forget(generation.prepared.prompt_ids)

    def _stats(self, step: Step, step_s: float) -> StepStats:
        """``step_s``: what it took, where that is not the time of one call."""
        pool, tokenizer = self._scheduler.pool, self._preparer.tokenizer
        num_invalid, self._num_invalid = self._num_invalid, 0
        num_unmatched, self._num_unmatched = self._num_unmatched, 0
        guessed = self._speculation if step.slices else None
        return StepStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            step_tokens=step.num_tokens,
            step_sequences=len(step.slices),
            step_s=step_s,
            num_preempted=step.num_preempted,
            prefix_query_tokens=step.prefix_query_tokens,
            prefix_hit_tokens=step.prefix_hit_tokens,
            num_drafts=guessed.num_drafts if guessed is not None else 0,
            drafted_tokens=guessed.num_drafted if guessed is not None else 0,
            accepted_tokens=guessed.num_accepted if guessed is not None else 0,
            tokenizer_cache_hits=tokenizer.cache_hits,
            tokenizer_cache_queries=tokenizer.cache_queries,
            tokenize_s=self._preparer.tokenize_s,
            parts=self._clock.parts(),
            num_invalid=num_invalid,
            num_unmatched=num_unmatched,
            adapters=self._adapter_use(),
            utilization=self._ledger.utilization(step, step.fullness),
        )

    def _adapter_use(self) -> AdapterUse:
        adapters = self._preparer.adapters
        num_loaded = 0 if adapters is None else adapters.num_loaded
        names: tuple[set[str], set[str]] = set(), set()
        for sequence in self._scheduler.sequences if num_loaded else ():
            if isinstance(sequence.adapter, LoadedAdapter):
                names[sequence.is_running].add(sequence.adapter.name)
        waiting, running = names
        return AdapterUse(num_loaded, tuple(sorted(running)), tuple(sorted(waiting)))


class _Unsure(NamedTuple):
    """A sequence whose next token was drawn, and of which only a mask tells whether it may follow."""

    part: Slice
    first: int  # its first row of those that are sampled
    num_right: int  # its guesses before that token, which were drawn
    guide: Guide


def _all_news(generation: Generation, now: float) -> Output:
    """The output of a generation whose choices have all ended."""
    output = generation.news(list(generation.choices.values()), now)
    assert output is not None
    return output


def _output_rows(step: Step) -> list[int]:
    """The rows whose hidden states are needed: the last ones of slices that catch up, and all rows of prompts that are
    scored."""
    rows: list[int] = []
    at = 0
    for part in step.slices:
        at += part.count
        if part.sequence.sampling.prompt_logprobs is not None:
            rows += range(at - part.count, at)
        elif part.sequence.scored_from is not None:
            rows += range(at - part.count + max(part.sequence.scored_from - 1 - part.start, 0), at)
        elif part.catches_up:
            rows += range(at - 1 - len(part.draft), at)
    return rows
