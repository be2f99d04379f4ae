"""A coroutine that is run eagerly does the same as in a task: results, errors, cancellations and timeouts.

Before its first wait there is no task. What needs one comes after ``in_task``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import THOROUGH

from inferd.eager import in_task, run_eagerly

STEPS = st.recursive(
    st.sampled_from(["turn", "done future", "future", "child", "shielded", "fail", "return", "uncancel"]),
    lambda steps: st.tuples(
        st.sampled_from(["timeout", "passed timeout", "keep on", "clean up", "gather"]), st.lists(steps, max_size=4)
    ),
    max_leaves=8,
)
PROGRAMS = st.lists(STEPS, max_size=6)
TURNS = 12  # of the event loop, within which a cancellation may come


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Returned(Exception):
    """A program is left early."""


class Run:
    """One run of a program, which notes what it meets."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.futures: list[asyncio.Future[None]] = []
        self.children: list[asyncio.Task[None]] = []

    async def whole(self, program: list[Any]) -> None:
        try:
            await self.steps(program)
        except Returned:
            self.seen.append("returned")
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise
        finally:
            task = asyncio.current_task()
            self.seen.append(("left", 0 if task is None else task.cancelling()))

    async def steps(self, program: list[Any]) -> None:
        for step in program:
            self.seen.append(step if isinstance(step, str) else step[0])
            await (self.leaf(step) if isinstance(step, str) else self.block(*step))

    async def leaf(self, step: str) -> None:
        loop = asyncio.get_running_loop()
        if step == "turn":
            await asyncio.sleep(0)
        elif step == "done future":
            future = loop.create_future()
            future.set_result(None)
            await future
        elif step == "future":
            future = loop.create_future()
            self.futures.append(future)
            loop.call_soon(loop.call_soon, _resolve, future)
            await future
        elif step == "child":
            await self.child()
        elif step == "shielded":
            await asyncio.shield(self.child())
        elif step == "fail":
            raise ValueError
        elif step == "return":
            raise Returned
        elif step == "uncancel":
            await in_task()
            task = asyncio.current_task()
            assert task is not None
            self.seen.append(task.uncancel() if task.cancelling() else "not cancelled")

    def child(self) -> asyncio.Task[None]:
        async def turns() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        self.children.append(asyncio.ensure_future(turns()))
        return self.children[-1]

    async def block(self, kind: str, program: list[Any]) -> None:
        if kind == "timeout":
            await in_task()
            async with asyncio.timeout(60):
                await self.steps(program)
        elif kind == "passed timeout":
            await in_task()
            try:
                async with asyncio.timeout(-1):
                    await self.steps(program)
            except TimeoutError:
                self.seen.append("timed out")
        elif kind == "keep on":
            try:
                await self.steps(program)
            except asyncio.CancelledError:
                self.seen.append("kept on")
        elif kind == "clean up":
            try:
                await self.steps(program)
            finally:
                await asyncio.sleep(0)
                self.seen.append("cleaned up")
        else:
            await asyncio.gather(self.child(), self.child())
            await self.steps(program)


def outcome(program: list[Any], cancelled_at: int | None, *, is_eager: bool) -> tuple[object, ...]:
    """What a run met, how it ended, and what became of what it waited for. ``cancelled_at``: turns after its first wait."""

    async def main() -> tuple[object, ...]:
        loop = asyncio.get_running_loop()
        run = Run()
        tasks: list[asyncio.Task[None]] = []

        def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(loop.create_task(coroutine))
            return tasks[-1]

        ended: object = None
        goes_on: asyncio.Task[None] | None = None

        def begin() -> None:
            """Outside of any task, as a request on a connection begins."""
            nonlocal ended, goes_on
            try:
                goes_on = run_eagerly(run.whole(program), spawn)
            except ValueError as error:
                ended = type(error).__name__

        if is_eager:
            loop.call_soon(begin)
        else:
            spawn(run.whole(program))
        await asyncio.sleep(0)  # it runs until it first waits
        if is_eager:
            assert goes_on is (tasks[0] if tasks else None)
        if tasks:
            if cancelled_at is not None:
                for _ in range(cancelled_at):
                    await asyncio.sleep(0)
                tasks[0].cancel()
            await asyncio.wait(tasks, timeout=20)
            (task,) = tasks
            ended = "cancelled" if task.cancelled() else type(task.exception()).__name__ if task.exception() else None
        for child in run.children:
            await asyncio.wait((child,))
        fates = [future.cancelled() for future in (*run.futures, *run.children)]
        return run.seen, ended, fates

    return asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(PROGRAMS)
def test_an_eager_coroutine_comes_to_the_same_as_a_task(program: list[Any]) -> None:
    assert outcome(program, None, is_eager=True) == outcome(program, None, is_eager=False)


@settings(max_examples=250, deadline=None)
@given(st.lists(st.sampled_from(["future", "child", "shielded", "done future", "turn", "fail", "return"])))
def test_a_coroutine_that_is_cancelled_while_it_first_waits_cancels_what_it_waits_for(program: list[Any]) -> None:
    for around in (lambda steps: steps, lambda steps: [("keep on", steps)], lambda steps: [("clean up", steps)]):
        whole: list[Any] = around(program)
        assert outcome(whole, 0, is_eager=True) == outcome(whole, 0, is_eager=False)


@THOROUGH
@settings(max_examples=250, deadline=None)
@given(PROGRAMS, st.integers(0, TURNS))
def test_an_eager_coroutine_that_is_cancelled_ends_as_its_task_would(program: list[Any], at: int) -> None:
    """A turn earlier or later: a future that is done when the task begins is seen a turn later than by a task."""
    whole = ["turn", *program]  # behind which ``in_task`` takes no time
    eager = outcome(whole, at, is_eager=True)
    assert eager in [outcome(whole, turn, is_eager=False) for turn in (at, at - 1, at + 1) if turn >= 0]


def test_behind_in_task_there_is_a_task() -> None:
    async def main() -> None:
        seen: list[object] = []
        tasks: list[asyncio.Task[None]] = []

        async def whole() -> None:
            seen.append(asyncio.current_task())
            await in_task()
            seen.append(asyncio.current_task())

        loop = asyncio.get_running_loop()

        def spawn(rest: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(loop.create_task(rest))
            return tasks[-1]

        loop.call_soon(run_eagerly, whole(), spawn)
        await asyncio.sleep(0)
        await tasks[0]
        assert seen == [None, tasks[0]]

    asyncio.run(main())


def test_an_error_before_the_first_wait_is_raised_where_it_was_run_and_leaves_no_task() -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ZeroDivisionError

        def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            raise AssertionError("there is nothing to go on with")

        raised: list[type[Exception]] = []

        def begin() -> None:
            with pytest.raises(ZeroDivisionError) as error:
                run_eagerly(fails(), spawn)
            raised.append(error.type)

        asyncio.get_running_loop().call_soon(begin)
        await asyncio.sleep(0)
        assert raised == [ZeroDivisionError]

    asyncio.run(main())


def test_what_is_not_gone_on_with_is_closed() -> None:
    async def main() -> None:
        seen: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append("closed")

        rests: list[Coroutine[Any, Any, None]] = []

        def spawn(rest: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            rests.append(rest)
            return asyncio.create_task(asyncio.sleep(0))

        asyncio.get_running_loop().call_soon(run_eagerly, waits(), spawn)
        await asyncio.sleep(0)
        rests[0].close()
        assert seen == ["closed"]

    asyncio.run(main())
