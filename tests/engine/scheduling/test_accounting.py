"""What the times of requests were spent on, under a virtual clock: a step takes what a plane over its tokens says."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.config import SchedulerConfig
from inferd.engine.scheduling.accounting import Account, Ledger
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler, Slice, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import EngineTimes, SamplingParams

FIXED, PREFILL, DECODE = 0.005, 0.0001, 0.0002
BETWEEN = 0.0003  # from the end of a step to the beginning of the next


@dataclass(eq=False)
class Job:
    """A request with one sequence or several, and what became of it."""

    account: Account
    ready_at: float
    answer: int
    width: int = 1
    sequences: list[Sequence] = field(default_factory=list)
    times: EngineTimes | None = None
    ended_at: float = 0.0

    @property
    def spent(self) -> EngineTimes:
        assert self.times is not None, "it has not ended"
        return self.times


class Clockwork:
    """A scheduler and its ledger. ``slowness``: times what a step takes usually."""

    def __init__(self, *, num_blocks: int = 1024, max_num_batched_tokens: int = 64, max_num_seqs: int = 8) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.scheduler = Scheduler(config, BlockPool(num_blocks), 4)
        self.ledger = Ledger()
        self.now = 100.0
        self.slowness = 1.0
        self.fixed_s, self.prefill_s, self.decode_s = FIXED, PREFILL, DECODE
        self.context_s = 0.0  # for each token before those of a step
        self.noise: random.Random | None = None  # of the steps: up to a fifth of their time
        self.guess = 0  # guessed tokens of a lone decode, and of them:
        self.num_right = 0
        self.open: list[Job] = []
        self._ids = 0

    def add(self, prompt: int, answer: int, *, width: int = 1, priority: int = 0, waited_s: float = 0.0) -> Job:
        self._ids += 1
        job = Job(Account(self.ledger, self.now - waited_s), self.now - waited_s, answer, width)
        sequence = Sequence(
            request_id=str(self._ids),
            index=0,
            prompt_ids=[self._ids * 10_000 + i for i in range(prompt)],
            sampling=SamplingParams(),
            seed=0,
            priority=priority,
            arrived_at=self.now,
            account=job.account,
        )
        job.sequences.append(sequence)
        self.open.append(job)
        self.scheduler.add(sequence)
        return job

    def step(self) -> Step:
        scheduler, began = self.scheduler, self.now
        step = scheduler.schedule()
        if not step.slices:
            self.now += BETWEEN
            return step
        if self.guess and len(step.slices) == 1 and step.slices[0].count == 1:
            scheduler.speculate(step.slices[0], tuple([1] * self.guess))
        self.ledger.begin(step, began)
        seconds = self._seconds(step)
        self._finish(step, seconds)
        self.now = began + seconds + BETWEEN
        return step

    def step_that_pauses(self, prompt: int, answer: int) -> Job:
        """A step that pauses after a third of its time for a request that arrives then."""
        paused = self.scheduler.schedule()
        seconds = self._seconds(paused)
        self.ledger.begin(paused, self.now)
        self.ledger.pause(seconds / 3)
        self.now += seconds / 3 + BETWEEN
        job = self.add(prompt, answer)
        first = self.scheduler.schedule_before(paused)
        assert [part.sequence for part in first.slices] == job.sequences
        self.ledger.begin(first, self.now)
        self._finish(first, self._seconds(first))
        self.now += self._seconds(first) + BETWEEN
        self.ledger.begin(paused, self.now, seconds / 3)
        self._finish(paused, seconds * 2 / 3)
        self.now += seconds * 2 / 3 + BETWEEN
        return job

    def _seconds(self, step: Step) -> float:
        decodes = sum(part.count - len(part.draft) == 1 for part in step.slices)
        seconds = self.fixed_s + self.prefill_s * (step.num_tokens - decodes) + self.decode_s * decodes
        seconds += self.context_s * sum(part.start for part in step.slices)
        return seconds * self.slowness * (1 + self.noise.uniform(-0.2, 0.2) if self.noise else 1)

    def _finish(self, step: Step, seconds: float) -> None:
        began = self.ledger._at
        self.scheduler.commit(step)
        caught_up = [part for part in step.slices if part.catches_up]
        for part in caught_up:
            self._extend(part, began + 0.9 * seconds)  # the token's time; text is made after it
        self.ledger.commit(seconds)

    def _extend(self, part: Slice, at: float) -> None:
        sequence = part.sequence
        job = next((job for job in self.open if sequence in job.sequences), None)
        if job is None:
            return
        if sequence is job.sequences[0] and len(job.sequences) < job.width:
            for index in range(1, job.width):
                child = self.scheduler.fork(sequence, index)
                child.tokens.append(index)
                job.sequences.append(child)
        num_right = min(self.num_right, len(part.draft))
        sequence.tokens += [1] * (num_right + 1)
        if part.draft:
            self.scheduler.accept_guesses(part, num_right)
            job.account.num_accepted += num_right
        if sequence.num_outputs >= job.answer:
            self.scheduler.remove(sequence)
        if all(one.num_outputs >= job.answer for one in job.sequences):
            self.end(job, at)

    def end(self, job: Job, at: float) -> None:
        for sequence in job.sequences:
            self.scheduler.remove(sequence)
        self.open.remove(job)
        job.ended_at = at
        job.times = job.account.close(at)

    def run(self) -> None:
        while self.open:
            self.step()

    def warm(self) -> None:
        """Show the ledger what steps of some compositions take usually."""
        for _ in range(6):
            jobs = [self.add(20, 12) for _ in range(4)]
            self.run()
            assert all(job.times is not None for job in jobs)
            self.add(20, 30)
            self.run()
            self.add(60, 3)
            self.run()


def seconds_of(times: EngineTimes) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(times).items() if name != "num_steps"}


def check_sum(job: Job) -> None:
    parts = seconds_of(job.spent)
    assert math.isclose(math.fsum(parts.values()), job.ended_at - job.ready_at, abs_tol=1e-9)
    assert all(value >= -1e-12 for name, value in parts.items() if name != "speculation"), parts


def test_a_request_alone_is_spent_on_its_own_tokens() -> None:
    world = Clockwork()
    world.warm()
    job = world.add(20, 30)
    world.run()
    check_sum(job)
    spent = job.spent
    assert spent.num_steps == 30
    assert spent.prefill == pytest.approx(FIXED + 20 * PREFILL, rel=0.02)
    assert spent.decode == pytest.approx(29 * (BETWEEN + FIXED + DECODE), rel=0.02)
    assert spent.rest < 1e-9
    others = (spent.schedule_wait, spent.prefill_shared, spent.crowding, spent.others_prefill, spent.preempted)
    assert max(*others, spent.recomputed, spent.slowed, abs(spent.speculation)) < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_a_request_alone_has_no_crowding_while_the_cost_of_its_context_changes(seed: int) -> None:
    work = Clockwork(max_num_batched_tokens=512)
    work.noise = random.Random(seed)
    work.warm()
    for context_s, prompt in ((1e-6, 20), (1e-5, 700), (2e-6, 1200), (0.0, 60)):
        work.context_s = context_s
        job = work.add(prompt, 200)
        work.run()
        assert (job.spent.crowding, job.spent.others_prefill) == pytest.approx((0.0, 0.0), abs=1e-9)
        assert job.spent.decode > 199 * FIXED / 2


def test_a_neighbours_prompt_is_entered_as_the_prefill_of_others() -> None:
    world = Clockwork()
    world.warm()
    job = world.add(20, 40)
    for _ in range(5):
        world.step()
    world.add(63 * 20, 1)
    world.run()
    check_sum(job)
    assert job.spent.others_prefill == pytest.approx(63 * 20 * PREFILL, rel=0.05)
    assert job.spent.crowding < 0.1 * job.spent.others_prefill


def test_each_part_of_a_step_that_has_paused_is_entered_when_it_came() -> None:
    world = Clockwork(max_num_batched_tokens=512)
    world.warm()
    job = world.add(20, 40, priority=1)
    for _ in range(5):
        world.step()
    first = world.step_that_pauses(60, 1)
    world.run()
    check_sum(job)
    check_sum(first)
    assert first.spent.schedule_wait == 0.0
    assert first.spent.prefill == pytest.approx(0.9 * (FIXED + 60 * PREFILL), rel=0.02)  # it ends with its token
    assert job.spent.num_steps == 40
    assert job.spent.others_prefill + job.spent.crowding == pytest.approx(FIXED + 60 * PREFILL + BETWEEN, rel=0.1)
    assert job.spent.decode == pytest.approx(39 * (BETWEEN + FIXED + DECODE), rel=0.05)
    assert max(job.spent.slowed, first.spent.slowed) < 2 * BETWEEN


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_of_requests_around_steps_that_pause_add_up(seed: int) -> None:
    """Those that arrive in a pause have no part of what was computed before it."""
    world, rng = Clockwork(max_num_batched_tokens=512, max_num_seqs=16), random.Random(seed)
    world.warm()
    jobs = [world.add(rng.randrange(2, 80), 60, priority=1, width=rng.choice([1, 2])) for _ in range(3)]
    for _ in range(12):
        for _ in range(rng.randrange(1, 4)):
            world.step()
        jobs.append(world.step_that_pauses(rng.randrange(2, 80), rng.randrange(1, 9)))
    world.run()
    for job in jobs:
        check_sum(job)


def test_neighbours_that_decode_are_entered_as_crowding() -> None:
    world = Clockwork()
    world.warm()
    jobs = [world.add(8, 60) for _ in range(6)]
    world.run()
    for job in jobs:
        check_sum(job)
        assert job.spent.crowding == pytest.approx(59 * 5 * DECODE, rel=0.1)
        assert job.spent.prefill_shared == pytest.approx(5 * 8 * PREFILL, rel=0.1)
        assert job.spent.others_prefill < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_a_request_beside_a_long_job_costs_what_it_costs_alone(seed: int) -> None:
    """The job's steps have the same composition for so long that none of them shows what one token costs."""
    world = Clockwork(num_blocks=8192, max_num_seqs=4)
    world.noise = random.Random(seed)
    world.decode_s, world.context_s = FIXED / 4, FIXED / 2000  # so that a long answer makes steps three times as long
    for _ in range(20):
        world.add(20, 30)
        world.run()
    for _ in range(6):
        world.add(20, 2000, priority=1)
    for _ in range(1500):
        world.step()
    job = world.add(20, 100)
    while job.times is None:
        world.step()
    check_sum(job)
    assert job.spent.decode == pytest.approx(99 * (BETWEEN + FIXED * (1.25 + 70 / 2000)), rel=0.15)
    assert job.spent.crowding > job.spent.decode


def test_waiting_for_the_first_step_is_entered_as_waiting_for_the_schedule() -> None:
    world = Clockwork(max_num_seqs=1)
    first = world.add(20, 30)
    second = world.add(20, 3, waited_s=0.25)
    world.run()
    check_sum(first)
    check_sum(second)
    assert second.spent.schedule_wait == pytest.approx(0.25 + first.ended_at - 100.0, rel=0.05)


def test_a_preemption_is_entered_with_what_is_computed_again() -> None:
    world = Clockwork(num_blocks=32)  # 128 tokens
    world.warm()
    jobs = [world.add(30, 60), world.add(30, 60)]
    world.run()
    preempted = jobs[1]
    for job in jobs:
        check_sum(job)
    assert preempted.sequences[0].num_preemptions
    assert not jobs[0].sequences[0].num_preemptions
    assert preempted.spent.preempted > 10 * (FIXED + DECODE)
    assert preempted.spent.recomputed > 0
    assert jobs[0].spent.preempted == jobs[0].spent.recomputed == 0.0


def test_batch_work_that_is_left_out_of_steps_is_crowded_by_the_others() -> None:
    world = Clockwork()
    world.warm()
    batch = world.add(8, 40, priority=1)
    for _ in range(4):
        world.step()
    for _ in range(40):
        world.add(60, 2, priority=-1)
        world.step()
    world.run()
    check_sum(batch)
    assert batch.spent.num_steps == 40
    assert batch.spent.crowding + batch.spent.others_prefill > 2 * batch.spent.decode / 3
    assert batch.spent.preempted == 0.0


def test_a_slow_device_is_entered_as_slowed_and_an_ordinary_one_is_not() -> None:
    world = Clockwork()
    world.warm()
    usual = world.add(20, 30)
    world.run()
    world.slowness = 3.0
    slowed = world.add(20, 30)
    world.run()
    check_sum(slowed)
    assert usual.spent.slowed == 0.0
    assert slowed.spent.slowed == pytest.approx(2 * (usual.spent.prefill + usual.spent.decode), rel=0.1)
    assert slowed.spent.decode == pytest.approx(usual.spent.decode, rel=0.1)


def test_a_long_pause_between_two_steps_is_entered_as_slowed() -> None:
    world = Clockwork()
    world.warm()
    jobs = [world.add(20, 30), world.add(8, 30)]
    for _ in range(5):
        world.step()
    world.now += 0.5
    for _ in range(5):
        world.step()
    world.now += 10 * BETWEEN
    world.run()
    late = world.add(20, 3)
    world.now += 0.5  # nothing runs yet
    world.run()
    for job in jobs:
        check_sum(job)
        assert job.spent.slowed == pytest.approx(0.5 + 10 * BETWEEN, rel=0.01)
    check_sum(late)
    assert late.spent.slowed == 0.0
    assert late.spent.schedule_wait == pytest.approx(0.5)


def test_a_device_that_stays_slow_becomes_usual() -> None:
    world = Clockwork()
    world.warm()
    world.slowness = 2.0
    shares = []
    for _ in range(400):
        world.now += 2.0
        job = world.add(20, 30)
        world.run()
        shares.append(job.spent.slowed / (job.ended_at - job.ready_at))
    assert shares[0] > 0.4
    assert shares[30] > 0.4, "a minute"
    assert shares[-1] == 0.0, "a quarter of an hour"


def test_accepted_guesses_save_time_and_wrong_ones_cost_it() -> None:
    def spent(num_right: int) -> EngineTimes:
        world = Clockwork()
        world.warm()
        world.guess, world.num_right = 3, num_right
        job = world.add(20, 41)
        world.run()
        check_sum(job)
        return job.spent

    plain, right, wrong = spent(0), spent(3), spent(0)
    assert right.num_steps == 11
    assert right.speculation == pytest.approx(10 * 3 * PREFILL - 30 * (BETWEEN + FIXED + DECODE), rel=0.05)
    assert right.decode == pytest.approx(plain.decode, rel=0.05)
    assert wrong.speculation == pytest.approx(40 * 3 * PREFILL, rel=0.1)


def test_the_choices_of_a_request_are_entered_once() -> None:
    world = Clockwork()
    world.warm()
    job = world.add(20, 30, width=4)
    world.run()
    check_sum(job)
    assert job.spent.decode == pytest.approx(29 * (FIXED + 4 * DECODE), rel=0.05)
    assert job.spent.crowding < 1e-9


def test_neighbours_of_a_request_with_several_choices_are_entered_as_crowding() -> None:
    world = Clockwork()
    world.warm()
    job = world.add(20, 30, width=4)
    for _ in range(3):
        world.add(20, 60)
    while job.times is None:
        world.step()
    check_sum(job)
    assert job.spent.decode == pytest.approx(29 * (BETWEEN + FIXED + 4 * DECODE), rel=0.05)
    assert job.spent.crowding == pytest.approx(29 * 3 * DECODE, rel=0.1)
    assert job.spent.rest < 1e-9


def test_a_failed_step_is_entered_as_rest() -> None:
    world = Clockwork()
    job = world.add(8, 30)
    for _ in range(4):
        world.step()
    step = world.scheduler.schedule()
    world.ledger.begin(step, world.now)
    world.ledger.drop()
    world.now += 1.0
    world.end(job, world.now)
    check_sum(job)
    assert job.spent.rest > 1.0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_parts_add_up_whatever_happens(data: st.DataObject) -> None:
    world = Clockwork(
        num_blocks=data.draw(st.sampled_from([24, 40, 512])),
        max_num_batched_tokens=data.draw(st.sampled_from([8, 64])),
        max_num_seqs=data.draw(st.sampled_from([1, 3, 8])),
    )
    world.context_s = data.draw(st.sampled_from([0.0, 1e-4]))
    jobs: list[Job] = []
    for _ in range(data.draw(st.integers(10, 60))):
        match data.draw(st.integers(0, 9)):
            case 0 | 1 | 2:
                width = min(data.draw(st.sampled_from([1, 1, 1, 2, 3])), world.scheduler.config.max_num_seqs)
                jobs.append(
                    world.add(
                        data.draw(st.integers(1, 40)),
                        data.draw(st.integers(1, 12)),
                        width=width,
                        priority=data.draw(st.sampled_from([-1, 0, 1])),
                        waited_s=data.draw(st.sampled_from([0.0, 0.5])),
                    )
                )
            case 3 if world.open:
                world.end(data.draw(st.sampled_from(world.open)), world.now)
            case 4:
                world.slowness = data.draw(st.sampled_from([0.5, 1.0, 4.0]))
            case 5:
                world.guess = data.draw(st.integers(0, 3))
                world.num_right = data.draw(st.integers(0, world.guess))
            case _:
                world.step()
    for _ in range(3000):
        if not world.open:
            break
        world.step()
    for job in world.open.copy():
        world.end(job, world.now)
    for job in jobs:
        check_sum(job)
