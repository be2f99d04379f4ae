"""Starts servers whose model answers from a script."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.scripted import Rule
from tests.scripted.serving import serving

Serve = Callable[[Sequence[Rule]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serve a model ``scripted`` with these rules; the server's URL."""
    with contextlib.ExitStack() as running:
        number = iter(range(100))
        yield lambda rules: running.enter_context(serving(tmp_path / str(next(number)), rules)).url
