"""Laws of the scheduler, with no model: a step is computed by saying so."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferd.config import SchedulerConfig
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import RANKS, SamplingParams


def make_scheduler(num_blocks: int = 64, block_size: int = 4, **options: int | bool) -> Scheduler:
    return Scheduler(SchedulerConfig(**options), BlockPool(num_blocks), block_size)  # type: ignore[arg-type]


def make_sequence(
    name: str, prompt: list[int], *, priority: int = 0, arrived_at: float = 0.0, salt: bytes = b""
) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        prompt_ids=prompt,
        sampling=SamplingParams(),
        seed=0,
        priority=priority,
        arrived_at=arrived_at,
        salt=salt,
    )


def run(scheduler: Scheduler, token: int = 7) -> Step:
    """One step: what has caught up gets a token."""
    step = scheduler.schedule()
    ready = [part.sequence for part in step.slices if part.catches_up]
    scheduler.commit(step)
    for sequence in ready:
        sequence.tokens.append(token)
    return step


def names(step: Step) -> list[tuple[str, int, int]]:
    return [(part.sequence.request_id, part.start, part.count) for part in step.slices]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_sequence("short", [1, 2]))
    assert names(run(scheduler)) == [("short", 0, 2)]
    scheduler.add(make_sequence("long", list(range(12))))
    assert names(run(scheduler)) == [("short", 2, 1), ("long", 0, 5)]
    assert names(run(scheduler)) == [("short", 3, 1), ("long", 5, 5)]
    assert names(run(scheduler)) == [("short", 4, 1), ("long", 10, 2)]
    assert names(run(scheduler)) == [("short", 5, 1), ("long", 12, 1)]


def test_decodes_come_before_a_chunk_of_an_earlier_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_sequence("long", list(range(40)), arrived_at=1.0))
    run(scheduler)
    late = make_sequence("late", [1], arrived_at=2.0)
    scheduler.add(late)
    # The long prompt takes whole steps while it runs alone; the late one joins when budget is left.
    for _ in range(20):
        step = run(scheduler)
        if late.num_outputs:
            break
    assert late.num_outputs == 1
    step = run(scheduler)
    assert step.slices[0].sequence is late or step.num_tokens == 2


def test_a_finished_sequence_frees_its_slot_for_the_next_step() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make_sequence("first", [1]), make_sequence("second", [2])
    scheduler.add(first)
    scheduler.add(second)
    assert names(run(scheduler)) == [("first", 0, 1)]
    scheduler.remove(first)
    assert names(run(scheduler)) == [("second", 0, 1)]


def test_a_short_request_behind_a_long_one_finishes_first() -> None:
    scheduler = make_scheduler()
    long, short = make_sequence("long", [1]), make_sequence("short", [2])
    scheduler.add(long)
    run(scheduler)
    scheduler.add(short)
    for _ in range(3):
        run(scheduler)
    assert short.num_outputs == 3
    scheduler.remove(short)
    assert long.num_outputs == 4


def test_lower_priority_number_is_admitted_first_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    batch = make_sequence("batch", [1], priority=10, arrived_at=0.0)
    late = make_sequence("late", [1], arrived_at=2.0)
    early = make_sequence("early", [1], arrived_at=1.0)
    for sequence in (batch, late, early):
        scheduler.add(sequence)
    order = []
    for _ in range(3):
        sequence = run(scheduler).slices[0].sequence
        order.append(sequence.request_id)
        scheduler.remove(sequence)
    assert order == ["early", "late", "batch"]


def test_a_shared_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler(block_size=4)
    first = make_sequence("first", list(range(10)))
    scheduler.add(first)
    run(scheduler)
    second = make_sequence("second", [*range(10), 50])
    scheduler.add(second)
    step = run(scheduler)
    assert ("second", 8, 3) in names(step)
    assert second.blocks[:2] == first.blocks[:2]
    assert (step.prefix_query_tokens, step.prefix_hit_tokens) == (11, 8)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence("first", list(range(8))))
    run(scheduler)
    scheduler.add(make_sequence("second", list(range(8))))
    assert ("second", 4, 4) in names(run(scheduler))


def test_another_tenants_prefix_is_not_found() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence("first", list(range(9)), salt=b"a"))
    run(scheduler)
    scheduler.add(make_sequence("second", list(range(9)), salt=b"b"))
    assert ("second", 0, 9) in names(run(scheduler))


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler(block_size=4)
    first = make_sequence("first", [1, 2, 3])
    scheduler.add(first)
    for _ in range(6):
        run(scheduler)
    spoken = list(first.tokens)
    scheduler.remove(first)
    scheduler.add(make_sequence("second", [*spoken, 9]))
    assert names(run(scheduler)) == [("second", 8, 2)]


def test_a_fork_shares_blocks_and_copies_the_last_one_when_it_writes() -> None:
    scheduler = make_scheduler(block_size=4)
    parent = make_sequence("parent", list(range(6)))
    scheduler.add(parent)
    run(scheduler)
    child = scheduler.fork(parent, 1)
    assert child.blocks == parent.blocks
    shared = parent.blocks[1]
    step = run(scheduler)
    assert len(step.copies) == 1
    assert step.copies[0][0] == shared
    assert parent.blocks[0] == child.blocks[0]
    assert parent.blocks[1] != child.blocks[1]


def test_when_blocks_run_out_the_last_arrival_is_preempted_and_later_completes() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2, prefix_caching=False)
    first = make_sequence("first", [1, 2, 3], arrived_at=1.0)
    second = make_sequence("second", [1, 2, 3], arrived_at=2.0)
    scheduler.add(first)
    scheduler.add(second)
    preempted = 0
    while first.num_outputs < 5 or second.num_outputs < 5:
        preempted += run(scheduler).num_preempted
        for sequence in (first, second):
            if sequence.num_outputs == 5:
                scheduler.remove(sequence)
    assert preempted
    assert first.num_preemptions == 0
    assert second.num_preemptions
    assert scheduler.pool.num_used == 0


def test_a_preempted_sequence_is_recomputed_when_there_is_room() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2, prefix_caching=False)
    first = make_sequence("first", [1, 2, 3], arrived_at=1.0)
    second = make_sequence("second", [1, 2, 3], arrived_at=2.0)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(8):
        if run(scheduler).num_preempted:
            break
    assert second.num_preemptions == 1
    known = len(second.tokens)
    scheduler.remove(first)
    assert scheduler.has_work
    assert names(run(scheduler)) == [("second", 0, known)]


def test_a_sequence_that_idles_in_lockstep_gives_way_to_an_earlier_one() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, prefix_caching=False)
    idle = make_sequence("idle", list(range(6)), arrived_at=2.0)
    scheduler.add(idle)
    scheduler.commit(scheduler.schedule())  # caught up; its beam siblings are not, so it gets no token
    scheduler.add(make_sequence("earlier", list(range(4)), arrived_at=1.0))
    assert names(run(scheduler)) == [("earlier", 0, 4)]
    assert idle.num_preemptions == 1


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, cancels, forks and steps in an arena that is far too small.

    Computing is modelled by a dictionary of what each slot of the arena holds, so the machine also
    proves that every token is read back from where it was written.
    """

    block_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            num_blocks=12, block_size=self.block_size, max_num_seqs=4, max_num_batched_tokens=5
        )
        self.alive: list[Sequence] = []
        self.arena: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> the tokens up to here
        self.made = 0
        self.clock = 0.0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), priority=st.integers(-1, 1))
    def add(self, prompt: list[int], priority: int) -> None:
        self.made += 1
        self.clock += 1
        sequence = make_sequence(f"r{self.made}", prompt, priority=priority, arrived_at=self.clock)
        self.alive.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.scheduler.remove(sequence)
        assert not sequence.blocks

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.alive))
        self.made += 1
        self.alive.append(self.scheduler.fork(parent, self.made))

    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        step = self.scheduler.schedule()
        assert step.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len({id(part.sequence) for part in step.slices}) == len(step.slices)
        assert len(self.scheduler.running) <= self.scheduler.config.max_num_seqs
        sources = {pair: [self.arena.get((pair[0], o)) for o in range(self.block_size)] for pair in step.copies}
        for pair, held in sources.items():
            for offset, tokens in enumerate(held):
                if tokens is not None:
                    self.arena[pair[1], offset] = tokens
        written: set[tuple[int, int]] = set()
        for part in step.slices:
            sequence = part.sequence
            assert part.count > 0
            for at in range(part.start, part.start + part.count):
                slot = (sequence.blocks[at // self.block_size], at % self.block_size)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.arena[slot] = tuple(sequence.tokens[: at + 1])
        for part in step.slices:
            sequence = part.sequence
            for at in range(part.start + part.count):
                slot = (sequence.blocks[at // self.block_size], at % self.block_size)
                assert self.arena[slot] == tuple(sequence.tokens[: at + 1]), "a slot holds another sequence's token"
        ready = [part.sequence for part in step.slices if part.catches_up]
        self.scheduler.commit(step)
        if self.alive and not step.slices:
            assert all(len(s.tokens) == s.num_computed for s in self.alive), "work was left although nothing ran"
        for sequence in ready:
            if len(sequence.tokens) < 16:  # eight blocks: always fits the arena
                sequence.tokens.append(token)
            else:
                self.alive.remove(sequence)
                self.scheduler.remove(sequence)

    @invariant()
    def books_balance(self) -> None:
        pool = self.scheduler.pool
        pool.check()
        held = {block for sequence in self.alive for block in sequence.blocks}
        assert pool.num_used == len(held)
        assert sum(not s.is_running for s in self.alive) == self.scheduler.num_waiting
        for sequence in self.alive:
            assert len(sequence.blocks) * self.block_size >= sequence.num_computed
            assert len(sequence.blocks) <= -(-len(sequence.tokens) // self.block_size)  # no reservation ahead

    def teardown(self) -> None:
        # Everything that still lives completes when only steps follow.
        for _ in range(2000):
            if not self.alive:
                break
            self.step(0)
        assert not self.alive
        assert self.scheduler.pool.num_used == 0
        assert not self.scheduler.has_work


TestScheduler = SchedulerMachine.TestCase


def test_a_first_token_is_due_until_the_prompt_is_computed_whatever_tokens_of_the_answer_are_known() -> None:
    def steps_of(known: int) -> list[list[tuple[str, int]]]:
        """The requests and numbers of tokens of each step until the prompt is computed."""
        scheduler = make_scheduler(max_num_batched_tokens=8)
        for number in range(2):
            scheduler.add(make_sequence(f"batch{number}", [number] * 4, priority=RANKS["batch"]))
        for _ in range(3):
            run(scheduler)
        urgent = make_sequence("urgent", list(range(13 - known)), priority=RANKS["interactive"])
        urgent.tokens += [7] * known  # as of an answer that begins with tokens that its form leaves no choice for
        scheduler.add(urgent)
        found = []
        while urgent.num_computed < urgent.num_prompt:
            found.append([(name, count) for name, _, count in names(run(scheduler))])
        return found

    steps = steps_of(0)
    assert any(len(parts) == 1 for parts in steps), "batch work that decodes waits for the first token"
    assert steps_of(3) == steps
