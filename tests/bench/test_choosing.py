"""The simulation of choices by load: prompts that count as load keep others away."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.choosing import main


def test_prompts_wait_less_behind_long_ones_that_count_as_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(800):
        tokens = 20_000 if number % 40 == 0 else 100
        lines.append(f"2023-11-16 18:00:{number * 0.05:09.6f}0,{tokens},200")
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    assert main([str(tmp_path / "trace.csv"), "--replicas", "4"]) == 0
    table = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    waits = {cells[2]: float(cells[4]) for cells in table if cells[1:2] == ["trace.csv"]}
    assert waits["sequences and prompts"] < waits["sequences"]
