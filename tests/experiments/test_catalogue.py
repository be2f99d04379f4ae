"""The table of experiments is complete, and the pages for operators know every row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.experiments.catalogue import EXPERIMENTS, Elsewhere, Experiment
from tests.experiments.table import ELSEWHERE, FAULTS, SECURITY, page, rows

ROOT = Path(__file__).resolve().parent.parent.parent
COVERED = {row.row for row in rows()}


@pytest.mark.parametrize("item", [*FAULTS, *SECURITY])
def test_every_fault_and_every_security_item_has_a_row(item: str) -> None:
    assert item in COVERED


@pytest.mark.parametrize(("name", "items"), [("failure-modes.md", FAULTS), ("security.md", SECURITY)])
def test_the_operators_page_names_every_item(name: str, items: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert [item for item in items if not re.search(rf"\b{item}\b", text)] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_a_row_says_what_is_injected_what_holds_and_how_the_check_fails(row: Experiment | Elsewhere) -> None:
    assert re.fullmatch(r"(F|SEC-)\d\d[a-h]?", row.id)
    assert row.injects
    assert row.holds
    assert row.control
    if isinstance(row, Experiment):
        assert len(row.red) >= 2, "the control's failure must be told from any other"


@pytest.mark.parametrize("place", [place for row in ELSEWHERE for place in (*row.tests, row.control)])
def test_what_is_shown_elsewhere_is_there(place: str) -> None:
    if "::" not in place:
        assert place in EXPERIMENTS
        return
    path, _, name = place.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_has_one_line_per_row() -> None:
    lines = [line for line in page().splitlines() if re.match(r"\| (F|SEC-)\d", line)]
    assert len(lines) == len(rows()) >= 70
