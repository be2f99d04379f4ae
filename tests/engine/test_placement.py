"""Threads are counted by the cores that may be used, not by those the machine has."""

from __future__ import annotations

import os

import pytest

from inferd.engine.placement import num_threads, usable_cores


@pytest.mark.parametrize(("replicas", "threads"), [(1, 4), (2, 2), (3, 1), (9, 1)])
def test_the_cores_of_the_mask_are_shared_out(monkeypatch: pytest.MonkeyPatch, replicas: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 2, 0, 5}, raising=False)
    assert usable_cores() == (0, 2, 5, 9)
    assert num_threads(replicas) == threads
