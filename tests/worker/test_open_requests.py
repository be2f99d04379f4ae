"""Whatever a backend returns, the gateway reads one end of each accepted request and nothing after it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.types import Delta, End, Output, Usage
from inferd.worker.channel import ChannelError
from inferd.worker.messages import Outputs
from inferd.worker.open_requests import OpenRequests

MAX_TEXT = 10
NAMES = st.sampled_from("abcd")
OUTPUTS = st.builds(
    lambda name, size, is_end: Output(
        name, (Delta(0, "x" * size),), None, End("done", Usage(1, size)) if is_end else None
    ),
    NAMES,
    st.sampled_from([1, 4, MAX_TEXT + 1]),
    st.booleans(),
)
EVENTS = st.lists(st.one_of(NAMES, st.lists(OUTPUTS, max_size=4)), max_size=25)


class Gateway:
    """Reads messages of at most MAX_TEXT characters, and notes which requests the backend was to cancel."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.cancelled: list[str] = []
        self.requests = OpenRequests("predict", self._send, self.cancelled.append)

    def _send(self, message: Outputs) -> None:
        if sum(len(delta.text) for output in message.outputs for delta in output.deltas) > MAX_TEXT:
            raise ChannelError("too large")
        self.outputs += message.outputs

    def of(self, name: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == name]


@given(EVENTS)
def test_each_accepted_request_ends_exactly_once_and_says_nothing_after(events: list[str | list[Output]]) -> None:
    gateway = Gateway()
    accepted = 0
    for event in events:
        if isinstance(event, str):
            accepted += gateway.requests.accept(event, 0.0)
        else:
            gateway.requests.send(event)
    gateway.requests.cancel_all(1.0)
    ends = [output for output in gateway.outputs if output.end is not None]
    assert len(ends) == accepted
    for name in "abcd":
        found = gateway.of(name)
        assert not found or found[-1].end is not None
        assert name not in gateway.requests


def test_a_request_whose_output_is_too_large_is_cancelled_and_refused_with_what_was_computed() -> None:
    gateway = Gateway()
    gateway.requests.accept("large", 0.0)
    gateway.requests.accept("small", 0.0)
    gateway.requests.send([_output("large", MAX_TEXT + 1), _output("small", 2)])
    assert gateway.cancelled == ["large"]
    assert not gateway.of("large")
    gateway.requests.send([_output("large", 1), Output("large", (), None, End("cancelled", Usage(1, 7)))])
    (refused,) = gateway.of("large")
    assert refused.end is not None
    assert (refused.end.outcome, refused.end.usage) == ("refused", Usage(1, 7))
    assert refused.end.failure is not None
    assert refused.end.failure.message == "The answer is too large to be sent; ask for fewer rows or outputs."
    assert len(gateway.of("small")) == 1


def test_a_large_output_and_its_end_in_one_message_are_a_refusal() -> None:
    gateway = Gateway()
    gateway.requests.accept("a", 0.0)
    gateway.requests.send([_output("a", MAX_TEXT + 1), Output("a", (), None, End("done", Usage(1, 3)))])
    (output,) = gateway.of("a")
    assert output.end is not None
    assert (output.end.outcome, output.end.usage) == ("refused", Usage(1, 3))
    assert gateway.requests.accept("a", 0.0)
    gateway.requests.send([Output("a", (), None, End("done"))])
    assert [output.end.outcome for output in gateway.of("a") if output.end is not None] == ["refused", "done"]


def _output(name: str, size: int) -> Output:
    return Output(name, (Delta(0, "x" * size),))
