"""Trials of forms keep their share of the cores in these tests, so that other programs do not hold them up."""

from __future__ import annotations

import pytest

from inferd.structured.trial import client


@pytest.fixture(autouse=True)
def large_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_SAVED_S", 600.0)
