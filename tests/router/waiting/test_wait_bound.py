"""The bound in time of a queue: what lowers it, what does not, and how it comes back."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.waiting.wait_bound import DOUBLING, EVIDENCE, GENERATIONS, LEAST_S, TOGETHER_S, WaitBound

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


def give_up(bound: WaitBound, waited_s: float, until: float) -> None:
    """As many requests as it takes, the last one at ``until``."""
    for number in reversed(range(int(EVIDENCE))):
        at = until - 2 * TOGETHER_S * number
        bound.given_up(waited_s, at - waited_s / 2, at)


@given(st.floats(0.5, 9.0), st.floats(0.01, 1.0))
def test_it_falls_to_half_of_what_impatient_clients_had_waited(waited_s: float, answer_s: float) -> None:
    bound = known(10.0, answer_s)
    now = 100.0
    give_up(bound, waited_s, now)
    assert bound.seconds(now) == max(waited_s / 2, LEAST_S)
    for number in range(int(2 * EVIDENCE)):  # begun before the bound fell: it could not have spared them
        bound.given_up(waited_s / 8, now - waited_s / 16, now + 2 * TOGETHER_S * number)
    assert bound.seconds(now + 1.0) >= max(waited_s / 2, LEAST_S)


@given(st.floats(0.05, 1.0), st.floats(0.5, 9.0))
def test_it_doubles_until_it_is_what_it_was(answer_s: float, waited_s: float) -> None:
    bound = known(10.0, answer_s)
    give_up(bound, waited_s, 0.0)
    low = bound.seconds(0.0)
    at = DOUBLING * answer_s
    assert math.isclose(bound.seconds(at), min(10.0, max(waited_s, LEAST_S)), rel_tol=1e-9)
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


@given(st.integers(1, 1000), st.floats(0.1, 20.0))
def test_a_client_that_ends_with_all_its_requests_changes_nothing(num_requests: int, waited_s: float) -> None:
    bound = known(10.0, 0.1)
    for number in range(num_requests):
        now = 100.0 + 0.9 * TOGETHER_S * number / num_requests
        bound.given_up(waited_s, now - 0.05, now)
    assert bound.seconds(101.0) == 10.0


@given(st.lists(st.tuples(TIMES, TIMES), max_size=50), st.floats(0.001, 20.0))
def test_a_second_may_be_waited_in_any_case(ends: list[tuple[float, float]], answer_s: float) -> None:
    bound = known(10.0, answer_s)
    now = 0.0
    for waited_s, after_s in ends:
        now += after_s
        bound.given_up(waited_s, now - min(waited_s, after_s) / 2, now)
        assert bound.seconds(now) >= LEAST_S


@given(TIMES, TIMES)
def test_a_request_that_waited_for_less_than_it_was_worked_on_says_nothing(waited_s: float, worked_s: float) -> None:
    bound = known(1000.0, 1.0)
    worked_s += waited_s
    for number in range(20):
        bound.given_up(waited_s, 200.0 * number, 200.0 * number + worked_s * 1.001)
    assert bound.seconds(5000.0) == 1000.0
