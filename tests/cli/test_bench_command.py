"""``inferd bench`` from its words to its tables and files, against servers that run and servers of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.server_process import Server, running
from tests.tiers import THOROUGH


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as made:
        yield made


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return subprocess.run(
        [sys.executable, "-m", "inferd", "bench", "--output", str(folder / "found"), *words],
        env=environment | {"INFERD_STATE__DATA_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


SHORT = ("--input-len", "3", "--output-len", "4")


def test_runs_of_both_kinds_are_in_the_tables_and_the_files(server: Server, tmp_path: Path) -> None:
    words = ("--url", server.url, "--concurrency", "1,3", "--rate", "200", "--requests", "5", *SHORT)
    found = bench(tmp_path, *words)
    assert found.returncode == 0, found.stderr
    for told in (
        "1 client ",
        "3 clients ",
        "200 req/s",
        "TTFT",
        "TPOT",
    ):
        assert told in found.stdout, found.stdout
    assert "tiny at" in found.stdout
    assert "3 random tokens in, 4 out" in found.stdout
    report = json.loads((tmp_path / "found.json").read_bytes())
    runs = report["runs"]
    assert [(run["kind"], run["load"]) for run in runs] == [("closed", 1.0), ("closed", 3.0), ("open", 200.0)]
    for run in runs:
        assert (run["num_requests"], run["num_errors"]) == (5, 0)
        assert run["output_tokens_per_s"] > 0
        assert 0 < run["ttft"]["p50"] <= run["e2e"]["p50"]
    assert report["profiles"] == []
    assert "Where a step spends its time" not in found.stdout
    assert report["model"] == "tiny"
    assert "<html" in (tmp_path / "found.html").read_text()


def test_the_warm_up_is_sent_and_not_measured(tmp_path: Path) -> None:
    books = tmp_path / "books"
    with running(source=f"books={books}") as server:
        for warmup, lines in ((0, 3), (2, 2 + 3)):
            books.write_text("")
            words = ("--url", server.url, "--concurrency", "1", "--requests", "3", "--warmup", str(warmup))
            assert bench(tmp_path, *words, "--input-len", "3", "--output-len", "1").returncode == 0
            assert len(books.read_text().splitlines()) == lines
            (run,) = json.loads((tmp_path / "found.json").read_bytes())["runs"]
            assert run["num_requests"] == 3


def test_prompts_come_from_a_file(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "good bye"}\n')
    found = bench(tmp_path, "--url", server.url, "--prompts", str(prompts), "--rate", "100", "--requests", "2")
    assert found.returncode == 0, found.stderr
    assert f"prompts of {prompts}".split("/")[0] in found.stdout
    (run,) = json.loads((tmp_path / "found.json").read_bytes())["runs"]
    assert (run["kind"], run["num_requests"], run["num_errors"]) == ("open", 2, 0)


def test_requests_that_fail_are_told_and_make_the_exit_code(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "invalid"}\n')
    words = ("--url", server.url, "--prompts", str(prompts), "--concurrency", "2", "--requests", "4")
    found = bench(tmp_path, *words, "--warmup", "0")
    assert found.returncode == 1
    assert "2 clients: 4 times: " in found.stdout
    warm = bench(tmp_path, *words, "--warmup", "1")
    assert warm.returncode == 1
    assert "does not answer completions: " in warm.stderr


def test_the_server_of_this_machine_is_found_and_another_port_is_none(tmp_path: Path) -> None:
    words = ("--concurrency", "1", "--requests", "1", *SHORT)
    with running(data_dir=tmp_path) as server:
        found = bench(tmp_path, *words)
        assert found.returncode == 0, found.stderr
        assert f"Testing the server at {server.url}" in found.stderr
        assert bench(tmp_path, "--port", str(server.port), *words).returncode == 0
        other = bench(tmp_path, "--port", "1", *words)
        assert other.returncode == 1
        assert "port 1" in other.stderr


def test_a_server_of_its_own_is_started_measured_and_ended(tmp_path: Path) -> None:
    words = ("demo-draft", "--concurrency", "1,2", "--requests", "2", "--vocab-size", "64", "--profile", *SHORT)
    found = bench(tmp_path, *words)
    assert found.returncode == 0, found.stderr
    told = found.stdout.partition("Where a step spends its time")[2]
    for part in ("steps", "forward", "sample", "together"):
        (line,) = [line for line in told.splitlines() if line.startswith(f"│ {part} ")]
        assert not any(cell.split()[0] in ("0", "0.000") for cell in line.strip("│").split("│")[1:]), line
    report = msgspec.json.decode((tmp_path / "found.json").read_bytes())
    assert [(run["num_requests"], run["num_errors"]) for run in report["runs"]] == [(2, 0), (2, 0)]
    assert all(profile["steps"] >= 4 for profile in report["profiles"])
    port = report["url"].rpartition(":")[2]
    assert not any(f":{int(port):04X} " in line for line in _listening())


def _listening() -> list[str]:
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return [f"{row[1]} " for row in rows if row[3] == "0A"]


@THOROUGH
def test_a_server_of_its_own_that_does_not_start_says_why(tmp_path: Path) -> None:
    found = bench(tmp_path, str(tmp_path / "none"))
    assert found.returncode == 1
    assert " did not start: " in found.stderr
    assert "no file or folder" in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("demo", "--port", "8000"), "not both"),
        (("demo", "--url", "http://a"), "not both"),
        (("--concurrency", "0"), "is not a list of positive numbers"),
        (("--concurrency", "1,x"), "is not a list of positive numbers"),
        (("--rate", "1000000"), "is not a list of positive numbers"),
        (("--rate", ","), "is not a list of positive numbers"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    found = bench(tmp_path, *words)
    assert found.returncode == 2
    assert said in " ".join(found.stderr.replace("│", " ").split())
    assert not list(tmp_path.glob("found*"))
