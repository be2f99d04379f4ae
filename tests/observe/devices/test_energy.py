"""The energy of devices, attributed to models and tenants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.config import DevicesConfig
from inferd.observe.devices.cost import cost_of, per_1000_tokens
from inferd.observe.devices.energy import MAX_TENANTS, OTHER, Energy, Use
from inferd.observe.devices.reading import Reading

IDLE_W, BUSY_W = 60.0, 340.0


def metered(energy: Energy, at: float, energy_j: float | None, device: str = "gpu0", place: str = "cuda:0") -> None:
    energy.metered(Reading(device=device, kind="gpu", at=at, place=place, energy_j=energy_j))


def account(**places: str) -> Energy:
    energy = Energy()
    energy.configure(places or {"a": "cuda:0", "b": "cuda:0"})
    metered(energy, 0.0, 0.0)
    return energy


def joules(energy: Energy) -> dict[str, float | None]:
    return {name: use.energy_j for name, use in energy.models().items()}


def test_models_share_what_the_device_used_by_the_time_of_their_steps() -> None:
    energy = account()
    energy.stepped("a", 0.6, 10)
    energy.stepped("b", 0.2, 10)
    metered(energy, 1.0, 100.0)
    assert joules(energy) == pytest.approx({"a": 60.0, "b": 20.0})
    assert energy.idle_j() == pytest.approx({"gpu0": 20.0})


def test_idle_time_costs_what_the_device_draws_when_it_is_idle() -> None:
    energy = account()
    metered(energy, 10.0, 600.0)
    energy.stepped("a", 0.5, 10)
    metered(energy, 11.0, 600.0 + 0.5 * 340 + 0.5 * 60)
    assert joules(energy) == pytest.approx({"a": 170.0})
    assert energy.idle_j() == pytest.approx({"gpu0": 630.0})


def test_a_step_that_takes_longer_than_readings_gets_all_of_their_energy() -> None:
    energy = account()
    energy.set_in_flight("a", 1)
    for second in range(1, 5):
        metered(energy, float(second), 100.0 * second)
    assert energy.idle_j() == {"gpu0": 0.0}, "it is not known yet"
    energy.stepped("a", 5.0, 10)
    metered(energy, 5.0, 500.0)
    assert joules(energy) == pytest.approx({"a": 500.0})


def test_a_model_elsewhere_and_a_device_that_counts_no_energy_change_nothing() -> None:
    energy = account(a="cpu", b="cuda:1")
    energy.stepped("a", 1.0, 10)
    energy.stepped("b", 1.0, 10)
    metered(energy, 1.0, 100.0)
    metered(energy, 1.0, None, device="package-0", place="cpu")
    assert joules(energy) == {"a": None, "b": None}, "absent, not 0"
    assert energy.idle_j() == {"gpu0": 100.0}


def test_a_counter_of_a_driver_that_began_again_goes_on() -> None:
    energy = account()
    metered(energy, 1.0, 100.0)
    metered(energy, 2.0, 30.0)
    assert energy.total_j() == {"gpu0": 130.0}


Turn = st.tuples(st.sampled_from(["a", "b", ""]), st.floats(0.01, 3.0))


@given(st.lists(Turn, min_size=1, max_size=60), st.floats(0.3, 2.0))
def test_no_energy_is_lost_and_none_is_made(turns: list[tuple[str, float]], interval: float) -> None:
    energy, now, used, read_at = account(), 0.0, 0.0, 0.0
    for model, seconds in turns:
        now, used = now + seconds, used + seconds * (BUSY_W if model else IDLE_W)
        if model:
            energy.stepped(model, seconds, 1)
        if now - read_at >= interval:
            metered(energy, now, used)
            read_at = now
    metered(energy, now + 1.0, used + IDLE_W)
    found = sum(one or 0.0 for one in joules(energy).values()) + sum(energy.idle_j().values())
    assert found == pytest.approx(used + IDLE_W)
    assert energy.total_j()["gpu0"] == pytest.approx(used + IDLE_W)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.floats(0.005, 0.2), st.floats(0.0, 0.2)), min_size=60, max_size=80
    )
)
def test_each_model_has_its_own_energy_within_5_percent(steps: list[tuple[str, float, float]]) -> None:
    """A device that draws one power when it computes and another when it is idle, read once in a second."""
    energy = account()
    truth, now, used, read_at = {"a": 0.0, "b": 0.0}, 10.0, 10 * IDLE_W, 10.0
    metered(energy, now, used)
    for model, seconds, pause in steps:
        now += seconds + pause
        used += seconds * BUSY_W + pause * IDLE_W
        truth[model] += seconds * BUSY_W
        energy.stepped(model, seconds, 1)
        if now - read_at >= 1.0:
            metered(energy, now, used)
            read_at = now
    metered(energy, now, used)
    for model, real in truth.items():
        assert (joules(energy).get(model) or 0.0) == pytest.approx(real, rel=0.05)


def test_tenants_share_what_a_model_used_by_their_tokens() -> None:
    energy = account()
    energy.stepped("a", 1.0, 100)
    metered(energy, 1.0, 100.0)
    energy.ended("a", {"blue": 75, "red": 25}, 4)
    first = energy.tenants()
    assert {name: (use.device_s, use.energy_j, use.tokens) for name, use in first.items()} == {
        "blue": (0.75, 75.0, 75),
        "red": (0.25, 25.0, 25),
    }
    energy.stepped("a", 1.0, 100)
    metered(energy, 2.0, 300.0)
    energy.ended("a", {"red": 10}, 1)
    assert {name: use.energy_j for name, use in energy.tenants().items()} == {"blue": 75.0, "red": 225.0}
    assert energy.models()["a"] == Use(device_s=2.0, energy_j=300.0, tokens=200, requests=5)


def test_what_tenants_owe_of_each_model_is_taken_once() -> None:
    energy = account(big="cuda:0", other="cuda:0")
    metered(energy, 0.0, 0.0)
    energy.stepped("big", 1.0, 10)
    metered(energy, 1.0, 300.0)
    energy.ended("big", {"red": 30, "blue": 10}, 2)
    owed = energy.take_owed()
    assert {key: (use.device_s, use.energy_j) for key, use in owed.items()} == {
        ("red", "big"): (0.75, 225.0),
        ("blue", "big"): (0.25, 75.0),
    }
    assert energy.take_owed() == {}
    energy.stepped("other", 2.0, 10)
    energy.ended("other", {"red": 1}, 1)
    assert [(key, use.device_s) for key, use in energy.take_owed().items()] == [(("red", "other"), 2.0)]
    assert {name: use.device_s for name, use in energy.tenants().items()} == {"blue": 0.25, "red": 2.75}


def test_tenants_beyond_the_limit_are_one() -> None:
    energy = account()
    energy.ended("a", {f"t{number}": 1 for number in range(MAX_TENANTS + 50)}, 1)
    found = energy.tenants()
    assert len(found) == MAX_TENANTS + 1
    assert found[OTHER].tokens == 50


def test_cost_is_energy_and_time_at_their_prices() -> None:
    use = Use(device_s=7200.0, energy_j=3.6e6, tokens=2000)
    assert cost_of(use, DevicesConfig()) is None
    assert cost_of(use, DevicesConfig(price_per_kwh=0.3)) == pytest.approx(0.3)
    assert cost_of(use, DevicesConfig(price_per_kwh=0.3, price_per_device_hour=2.5)) == pytest.approx(5.3)
    assert cost_of(Use(device_s=7200.0), DevicesConfig(price_per_kwh=0.3)) is None, "no device told its energy"
    assert per_1000_tokens(use.energy_j, use.tokens) == 1.8e6
    assert per_1000_tokens(use.energy_j, 0) is None
    assert per_1000_tokens(None, 7) is None
