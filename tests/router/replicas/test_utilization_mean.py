"""The utilization of a replica over its steps."""

from __future__ import annotations

import pytest

from inferd.router.replicas.utilization import MEMORY_S, Utilization


def test_steps_count_by_their_seconds() -> None:
    """Long full steps that alternate with short ones of little use are most of the time."""
    found = Utilization()
    assert found.mean == 1.0
    for _ in range(200):
        found.add(0.370, 1.0)
        found.add(0.060, 0.1)
    assert found.mean == pytest.approx((0.370 + 0.006) / 0.430, abs=0.01)
    found.add(100 * MEMORY_S, 0.25)
    assert found.mean == pytest.approx(0.25)
