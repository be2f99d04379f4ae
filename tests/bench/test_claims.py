"""Claims: what is written of them, and that every one that is named can be measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from bench.__main__ import command
from bench.claims.__main__ import CLAIMS, bar
from bench.claims.claim import Claim, Scale


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_has_a_measurement_and_a_line_in_the_documentation(name: str) -> None:
    assert callable(importlib.import_module(f"bench.claims.{name}").measure)
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    assert f"| `{name}`: " in page.read_text(encoding="utf-8")


def test_a_claim_is_written_as_figures_page_and_picture(tmp_path: Path) -> None:
    Claim(
        name="c",
        claim="This is faster.",
        baseline="that",
        head=["a", "b"],
        rows=[["1", "2"]],
        picture="<svg/>",
        verdicts=[(True, "2 times"), (False, "3 times")],
        data={"a": [1.0]},
    ).write(tmp_path)
    text = (tmp_path / "c.md").read_text()
    assert "- holds: 2 times\n- DOES NOT HOLD: 3 times" in text
    assert "Baseline: that" in text
    assert (tmp_path / "c.svg").read_text() == "<svg/>"
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["figures"] == {"a": [1.0]}
    assert [one["held"] for one in found["verdicts"]] == [True, False]


def test_a_full_measurement_is_the_longer_one() -> None:
    assert [Scale(full=full, model="demo", threads=1).pick(2, 5) for full in (False, True)] == [2, 5]


def test_progress_tells_the_share_done_and_what_comes() -> None:
    told: list[tuple[float, str]] = []
    Scale(True, "demo", 1, progress=lambda share, what: told.append((share, what))).say(1, 4, "this")
    assert told == [(0.25, "this")]
    assert bar(0.25, 12.4, "paged: this") == "[#####...............]  25%   12 s  paged: this"


def test_words_of_make_bench_lead_to_their_programs() -> None:
    assert command("claims", ["paged"])[1:3] == ["-m", "bench.claims"]
    assert command("replay", ["t.jsonl"])[-1] == "t.jsonl"
    server = command("server", ["--model", "/m", "--repeat", "3"])
    assert server[2] == "bench.llm_peers"
    assert server[-4:] == ["--model", "/m", "--repeat", "3"]
