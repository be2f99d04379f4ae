"""The usual time of a step: steps of an exact plane tell the plane, and slow steps become usual little by little."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from inferd.engine.scheduling.usual import UsualCost

FIXED, PREFILL, DECODE, CONTEXT = 4e-3, 2e-4, 1e-3, 3e-6
STEPS = [*itertools.product((0, 40, 300), (0, 1, 6), (0, 3000, 20_000))][1:]  # tokens of prefill, decodes, context


def seconds(prefill: int, decodes: int, context: int) -> float:
    return FIXED + PREFILL * prefill + DECODE * decodes + CONTEXT * context


def learned(rounds: int, first: int = 0) -> UsualCost:
    usual = UsualCost()
    for at in range(first, first + rounds):
        for step in STEPS:
            usual.find(*step)
            usual.record(*step, seconds(*step), float(at), is_slow=False)
    return usual


def test_the_plane_of_exact_steps_is_found() -> None:
    usual = learned(200)
    assert usual.fixed == pytest.approx(FIXED, rel=0.02)
    assert usual.prefill == pytest.approx(PREFILL, rel=0.02)
    assert usual.decode == pytest.approx(DECODE, rel=0.02)
    assert usual.context == pytest.approx(CONTEXT, rel=0.02)


def test_a_step_within_a_factor_of_two_of_known_ones_is_converted_in_the_plane() -> None:
    usual = learned(200)
    for step in ((40, 1, 3000), (63, 1, 3500), (33, 1, 2600), (300, 6, 20_000), (400, 5, 28_000), (0, 1, 0)):
        assert usual.find(*step) == pytest.approx(seconds(*step), rel=0.01), step
        assert usual.plane_s == pytest.approx(seconds(*step), rel=0.03)
    assert usual.find(64, 1, 3000) is None, "of other tokens of prefill"
    assert usual.find(40, 2, 3000) is None, "of other decodes"
    assert usual.find(40, 1, 8 * 512) is None, "of another context"
    assert usual.find(40, 0, 511) is not None, "so little context makes no difference"


def test_steps_of_differing_tokens_tell_the_plane_as_well() -> None:
    usual, random = UsualCost(), Random(1)
    for at in range(3000):
        tokens, decodes, before = (2 ** random.uniform(0.0, most) for most in (4, 3, 4))
        step = int(30 * tokens), int(decodes), int(2000 * before)
        usual.find(*step)
        usual.record(*step, seconds(*step), float(at), is_slow=False)
    for step in ((40, 1, 3000), (63, 1, 3500), (300, 6, 20_000), (400, 5, 28_000), (130, 4, 9000)):
        assert usual.find(*step) == pytest.approx(seconds(*step), rel=0.05), step


def test_the_plane_follows_compositions_of_the_last_minutes() -> None:
    usual = UsualCost()
    for began, speed, sizes in ((0.0, 1.0, (16, 64, 256)), (60_000.0, 2.0, (32, 128, 512))):
        for at, size in itertools.product(range(100), sizes):
            usual.find(size, 0, 0)
            usual.record(size, 0, 0, speed * seconds(size, 0, 0), began + at, is_slow=False)
    assert usual.prefill == pytest.approx(2 * PREFILL, rel=0.1)
    assert usual.find(32, 0, 0) == pytest.approx(2 * seconds(32, 0, 0), rel=0.01)
    assert usual.find(16, 0, 0) == pytest.approx(seconds(16, 0, 0), rel=0.01), "of its own steps"


def test_a_steps_usual_time_is_known_from_four_steps_on() -> None:
    usual = UsualCost()
    for at, took in enumerate((1.0, 2.0, 3.0, 4.0)):
        assert usual.find(8, 0, 0) is None
        usual.record(8, 0, 0, took, float(at), is_slow=False)
    assert usual.find(8, 0, 0) == pytest.approx(2.5), "their mean"
    usual.record(8, 0, 0, 2.5, 4.0, is_slow=False)
    for at in range(5, 8):
        usual.find(8, 0, 0)
        usual.record(8, 0, 0, 2.5, float(at), is_slow=False)
    usual.find(8, 0, 0)
    usual.record(8, 0, 0, 10.5, 8.0, is_slow=False)
    assert usual.find(8, 0, 0) == pytest.approx(2.5 + 8.0 / 8), "an eighth of what it differs by"


def test_slow_steps_are_usual_after_about_ten_minutes() -> None:
    usual, now = learned(100), 100.0
    step = (40, 1, 3000)
    found = []
    for _ in range(1800):
        now += 1.0
        found.append(usual.find(*step))
        usual.record(*step, 3 * seconds(*step), now, is_slow=True)
    at = {minutes: found[60 * minutes - 1] or 0.0 for minutes in (1, 10, 29)}
    assert at[1] < 1.25 * seconds(*step)
    assert at[10] == pytest.approx((1 + 2 * 0.632) * seconds(*step), rel=0.03)
    assert at[29] > 2.8 * seconds(*step)
    assert usual.find(40, 1, 0) == pytest.approx(seconds(40, 1, 0), rel=0.01), "others are as they were"
    usual.find(*step)
    before = usual.find(*step)
    usual.record(*step, 100 * seconds(*step), now - 5.0, is_slow=True)
    assert usual.find(*step) == before, "time that goes back teaches nothing"
    usual.record(*step, 3 * seconds(*step), now + 1e6, is_slow=True)
    assert usual.find(*step) == pytest.approx(3 * seconds(*step), rel=0.1), "one step moves it by an eighth at most"
