"""How units are divided between versions: exactly, and the same at every share."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom  # type: ignore[import-untyped]

from inferd.config import Config
from inferd.config.versions import draw
from inferd.rollout.machine import Progress
from inferd.rollout.plan import Plan, Step
from inferd.rollout.split import Split, split_of, with_weights


def config(stable: int, new: int) -> Config:
    models = {"m": {"source": "x", "version": str(stable)}, f"m@{new}": {"source": "y", "version": str(new)}}
    return msgspec.convert({"models": models}, Config)


def divided(share: float, shadow: float = 0.0, stable: int = 1, new: int = 2) -> tuple[Config, Split]:
    plan = Plan(model="m", stable=str(stable), new=str(new), steps=(Step(share=1.0),))
    split = split_of(plan, Progress(state="running", share=share, shadow=shadow, run=1), config(stable, new))
    return with_weights(config(stable, new), {"m": plan}, {"m": split}), split


@pytest.mark.parametrize(("units", "share"), [(100_000, 0.05)])
def test_the_share_of_many_units_is_that_of_the_step(units: int, share: float) -> None:
    """Inside the exact interval that holds 99.9 % of draws by chance."""
    check_share(units, share)


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_the_share_of_a_million_units_is_that_of_the_step(share: float) -> None:
    check_share(1_000_000, share)


def check_share(units: int, share: float) -> None:
    models = divided(share)[0].models
    found = sum(draw(models, "m", f"acme\0user-{number}").entry == "m@2" for number in range(units))
    least, most = binom.interval(0.999, units, share)
    assert least <= found <= most, found


@given(
    st.binary(min_size=8, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([(1, 2), (2, 1)]),
)
def test_shadowed_are_the_units_that_a_share_as_large_would_give_the_new_version(
    name: bytes, share: float, shadow: float, versions: tuple[int, int]
) -> None:
    stable, new = versions
    _, split = divided(share, shadow, stable, new)
    unit = draw(divided(shadow, 0.0, stable, new)[0].models, "m", name.hex())
    if 0.0 < shadow < 1.0:
        digest = hashlib.blake2b(f"m\0{name.hex()}".encode(), digest_size=8).digest()
        assert unit.digest == digest
        assert split.is_shadowed(digest) == (unit.entry == split.new_entry)
    else:
        assert split.is_shadowed(unit.digest) == (shadow == 1.0)


@pytest.mark.parametrize("state", ["promoted", "rolled_back", "pending", "preparing"])
def test_nothing_is_copied_before_and_after_a_rollout(state: str) -> None:
    plan = Plan(model="m", stable="1", new="2", steps=(Step(share=1.0),))
    progress = Progress(state=state, shadow=1.0, run=1)  # type: ignore[arg-type]
    assert split_of(plan, progress, config(1, 2)).shadow == 0.0
