"""Copies of requests, which rollouts make: they take no block, no slot and no cache entry from requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.scheduling.test_scheduler import make_scheduler, names, run

from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import RANKS, SamplingParams


def make(name: str, prompt: list[int], *, is_copy: bool = False, priority: int = 0, at: float = 0.0) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        prompt_ids=prompt,
        sampling=SamplingParams(),
        seed=0,
        priority=RANKS["batch"] if is_copy else priority,
        arrived_at=at,
        use_cache=not is_copy,
        is_copy=is_copy,
    )


def copy_of(name: str, prompt: list[int]) -> Sequence:
    return make(name, prompt, is_copy=True)


def test_a_copy_leaves_nothing_in_the_prefix_cache_and_finds_nothing_there() -> None:
    scheduler = make_scheduler(num_blocks=16)
    request = make("request", list(range(8)))
    scheduler.add(request)
    run(scheduler)
    scheduler.remove(request)
    cached = scheduler.pool.num_cached
    copy = copy_of("copy", list(range(12)))
    scheduler.add(copy)
    (part,) = run(scheduler).slices
    assert (part.sequence, part.start) == (copy, 0)
    run(scheduler)
    scheduler.remove(copy)
    assert (scheduler.pool.num_cached, scheduler.pool.num_used) == (cached, 0)
    assert not scheduler.dropped


def test_a_copy_that_would_need_cached_blocks_is_dropped() -> None:
    scheduler = make_scheduler(num_blocks=4)
    request = make("request", list(range(12)))
    scheduler.add(request)
    run(scheduler)
    scheduler.remove(request)
    assert scheduler.pool.num_free == 1
    scheduler.add(copy_of("copy", [1] * 5))
    assert names(run(scheduler)) == []
    assert list(scheduler.dropped) == ["copy"]
    assert scheduler.pool.num_cached == 3
    assert not scheduler.has_work


def test_a_growing_copy_is_dropped_where_free_blocks_end() -> None:
    scheduler = make_scheduler(num_blocks=4)
    request = make("request", list(range(8)))
    scheduler.add(request)
    run(scheduler)
    scheduler.remove(request)
    scheduler.add(copy_of("copy", [1] * 3))
    for _ in range(9):
        run(scheduler)
    assert list(scheduler.dropped) == ["copy"]
    assert scheduler.pool.num_cached == 2


def test_a_request_that_needs_blocks_gets_those_of_copies_before_any_is_evicted() -> None:
    scheduler = make_scheduler(num_blocks=6)
    first = make("first", list(range(8)))
    scheduler.add(first)
    run(scheduler)
    scheduler.remove(first)
    scheduler.add(copy_of("copy", [1] * 13))
    run(scheduler)
    scheduler.add(make("second", [2] * 9))
    assert names(run(scheduler)) == [("second", 0, 9)]
    assert list(scheduler.dropped) == ["copy"]
    assert scheduler.pool.num_cached == 2


def test_a_request_gets_the_slot_of_a_copy_whatever_its_class() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(copy_of("copy", [1, 2]))
    run(scheduler)
    scheduler.add(make("batch", [3, 4], priority=RANKS["batch"]))
    assert names(run(scheduler)) == [("batch", 0, 2)]
    assert list(scheduler.dropped) == ["copy"]


def test_a_copy_that_cannot_be_admitted_holds_up_no_batch_request_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=4)
    request = make("request", [9] * 12)
    scheduler.add(request)
    run(scheduler)
    scheduler.remove(request)
    scheduler.add(copy_of("copy", [1] * 5))
    scheduler.add(make("batch", [2, 3], priority=RANKS["batch"], at=1.0))
    assert names(run(scheduler)) == [("batch", 0, 2)]


def test_guesses_take_no_cached_block_while_a_copy_holds_one() -> None:
    scheduler = make_scheduler(num_blocks=6)
    first = make("first", list(range(8)))
    scheduler.add(first)
    run(scheduler)
    scheduler.remove(first)
    scheduler.add(copy_of("copy", [1] * 6))
    run(scheduler)
    second = make("second", [2] * 4)
    scheduler.add(second)
    run(scheduler)
    step = scheduler.schedule()
    (part,) = [part for part in step.slices if part.sequence is second]
    assert (part.start, part.count, scheduler.pool.num_free) == (4, 1, 0)
    scheduler.speculate(part, (7,) * 8)
    assert part.draft == (7,) * 3, "as many as its block holds"
    assert (scheduler.pool.num_cached, scheduler.dropped) == (2, {})


_arrivals = st.lists(
    st.tuples(
        st.booleans(),  # a copy
        st.integers(1, 3),  # the prompt's kind: equal kinds share prefixes
        st.integers(1, 14),  # its length
        st.integers(0, 6),  # tokens that are generated
        st.sampled_from(sorted(RANKS.values())),
        st.integers(0, 3),  # steps until it arrives
    ),
    max_size=12,
)


class Watched:
    """Runs sequences to their ends, and looks at every allocation."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = make_scheduler(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=12)
        self.wanted: dict[Sequence, int] = {}
        self.num_copies_done = 0
        allocate = self.scheduler.pool.allocate

        def watched(count: int) -> list[int]:
            before = self.scheduler.pool.num_cached
            taken = allocate(count)
            evicted = before - self.scheduler.pool.num_cached
            holding = [one for one in self.wanted if one.is_copy and one.blocks]
            assert not (evicted and holding), f"{evicted} blocks were evicted while {holding} held some"
            return taken

        self.scheduler.pool.allocate = watched  # type: ignore[method-assign]

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.wanted[sequence] = num_tokens
        self.scheduler.add(sequence)

    def step(self) -> None:
        scheduler = self.scheduler
        step = run(scheduler)
        dropped, scheduler.dropped = scheduler.dropped, {}
        for sequence in [one for one in self.wanted if one.request_id in dropped]:
            assert sequence.is_copy
            assert not sequence.blocks
            assert all(part.sequence is not sequence for part in step.slices)
            del self.wanted[sequence]
        for sequence in [one for one, wanted in self.wanted.items() if one.num_outputs >= max(wanted, 1)]:
            self.num_copies_done += sequence.is_copy
            del self.wanted[sequence]
            scheduler.remove(sequence)
        scheduler.pool.check()
        waiting = [one for one in self.wanted if not one.is_running and not one.is_copy]
        if waiting and step.num_tokens < scheduler.config.max_num_batched_tokens // 2:
            assert not any(one.is_copy for one in scheduler.running), "a copy runs while a request waits for room"


@given(_arrivals)
def test_nothing_is_evicted_while_a_copy_holds_a_block_and_requests_end_as_ever(
    arrivals: list[tuple[bool, int, int, int, int, int]],
) -> None:
    watched = Watched()
    for number, (is_copy, kind, length, num_tokens, priority, pause) in enumerate(arrivals):
        for _ in range(pause):
            watched.step()
        name = f"{'copy' if is_copy else 'request'}-{number}"
        watched.add(make(name, [kind] * length, is_copy=is_copy, priority=priority, at=float(number)), num_tokens)
    for _ in range(600):
        if not watched.wanted:
            break
        watched.step()
    assert not watched.wanted, f"these never ended: {list(watched.wanted)}"
    assert watched.scheduler.pool.num_used == 0
