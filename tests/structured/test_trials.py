"""Forms that may be costly are tried in a process of its own: its limits, its end, and what the worker is told."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.heap import thread_seconds
from tests.tiers import THOROUGH

from inferd.answer_form import Choices, Constraint, Grammar, JsonSchema, Regex
from inferd.backend import FOR_EVER, TakesLong, Wait, WaitEndedError
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.errors import InferdError, InvalidRequest, Overloaded
from inferd.structured import compiled as compiled_forms
from inferd.structured.compiled import Compiler
from inferd.structured.grammar_text import Form
from inferd.structured.trial import __main__ as waiting
from inferd.structured.trial import client
from inferd.structured.trial.task import Task
from inferd.structured.vocabulary import Vocabulary

_MEMBERS = {f"p{i}": {"type": "integer", "maximum": i} for i in range(900)}
# Its normal form alone takes about a second.
LONG = JsonSchema(schema={"properties": {f"q{i}": {"properties": _MEMBERS} for i in range(18)}}, at="s")
CHEAP = JsonSchema(
    schema={
        "type": "object",
        "properties": {"line_12345": {"type": "string"}, "b": {"$ref": "#/properties/line_12345"}},
    },
    at="s",
)
COSTLY = JsonSchema(schema={"type": "string", "pattern": "^[a-z]{3}$"}, at="s")


@pytest.fixture
def compiler(tiny_model: Path) -> Iterator[Compiler]:
    tokenizer = Tokenizer.load(tiny_model)
    made = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((0,))))
    yield made
    made.close()


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def state_of(pid: int) -> str:
    """A letter, as the system writes it: T for a process that was stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def failure(compiler: Compiler, constraint: Constraint, tenant: str = "") -> InferdError:
    with pytest.raises(InferdError) as caught:
        compiler.compile(constraint, tenant)
    return caught.value


class InThread:
    """A form that is compiled in a thread, and how that ends."""

    def __init__(self, compiler: Compiler, constraint: Constraint) -> None:
        self.outcome: object = None
        self.cancellable = Wait()
        self._thread = threading.Thread(target=self._run, args=(compiler, constraint))
        self._thread.start()

    def _run(self, compiler: Compiler, constraint: Constraint) -> None:
        try:
            self.outcome = compiler.compile(constraint, wait=self.cancellable)
        except (InferdError, WaitEndedError) as error:
            self.outcome = error

    def wait(self) -> object:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.outcome


def trial_of(compiler: Compiler) -> int:
    """The process of the trial that runs now."""

    def found() -> int | None:
        pid = compiler.trials.pid
        running = children(pid) if pid is not None else []
        return running[0] if running else None

    pid: int = until(found)
    return pid


def test_a_cheap_form_needs_no_trial_and_others_say_that_they_take_long(compiler: Compiler) -> None:
    compiler.compile(CHEAP, wait=None)
    compiler.compile(Choices(texts=("a", "b"), at="c"), wait=None)
    assert compiler.trials.pid is None
    costly: list[Constraint] = [
        COSTLY,
        Regex(pattern="a", at="r"),
        Grammar(text='start: "a"', syntax="lark", at="g"),
        JsonSchema(schema={"type": "string", "maxLength": 123_456}, at="s"),
        JsonSchema(schema={"type": "integer"}, at="s", whitespace="( {1,99}){1,99}"),
    ]
    for constraint in costly:
        with pytest.raises(TakesLong):
            compiler.compile(constraint, wait=None)
    assert compiler.trials.pid is None
    grammar = compiler.compile(COSTLY)
    assert compiler.compile(COSTLY, wait=None) is grammar


def test_schemas_are_checked_in_a_trial_and_what_became_of_them_is_kept(compiler: Compiler) -> None:
    refused = {"type": "array", "uniqueItems": True}
    given = [(COSTLY.schema, "a"), (refused, "b"), (CHEAP.schema, "c")]
    with pytest.raises(TakesLong):
        compiler.refusals(given, wait=None)
    for wait in (FOR_EVER, None):
        first, second, third = compiler.refusals(given, wait=wait)
        assert first is None
        assert third is None
        assert second is not None
        assert second.param == "b"


def test_a_trial_ends_at_its_limit_of_processor_time_and_the_refusal_is_kept(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_SECONDS", 0.05)
    error = failure(compiler, LONG)
    assert isinstance(error, InvalidRequest)
    assert (error.param, "longer than 0.05 s" in error.message) == ("s", True)
    monkeypatch.setattr(compiler.trials, "run", lambda *given: pytest.fail("tried again"))
    assert failure(compiler, LONG).message == error.message


def test_a_trial_that_takes_too_much_memory_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 21)
    error = failure(compiler, LONG)
    assert isinstance(error, InvalidRequest)
    assert "memory" in error.message
    assert failure(compiler, LONG, "another").message == error.message


def test_a_grammar_that_needs_much_of_the_stack_ends_its_trial_and_no_worker(compiler: Compiler) -> None:
    """A thread of the worker has room for these rules, and for a few more only."""
    rules = "".join(f'r{n}: "a" r{n + 1}\n' for n in range(2_000))
    error = failure(compiler, Grammar(text=f'start: r0\n{rules}r2000: "b"', syntax="lark", at="g"))
    assert isinstance(error, InvalidRequest)
    assert "stand too deeply within each other" in error.message


def test_a_trial_whose_process_is_killed_ends_one_request(compiler: Compiler) -> None:
    compiler.compile(COSTLY)
    waiting = compiler.trials.pid
    killed = InThread(compiler, LONG)
    os.kill(trial_of(compiler), signal.SIGKILL)
    assert isinstance(killed.wait(), Overloaded)
    compiler.compile(Regex(pattern="b", at="r"))
    assert compiler.trials.pid == waiting


def test_the_process_that_waits_for_trials_is_started_again(compiler: Compiler) -> None:
    compiler.compile(COSTLY)
    first = compiler.trials.pid
    assert first is not None
    lost = InThread(compiler, LONG)
    trial = trial_of(compiler)
    os.kill(first, signal.SIGKILL)
    assert isinstance(lost.wait(), Overloaded)
    until(lambda: not Path(f"/proc/{trial}").exists())
    compiler.compile(Regex(pattern="b", at="r"))
    assert compiler.trials.pid not in (None, first)


def test_nothing_is_left_when_the_compiler_is_closed_during_a_trial(compiler: Compiler) -> None:
    running = InThread(compiler, LONG)
    trial, waiting = trial_of(compiler), compiler.trials.pid
    compiler.close()
    assert isinstance(running.wait(), Overloaded)
    until(lambda: not Path(f"/proc/{trial}").exists() and not Path(f"/proc/{waiting}").exists())
    assert isinstance(failure(compiler, Regex(pattern="b", at="r")), Overloaded)


def test_a_trial_that_gets_too_little_of_the_processor_is_no_fault_of_the_form(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(COSTLY)
    monkeypatch.setattr(client, "MOST_WAIT_S", 0.05)
    assert isinstance(failure(compiler, LONG), Overloaded)
    waiting = compiler.trials.pid
    assert waiting is not None
    until(lambda: not children(waiting))  # it does not go on for nothing
    monkeypatch.setattr(client, "MOST_WAIT_S", 30.0)
    compiler.compile(Regex(pattern="b", at="r"))


def test_a_trial_ends_with_the_wait_for_it_and_others_go_on(compiler: Compiler) -> None:
    left = InThread(compiler, LONG)
    trial = trial_of(compiler)
    other = InThread(compiler, COSTLY)
    left.cancellable.end()
    assert isinstance(left.wait(), WaitEndedError)
    until(lambda: not Path(f"/proc/{trial}").exists())
    assert other.wait() is compiler.compile(COSTLY, wait=None)
    with pytest.raises(WaitEndedError):
        compiler.compile(LONG, wait=left.cancellable)


def test_a_form_that_passed_its_trial_is_not_compiled_once_nothing_waits_for_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compile, compiled = threading.Event(), []

    def first_of_the_thread() -> None:
        assert may_compile.wait(30)

    def note(given: Form, *_: object, **__: object) -> NoReturn:
        compiled.append(given)
        raise InvalidRequest("it is not compiled here")

    thread = ThreadPoolExecutor(1)
    monkeypatch.setattr(compiler, "_thread", thread)
    monkeypatch.setattr(compiler, "_compiled", note)
    monkeypatch.setattr(compiled_forms, "_SHORT_S", 0.0)
    thread.submit(first_of_the_thread)
    left = InThread(compiler, COSTLY)
    until(thread._work_queue.qsize)
    left.cancellable.end()
    assert isinstance(left.wait(), WaitEndedError)
    may_compile.set()
    thread.shutdown()
    assert not compiled


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such share")
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_trial_gets_the_least_share_once_it_has_set_its_own(*, has_begun: bool) -> None:
    """Until then it would set another policy afterwards."""
    with subprocess.Popen(["sleep", "60"], start_new_session=has_begun) as trial:
        try:
            if has_begun:
                until(lambda: waiting._give_least_share(trial.pid))
            else:
                assert not waiting._give_least_share(trial.pid)
            assert (os.sched_getscheduler(trial.pid) == os.SCHED_IDLE) == has_begun
        finally:
            trial.kill()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such share")
def test_a_long_trial_leaves_the_cores_to_others_and_is_stopped_in_turns_while_the_worker_computes(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_SAVED_S", 0.1)
    may_end = threading.Event()

    def compute() -> None:  # without the interpreter's lock
        while not may_end.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000)

    computing = threading.Thread(target=compute)
    running = InThread(compiler, LONG)
    trial = trial_of(compiler)
    computing.start()
    try:
        until(lambda: os.sched_getscheduler(trial) == os.SCHED_IDLE)  # raises where it ended before
        until(lambda: state_of(trial) == "T")
    finally:
        may_end.set()
        computing.join()
    before_s = waiting._processor_s(trial)
    until(lambda: waiting._processor_s(trial) > before_s + 0.02 or not Path(f"/proc/{trial}").exists())
    with contextlib.suppress(ProcessLookupError):
        os.kill(trial, signal.SIGKILL)
    running.wait()
    assert os.sched_getscheduler(os.getpid()) == os.SCHED_OTHER


names = st.sampled_from(["a", "b", "long name", "é", '"', "\\", "$ref", "type", "x" * 30])
leaves = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind}),
    st.lists(st.one_of(names, st.integers(-9, 999), st.none()), min_size=1, max_size=9).map(
        lambda some: {"enum": some}
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 499)] * 2
    ),
    st.builds(lambda low, more: {"type": "number", "minimum": low, "maximum": low + more}, *[st.integers(0, 499)] * 2),
)
cheap_schemas: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda members, is_closed: {
                "type": "object", "properties": members, "required": list(members), "additionalProperties": not is_closed
            },
            st.dictionaries(names, inner, max_size=6),
            st.booleans(),
        ),
        st.builds(
            lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
            inner, *[st.integers(0, 499)] * 2,
        ),
        st.lists(inner, min_size=1, max_size=4).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def lasting(tiny_model: Path) -> Iterator[Compiler]:
    tokenizer = Tokenizer.load(tiny_model)
    made = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((0,))))
    yield made
    made.close()


@THOROUGH
@settings(max_examples=150, deadline=None)
@given(cheap_schemas)
def test_what_needs_no_trial_is_cheap(lasting: Compiler, schema: Any) -> None:
    """It is compiled beside other work, in well under the time that a trial may take."""
    with thread_seconds() as taken_s:
        with contextlib.suppress(InvalidRequest, TakesLong):
            lasting.compile(JsonSchema(schema=schema, at="s"), wait=None)
        assert taken_s() < client.MOST_SECONDS / 4, json.dumps(schema)


def test_the_process_imports_no_torch() -> None:
    code = "import sys, inferd.structured.trial.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tasks_are_told_apart(compiler: Compiler) -> None:
    result = compiler.trials.run(Task(schemas=((True, "a"), ({"$ref": "#"}, "b"))))
    assert result.refusals[0] is None
    assert result.refusals[1] is not None
