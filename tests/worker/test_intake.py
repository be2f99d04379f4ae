"""Preparing beside the loop: a cancellation finds its request wherever it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec
from tests.worker.tiny_backend import Prepared, TinyBackend
from tests.worker.watching import until_now

from inferd import clock
from inferd.config import ModelConfig
from inferd.types import Chat, GenerateRequest, TextPrompt
from inferd.worker.intake import Intake
from inferd.worker.loop import Add, Drop, Inbox
from inferd.worker.messages import Detokenize, Detokenized, FromWorker, Outputs, Tokenize, Tokenized


class SlowToPrepare(TinyBackend):
    """Says when it has begun to prepare, and goes on when it may."""

    def __init__(self) -> None:
        super().__init__("tiny", ModelConfig(source="tiny"))
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def prepare(self, request: GenerateRequest) -> Prepared:
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
