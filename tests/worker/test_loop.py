"""The step loop's law: every request that came in ends exactly once, whatever happens in which order."""

from __future__ import annotations

import queue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.tiny_backend import TinyBackend

from inferd.config import ModelConfig
from inferd.types import GenerateRequest, Output, SamplingParams, StepStats, TextPrompt, Usage
from inferd.worker.channel import ChannelError
from inferd.worker.loop import Add, Drop, Halt, StepLoop, StepsFailedError, Work
from inferd.worker.messages import Outputs

NAMES = st.sampled_from("abcdef")
WORDS = st.sampled_from(["hello", "raise", "raise@1", "refused"])
ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "drop"]), NAMES, WORDS, st.integers(1, 4)), max_size=30)


class Script(queue.SimpleQueue[Work]):
    """An inbox that gets its next part whenever the loop has sent something or has nothing to do."""

    def __init__(self) -> None:
        self.parts: list[list[Work]] = []

    def feed(self) -> None:
        for work in self.parts.pop(0) if self.parts else [Halt()]:
            self.put(work)

    comes_soon = False
    """Whether what comes next comes within the time of a limited wait."""

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        if timeout is not None and self.empty() and not self.comes_soon:
            raise queue.Empty
        while self.empty():
            self.feed()
        return super().get(block, timeout)


class Bench:
    """A loop in this thread, over the tiny backend: every order of events can be repeated."""

    def __init__(self) -> None:
        self.backend = TinyBackend("tiny", ModelConfig(source="tiny"))
        self.inbox = Script()
        self.sent: list[Output] = []
        self.stats: list[StepStats] = []
        self.loop = StepLoop(self.backend, self.inbox, self._send)

    def run(self, *parts: list[Work]) -> None:
        self.inbox.parts = list(parts)
        self.loop.run()

    def _send(self, message: Outputs) -> None:
        self.sent += message.outputs
        self.stats += [] if message.stats is None else [message.stats]
        self.inbox.feed()

    def add(self, name: str, words: str, max_tokens: int) -> Add:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerateRequest(id=name, model="tiny", prompt=TextPrompt(text=words), sampling=sampling)
        return Add(name, self.backend.prepare(request), 0.0)


@given(st.lists(ACTIONS, max_size=6))
def test_every_request_ends_exactly_once_and_says_nothing_after(script: list[list[tuple[str, str, str, int]]]) -> None:
    bench = Bench()
    submitted: list[str] = []
    parts: list[list[Work]] = []
    for actions in script:
        part: list[Work] = []
        for kind, name, words, max_tokens in actions:
            if kind == "add":
                submitted.append(f"{name}{len(submitted)}")
                part.append(bench.add(submitted[-1], words, max_tokens))
            else:
                part += [Drop(unique) for unique in submitted if unique.startswith(name)] or [Drop(name)]
        parts.append(part)
    try:
        bench.run(*parts)
    except StepsFailedError:
        return  # the process ends; what it held is the router's to settle
    ends = [output.request_id for output in bench.sent if output.end is not None]
    assert len(ends) == len(set(ends))
    assert {output.request_id for output in bench.sent} == set(ends)
    for name in ends:
        news = [output for output in bench.sent if output.request_id == name]
        assert [output.end is not None for output in news] == [False] * (len(news) - 1) + [True]
    assert not bench.backend.requests


def test_a_second_submission_of_a_running_request_is_ignored() -> None:
    bench = Bench()
    bench.run([bench.add("a", "hello", 2), bench.add("a", "hello", 2)], [], [])
    assert [output.end is not None for output in bench.sent] == [False, True]


def test_a_loop_is_busy_with_what_came_and_with_what_it_computes() -> None:
    """What a watch takes for a hang: busy, and no step ends."""
    bench = Bench()
    computing: list[tuple[bool, bool]] = []
    step = bench.backend.step

    def watched(now: float) -> tuple[list[Output], StepStats]:
        computing.append((bench.loop.is_busy, bench.inbox.empty()))
        return step(now)

    bench.backend.step = watched  # type: ignore[method-assign]
    assert not bench.loop.is_busy
    bench.inbox.put(bench.add("a", "hello", 2))
    assert bench.loop.is_busy
    bench.run([], [Halt()])
    assert computing[0] == (True, True)


class Diligent(TinyBackend):
    """One with something to do ahead of time: so many turns, and work that arrives during one of them."""

    def __init__(self, turns: int, arrives: int, inbox: Script) -> None:
        super().__init__("tiny", ModelConfig(source="tiny"))
        self.left, self.arrives, self.inbox = turns, arrives, inbox

    def use_idle_time(self) -> bool:
        assert not self.requests, "there is other work"
        self.left -= 1
        if self.left == self.arrives:
            self.inbox.feed()
        return self.left > 0


@pytest.mark.parametrize(("turns", "arrives", "left"), [(5, 2, 2), (3, -1, 0)])
def test_idle_time_is_used_until_work_comes_or_nothing_is_left_to_do(turns: int, arrives: int, left: int) -> None:
    bench = Bench()
    backend = Diligent(turns, arrives, bench.inbox)
    loop = StepLoop(backend, bench.inbox, bench._send)
    bench.inbox.parts = [[bench.add("a", "hello", 1)], [Halt()]]
    loop.run()
    assert backend.left == left
    assert [output.end.outcome for output in bench.sent if output.end] == ["done"]


def test_work_that_comes_soon_does_not_wait_for_what_is_done_ahead() -> None:
    bench = Bench()
    backend = Diligent(5, -1, bench.inbox)
    bench.loop = StepLoop(backend, bench.inbox, bench._send)
    bench.inbox.comes_soon = True
    bench.run([bench.add("a", "hello", 1)], [bench.add("b", "hello", 1)])
    assert backend.left == 5
    assert [output.end.outcome for output in bench.sent if output.end] == ["done", "done"]


def test_halting_ends_what_runs_as_cancelled() -> None:
    bench = Bench()
    bench.run([bench.add("a", "hello", 9)], [Halt()])
    assert [output.end.outcome for output in bench.sent if output.end] == ["cancelled"]


def test_what_is_halted_tells_what_was_computed() -> None:
    bench = Bench()
    bench.run([bench.add("a", "hello you", 9)], [], [], [bench.add("b", "hello", 9), Halt()])
    ends = {output.request_id: output.end.usage for output in bench.sent if output.end}
    assert ends == {"a": Usage(2, 3), "b": Usage(0, 0)}


def test_the_loop_gives_up_when_steps_fail_again_and_again() -> None:
    bench = Bench()
    with pytest.raises(StepsFailedError):
        bench.run([bench.add("a", "raise", 1)], [bench.add("b", "raise", 1)], [bench.add("c", "raise", 1)])
    assert [output.end.outcome for output in bench.sent if output.end] == ["failed"] * 3


def test_what_sending_took_is_told_with_the_next_step() -> None:
    bench = Bench()
    bench.run([bench.add("a", "hello", 3)], [], [])
    assert len(bench.stats) >= 2
    assert bench.stats[0].parts.send == 0.0
    assert all(stats.parts.send > 0 for stats in bench.stats[1:])


def test_an_answer_too_large_for_a_frame_fails_its_request_alone() -> None:
    class Narrow(Bench):
        def _send(self, message: Outputs) -> None:
            if any(output.request_id == "big" and output.deltas for output in message.outputs):
                raise ChannelError("too large")
            super()._send(message)

    bench = Narrow()
    bench.run([bench.add("big", "hello", 9), bench.add("small", "hello", 2)], [], [], [], [])
    ends = {output.request_id: (output.end.outcome, output.end.usage) for output in bench.sent if output.end}
    assert ends == {"big": ("refused", Usage(1, 1)), "small": ("done", Usage(1, 2))}


def test_a_last_output_too_large_for_a_frame_still_tells_what_was_computed() -> None:
    class Narrow(Bench):
        def _send(self, message: Outputs) -> None:
            if any(output.end is not None and output.deltas for output in message.outputs):
                raise ChannelError("too large")
            super()._send(message)

    bench = Narrow()
    bench.run([bench.add("a", "hello you", 2)], [], [], [])
    assert [(output.end.outcome, output.end.usage) for output in bench.sent if output.end] == [("refused", Usage(2, 2))]


def test_idle_time_is_used_until_something_arrives_or_nothing_is_left() -> None:
    pieces = iter([True] * 5)
    done: list[int] = []

    class Ahead(TinyBackend):
        def use_idle_time(self) -> bool:
            done.append(bench.inbox.qsize())
            if len(done) == 3:  # a request comes in between
                bench.inbox.put(request)
            return next(pieces, False)

    bench = Bench()
    request = bench.add("a", "hello", 3)
    bench.loop = StepLoop(Ahead("tiny", ModelConfig(source="tiny")), bench.inbox, bench._send)
    bench.run([], [], [])
    assert done == [0] * 6  # three, the request, which is answered, and the other three
    assert [output.end.outcome for output in bench.sent if output.end] == ["done"]
