"""Refusals in the audit log: none is lost from the counts, and a flood writes few lines."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from inferd.app.refused_access import FIRST_WINDOW_S, LONGEST_WINDOW_S, MAX_LINES, Origin, RefusedAccess, RefusedLine


def numbers(lines: list[RefusedLine]) -> int:
    """The refusals that lines stand for."""
    return sum(
        int(found[1]) if (found := re.search(r"(?:, |^)(\d+) (?:times|further)", line.detail)) else 1 for line in lines
    )


@given(st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 30)), max_size=200))
def test_every_refusal_is_counted_once_and_windows_have_few_lines(steps: list[tuple[float, int]]) -> None:
    refused, now = RefusedAccess(), 0.0
    lines: list[RefusedLine] = []
    for pause_s, number in steps:
        now += pause_s
        while refused.ends_at is not None and refused.ends_at <= now:
            due = refused.due(refused.ends_at)
            assert len(due) <= MAX_LINES + 1
            lines += due
        lines += refused.note(now, Origin(f"address:{number}", "", "sign_in", "", "invalid"), "", "r")
    lines += refused.rest()
    assert numbers(lines) == len(steps)
    assert refused.rest() == []


def test_a_day_of_a_flood_from_ever_new_addresses_is_few_lines() -> None:
    refused, number = RefusedAccess(), 0
    lines: list[RefusedLine] = []
    for second in range(86_400):
        for _ in range(3):
            number += 1
            lines += refused.note(float(second), Origin(f"address:{number}", "", "sign_in", "", "x"), "", "r")
    lines += refused.rest()
    assert numbers(lines) == number
    num_windows = 6 + 86_400 / LONGEST_WINDOW_S + 2  # 1, 2, 4 ... 32 minutes, then hours
    assert len(lines) <= 1 + num_windows * (MAX_LINES + 1)


def test_the_first_refusal_is_a_line_at_once_also_after_a_quiet_window() -> None:
    refused, origin = RefusedAccess(), Origin("address:a", "", "sign_in", "", "invalid_api_key")
    assert refused.note(0.0, origin, "/console/session", "r1") == [
        RefusedLine("address:a", "", "sign_in", "/console/session", "invalid_api_key", "r1")
    ]
    assert refused.note(1.0, origin, "/console/session", "r2") == []
    assert refused.note(2.0, origin, "/console/session", "r3") == []
    assert refused.due(FIRST_WINDOW_S - 0.1) == []
    (line,) = refused.due(FIRST_WINDOW_S)
    assert (line.detail, line.request_id) == ("invalid_api_key, 2 times within 60 s", "r2")
    assert refused.ends_at == 3 * FIRST_WINDOW_S
    assert refused.due(3 * FIRST_WINDOW_S) == []
    assert refused.ends_at is None
    assert len(refused.note(1000.0, origin, "", "r4")) == 1
