"""Threads are counted by the cores that may be used, not by those the machine has."""

from __future__ import annotations

import os

import pytest

from inferd.config import ModelConfig
from inferd.machine import placement
from inferd.machine.placement import usable_cores
from inferd.predict import load


@pytest.mark.parametrize(
    ("allowed", "replicas", "threads"),
    [(None, 1, 4), (None, 2, 2), (None, 3, 1), (None, 9, 1), (3.5, 1, 3), (0.5, 1, 1), (8.0, 2, 2), (2.0, 2, 1)],
)
def test_the_cores_of_the_mask_are_shared_out_as_far_as_a_cpu_limit_pays_for_them(
    monkeypatch: pytest.MonkeyPatch, allowed: float | None, replicas: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 2, 0, 5}, raising=False)
    monkeypatch.setattr(placement, "cores_allowed", lambda groups: allowed)
    assert usable_cores() == (0, 2, 5, 9)
    assert placement.num_threads(replicas) == threads
    assert load.num_threads(ModelConfig(source="m", replicas=replicas)) == threads
    assert load.num_threads(ModelConfig(source="m", replicas=replicas, threads=7)) == 7


@pytest.mark.parametrize(("count", "cores"), [(3, (0, 1, 2)), (None, (0,))])
def test_where_the_system_tells_no_mask_all_cores_are_used(
    monkeypatch: pytest.MonkeyPatch, count: int | None, cores: tuple[int, ...]
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == cores
