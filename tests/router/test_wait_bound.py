"""The bound in time of a queue: what lowers it, what does not, and how it comes back."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.wait_bound import DOUBLING, EVIDENCE, GENERATIONS, LEAST, WaitBound

TIMES = st.floats(0.001, 100.0)


def known(max_wait_s: float, answer_s: float) -> WaitBound:
    bound = WaitBound(max_wait_s)
    bound.answered(answer_s)
    return bound


def test_there_is_no_bound_until_it_is_known_how_long_an_answer_takes() -> None:
    bound = WaitBound(10.0)
    bound.given_up(5.0, 5.0, 6.0)
    assert math.isinf(bound.seconds(6.0))


@given(TIMES, TIMES)
def test_it_is_the_setting_or_two_answers_time(max_wait_s: float, answer_s: float) -> None:
    assert known(max_wait_s, answer_s).seconds(0.0) == max(max_wait_s, GENERATIONS * answer_s)


@given(st.floats(0.5, 9.0), st.floats(0.01, 1.0))
def test_it_falls_to_half_of_what_impatient_clients_had_waited(waited_s: float, answer_s: float) -> None:
    bound = known(10.0, answer_s)
    now = 100.0
    for _ in range(int(EVIDENCE)):
        bound.given_up(waited_s, now - waited_s / 2, now)
    assert bound.seconds(now) == max(waited_s / 2, LEAST * answer_s)
    for _ in range(int(2 * EVIDENCE)):  # begun before the bound fell: it could not have spared them
        bound.given_up(waited_s / 8, now - waited_s / 16, now + 0.01)
    assert bound.seconds(now + 0.01) >= min(waited_s / 2, 10.0)


@given(st.floats(0.05, 1.0), st.floats(0.5, 9.0))
def test_it_doubles_until_it_is_what_it_was(answer_s: float, waited_s: float) -> None:
    bound = known(10.0, answer_s)
    for _ in range(int(EVIDENCE)):
        bound.given_up(waited_s, -0.1, 0.0)
    low = bound.seconds(0.0)
    at = DOUBLING * answer_s
    assert math.isclose(bound.seconds(at), min(10.0, max(waited_s, LEAST * answer_s)), rel_tol=1e-9)
    assert low <= bound.seconds(at / 2) <= bound.seconds(at) <= bound.seconds(8 * at) == 10.0


@given(st.lists(st.booleans(), max_size=200))
def test_a_few_clients_that_leave_change_nothing(leaves: list[bool]) -> None:
    """As long as there are eight answers to each that is given up, and no more than three are in a row."""
    bound = known(10.0, 0.4)
    now = 0.0
    for left in leaves:
        now += 0.1
        if left:
            bound.given_up(8.0, now - 0.1, now)
            for _ in range(8):
                bound.answered(0.4)
        else:
            bound.answered(0.4)
        assert bound.seconds(now) == 10.0


@given(TIMES, TIMES)
def test_a_request_that_waited_for_less_than_it_was_worked_on_says_nothing(waited_s: float, worked_s: float) -> None:
    bound = known(1000.0, 1.0)
    worked_s += waited_s
    for number in range(20):
        bound.given_up(waited_s, 200.0 * number, 200.0 * number + worked_s * 1.001)
    assert bound.seconds(5000.0) == 1000.0
