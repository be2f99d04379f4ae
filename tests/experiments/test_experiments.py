"""Each experiment holds, and each check can fail: the table's programs, run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import stopwatch
from tests.experiments.catalogue import Experiment, Tier
from tests.experiments.field import Field
from tests.experiments.table import rows
from tests.tiers import THOROUGH

MARKS: dict[Tier, tuple[pytest.MarkDecorator, ...]] = {
    "everyday": (),
    "thorough": (THOROUGH,),  # tests/test_app.py and tests/test_reload.py have a smaller one of each
    "soak": (pytest.mark.soak, pytest.mark.timeout(300)),
}
ROWS = [pytest.param(row, id=row.id, marks=MARKS[row.tier]) for row in rows() if isinstance(row, Experiment)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose name is short: the path of a Unix socket may have 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="inferd-") as name:
        yield Path(name)


@pytest.mark.parametrize("row", ROWS)
def test_it_holds(row: Experiment, folder: Path) -> None:
    row.run(Field(folder))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS)
def test_the_check_fails_where_the_defect_is_present(
    row: Experiment, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every second counts, that of a crowded machine as well: it would else excuse the defect.
    monkeypatch.setattr(stopwatch, "_PRESSURE", folder / "unknown")
    with pytest.raises(AssertionError, match=row.red):
        row.run(Field(folder, defect=row.control))
