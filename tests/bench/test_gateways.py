"""The replay behind several gateways counts what servers find, and hints bring four gateways close to one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.gateways import main


def trace(file: Path) -> Path:
    """Conversations of four turns behind one system prompt: 40 at the same time, in Mooncake's form."""
    rows = []
    for turn in range(4):
        for talk in range(40):
            ids = [0, *(1 + talk * 10 + part for part in range(turn + 1))]
            rows.append({"timestamp": 20_000 * turn + 300 * talk, "input_length": 512 * len(ids), "hash_ids": ids})
    lines = [json.dumps({**row, "output_length": 50}) for row in rows]
    file.write_text("\n".join(lines))
    return file


def test_gateways_with_hints_find_what_one_finds_and_without_them_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.gateways", str(trace(tmp_path / "trace.jsonl")), "--speed", "1"])
    assert main() == 0
    shares = {
        cells[1].strip(): float(cells[3].strip(" %"))
        for line in capsys.readouterr().out.splitlines()
        if len(cells := line.split("|")) > 3 and "gateway" in cells[1]
    }
    assert shares["4 gateways that share nothing"] < 80
    assert shares["4 gateways, rendezvous alone"] > shares["4 gateways that share nothing"]
    assert shares["4 gateways, rendezvous and hints"] >= 95
