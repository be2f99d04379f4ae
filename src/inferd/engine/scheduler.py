"""Which tokens are computed next. Pure over its tables: no tensor, no clock, no I/O.

Each sequence has tokens known and tokens computed; a step lets computed catch up with known under a
token budget. Decoding is a gap of one, a fresh prompt is a gap of its length, a preempted sequence
is a gap of everything it had. Continuous batching, chunked prefill, prefix hits and
preemption-by-recompute are all this one rule.

    schedule() -> Step      decide, and take the blocks that the step writes to
    commit(step)            the step was computed: move ``num_computed`` on, publish full blocks
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from inferd.config import SchedulerConfig
from inferd.engine.blocks import BlockPool, block_key
from inferd.engine.sequence import Sequence

Rank = tuple[int, float, int, int]


@dataclass(slots=True)
class Slice:
    """One sequence's part of a step: tokens ``start`` to ``start + count`` are computed."""

    sequence: Sequence
    start: int
    count: int

    @property
    def catches_up(self) -> bool:
        """Whether the last row's logits are wanted: nothing known remains to be computed."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class Step:
    """What to compute now."""

    slices: list[Slice] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to), before computing
    num_preempted: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(part.count for part in self.slices)


class Scheduler:
    """Owns the waiting and running sequences and their blocks."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, block_size: int) -> None:
        self.config = config
        self.pool = pool
        self.block_size = block_size
        self.running: list[Sequence] = []  # in order of rank
        # A heap; entries of removed sequences linger until they come to the top. The count breaks ties.
        self._waiting: list[tuple[Rank, int, Sequence]] = []
        self._pushes = 0
        self._ranks: dict[Sequence, Rank] = {}
        self._num_waiting = 0
        self._arrivals = 0

    # -- membership -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self._ranks)

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        rank = (sequence.priority, sequence.arrived_at, self._arrivals, sequence.index)
        self._ranks[sequence] = rank
        self._wait(sequence)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new sequence that knows what ``parent`` knows and shares its blocks.

        Where no slot is free it waits instead, and finds the shared part in the prefix cache.
        """
        child = Sequence(
            request_id=parent.request_id,
            index=index,
            prompt_ids=parent.tokens[: parent.num_prompt],
            sampling=parent.sampling,
            seed=parent.seed,
            salt=parent.salt,
            tenant=parent.tenant,
            priority=parent.priority,
            arrived_at=parent.arrived_at,
            use_cache=True,
        )
        child.tokens = list(parent.tokens)
        child.num_cached = parent.num_cached
        child.cumulative_logprob = parent.cumulative_logprob
        self._ranks[child] = (*self._ranks[parent][:3], index)
        if parent.is_running and len(self.running) < self.config.max_num_seqs:
            self.pool.share(parent.blocks)
            child.blocks = list(parent.blocks)
            child.num_computed = parent.num_computed
            child.cache_keys = list(parent.cache_keys)
            child.num_hashed = parent.num_hashed
            self._run(child)
        else:
            self._wait(child)
        return child

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or cancelled, and give back its blocks. Idempotent."""
        if self._ranks.pop(sequence, None) is None:
            return
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
            self._give_back(sequence)
        else:
            self._num_waiting -= 1  # its heap entry is dropped when it comes to the top

    # -- the step ---------------------------------------------------------------------------

    def schedule(self) -> Step:
        step = Step()
        budget = self._continue_running(step, self.config.max_num_batched_tokens)
        if step.num_preempted == 0:
            self._admit_waiting(step, budget)
        if not step.slices and self._num_waiting:
            self._make_room(step)
        return step

    def commit(self, step: Step) -> None:
        for part in step.slices:
            sequence = part.sequence
            sequence.num_computed = part.start + part.count
            if self.config.prefix_caching:
                self._publish(sequence)

    # -- running sequences ------------------------------------------------------------------

    def _continue_running(self, step: Step, budget: int) -> int:
        # Decodes first: a long prompt in chunks never keeps them waiting.
        behind = [s for s in self.running if len(s.tokens) > s.num_computed]
        behind.sort(key=lambda s: len(s.tokens) - s.num_computed > 1)
        for sequence in behind:
            if budget == 0:
                break
            if not sequence.is_running:  # preempted for one before it
                continue
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            while not self._take_blocks(sequence, count, step):
                victim = self.running[-1]
                budget += self._preempt(victim, step)
                if victim is sequence:
                    break
            if sequence.is_running:
                step.slices.append(Slice(sequence, sequence.num_computed, count))
                budget -= count
        return budget

    def _take_blocks(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Make blocks hold ``count`` more tokens, all or nothing."""
        first = sequence.num_computed // self.block_size  # block written first
        missing = -(-(sequence.num_computed + count) // self.block_size) - len(sequence.blocks)
        copied = first < len(sequence.blocks) and self.pool.is_shared(sequence.blocks[first])
        if missing + copied > self.pool.num_available:
            return False
        if copied:  # copy-on-write: another sequence reads the block this one is about to extend
            (fresh,) = self.pool.allocate(1)
            step.copies.append((sequence.blocks[first], fresh))
            self.pool.release([sequence.blocks[first]])
            sequence.blocks[first] = fresh
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> int:
        """Back to waiting, blocks given up, everything to be recomputed. Returns budget regained."""
        regained = 0
        for i, part in enumerate(step.slices):
            if part.sequence is sequence:
                regained = part.count
                del step.slices[i]
                break
        # A copy into a block that is given up would be written after its next owner took it.
        mine = set(sequence.blocks)
        step.copies = [pair for pair in step.copies if pair[1] not in mine]
        self.running.remove(sequence)
        sequence.is_running = False
        self._give_back(sequence)
        sequence.num_preemptions += 1
        step.num_preempted += 1
        self._wait(sequence)
        return regained

    # -- waiting sequences ------------------------------------------------------------------

    def _admit_waiting(self, step: Step, budget: int) -> None:
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self._first_waiting()
            if sequence is None:
                return
            hits = self._find_prefix(sequence)
            num_hit = len(hits) * self.block_size
            needed = -(-len(sequence.tokens) // self.block_size) - len(hits)
            revived = sum(1 for block in hits if self.pool.is_idle(block))
            # Leave a block for each sequence that grows in this step, or it would be preempted soon.
            if needed + revived + len(step.slices) > self.pool.num_available:
                return  # in order: a smaller one behind does not overtake
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            if sequence.num_preemptions == 0 and sequence.use_cache:
                step.prefix_query_tokens += len(sequence.tokens)
                step.prefix_hit_tokens += num_hit
                sequence.num_cached = min(num_hit, sequence.num_prompt)
            self.pool.share(hits)
            sequence.blocks = hits
            sequence.num_computed = num_hit
            sequence.num_hashed = len(hits)
            self._run(sequence)
            count = min(len(sequence.tokens) - num_hit, budget)
            taken = self._take_blocks(sequence, count, step)
            assert taken, "admission checked that the blocks are there. This is a bug."
            step.slices.append(Slice(sequence, num_hit, count))
            budget -= count

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix; the last token is always left to compute."""
        if not (self.config.prefix_caching and sequence.use_cache):
            return []
        hits: list[int] = []
        for i in range((len(sequence.tokens) - 1) // self.block_size):
            block = self.pool.find(self._key(sequence, i))
            if block is None:
                break
            hits.append(block)
        return hits

    def _make_room(self, step: Step) -> None:
        """Nothing could be scheduled although something waits: running sequences that wait for
        others (beams in lockstep) hold the blocks. The last of them gives way; the first to have
        arrived always gets through, so no two groups can block each other for ever."""
        first = self._first_waiting()
        while first is not None and self.running and not step.slices:
            last = self.running[-1]
            if self._ranks[last] < self._ranks[first]:
                return
            self._preempt(last, step)
            first = self._first_waiting()
            self._admit_waiting(step, self.config.max_num_batched_tokens)

    # -- books ------------------------------------------------------------------------------

    def _first_waiting(self) -> Sequence | None:
        while self._waiting:
            rank, _, sequence = self._waiting[0]
            if self._ranks.get(sequence) == rank and not sequence.is_running:
                return sequence
            heapq.heappop(self._waiting)
        return None

    def _wait(self, sequence: Sequence) -> None:
        self._pushes += 1
        heapq.heappush(self._waiting, (self._ranks[sequence], self._pushes, sequence))
        self._num_waiting += 1

    def _run(self, sequence: Sequence) -> None:
        sequence.is_running = True
        rank = self._ranks[sequence]
        at = len(self.running)
        while at and self._ranks[self.running[at - 1]] > rank:
            at -= 1
        self.running.insert(at, sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_hashed = 0

    def _key(self, sequence: Sequence, i: int) -> bytes:
        """Key of the sequence's ``i``-th full block; keys before it are computed on the way."""
        size, keys = self.block_size, sequence.cache_keys
        while len(keys) <= i:
            at = len(keys) * size
            keys.append(block_key(keys[-1] if keys else sequence.salt, sequence.tokens[at : at + size]))
        return keys[i]

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self.block_size
        while sequence.num_hashed < full:
            i = sequence.num_hashed
            self.pool.publish(sequence.blocks[i], self._key(sequence, i))
            sequence.num_hashed = i + 1
