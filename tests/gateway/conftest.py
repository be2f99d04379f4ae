"""What tests of several ways into the gateway share."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.router.errand import Errand


@pytest.fixture
def departed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that took the short way to a worker."""
    ids: list[str] = []
    depart = Errand.depart

    def noted(errand: Errand, desk: Any, request: Any, line: int, now: float) -> None:
        ids.append(request.id)
        depart(errand, desk, request, line, now)

    monkeypatch.setattr(Errand, "depart", noted)
    return ids
