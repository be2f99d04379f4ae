"""What the time of each request in the engine was spent on. Pure: no tensor, no clock.

    account = Account(ledger, ready_at)     a request may be computed from now on
    ledger.begin(step, at)                  the tokens of a step are chosen
    account.close(now)                      the request ends, within a step or between two
    ledger.commit(seconds)                  the step is over

The seconds of a step are divided by the usual cost of its tokens (``usual``): what the request's own tokens cost alone,
and what the tokens of other requests add. Time above the usual cost of all of them is ``slowed``.

The loop's work between two steps is a part of the second one, for every request that was in the engine meanwhile. It is
divided as the step is. What makes it longer than usual is ``slowed`` too.

Most requests compute one token in a step, as in the step before. They are *steady*: a step computes nothing for them.
The ledger keeps cumulative sums over the steps, and an account reads them when its request is no longer steady.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from inferd.engine.scheduling.usual import SLOW, UsualCost
from inferd.types import EngineTimes

LEAST_PAUSE_S = 0.001  # a shorter pause between two steps is never unusual


class Computed(Protocol):
    """The part of a sequence (``sequence.Sequence``) that accounts read."""

    @property
    def account(self) -> Account | None: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_reached(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def priority(self) -> int: ...


class Slice(Protocol):
    """One sequence's part of a step (``scheduler.Slice``)."""

    @property
    def sequence(self) -> Computed: ...
    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def draft(self) -> tuple[int, ...]: ...
    @property
    def catches_up(self) -> bool: ...


class Step(Protocol):
    """The tokens of a step (``scheduler.Step``)."""

    @property
    def slices(self) -> Sequence[Slice]: ...


class Sums(NamedTuple):
    """Sums over all steps so far, in seconds."""

    at: float  # when the last step ended
    num_steps: int
    fixed: float  # the part of a step that does not depend on its tokens
    one_decode: float  # one decode in each step
    one_context: float  # one token of context in each step
    growing_context: float  # as many tokens of context in each step as there were steps before it
    decodes: float  # all decodes, with guessed tokens and the context of all requests
    prefill: float
    slowed: float
    masks: float  # waiting for masks


class Account:
    """The times of one request, of all its sequences together. ``ready_at``: when it was prepared."""

    __slots__ = (
        "_again",
        "_catches_up",
        "_closed",
        "_context",
        "_crowding",
        "_decode",
        "_decodes",
        "_guesses",
        "_has_begun",
        "_is_decoding",
        "_joins",
        "_ledger",
        "_mark",
        "_masks",
        "_num_preempted",
        "_num_steps",
        "_others_prefill",
        "_preempted",
        "_prefill",
        "_prefill_shared",
        "_prompt",
        "_ready_at",
        "_recomputed",
        "_schedule_wait",
        "_slowed",
        "_speculation",
        "num_accepted",
        "num_preempted",
        "steady_step",
        "step",
    )

    def __init__(self, ledger: Ledger, ready_at: float) -> None:
        self._ledger = ledger
        self._ready_at = ready_at
        self._mark = ledger.sums  # everything before is entered
        self._closed: EngineTimes | None = None
        self._has_begun = False  # it was in a step
        self._is_decoding = False  # its prompt is computed
        self._joins = False  # it was outside the batch until the present step
        self._num_preempted = 0  # preemptions whose time is entered
        self.num_preempted = 0  # of all its sequences
        self.num_accepted = 0  # guesses of the present step that were right
        self.steady_step = -1  # the last step in which it was steady; below: it is not
        self.step = -1  # the last step in which its tokens were counted:
        self._decodes = self._prompt = self._guesses = self._again = 0
        self._context = 0  # the tokens before its tokens of that step; while it is steady: of the next one
        self._catches_up = False
        self._schedule_wait = self._prefill = self._prefill_shared = self._decode = 0.0
        self._crowding = self._others_prefill = self._preempted = self._recomputed = 0.0
        self._speculation = self._slowed = self._masks = 0.0
        self._num_steps = 0

    def close(self, now: float) -> EngineTimes:
        """The times of the request, which ends at ``now``. Idempotent."""
        if self._closed is None:
            self._ledger.leave(self, now)
            spent = self._schedule_wait + self._prefill + self._prefill_shared + self._decode + self._crowding
            spent += self._others_prefill + self._preempted + self._recomputed + self._speculation + self._slowed
            spent += self._masks
            self._closed = EngineTimes(
                schedule_wait=self._schedule_wait,
                prefill=self._prefill,
                prefill_shared=self._prefill_shared,
                decode=self._decode,
                crowding=self._crowding,
                others_prefill=self._others_prefill,
                preempted=self._preempted,
                recomputed=self._recomputed,
                masks=self._masks,
                speculation=self._speculation,
                slowed=self._slowed,
                rest=max(now - self._ready_at - spent, 0.0),
                num_steps=self._num_steps,
            )
        return self._closed

    # -- called by the ledger ----------------------------------------------------------------

    def count(self, part: Slice, step: int, at: float, sums: Sums) -> bool:
        """Count a slice of a step that begins at ``at``. Whether it is the request's first."""
        is_first = self.step != step
        if is_first:
            self.step = step
            self.enter_absence(at, sums)
            self._decodes = self._prompt = self._guesses = self._again = self._context = 0
            self._catches_up = False
        self._context += part.start
        guesses = len(part.draft)
        count = part.count - guesses
        sequence = part.sequence
        is_again = part.start < sequence.num_reached and sequence.num_preemptions > 0
        if count == 1:
            self._decodes += 1
        elif self._is_decoding and part.start >= sequence.num_prompt and not is_again:
            self._decodes += 1
            guesses += count - 1  # tokens that were appended without being drawn
        else:
            self._prompt += count
        self._guesses += guesses
        if is_again:
            self._again += min(count, sequence.num_reached - part.start)
        self._catches_up = self._catches_up or part.catches_up
        return is_first

    def count_first(self, context: int) -> None:
        """It was taken for steady in this step, and has another slice."""
        self._decodes += 1
        self._context += context

    def count_steady(self) -> None:
        """It computes one token in this step, as in the step before."""
        self._decodes = 1
        self._prompt = self._guesses = self._again = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Its decodes, tokens of prefill and guesses in the present step."""
        return self._decodes, self._prompt, self._guesses

    @property
    def joins(self) -> bool:
        """Whether it was outside the batch until the present step began."""
        return self._joins

    @property
    def may_be_steady(self) -> bool:
        """Whether its next step is likely to be one decode."""
        return self._catches_up and not self._guesses and self._decodes + (self._prompt > 0) == 1

    def enter_absence(self, at: float, sums: Sums) -> None:
        """Enter the time before ``at`` in which none of it was computed."""
        mark = self._mark
        self._joins = not self._has_begun or self.num_preempted != self._num_preempted
        if not self._has_begun:
            self._has_begun = True
            self._schedule_wait = max(at - self._ready_at, 0.0)
        elif self._joins:
            self._preempted += max(at - mark.at, 0.0)
        elif mark is not sums:  # running, and left out of steps: other requests used them
            others = sums.fixed - mark.fixed + sums.decodes - mark.decodes
            prefill = sums.prefill - mark.prefill
            if self._is_decoding:
                self._crowding += others
                self._others_prefill += prefill
            else:
                self._prefill_shared += others + prefill
            self._slowed += sums.slowed - mark.slowed
            self._masks += sums.masks - mark.masks
        self._num_preempted = self.num_preempted
        self._mark = sums

    def enter_steady(self, sums: Sums) -> None:
        """Enter the steps since the mark, in each of which it computed one token."""
        mark = self._mark
        num_steps = sums.num_steps - mark.num_steps
        decodes = sums.decodes - mark.decodes
        # Its context grew by one token in each step, from the one of the first.
        context_before = self._context - mark.num_steps
        decode = sums.one_decode - mark.one_decode + context_before * (sums.one_context - mark.one_context)
        decode = min(decode + sums.growing_context - mark.growing_context, decodes)
        self._context += num_steps
        self._decode += sums.fixed - mark.fixed + decode
        self._crowding += decodes - decode
        self._others_prefill += sums.prefill - mark.prefill
        self._slowed += sums.slowed - mark.slowed
        self._masks += sums.masks - mark.masks
        self._num_steps += num_steps
        self._mark = sums

    def enter_step(self, divided: Divided, sums: Sums) -> None:
        """Enter the present step. ``sums``: at its end."""
        num_accepted, self.num_accepted = self.num_accepted, 0
        self._enter(divided, num_accepted)
        self._num_steps += 1
        self._is_decoding = self._is_decoding or self._catches_up
        self._context += self._decodes + self._prompt
        self._joins = False
        self._mark = sums

    def enter_part(self, divided: Divided, sums: Sums) -> None:
        """Enter a part of the present step, of which nothing is known yet but its time. ``sums``: at its end."""
        self._enter(divided, 0)
        self._mark = sums

    def _enter(self, divided: Divided, num_accepted: int) -> None:
        fixed, prefill, decode, context, num_decodes, num_prompt, num_guesses, num_context, slowed, masks = divided
        own = self._decodes + self._prompt
        again = self._again / own if own else 0.0
        fresh = 1.0 - again
        # An estimate while it is steady: another of its sequences may have decoded in the place of the counted one.
        own_context = min(self._context, num_context)
        others_decode = decode * (num_decodes - self._decodes) + prefill * (num_guesses - self._guesses)
        others_decode += context * (num_context - own_context)
        others_prefill = prefill * (num_prompt - self._prompt)
        alone = fixed + decode * self._decodes + prefill * self._prompt + context * own_context
        guessed = prefill * self._guesses
        if again:
            self._recomputed += again * (alone + guessed + others_decode + others_prefill)
        if self._is_decoding:
            saved = num_accepted * (fixed + decode)
            self._decode += fresh * alone + saved
            self._speculation += fresh * guessed - saved
            self._crowding += fresh * others_decode
            self._others_prefill += fresh * others_prefill
        else:
            self._prefill += fresh * (alone + guessed)
            self._prefill_shared += fresh * (others_decode + others_prefill)
        self._slowed += slowed
        self._masks += masks


class Divided(NamedTuple):
    """The seconds of a step: without tokens, for a token of prefill, for a decode, for a token of context; its tokens;
    what was too much; what it waited for masks."""

    fixed: float
    prefill: float
    decode: float
    context: float
    num_decodes: int
    num_prompt: int
    num_guesses: int
    num_context: int
    slowed: float
    masks: float


class Ledger:
    """The steps of one engine. ``sums``: at the end of the last step. ``fixed_share``: the part of the last step that
    usually does not depend on its tokens; 0 before that is known."""

    __slots__ = (
        "_apart",
        "_at",
        "_before_s",
        "_context",
        "_is_open",
        "_masks_s",
        "_num_decodes",
        "_num_guesses",
        "_num_prompt",
        "_number",
        "_pause_s",
        "_paused_s",
        "_steady",
        "_usual",
        "fixed_share",
        "sums",
    )

    def __init__(self) -> None:
        self._usual = UsualCost()
        self.fixed_share = 0.0
        self.sums = Sums(0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._masks_s = 0.0  # of the present step
        self._steady: set[Account] = set()
        self._apart: list[Account] = []  # in the present step, and not steady
        self._number = 0
        self._pause_s = 0.0  # the usual one between two steps
        self._paused_s = 0.0  # the ordinary part of the pause before the present step
        self._is_open = False
        self._at = 0.0
        self._before_s = 0.0  # of the present step: its parts before ``_at``
        self._num_decodes = self._num_prompt = self._num_guesses = self._context = 0

    def begin(self, step: Step, at: float, before_s: float = 0.0) -> None:
        """The tokens of a step that begins at ``at`` are chosen, guesses included.

        ``before_s``: of a step that has paused and goes on: the seconds of its parts so far.
        """
        last = self._number
        number = self._number = last + 1
        apart = self._apart
        had_work = self._steady or any(account.step == last for account in apart)
        self._paused_s = self._enter_pause(max(at - self.sums.at, 0.0)) if had_work else 0.0
        sums = self.sums
        apart.clear()
        num_apart = context = 0
        for part in step.slices:
            account = part.sequence.account
            assert account is not None, "the engine computes for requests alone"
            context += part.start
            if account.steady_step == last and part.count == 1:
                account.steady_step = number
                continue
            num_apart += 1
            was_counted = account.steady_step == number  # it was steady, and has a second slice
            if account in self._steady:
                self._steady.discard(account)
                account.enter_steady(sums)
                account.steady_step = -1
            if account.count(part, number, at, sums):
                apart.append(account)
                if was_counted:
                    num_apart += 1
                    account.count_first(next(one.start for one in step.slices if one.sequence.account is account))
        num_steady = num_decodes = len(step.slices) - num_apart
        if num_steady < len(self._steady):
            self._leave_out(number)
        num_prompt = num_guesses = 0
        for account in apart:
            decodes, prompt, guesses = account.counts
            num_decodes += decodes
            num_prompt += prompt
            num_guesses += guesses
        self._num_decodes, self._num_prompt, self._num_guesses = num_decodes, num_prompt, num_guesses
        self._context, self._at, self._is_open = context, at, True
        self._masks_s = 0.0
        self._before_s = before_s

    def utilization(self, step: Step, fullness: float) -> float:
        """The part of the step's time that steps of ``fullness`` 1 would have needed for its work, batch work left out.

        Only the part of the time that does not depend on the tokens is shared with what a fuller step would compute.
        """
        others = 1.0
        batch = [part for part in step.slices if part.sequence.priority > 0]
        if batch:
            of_batch, of_all = self._cost_of(batch), self._cost_of(step.slices)
            others = 1.0 - of_batch / of_all if of_all > 0.0 else float(len(batch) < len(step.slices))
        return others * (1.0 - self.fixed_share) + fullness * self.fixed_share

    def _cost_of(self, slices: Sequence[Slice]) -> float:
        """What the tokens of slices usually add to the seconds of a step; in tokens, before that is known."""
        usual = self._usual
        of_tokens = sum([usual.decode if part.count == 1 else usual.prefill * part.count for part in slices])
        return of_tokens + usual.context * sum([part.start for part in slices])

    def wait_for_masks(self, seconds: float) -> None:
        """The present step waited so long for masks, and so did all requests in it."""
        self._masks_s += seconds

    def pause(self, seconds: float) -> None:
        """The step goes on after others, and its part so far took ``seconds``."""
        self._is_open = False
        number = self._number
        for account in [account for account in self._steady if account.steady_step == number]:
            self._steady.discard(account)
            account.enter_steady(self.sums)
            account.steady_step = -1
            account.step = number
            account.count_steady()
            self._apart.append(account)
        divided = self._divide(seconds, self._paused_s, is_whole=False)
        of_joining = self._divide(seconds, 0.0, is_whole=False)
        self.sums = sums = self._sums(divided, self._at + seconds, num_steps=0)
        for account in self._apart:
            if account.step == number:
                account.enter_part(of_joining if account.joins else divided, sums)

    def commit(self, seconds: float) -> None:
        """The step is over, and took ``seconds`` since it began, or went on."""
        self._is_open = False
        divided = self._divide(seconds, self._paused_s)
        of_joining = self._divide(seconds, 0.0) if self._paused_s else divided
        now = self._at + seconds
        self.fixed_share = self._usual.fixed / self._usual.plane_s
        self._usual.record(
            self._num_prompt + self._num_guesses,
            self._num_decodes,
            self._context,
            self._before_s + seconds - divided.masks,
            now,
            is_slow=divided.slowed > 0.0,
        )
        self.sums = sums = self._sums(divided, now, num_steps=1)
        number = self._number
        for account in self._apart:
            if account.step == number:  # else it has ended
                account.enter_step(of_joining if account.joins else divided, sums)
                if account.may_be_steady:
                    account.steady_step = number
                    self._steady.add(account)

    def _sums(self, divided: Divided, now: float, num_steps: int) -> Sums:
        """The sums at ``now``, after a step or a part of one."""
        fixed, prefill, decode, context, num_decodes, num_prompt, num_guesses, num_context, slowed, masks = divided
        last = self.sums
        return Sums(
            now,
            last.num_steps + num_steps,
            last.fixed + fixed,
            last.one_decode + decode,
            last.one_context + context,
            last.growing_context + context * last.num_steps,
            last.decodes + decode * num_decodes + prefill * num_guesses + context * num_context,
            last.prefill + prefill * num_prompt,
            last.slowed + slowed,
            last.masks + masks,
        )

    def drop(self) -> None:
        """The step failed: its time is entered for no request."""
        self._is_open = False

    def leave(self, account: Account, now: float) -> None:
        """The account's request ends at ``now``. Enter what is not entered."""
        is_steady = account in self._steady
        if is_steady:
            self._steady.discard(account)
            account.enter_steady(self.sums)
        if not self._is_open or self._number not in (account.step, account.steady_step):
            account.enter_absence(now, self.sums)
            return
        divided = self._divide(now - self._at, 0.0 if account.joins else self._paused_s)
        if is_steady:
            account.count_steady()
        account.enter_step(divided, self.sums)
        account.step = -1

    def _enter_pause(self, seconds: float) -> float:
        """So many seconds passed between the last step and this one, in which the engine had work. Those that are not
        unusual."""
        usual_s = self._pause_s
        most_s = 2.0 * usual_s + LEAST_PAUSE_S
        ordinary_s = seconds
        if seconds > most_s:
            self.sums = self.sums._replace(slowed=self.sums.slowed + seconds - usual_s)
            seconds, ordinary_s = most_s, usual_s
        self._pause_s += (seconds - usual_s) / 16
        return ordinary_s

    def _leave_out(self, number: int) -> None:
        """Some steady requests are not in this step."""
        for account in [account for account in self._steady if account.steady_step != number]:
            self._steady.discard(account)
            account.enter_steady(self.sums)
            account.steady_step = -1

    def _divide(self, seconds: float, paused_s: float, *, is_whole: bool = True) -> Divided:
        """The seconds of the present step, or of its part so far, and of the pause before it, by the usual cost of its
        tokens. ``is_whole``: what comes with its earlier parts was the whole step, which may have been slow."""
        usual = self._usual
        usual_s = usual.find(self._num_prompt + self._num_guesses, self._num_decodes, self._context)
        slowed = 0.0
        masks = min(self._masks_s, seconds)
        seconds -= masks
        step_s = self._before_s + seconds
        if is_whole and usual_s is not None and step_s > SLOW * usual_s:
            slowed = min(step_s - usual_s, seconds)
            seconds -= slowed
        scale = (paused_s + seconds) / usual.plane_s
        return Divided(
            scale * usual.fixed,
            scale * usual.prefill,
            scale * usual.decode,
            scale * usual.context,
            self._num_decodes,
            self._num_prompt,
            self._num_guesses,
            self._context,
            slowed,
            masks,
        )
