"""Steps with batch work pause for first tokens of other classes, and change no answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.adapters import write_adapter
from tests.engine.test_engine import PROMPTS, Answer, Build, build, make_request, run

from inferd.config import KVCacheConfig, ModelConfig, SpeculationConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.paused_step import MOST_BEFORE
from inferd.native import compiled
from inferd.types import RANKS, GenerateRequest
from inferd.worker.loop import Add, Halt, Inbox, StepLoop
from inferd.worker.messages import Outputs

__all__ = ["build"]  # a fixture
pytestmark = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")

BATCH, INTERACTIVE = RANKS["batch"], RANKS["interactive"]


class Pausing:
    """An engine whose steps with batch work pause while ``arrived``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.arrived = False
        self.answers: dict[str, Answer] = {}
        self.num_paused = 0
        engine.pause_steps_when(lambda: self.arrived)
        run(engine, make_request("first", "Other classes are active.", priority=INTERACTIVE, max_tokens=2))

    def add(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.answers[request.id] = Answer()
            self.engine.add(self.engine.prepare(request), 1.0)

    def step(self, *, arrived: bool = False) -> list[str]:
        """The requests that had outputs."""
        self.arrived = arrived
        outputs, stats = self.engine.step(1.0)
        self.num_paused += stats is None
        for output in outputs:
            self.answers[output.request_id].take(output)
        self.engine.pool.check()
        return [output.request_id for output in outputs]

    def finish(self) -> None:
        for _ in range(5000):
            if self.engine.due(1.0) is None:
                break
            self.step()
        assert self.engine.pool.num_used == 0
        assert all(answer.end is not None for answer in self.answers.values())


def batch_requests(count: int, **sampling: Any) -> list[GenerateRequest]:
    return [
        make_request(f"b{number}", PROMPTS[number % len(PROMPTS)] * 2, priority=BATCH, **sampling)
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def alone(build: Build) -> Engine:
    return build()


def test_a_first_token_is_computed_before_the_rest_of_a_step_that_has_paused(build: Build, alone: Engine) -> None:
    pausing = Pausing(build())
    work = batch_requests(4)
    pausing.add(*work)
    for _ in range(3):
        pausing.step()
    assert pausing.step(arrived=True) == []
    assert pausing.num_paused == 1
    urgent = make_request("urgent", "Now!", priority=INTERACTIVE)
    pausing.add(urgent)
    before = {name: len(answer.tokens()) for name, answer in pausing.answers.items()}
    assert pausing.step(arrived=True) == ["urgent"]
    assert len(pausing.answers["urgent"].tokens()) == 1
    resumed = pausing.step()  # the rest: the batch work that this step had room for, by the seconds of the steps before
    assert set(resumed) <= {request.id for request in work}
    assert all(len(pausing.answers[name].tokens()) > before[name] for name in resumed)
    pausing.finish()
    for request in [*work, urgent]:
        (expected,) = run(alone, request)
        assert pausing.answers[request.id].tokens() == expected.tokens()


def test_steps_without_batch_work_do_not_pause(build: Build) -> None:
    pausing = Pausing(build())
    pausing.add(make_request("a", "Hello", priority=INTERACTIVE))
    while pausing.engine.due(1.0) is not None:
        pausing.step(arrived=True)
    assert not pausing.num_paused


def test_steps_of_a_model_that_has_batch_requests_alone_do_not_pause(build: Build) -> None:
    engine = build()
    engine.pause_steps_when(lambda: True)
    engine.add(engine.prepare(batch_requests(1)[0]), 1.0)
    while engine.due(1.0) is not None:
        assert engine.step(1.0)[1] is not None


def test_batch_work_goes_on_however_many_requests_arrive(build: Build) -> None:
    pausing = Pausing(build())
    pausing.add(*batch_requests(1, max_tokens=20))
    since = most = number = 0
    while pausing.answers["b0"].end is None:
        number += 1
        pausing.add(make_request(f"i{number}", f"{number} is a number", priority=INTERACTIVE, max_tokens=1))
        said = pausing.step(arrived=True)
        since = 0 if "b0" in said else since + 1
        most = max(most, since)
        assert number < 2000
    # A first token is due in every step, so batch work has one of eight; it pauses, goes on, and is sampled.
    assert MOST_BEFORE < most <= 8 * (MOST_BEFORE + 3)
    pausing.finish()


@pytest.mark.parametrize("how", ["cancelled", "expired", "halted"])
def test_a_request_of_a_step_that_has_paused_ends_and_the_others_go_on(build: Build, alone: Engine, how: str) -> None:
    pausing = Pausing(build())
    work = batch_requests(3)
    if how == "expired":
        work[0] = msgspec.structs.replace(work[0], deadline_s=2.0)
    pausing.add(*work)
    for _ in range(3):
        pausing.step()
    assert pausing.step(arrived=True) == []
    engine, answers = pausing.engine, pausing.answers
    if how == "halted":
        ends = engine.halt(1.0)
        assert sorted(output.request_id for output in ends if output.end is not None) == ["b0", "b1", "b2"]
        assert engine.pool.num_used == 0
        return
    if how == "cancelled":
        engine.cancel("b0")
        assert pausing.step()[0] == "b0"
    else:
        for output in engine.step(9.0)[0]:
            answers[output.request_id].take(output)
    end = answers["b0"].end
    assert end is not None
    assert end.outcome == ("cancelled" if how == "cancelled" else "failed")
    pausing.finish()
    for request in work[1:]:
        (expected,) = run(alone, request)
        assert answers[request.id].tokens() == expected.tokens()


def test_a_step_that_fails_after_it_has_paused_ends_its_own_requests_alone(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = Pausing(build())
    pausing.add(*batch_requests(2))
    pausing.step()
    assert pausing.step(arrived=True) == []
    pausing.add(make_request("urgent", "Now!", priority=INTERACTIVE))
    pausing.step(arrived=True)
    engine = pausing.engine
    with monkeypatch.context() as patched:
        patched.setattr(engine._sampler, "draw", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.step(1.0)
    for output in engine.abort_step(caught.value, 1.0):
        pausing.answers[output.request_id].take(output)
    assert {name for name, answer in pausing.answers.items() if answer.end is not None} == {"b0", "b1"}
    pausing.finish()


EVENTS = st.lists(st.tuples(st.booleans(), st.sampled_from(["", "", "batch", "urgent", "cancel"])), max_size=60)


@given(events=EVENTS, seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pauses_change_no_answer(build: Build, alone: Engine, events: list[tuple[bool, str]], seed: int) -> None:
    pausing = Pausing(build(num_blocks=64, max_num_seqs=6))
    made: dict[str, GenerateRequest] = {}
    cancelled: set[str] = set()
    for number, (arrived, event) in enumerate([*((False, "batch"),) * 3, *events]):
        if event in ("batch", "urgent"):
            request = make_request(
                f"{event}{number}",
                f"{number} " + PROMPTS[number % len(PROMPTS)],
                priority=BATCH if event == "batch" else INTERACTIVE,
                temperature=0.5 * (number % 3),
                seed=seed,
                n=1 + number % 2,
                max_tokens=1 + number % 7,
            )
            made[request.id] = request
            pausing.add(request)
        elif event == "cancel" and made:
            name = sorted(made)[number % len(made)]
            if pausing.answers[name].end is None:
                pausing.engine.cancel(name)
                cancelled.add(name)
        pausing.step(arrived=arrived)
    pausing.finish()
    for name, request in made.items():
        if name not in cancelled:
            (expected,) = run(alone, request)
            for index in range(request.sampling.n):
                assert pausing.answers[name].tokens(index) == expected.tokens(index)


def test_requests_with_adapters_and_guesses_pause_too(tiny_model: Path, tmp_path: Path) -> None:
    names = ["one", "two"]
    for seed, name in enumerate(names):
        write_adapter(tmp_path / name, tiny_model, seed=seed)
    config = ModelConfig(
        source=str(tiny_model),
        dtype="float32",
        threads=1,
        max_model_len=128,
        kv_cache=KVCacheConfig(block_size=4, num_blocks=256),
        adapters={name: str(tmp_path / name) for name in names},
        speculation=SpeculationConfig(method="prompt_lookup"),
    )
    expected: list[list[int]] = []
    for pauses in (False, True):
        engine = create_backend("tiny", config, lambda phase, done, total: None)
        pausing = Pausing(engine)
        work = [
            msgspec.structs.replace(
                make_request(f"b{number}", "one two three " * 4, priority=BATCH, max_tokens=24),
                adapter=(*names, "")[number],
            )
            for number in range(3)
        ]
        pausing.add(*work)
        turns = 0
        while engine.due(1.0) is not None:
            turns += 1
            pausing.step(arrived=pauses and turns % 3 != 0)
        found = [pausing.answers[request.id].tokens() for request in work]
        assert bool(pausing.num_paused) == pauses
        expected = expected or found
        assert found == expected
        engine.close()


def test_the_loop_lets_steps_pause_while_work_waits_in_its_inbox(build: Build) -> None:
    """Every step with batch work finds the next request, so each but the first is added while a step has paused."""
    engine = build()
    run(engine, make_request("first", "Other classes are active.", priority=INTERACTIVE, max_tokens=2))
    inbox: Inbox = queue.SimpleQueue()
    sent: list[tuple[str, bool]] = []
    left = [make_request(f"i{number}", "Now!", priority=INTERACTIVE, max_tokens=1) for number in range(3)]

    def send(message: Outputs) -> None:
        sent.extend((output.request_id, output.end is not None) for output in message.outputs)
        ended = {name for name, is_end in sent if is_end}
        if "b0" in ended and len(ended) == 4:
            inbox.put(Halt())

    advance = engine._runner.begin
    during: list[str] = []

    def begin(batch: object) -> object:
        if left:  # arrives while the step is computed
            request = left.pop()
            during.append(request.id)
            inbox.put(Add(request.id, engine.prepare(request), 0.0))
        return advance(batch)  # type: ignore[arg-type]

    engine._runner = _Wrapped(engine._runner, begin)  # type: ignore[assignment]
    work = batch_requests(1, max_tokens=12)[0]
    inbox.put(Add(work.id, engine.prepare(work), 0.0))
    loop = StepLoop(engine, inbox, send)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    firsts = [name for name, _ in sent if name != "b0"]
    assert firsts == during
    order = [name for name, _ in sent]
    assert order.index(during[0]) < order.index("b0"), "the first token came before the batch's, whose step it was"


class _Wrapped:
    """A runner with another ``begin``."""

    def __init__(self, runner: object, begin: object) -> None:
        self._runner = runner
        self.begin = begin

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
