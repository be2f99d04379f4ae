"""Preparing beside the loop: a cancellation finds its request wherever it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec
from tests.worker.tiny_backend import Prepared, TinyBackend
from tests.worker.watching import until_now

from inferd import clock
from inferd.answer_form import AnswerForm, Regex
from inferd.backend import FOR_EVER, TakesLong, Wait
from inferd.config import ModelConfig
from inferd.types import Chat, GenerateRequest, TextPrompt
from inferd.worker.intake import NUM_TRYING, Intake
from inferd.worker.loop import Add, Drop, Inbox
from inferd.worker.messages import Check, Checked, Detokenize, Detokenized, FromWorker, Outputs, Tokenize, Tokenized


class SlowToPrepare(TinyBackend):
    """Says when it has begun to prepare, and goes on when it may."""

    def __init__(self) -> None:
        super().__init__("tiny", ModelConfig(source="tiny"))
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=10)
        return super().prepare(request)


class SlowToTokenize(TinyBackend):
    """The same for the calls of the tokenizer."""

    begun = threading.Semaphore(0)
    may_go_on = threading.Semaphore(0)

    def tokenize(
        self, prompt: Chat | TextPrompt, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=10)
        return super().tokenize(prompt, want_strings, tenant)


def started(backend: TinyBackend) -> tuple[Intake, Inbox, list[FromWorker]]:
    inbox: Inbox = queue.SimpleQueue()
    sent: list[FromWorker] = []
    intake = Intake(backend, inbox, sent.append)
    threading.Thread(target=intake.run, daemon=True).start()
    threading.Thread(target=intake.run_formed, daemon=True).start()
    for _ in range(NUM_TRYING):
        threading.Thread(target=intake.run_tried, daemon=True).start()
    threading.Thread(target=intake.run_calls, daemon=True).start()
    return intake, inbox, sent


def request(name: str, text: str = "hello") -> GenerateRequest:
    return GenerateRequest(id=name, model="tiny", prompt=TextPrompt(text=text))


def ends(sent: list[FromWorker]) -> list[tuple[str, str]]:
    return [(o.request_id, o.end.outcome) for m in sent if isinstance(m, Outputs) for o in m.outputs if o.end]


def settled(intake: Intake) -> Callable[[], bool]:
    return lambda: not intake.is_busy


def test_a_request_cancelled_before_or_while_it_is_prepared_ends_at_once_and_never_reaches_the_loop() -> None:
    backend = SlowToPrepare()
    intake, inbox, sent = started(backend)
    intake.submit(request("preparing"))
    intake.submit(request("queued"))
    assert backend.begun.acquire(timeout=10)
    intake.cancel("queued")
    intake.cancel("preparing")
    assert ends(sent) == [("queued", "cancelled"), ("preparing", "cancelled")]
    backend.may_go_on.release()
    until_now(settled(intake), "the intake is idle")
    assert inbox.empty()


def test_a_request_cancelled_after_it_was_prepared_is_the_loops_to_end() -> None:
    intake, inbox, sent = started(TinyBackend("tiny", ModelConfig(source="tiny")))
    intake.submit(request("a"))
    until_now(settled(intake), "the intake is idle")
    intake.cancel("a")
    assert isinstance(inbox.get(timeout=10), Add)
    assert inbox.get(timeout=10) == Drop("a")
    assert not ends(sent)


def test_a_request_submitted_twice_is_prepared_once() -> None:
    backend = SlowToPrepare()
    intake, inbox, _ = started(backend)
    intake.submit(request("a"))
    intake.submit(request("a"))
    backend.may_go_on.release(2)
    until_now(settled(intake), "the intake is idle")
    assert isinstance(inbox.get(timeout=10), Add)
    assert inbox.empty()


def test_a_bad_request_is_refused_and_a_defect_hides_its_cause() -> None:
    intake, inbox, sent = started(TinyBackend("tiny", ModelConfig(source="tiny")))
    intake.submit(request("bad", "invalid"))
    intake.submit(request("defect", "defect"))
    until_now(settled(intake), "the intake is idle")
    assert ends(sent) == [("bad", "refused"), ("defect", "failed")]
    assert "a defect in prepare" not in str(sent)
    assert inbox.empty()


def test_a_long_call_of_the_tokenizer_holds_up_no_request() -> None:
    backend = SlowToTokenize("tiny", ModelConfig(source="tiny"))
    intake, inbox, sent = started(backend)
    intake.call(Tokenize(1, TextPrompt(text="long")))
    assert backend.begun.acquire(timeout=10)
    intake.submit(request("quick"))
    until_now(lambda: not inbox.empty(), "the request is in the loop's inbox")
    assert not sent
    backend.may_go_on.release()
    until_now(lambda: len(sent) == 1, "the call is answered")


def test_calls_are_answered_with_their_number_even_when_they_fail() -> None:
    intake, _, sent = started(TinyBackend("tiny", ModelConfig(source="tiny")))
    intake.call(Tokenize(1, TextPrompt(text="ab"), True))
    intake.call(Tokenize(2, TextPrompt(text="defect")))
    intake.call(Detokenize(3, [97]))
    until_now(lambda: len(sent) == 3, "every call is answered")
    assert sent[0] == Tokenized(1, [97, 98], ["a", "b"])
    assert isinstance(sent[1], Tokenized)
    assert sent[1].failure is not None
    assert sent[1].failure.kind == "internal"
    assert sent[2] == Detokenized(3, "a")


def test_a_request_whose_deadline_has_passed_is_not_even_prepared() -> None:
    backend = SlowToPrepare()
    intake, inbox, sent = started(backend)
    late = msgspec.structs.replace(request("late"), deadline_s=1.0, arrived_at=clock.now() - 2.0)
    in_time = msgspec.structs.replace(request("in time"), deadline_s=60.0, arrived_at=clock.now())
    intake.submit(late)
    intake.submit(in_time)
    assert backend.begun.acquire(timeout=10)
    backend.may_go_on.release()
    until_now(settled(intake), "both were looked at")
    assert ends(sent) == [("late", "failed")]
    (only,) = [message for message in sent if isinstance(message, Outputs)]
    end = only.outputs[0].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.kind == "deadline_exceeded"
    work = inbox.get_nowait()
    assert isinstance(work, Add)
    assert work.request_id == "in time"
    assert not backend.begun.acquire(blocking=False), "the late one was never prepared"


def test_a_form_that_takes_long_to_compile_keeps_no_other_request_waiting() -> None:
    class SlowToCompile(SlowToPrepare):
        def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
            return super().prepare(request) if request.form is not None else TinyBackend.prepare(self, request)

    backend = SlowToCompile()
    intake, inbox, _ = started(backend)
    form = AnswerForm(constraint=Regex(pattern="a", at="guided_regex"))
    intake.submit(msgspec.structs.replace(request("formed"), form=form))
    assert backend.begun.acquire(timeout=10)
    intake.submit(request("plain"))
    first = inbox.get(timeout=10)
    assert isinstance(first, Add)
    assert first.request_id == "plain"
    assert intake.is_busy
    backend.may_go_on.release()
    second = inbox.get(timeout=10)
    assert isinstance(second, Add)
    assert second.request_id == "formed"
    until_now(settled(intake), "both are prepared")


class SlowToTry(SlowToPrepare):
    """Forms whose pattern is "slow" must be tried."""

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
        form = request.form
        if form is None or not isinstance(form.constraint, Regex) or form.constraint.pattern != "slow":
            return TinyBackend.prepare(self, request)
        if wait is None:
            raise TakesLong
        return super().prepare(request)


def formed(name: str, pattern: str, tenant: str) -> GenerateRequest:
    form = AnswerForm(constraint=Regex(pattern=pattern, at="guided_regex"))
    return msgspec.structs.replace(request(name), form=form, tenant=tenant)


def added(inbox: Inbox) -> str:
    work = inbox.get(timeout=10)
    assert isinstance(work, Add)
    return work.request_id


def test_forms_that_are_tried_hold_up_no_other_form_and_no_other_tenant() -> None:
    backend = SlowToTry()
    intake, inbox, _ = started(backend)
    for number in range(6):
        intake.submit(formed(f"bomb {number}", "slow", "a"))
    for _ in range(2):
        assert backend.begun.acquire(timeout=10)
    assert not backend.begun.acquire(timeout=0.1), "a tenant has all threads"
    intake.submit(formed("quick", "a", "a"))
    assert added(inbox) == "quick"
    intake.submit(formed("other", "slow", "b"))
    assert backend.begun.acquire(timeout=10)
    backend.may_go_on.release(7)
    assert {added(inbox) for _ in range(7)} == {"other", *(f"bomb {number}" for number in range(6))}
    until_now(settled(intake), "all are prepared")


def test_checking_a_form_that_is_tried_holds_up_no_call_of_the_tokenizer() -> None:
    backend = SlowToTry()
    intake, _, sent = started(backend)
    intake.call(Check(1, [formed("c", "slow", "a")]))
    assert backend.begun.acquire(timeout=10)
    intake.call(Detokenize(2, [97]))
    until_now(lambda: len(sent) == 1, "the call is answered")
    backend.may_go_on.release()
    until_now(lambda: len(sent) == 2, "the check is answered")
    assert sent == [Detokenized(2, "a"), Checked(1)]


def test_a_request_that_waits_for_a_trial_can_be_cancelled() -> None:
    backend = SlowToTry()
    intake, inbox, sent = started(backend)
    for number in range(3):
        intake.submit(formed(f"bomb {number}", "slow", "a"))
    for _ in range(2):
        assert backend.begun.acquire(timeout=10)
    intake.cancel("bomb 2")
    assert ends(sent) == [("bomb 2", "cancelled")]
    backend.may_go_on.release(2)
    until_now(settled(intake), "all are looked at")
    assert {added(inbox), added(inbox)} == {"bomb 0", "bomb 1"}
    assert inbox.empty()


class WaitsForTrials(TinyBackend):
    """Waits for a trial of each form, until the wait is ended or the trial is."""

    def __init__(self) -> None:
        super().__init__("tiny", ModelConfig(source="tiny"))
        self.begun = threading.Semaphore(0)
        self.trial_ends = threading.Event()

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> Prepared:
        if wait is None:
            raise TakesLong
        stopped = threading.Event()
        with wait.stopped_by(stopped.set):
            self.begun.release()
            until_now(lambda: stopped.is_set() or self.trial_ends.is_set(), "the trial ends")
        return TinyBackend.prepare(self, request)


def test_a_trial_ends_with_the_request_or_the_check_that_waits_for_it_and_another_one_begins() -> None:
    backend = WaitsForTrials()
    intake, inbox, sent = started(backend)
    intake.submit(formed("left", "slow", "a"))
    intake.call(Check(1, [formed("c", "slow", "a")]))
    for _ in range(2):
        assert backend.begun.acquire(timeout=10)
    intake.submit(formed("next", "slow", "a"))
    intake.call(Check(2, [formed("c", "slow", "a")]))
    intake.call(Check(3, [formed("c", "slow", "a")]))
    intake.cancel("left")
    assert backend.begun.acquire(timeout=10), "a cancelled request keeps the turn of its tenant"
    intake.withdraw(1)
    assert backend.begun.acquire(timeout=10), "a withdrawn check keeps the turn of its tenant"
    intake.withdraw(3)
    intake.withdraw(3)
    backend.trial_ends.set()
    assert added(inbox) == "next"
    until_now(lambda: Checked(2) in sent, "the check is answered")
    until_now(settled(intake), "all are looked at")
    assert ends(sent) == [("left", "cancelled")]
    assert [each.call_id for each in sent if isinstance(each, Checked)] == [2]
