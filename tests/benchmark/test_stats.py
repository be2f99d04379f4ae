"""The figures of a load test, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.benchmark.stats import Record, percentile, spread, summarise


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_equal_numpys(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-9)


def test_a_spread_of_nothing_is_zero() -> None:
    assert spread([]).count == 0


def test_failed_requests_count_as_errors_and_in_nothing_else() -> None:
    records = [
        Record(sent_at=0.0, first_at=0.5, ended_at=2.5, gaps_s=(1.0, 1.0), prompt_tokens=10, output_tokens=3),
        Record(sent_at=1.0, ended_at=5.0, error="503: full"),
        Record(sent_at=1.0, ended_at=4.0, error="503: full"),
    ]
    summary = summarise(records, kind="closed", load=2)
    assert (summary.num_requests, summary.num_errors, summary.errors) == (3, 2, {"503: full": 2})
    assert summary.duration_s == 5.0
    assert summary.output_tokens_per_s == pytest.approx(0.6)
    assert summary.requests_per_s == pytest.approx(0.2)
    assert (summary.ttft.p50, summary.tpot.p50, summary.itl.p99, summary.e2e.max) == (0.5, 1.0, 1.0, 2.5)
