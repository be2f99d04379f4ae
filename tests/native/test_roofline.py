"""The rates of this machine are what was read and computed, by the seconds that it took."""

from __future__ import annotations

import time

import pytest
import torch

from inferd.native import roofline
from inferd.native.roofline import Heads, cache_rate, measure


@pytest.fixture
def in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is measured takes one second."""

    def run(measured: object) -> float:
        assert callable(measured)
        measured()
        return 1.0

    monkeypatch.setattr(roofline, "_best", run)


@pytest.mark.usefixtures("in_a_second")
@pytest.mark.parametrize(("most", "layers"), [(1, 1), (3 * 2 * 16 * 512 * 2 * 2 * 8 * 2, 3)])
def test_attention_reads_the_keys_and_values_of_as_many_layers_as_fit(
    monkeypatch: pytest.MonkeyPatch, most: int, layers: int
) -> None:
    monkeypatch.setattr(roofline, "_BYTES", most)
    of_a_layer = 16 * 512 * 2 * 2 * 8 * 2  # sequences, tokens, keys and values, heads, numbers, bytes
    assert cache_rate(Heads(num_heads=4, num_kv_heads=2, dim=8)) == layers * of_a_layer


@pytest.mark.usefixtures("in_a_second")
def test_products_read_their_weights_and_compute_two_operations_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_BYTES", 1)
    monkeypatch.setattr(roofline, "_MANY_ROWS", 8)
    (rate,) = measure(("fp32",), ((64, 64), (128, 64))).values()
    # Of each measurement a tenth is left at least, where the calls alone take as long.
    assert rate.bytes_s == pytest.approx(3 * 64 * 64 * 4 / 0.1)
    assert rate.operations_s == pytest.approx(2 * 3 * 64 * 64 * 8 / 0.1)


def test_the_fastest_of_some_runs_counts_after_one_that_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    clock = "thread_time" if torch.get_num_threads() == 1 else "perf_counter"
    monkeypatch.setattr(time, clock, lambda: next(times))
    monkeypatch.setattr(roofline, "_REPEATS", 3)
    runs: list[int] = []
    assert roofline._best(lambda: runs.append(1)) == 2.0
    assert len(runs) == 4
