"""``inferd batch`` against a real server: files up, answers down, and what is told on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.jobs.serving_jobs import line
from tests.server_process import Server, running

from inferd.cli.main import main

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(data_dir=tmp_path_factory.mktemp("data")) as started:
        yield started


def batch(server: Server, *words: str | Path) -> int:
    return main(["batch", *map(str, words), "--url", server.url])


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


def test_every_request_of_a_file_is_answered(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{number}", PATH, prompt="hello", max_tokens=4) for number in range(20)))
    assert batch(server, "run", source, "-o", output) == 0
    assert [one["custom_id"] for one in written(output)] == [f"r{number}" for number in range(20)]
    said = capsys.readouterr()
    assert "20 of 20 requests answered" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    name = said.err.partition("The job is ")[2].partition(";")[0]
    assert batch(server, "list") == 0
    assert name in capsys.readouterr().out
    assert batch(server, "show", name) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
    again = tmp_path / "again.jsonl"
    assert batch(server, "wait", name, "--output", again) == 0
    assert again.read_bytes() == output.read_bytes()


def test_requests_that_fail_are_told_by_their_codes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good, bad = line("good", PATH, prompt="hello", max_tokens=4), line("bad", PATH, prompt="hello", temperature=99)
    source.write_text(f"{good}\n{bad}\n")
    assert batch(server, "run", source, "-o", output) == 1
    assert [one["custom_id"] for one in written(output)] == ["good"]
    assert [one["custom_id"] for one in written(tmp_path / "out.errors.jsonl")] == ["bad"]
    said = capsys.readouterr()
    assert "1 of 2 requests answered" in said.out
    assert "1 x " in said.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("\n\n", "has no requests"),
        ("hello", "Line 1 of"),
        ('{"custom_id": "1"}', "Line 1 of"),
    ],
)
def test_a_file_without_requests_is_refused_before_its_upload(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    assert batch(server, "run", source, "-o", tmp_path / "out.jsonl") == 1
    assert words in capsys.readouterr().err


def test_what_the_server_refuses_is_told(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("1", "/v1/nothing", prompt="hello"))
    assert batch(server, "run", source, "-o", tmp_path / "out.jsonl") == 1
    assert "endpoint" in capsys.readouterr().err
    assert batch(server, "cancel", "batch_none") == 1
    assert "batch_none" in capsys.readouterr().err
