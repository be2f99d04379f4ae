"""Which tests run every day: ``make test`` leaves out what is marked ``thorough``, and ``.ci/run`` runs it all.

A test is thorough when a smaller one beside it holds the same promise, or when it takes many seconds of servers that are
killed, files that are trained or windows that pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = pytest.mark.thorough


def sample(values: Iterable[Any], *everyday: Any, ids: Mapping[Any, str] | None = None) -> list[Any]:
    """All values as parameters of a test; those that are not ``everyday`` are thorough."""
    listed = list(values)
    assert all(value in listed for value in everyday), "a value of every day is no parameter"
    return [
        pytest.param(
            value, id=None if ids is None else ids[value], marks=() if value in everyday else (pytest.mark.thorough,)
        )
        for value in listed
    ]


def examples(number: int) -> int:
    """Examples of a costly property: a quarter where ``make test`` draws new ones each time, else all of them."""
    return max(1, number // 4) if settings.get_current_profile_name() == "everyday" else number
