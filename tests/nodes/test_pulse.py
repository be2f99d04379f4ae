"""Two signals: a machine is gone when neither its process nor its kernel is heard, and a late process is not."""

from __future__ import annotations

import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.nodes.pulse import BEAT_S, MAX_STEP_S, SILENT_S, STUCK_S, UNKNOWN_S, Acknowledgements, Pulse, judge

SECONDS = st.floats(0, 60)


@given(SECONDS, st.none() | SECONDS)
def test_a_machine_that_is_heard_by_either_signal_is_not_gone(silent_s: float, unacknowledged_s: float | None) -> None:
    verdict = judge(silent_s, unacknowledged_s)
    assert (verdict == "alive") == (silent_s < SILENT_S)
    if verdict == "gone":
        assert silent_s >= SILENT_S
        limit_s = UNKNOWN_S if unacknowledged_s is None else SILENT_S
        assert silent_s >= STUCK_S or (silent_s if unacknowledged_s is None else unacknowledged_s) >= limit_s


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_more_silence_never_makes_a_machine_less_gone(a: float, b: float, c: float, d: float) -> None:
    order = ("alive", "late", "gone")
    less, more = judge(min(a, b), min(c, d)), judge(max(a, b), max(c, d))
    assert order.index(less) <= order.index(more)


def test_a_machine_without_power_is_gone_within_a_second_of_its_last_beat() -> None:
    pulse, now = Pulse(0.0), 0.0
    while pulse.look(now, now) != "gone":
        now += BEAT_S
    assert now <= 1.0


def test_a_process_without_a_processor_is_late_while_its_kernel_answers() -> None:
    pulse, verdicts = Pulse(0.0), []
    for step in range(1, int(10 / BEAT_S)):
        verdicts.append(pulse.look(step * BEAT_S, 0.1))
    assert set(verdicts) == {"alive", "late"}
    pulse.beat()
    assert pulse.look(10.0, 0.1) == "alive"


@given(st.floats(0, 1e6))
def test_a_pause_of_this_process_counts_as_one_step(pause_s: float) -> None:
    pulse = Pulse(0.0)
    pulse.look(pause_s, pause_s)
    assert pulse.silent_s <= MAX_STEP_S


@pytest.mark.skipif(sys.platform != "linux", reason="acknowledgements are read on Linux alone")
def test_the_kernel_tells_the_bytes_of_a_connection_and_that_they_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            told = Acknowledgements(near.fileno())
            near.sendall(b"x" * 1000)
            far.sendall(b"y" * 10)
            assert near.recv(10, socket.MSG_WAITALL) == b"y" * 10  # with it came the acknowledgement
            since_s, sent, received = told.read()
            assert since_s is not None
            assert since_s < 60
            assert (sent, received) == (1001, 10)  # the first is the connection's own
            told.close()
            with pytest.raises(OSError, match=r"closed|Bad file"):
                told._socket.getsockname()
