"""GPUs that a process may use, by what the driver shows and what the environment leaves of them."""

from __future__ import annotations

import pytest

from inferd.machine.gpus import visible


@pytest.mark.parametrize(
    ("setting", "present", "found"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("0,2", 4, 2),
        ("3, 1", 4, 2),
        ("0,7,1", 4, 1),
        ("-1", 4, 0),
        ("GPU-1a2b,GPU-3c4d", 4, 2),
        ("0,1", 0, 0),
    ],
)
def test_the_environment_leaves_some_gpus(setting: str | None, present: int, found: int) -> None:
    assert visible(setting, present) == found
