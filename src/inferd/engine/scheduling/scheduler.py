"""Decides which tokens a step computes. Pure over its tables: no tensor, no clock, no I/O.

Each sequence has tokens known and tokens computed; a step lets computed catch up with known under a token budget. A
decode has a gap of one token, a new prompt a gap of its length, and a preempted sequence a gap of all its tokens.
Continuous batching, chunked prefill, prefix hits and preemption by recomputing all follow from this rule.

    schedule() -> Step           decide, and allocate the blocks that the step writes to
    schedule_before(step)        the same for first tokens that are computed while a step with batch work has paused
    speculate(part, ...)         add guessed tokens to a decode, in blocks that are free
    commit(step)                 the step was computed: advance ``num_computed``, publish full blocks
    accept_guesses(part, ...)    the first guessed tokens were right and count as computed

Sequences are ordered by class, then by the tenant's received tokens for its weight, then by arrival (``fairness``). The
last in this order is preempted first.

- When slots or blocks are short, a sequence displaces running ones of a worse class. A sequence that was displaced
  ``MAX_PREEMPTIONS`` times precedes all others and keeps what it has.
- Every ``AGING_EVERY``-th admission is that of the longest-waiting sequence of a worse class, which is not displaced.
  If it is held up for four times as long, no other sequence is admitted before it: no class starves.
- Batch work never delays a first token of another class for long (``batch_guard``). While one is due, steps leave batch
  work out, except every ``SHARE_EVERY``-th. Otherwise a step's batch work is limited while other classes are active,
  because a new arrival waits for the step in progress. Within these limits batch sequences take turns: with R of them
  running, each is computed at least once in SHARE_EVERY * R steps.

A **copy** of a request, which a rollout makes for comparison, is batch work that takes nothing from requests. It uses
free blocks alone, never cached ones, and neither reads nor fills the prefix cache. It is dropped, not preempted, when
it cannot be admitted, when free blocks end, and when a request wants a slot or a block that is not free. So nothing is
evicted while a copy holds a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferd.config import SchedulerConfig
from inferd.engine.scheduling.batch_guard import LEAST_BATCH, SHARE_EVERY, BatchGuard
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.cost import StepCost
from inferd.engine.scheduling.fairness import BATCH, OUTPUT_COST, Rank, Shares, WaitingQueue
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import class_index

MAX_PREEMPTIONS = 4
AGING_EVERY = 16
LEAST_CHUNK = 16  # tokens of prefill that every step may compute, whatever the objective
_OBJECTIVE_SHARE = 0.9  # of the objective: a margin for the error of the fit

_MANY = 2**31


@dataclass(slots=True)
class Slice:
    """One sequence's part of a step: tokens ``start`` to ``start + count`` are computed.

    ``draft``: guessed tokens after the known ones, counted in ``count``. They exist for this step only: their rows show
    which of them are right.
    """

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def catches_up(self) -> bool:
        """Whether all known tokens are computed after the step, so that the last row's logits are needed."""
        return self.start + self.count - len(self.draft) == len(self.sequence.tokens)

    @property
    def token_ids(self) -> list[int]:
        """What is computed, [count]."""
        ids = self.sequence.tokens[self.start : self.start + self.count]
        return [*ids, *self.draft] if self.draft else ids


@dataclass(slots=True)
class Step:
    """What to compute now."""

    slices: list[Slice] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to), before computing
    num_preempted: int = 0
    best_preempted: int = BATCH + 1  # the best class among them
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    fullness: float = 1.0  # the part of the sequences, the tokens or the blocks that all but batch work takes

    @property
    def num_tokens(self) -> int:
        return sum(part.count for part in self.slices)


@dataclass(slots=True)
class _Budget:
    """What is left of a step: tokens in all, tokens of prefill, and batch work, in tokens of prefill."""

    tokens: int
    prefill: int = _MANY
    batch: float = _MANY
    batch_limit: float = _MANY  # of batch work where no first token is due
    decode_cost: float = 1.0  # of one batch decode
    is_short: bool = False  # a gap of other work than batch work was not granted as a whole

    def grant(self, gap: int, *, is_batch: bool, is_decode: bool = False) -> int:
        """How much of a gap may be computed."""
        most = min(gap, self.tokens, _MANY if is_decode else self.prefill)
        self.is_short |= most < gap and not is_batch
        if is_batch:
            # The last one may exceed the budget, so that one decode is computed whatever it costs.
            most = min(most, max(int(self.batch), 1)) if self.batch > 0 else 0
        return most

    def spend(self, count: int, gap: int, *, is_batch: bool) -> None:
        self.tokens -= count
        if gap > 1:
            self.prefill -= count
        if is_batch:
            self.batch -= count if gap > 1 else self.decode_cost


class Scheduler:
    """Owns the waiting and running sequences and their blocks.

    ``tpot_s``: how long a decode step should take at most. Prefill beside decodes is cut to fit, once ``record_cost``
    has measured steps. None: prefill fills the token budget.
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, block_size: int, *, tpot_s: float | None = None
    ) -> None:
        self.config = config
        self.pool = pool
        self.block_size = block_size
        self.tpot_s = tpot_s
        self.cost = StepCost()
        self.running: list[Sequence] = []  # in order of class and arrival
        self._shares = [Shares() for _ in range(BATCH + 1)]
        self._waiting = WaitingQueue(self._shares)
        self._ranks: dict[Sequence, Rank] = {}
        self._num_running = [0] * (BATCH + 1)  # by class
        self._arrivals = 0
        self._steps = 0
        self._admissions = 0  # that overtook a worse class, since the last of the worst that waited
        self._guard = BatchGuard()
        self._copies: dict[Sequence, None] = {}  # sequences of copies, waiting and running
        self.may_pause = False  # whether steps with batch work may pause, as ``schedule_before`` needs
        self.dropped: dict[str, None] = {}  # ids of copies that were dropped; the caller ends them

    # -- membership -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._ranks)

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        rank = (class_index(sequence.priority), sequence.arrived_at, self._arrivals, sequence.index)
        self._ranks[sequence] = rank
        self._shares[rank[0]].enter(sequence.tenant)
        self._waiting.push(sequence, rank)
        if sequence.is_copy:
            self._copies[sequence] = None

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new sequence with the same tokens as ``parent``, which shares its blocks.

        Where no slot is free it waits, and later finds the shared part in the prefix cache.
        """
        child = Sequence(
            request_id=parent.request_id,
            index=index,
            prompt_ids=parent.tokens[: parent.num_prompt],
            sampling=parent.sampling,
            seed=parent.seed,
            salt=parent.salt,
            adapter=parent.adapter,
            tenant=parent.tenant,
            weight=parent.weight,
            priority=parent.priority,
            arrived_at=parent.arrived_at,
            use_cache=not parent.is_copy,
            is_copy=parent.is_copy,
            account=parent.account,
        )
        if child.is_copy:
            self._copies[child] = None
        child.tokens = list(parent.tokens)
        child.num_cached = parent.num_cached
        child.num_charged = parent.num_charged
        child.is_pinned = parent.is_pinned
        child.cumulative_logprob = parent.cumulative_logprob
        rank = self._ranks[child] = (*self._ranks[parent][:3], index)
        self._shares[rank[0]].enter(child.tenant)
        if parent.is_running and len(self.running) < self.config.max_num_seqs:
            self.pool.share(parent.blocks)
            child.blocks = list(parent.blocks)
            child.num_computed = parent.num_computed
            child.cache_keys = list(parent.cache_keys)
            child.num_hashed = parent.num_hashed
            self._run(child)
        else:
            self._waiting.push(child, rank)
        return child

    @property
    def num_spare_slots(self) -> int:
        """Sequences that could run beside those that do, where none waits."""
        return 0 if len(self._waiting) else self.config.max_num_seqs - len(self.running)

    @property
    def num_reservable(self) -> int:
        """Blocks that may be taken without preempting a sequence, and without evicting for a copy."""
        return self.pool.num_free if self._copies else self.pool.num_available

    def redirect(self, sequence: Sequence, length: int, tokens: list[int], scored_from: int | None) -> None:
        """Let ``tokens`` follow the first ``length`` known tokens of a running sequence, instead of what followed.

        They are charged as a prompt is. ``scored_from``: of the sequence from now on.
        """
        assert sequence.num_computed >= length, "only what is computed is kept"
        size = self.block_size
        kept = -(-length // size)
        self.pool.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        del sequence.cache_keys[length // size :]
        sequence.num_computed = length
        sequence.num_hashed = min(sequence.num_hashed, kept)
        sequence.num_reached = min(sequence.num_reached, length)
        del sequence.tokens[length:]
        sequence.tokens += tokens
        sequence.scored_from = scored_from
        place = self._ranks[sequence][0]
        self._shares[place].charge(sequence.tenant, len(tokens) / sequence.weight)
        sequence.num_charged = len(sequence.tokens)
        if place != BATCH:
            self._guard.record_prefill(len(tokens))

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and release its blocks. Idempotent."""
        rank = self._ranks.pop(sequence, None)
        if rank is None:
            return
        self._copies.pop(sequence, None)
        self._shares[rank[0]].leave(sequence.tenant)
        if rank[0] != BATCH:
            self._guard.record_length(len(sequence.tokens))
        if sequence.is_running:
            self._halt(sequence, rank)
        else:
            self._waiting.discard(sequence)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Those that wait and those that run."""
        return self._ranks

    # -- the step ---------------------------------------------------------------------------

    def schedule(self) -> Step:
        self._steps += 1
        step = Step()
        budget = self._budget()
        self._continue_running(step, budget)
        self._admit_waiting(step, budget)
        if not step.slices and self._ranks:
            if budget.batch < budget.batch_limit:  # nothing else can use the step
                budget.batch = budget.batch_limit
                self._continue_running(step, budget)
                self._admit_waiting(step, budget)
            if not step.slices and len(self._waiting):
                self._break_deadlock(step)
        step.fullness = self._fullness(step, budget)
        return step

    def _fullness(self, step: Step, budget: _Budget) -> float:
        """Of what is taken, the part that is largest; 1 where sequences wait, or had to leave tokens to later steps.

        Without batch work, which waits for all others, and fills every step as far as there is any.
        """
        if len(self._waiting) > self._waiting.counts[BATCH] or budget.is_short:
            return 1.0
        config = self.config
        num_running, num_used = len(self.running), self.pool.num_used
        num_tokens = config.max_num_batched_tokens - budget.tokens
        if self._num_running[BATCH]:
            others = [sequence for sequence in self.running if self._ranks[sequence][0] != BATCH]
            num_running = len(others)
            num_used = len(set().union(*[sequence.blocks for sequence in others]))  # those of a common prefix once
            num_tokens = sum([part.count for part in step.slices if self._ranks[part.sequence][0] != BATCH])
        return max(
            num_running / config.max_num_seqs,
            num_tokens / config.max_num_batched_tokens,
            num_used / self.pool.num_blocks,
        )

    def is_pausable(self, step: Step) -> bool:
        """Whether other classes may want a part of the time of this step, which has batch work."""
        return (
            self.may_pause
            and self._guard.is_active(self._steps)
            and any(self._ranks[part.sequence][0] == BATCH for part in step.slices)
        )

    def schedule_before(self, paused: Step) -> Step:
        """First tokens of other classes than batch, to be computed before a step that has paused goes on; none of them:
        no slices. Requests of the paused step are left alone, and nothing is preempted."""
        step = Step()
        budget = _Budget(self.config.max_num_batched_tokens)
        if self.tpot_s is not None and self.cost.is_known:
            budget.prefill = self._prefill_within_objective(self.tpot_s)
        held = {part.sequence.request_id for part in paused.slices}
        for sequence in self.running:
            gap = len(sequence.tokens) - sequence.num_computed
            if self._ranks[sequence][0] != BATCH and gap and sequence.num_computed < sequence.num_prompt:
                count = 0 if sequence.request_id in held else budget.grant(gap, is_batch=False)
                if count > 0 and self._allocate_blocks(sequence, count, step):
                    step.slices.append(Slice(sequence, sequence.num_computed, count))
                    budget.spend(count, gap, is_batch=False)
        while budget.tokens > 0 and (best := self._waiting.best_class) < BATCH:
            are_others_waiting = any(self._waiting.counts[best + 1 :])
            if are_others_waiting and self._admissions >= 4 * AGING_EVERY:
                break  # it is the turn of one of them
            waiting = self._waiting.best()
            assert waiting is not None
            if waiting.request_id in held or not self._admit(waiting, step, budget, may_displace=False):
                break
            self._admissions += are_others_waiting
        step.fullness = self._fullness(step, budget)
        return step

    def speculate(self, part: Slice, tokens: tuple[int, ...]) -> None:
        """Compute ``tokens`` as if they followed the known tokens of ``part``, which catches up.

        Fewer are added where free blocks end: no sequence is preempted for a guess.
        """
        sequence = part.sequence
        num_left = self.num_reservable
        room = (len(sequence.blocks) + num_left) * self.block_size - part.start - part.count
        part.draft = tokens[: max(room, 0)]
        part.count += len(part.draft)
        missing = -(-(part.start + part.count) // self.block_size) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)

    def commit(self, step: Step) -> None:
        for part in step.slices:
            self._advance(part.sequence, part.start + part.count - len(part.draft))

    def accept_guesses(self, part: Slice, num_right: int) -> None:
        """The first ``num_right`` guesses, known by now, are computed as well; blocks that only the others needed are
        released."""
        sequence = part.sequence
        # A last token that ended the sequence would not have been computed.
        self._advance(sequence, min(sequence.num_computed + num_right, len(sequence.tokens) - 1))
        kept = -(-sequence.num_computed // self.block_size)
        self.pool.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]

    def record_cost(self, step: Step, seconds: float) -> None:
        """What computing a step took."""
        decodes = sum(1 for part in step.slices if part.count - len(part.draft) == 1)
        self.cost.record(step.num_tokens - decodes, decodes, seconds)

    def _budget(self) -> _Budget:
        budget = _Budget(self.config.max_num_batched_tokens)
        num_batch = self._num_running[BATCH] + self._waiting.counts[BATCH]
        self._guard.record_step(self._steps, len(self._ranks) - num_batch)
        if self.tpot_s is not None and self.cost.is_known:
            budget.prefill = self._prefill_within_objective(self.tpot_s)
        if num_batch and self._guard.is_active(self._steps):
            budget.decode_cost = self.cost.decode_in_prefill
            fixed = self.cost.fixed_in_prefill
            # Requests that decode wait for the whole step, which an objective bounds.
            may_be_long = self.may_pause and self.tpot_s is None
            budget.batch_limit = self._guard.limit(self._steps, fixed, may_pause=may_be_long)
            budget.batch = self._guard.allowance(
                self._steps, budget.batch_limit, fixed, first_token_due=self._is_first_token_due()
            )
        return budget

    def _prefill_within_objective(self, tpot_s: float) -> int:
        gaps = ((sequence, len(sequence.tokens) - sequence.num_computed) for sequence in self.running)
        decodes = sum(1 for sequence, gap in gaps if gap and _is_decode(sequence, gap))
        if not decodes:
            return _MANY
        return max(self.cost.prefill_within(tpot_s * _OBJECTIVE_SHARE, decodes=decodes), LEAST_CHUNK)

    def _is_first_token_due(self) -> bool:
        """Whether a sequence of another class than batch waits, or computes its prompt."""
        return len(self._waiting) > self._waiting.counts[BATCH] or any(
            self._ranks[s][0] != BATCH and max(s.num_computed, s.num_reached) < s.num_prompt for s in self.running
        )

    # -- running sequences ------------------------------------------------------------------

    def _continue_running(self, step: Step, budget: _Budget) -> None:
        # Decodes first: a long prompt in chunks never keeps them waiting. Limited batch work is its own list.
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        batch: list[Sequence] = []
        is_limited = budget.batch_limit < _MANY
        for sequence in self.running:
            gap = len(sequence.tokens) - sequence.num_computed
            if gap:
                if is_limited and self._ranks[sequence][0] == BATCH:
                    batch.append(sequence)
                else:
                    (decodes if _is_decode(sequence, gap) else prefills).append(sequence)
        is_shared = self._steps % SHARE_EVERY == 0
        if len(prefills) > 1:
            prefills.sort(key=_waited_longest if is_shared else self._standing)
        if batch:
            batch.sort(key=_waited_longest)
        if is_shared and batch:  # its share, before other classes use up the step
            budget.batch = min(budget.batch, max(budget.tokens / SHARE_EVERY, 1))
            order = [*batch, *decodes, *prefills]
        else:
            order = [*decodes, *prefills, *batch]
        for sequence in order:
            if budget.tokens == 0:
                break
            if sequence.is_running:  # else preempted for one before it
                self._compute(sequence, step, budget)

    def _compute(self, sequence: Sequence, step: Step, budget: _Budget) -> None:
        is_batch = self._ranks[sequence][0] == BATCH
        gap = len(sequence.tokens) - sequence.num_computed
        count = budget.grant(gap, is_batch=is_batch, is_decode=_is_decode(sequence, gap))
        if count <= 0:
            return
        while not self._allocate_blocks(sequence, count, step):
            if self._copies:
                self._drop_copies(step, budget)
                if sequence.is_copy:
                    return
                continue
            victim = max(self.running, key=self._standing)
            self._preempt(victim, step, budget)
            if victim is sequence:
                return
        step.slices.append(Slice(sequence, sequence.num_computed, count))
        sequence.last_step = self._steps
        budget.spend(count, gap, is_batch=is_batch)

    def _allocate_blocks(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Allocate blocks for ``count`` more tokens, all or none."""
        first = sequence.num_computed // self.block_size  # block written first
        missing = -(-(sequence.num_computed + count) // self.block_size) - len(sequence.blocks)
        # A block that other sequences read, or may find by its key, is not written to.
        copied = first < len(sequence.blocks) and (
            first < sequence.num_hashed or self.pool.is_shared(sequence.blocks[first])
        )
        if missing + copied > self.num_reservable:
            return False
        if copied:
            (fresh,) = self.pool.allocate(1)
            step.copies.append((sequence.blocks[first], fresh))
            self.pool.release([sequence.blocks[first]])
            sequence.blocks[first] = fresh
            sequence.num_hashed = min(sequence.num_hashed, first)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence, step: Step, budget: _Budget) -> None:
        """Back to waiting: blocks are released, and everything that the prefix cache does not keep is recomputed."""
        self._leave_step(sequence, step, budget)
        rank = self._ranks[sequence]
        self._halt(sequence, rank)
        sequence.num_preemptions += 1
        if sequence.account is not None:
            sequence.account.num_preempted += 1
        step.num_preempted += 1
        step.best_preempted = min(step.best_preempted, rank[0])
        self._waiting.push(sequence, rank)

    def _leave_step(self, sequence: Sequence, step: Step, budget: _Budget) -> None:
        """Take a sequence out of a step before its blocks are released."""
        for i, part in enumerate(step.slices):
            if part.sequence is sequence:
                budget.tokens += part.count
                del step.slices[i]
                break
        # A copy into a released block would overwrite the data of the block's next owner.
        mine = set(sequence.blocks)
        step.copies = [pair for pair in step.copies if pair[1] not in mine]

    def _standing(self, sequence: Sequence) -> tuple[int, float, Rank]:
        """The place in the order; less is better.

        It changes with the tenants' counters. That of pinned sequences never changes, so the first of them gets
        through.
        """
        rank = self._ranks[sequence]
        if self._is_pinned(sequence):
            return -1, 0.0, (0, *rank[1:])
        return rank[0], self._shares[rank[0]][sequence.tenant], rank

    def _is_pinned(self, sequence: Sequence) -> bool:
        return sequence.is_pinned or sequence.num_preemptions >= MAX_PREEMPTIONS

    # -- waiting sequences ------------------------------------------------------------------

    def _admit_waiting(self, step: Step, budget: _Budget) -> None:
        while budget.tokens > 0 and len(self._waiting):
            best = self._waiting.best_class
            full = len(self.running) >= self.config.max_num_seqs
            if full and self._copies:
                self._drop_copies(step, budget)
                continue
            aged = self._aged(best, budget) if not full else None
            if aged is None and full and not any(self._num_running[best + 1 :]):
                return
            sequence = aged or self._waiting.best()
            assert sequence is not None
            if self._ranks[sequence][0] >= step.best_preempted:
                return  # a sequence that was just preempted is not admitted in the same step
            has_room = aged is not None or self._ranks[sequence][0] != BATCH or self._leaves_room(sequence, step)
            if not has_room or not self._admit(sequence, step, budget, may_displace=aged is None):
                if self._copies:
                    self._drop_copies(step, budget)
                    continue
                return  # in order: a smaller sequence does not overtake
            if aged is not None:
                aged.is_pinned = True
                self._admissions = 0
            elif any(self._waiting.counts[best + 1 :]):  # a waiting sequence was overtaken by class
                self._admissions += 1
            else:
                self._admissions = 0

    def _aged(self, best: int, budget: _Budget) -> Sequence | None:
        """The sequence of a worse class whose turn has come."""
        if self._admissions < AGING_EVERY or not any(self._waiting.counts[best + 1 :]):
            return None
        sequence = self._waiting.longest_below(best)
        if sequence is None or self._ranks[sequence][0] < BATCH or budget.batch > 0:
            return sequence
        # It could compute nothing now. Other sequences may be admitted, unless it has waited for too long.
        if self._admissions < 4 * AGING_EVERY:
            return None
        budget.batch = LEAST_BATCH
        return sequence

    def _admit(self, sequence: Sequence, step: Step, budget: _Budget, *, may_displace: bool) -> bool:
        """Start a waiting sequence and compute its first part; False: it does not fit now."""
        place = self._ranks[sequence][0]
        hits = self._find_prefix(sequence)
        num_hit = len(hits) * self.block_size
        gap = len(sequence.tokens) - num_hit
        count = budget.grant(gap, is_batch=place == BATCH)
        if count <= 0:
            return False
        if not self._fits(sequence, hits, step):
            if self._copies:  # they go first
                return False
            if not may_displace or not self._displace(sequence, hits, step, budget):
                return False
            count = max(count, budget.grant(gap, is_batch=place == BATCH))
        self._waiting.discard(sequence)
        if sequence.num_preemptions == 0 and sequence.use_cache:
            step.prefix_query_tokens += len(sequence.tokens)
            step.prefix_hit_tokens += num_hit
            sequence.num_cached = min(num_hit, sequence.num_prompt)
        if (
            sequence.num_charged == 0
        ):  # a prompt is charged at admission, so that one tenant's prompts are not all admitted
            self._shares[place].charge(sequence.tenant, gap / sequence.weight)
            sequence.num_charged = len(sequence.tokens)
            if place != BATCH:
                self._guard.record_prefill(gap)
        self.pool.reuse(hits)
        sequence.blocks = hits
        sequence.num_computed = num_hit
        sequence.num_hashed = len(hits)
        self._run(sequence)
        taken = self._allocate_blocks(sequence, count, step)
        assert taken, "admission checked that the blocks are there. This is a bug."
        step.slices.append(Slice(sequence, num_hit, count))
        sequence.last_step = self._steps
        budget.spend(count, gap, is_batch=place == BATCH)
        return True

    def _fits(self, sequence: Sequence, hits: list[int], step: Step) -> bool:
        if len(self.running) >= self.config.max_num_seqs:
            return False
        needed = -(-len(sequence.tokens) // self.block_size) - len(hits)
        revived = sum(1 for block in hits if self.pool.is_idle(block))
        # Leave a block for each sequence that grows in this step, or it would be preempted soon.
        return needed + revived + len(step.slices) <= self.num_reservable

    def _leaves_room(self, sequence: Sequence, step: Step) -> bool:
        """Whether a batch sequence may be admitted beside what other classes usually need."""
        return self._guard.admits(
            self._steps,
            needed_blocks=len(sequence.tokens) // self.block_size + 1 + len(step.slices),
            available_blocks=self.pool.num_available,
            num_blocks=self.pool.num_blocks,
            block_size=self.block_size,
            num_running=len(self.running),
            num_others_running=len(self.running) - self._num_running[BATCH],
            max_num_seqs=self.config.max_num_seqs,
        )

    def _displace(self, sequence: Sequence, hits: list[int], step: Step, budget: _Budget) -> bool:
        """Preempt sequences of worse classes until this one fits; none where all together would not be enough."""
        place = self._ranks[sequence][0]
        if not any(self._num_running[place + 1 :]):
            return False
        worse = [s for s in self.running if self._ranks[s][0] > place and not self._is_pinned(s)]
        if not worse:
            return False
        freed = sum(1 for s in worse for block in s.blocks if not self.pool.is_shared(block))
        if -(-len(sequence.tokens) // self.block_size) > self.pool.num_available + freed:
            return False
        worse.sort(key=self._standing)
        while worse and not self._fits(sequence, hits, step):
            self._preempt(worse.pop(), step, budget)
        return self._fits(sequence, hits, step)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix; the rows that are wanted are left to compute."""
        if not (self.config.prefix_caching and sequence.use_cache):
            return []
        hits: list[int] = []
        last = len(sequence.tokens) - 1
        if sequence.scored_from is not None:
            last = min(last, sequence.scored_from - 1)
        for i in range(last // self.block_size):
            block = self.pool.find(sequence.block_key(i, self.block_size))
            if block is None:
                break
            hits.append(block)
        return hits

    def _break_deadlock(self, step: Step) -> None:
        """Preempt a running sequence when nothing can be scheduled although a sequence waits.

        Running sequences that wait for others (beams in lockstep) then hold the blocks. The last of them is preempted.
        The first arrival always gets through, so no two groups block each other for ever.
        """
        first = self._waiting.first()
        while first is not None and self.running and not step.slices:
            last = self.running[-1]
            if self._ranks[last] < self._ranks[first]:
                return
            budget = _Budget(self.config.max_num_batched_tokens)
            self._preempt(last, step, budget)
            first = self._waiting.first()
            assert first is not None
            self._admit(first, step, budget, may_displace=False)

    def _drop_copies(self, step: Step, budget: _Budget) -> None:
        """Drop all copies, and what of the step is theirs. A dropped copy does not return, so this ends."""
        for sequence in tuple(self._copies):
            self.dropped[sequence.request_id] = None
            self._leave_step(sequence, step, budget)
            self.remove(sequence)

    # -- books ------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, end: int) -> None:
        """The known tokens up to ``end`` are computed."""
        sequence.num_computed = end
        if end > sequence.num_charged:  # what is recomputed after a preemption was charged before
            shares = self._shares[self._ranks[sequence][0]]
            shares.charge(sequence.tenant, (end - sequence.num_charged) * OUTPUT_COST / sequence.weight)
            sequence.num_charged = end
        if self.config.prefix_caching and not sequence.is_copy:
            self._publish(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.is_running = True
        rank = self._ranks[sequence]
        self._num_running[rank[0]] += 1
        at = len(self.running)
        while at and self._ranks[self.running[at - 1]] > rank:
            at -= 1
        self.running.insert(at, sequence)

    def _halt(self, sequence: Sequence, rank: Rank) -> None:
        self.running.remove(sequence)
        self._num_running[rank[0]] -= 1
        sequence.is_running = False
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence.num_computed > sequence.num_cached:  # what the prefix cache had is no work
            sequence.num_reached = max(sequence.num_reached, sequence.num_computed)
        sequence.num_computed = 0
        sequence.num_hashed = 0

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self.block_size
        while sequence.num_hashed < full:
            i = sequence.num_hashed
            key = sequence.block_key(i, self.block_size)
            self.pool.publish(sequence.blocks[i], key, sequence.tenant, sequence.weight)
            sequence.num_hashed = i + 1


def _is_decode(sequence: Sequence, gap: int) -> bool:
    """Whether one token is to be computed, or the end of an answer: one that was drawn, and few that were certain."""
    return gap == 1 or (gap <= LEAST_CHUNK and sequence.num_computed >= sequence.num_prompt)


def _waited_longest(sequence: Sequence) -> int:
    return sequence.last_step
