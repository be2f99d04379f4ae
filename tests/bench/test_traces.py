"""Traces become arrivals in which equal hashes are equal blocks, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.reuse import Numbering, unlimited
from bench.traces import read
from hypothesis import given
from hypothesis import strategies as st

SIZE = 16


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(at: int, length: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at, "input_length": length, "output_length": 40, "hash_ids": ids}


@given(st.integers(1, 5000))
def test_a_block_is_full_where_it_was_full_in_the_trace(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    (arrival,) = read(write(path, mooncake(0, length, list(range(-(-length // 512))))), SIZE)
    assert len(arrival.prompt) // SIZE == length // 512
    assert abs(len(arrival.prompt) - length / 32) <= 1
    assert arrival.answer == 2


def test_requests_share_exactly_the_blocks_whose_ids_are_equal(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(9, 2000, [1, 2, 5, 6]), mooncake(3, 2000, [1, 2, 3, 4]))
    first, second = read(path, SIZE)
    assert (first.at, second.at) == (0.003, 0.009)
    numbering = Numbering(SIZE)
    visits = [numbering.visit(a.prompt, a.answer) for a in (first, second)]
    assert [visit.findable for visit in visits] == [3, 3]
    assert unlimited(visits) == 2


def test_texts_become_tokens_of_four_bytes(tmp_path: Path) -> None:
    row = {"timestamp": 500, "requests": [{"Prompt Length": 3, "Output Length": 7, "prompt": "abcdé"}]}
    (arrival,) = read(write(tmp_path / "s.jsonl", row), SIZE)
    assert (arrival.at, arrival.answer, len(arrival.prompt)) == (0.5, 7, 2)


def test_another_form_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a Mooncake trace .* \['rows'\]"):
        read(write(tmp_path / "x.jsonl", {"rows": 1}), SIZE)
    with pytest.raises(ValueError, match="is empty"):
        read(write(tmp_path / "e.jsonl"), SIZE)
