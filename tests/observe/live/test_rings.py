"""Rings of recent values: equal to a plain list of everything, whatever the clock does, in memory that never grows."""

from __future__ import annotations

import json
import sys
from math import isnan
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from inferd.observe.live.rings import RESOLUTIONS, Rings, as_json, number

VALUES = st.none() | st.integers(0, 10**12).map(lambda thousandths: thousandths / 1000)


class Second(NamedTuple):
    advance_s: int  # since the second before; 0 and less: the clock did not go on
    values: dict[str, float | None]


STEPS = st.sampled_from((-5, 0, 1, 1, 1, 1, 1, 2, 7, 30, 299, 301, 4000, 700_000))
SECONDS = st.lists(st.builds(Second, STEPS, st.fixed_dictionaries({"mean|a": VALUES, "peak|a": VALUES})), max_size=60)


class Plain:
    """Everything that was ever entered."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, dict[str, float | None]]] = []

    def tick(self, second: int, values: dict[str, float | None]) -> None:
        if not self.entered or second > self.entered[-1][0]:
            self.entered.append((second, values))

    def values(self, key: str, place: int) -> list[float | None]:
        step, length = RESOLUTIONS[place]
        last = self.entered[-1][0] // step
        found: list[float | None] = []
        for slot in range(last - length + 1, last + 1):
            inside = [values[key] for second, values in self.entered if second // step == slot]
            present = [value for value in inside if value is not None]
            if not present:
                found.append(None)
            else:
                found.append(max(present) if key.startswith("peak") else sum(present) / len(present))
        return found


@given(st.integers(0, 10**6), SECONDS)
def test_rings_equal_a_plain_list_of_everything(start: int, seconds: list[Second]) -> None:
    rings, plain = Rings(), Plain()
    rings.configure({"mean|a": False, "peak|a": True})
    second = start
    for one in seconds:
        second += one.advance_s
        rings.tick(second, one.values.items())
        plain.tick(second, one.values)
        second = plain.entered[-1][0]
    for key in ("mean|a", "peak|a") if seconds else ():
        for place, (_, length) in enumerate(RESOLUTIONS):
            found, expected = rings.values(key, place), plain.values(key, place)
            assert len(found) == len(expected) == length
            for value, other in zip(found, expected, strict=True):
                assert isnan(value) if other is None else abs(value - other) <= 1e-6 * abs(other)


@given(SECONDS)
def test_series_that_stay_keep_their_past_and_others_begin_without_one(seconds: list[Second]) -> None:
    rings, second = Rings(), 0
    rings.configure({"mean|a": False, "peak|a": True})
    for one in seconds:
        second += max(one.advance_s, 1)
        rings.tick(second, one.values.items())
    kept = [rings.values("mean|a", place) for place in range(3)]
    rings.configure({"mean|a": False, "mean|b": False})
    assert [as_json(rings.values("mean|a", place)) for place in range(3)] == [as_json(ring) for ring in kept]
    assert all(isnan(value) for place in range(3) for value in rings.values("mean|b", place))
    assert rings.last("peak|a", 300) == []


@given(st.lists(VALUES, max_size=50))
def test_values_are_json_with_null_for_what_is_absent(values: list[float | None]) -> None:
    text = as_json([float("nan") if value is None else value for value in values])
    found = json.loads(text)
    begin = next((at for at, value in enumerate(values) if value is not None), len(values))
    assert len(found) == len(values) - begin
    for value, other in zip(found, values[begin:], strict=True):
        assert value is None if other is None else abs(value - other) <= 1e-4 * abs(other)
    for value in values:
        assert json.loads(number(value)) is None or value is not None


def test_the_memory_of_a_series_is_fixed_and_small() -> None:
    rings = Rings()
    keys = [f"series|{n}" for n in range(100)]
    rings.configure(dict.fromkeys(keys, False))

    def num_bytes() -> int:
        return sum(sys.getsizeof(ring.values) for row in rings._rows.values() for ring in row)

    before = num_bytes()
    for second in range(0, 50_000, 997):
        rings.tick(second, [(key, float(second)) for key in keys[:1]])
    assert num_bytes() == before < 2 * 1024 * 1024
