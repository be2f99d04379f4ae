"""The replay against a server whose answers are scripted: what is sent, servers that go, refuse, or change."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.replay.scripted_server import Script, ScriptedServer, answered
from tests.replay.test_record_files import record, written

from inferd.benchmark.load import Connection
from inferd.cli.main import main
from inferd.errors import Unavailable
from inferd.replay import server as server_module
from inferd.replay.records import Recorded, read
from inferd.replay.replay import Outcome, Target, asked_model, is_random, question, replay
from inferd.replay.server import AskedServer


def chat(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}


def asked(number: int, text: str = "hi", **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [], "temperature": 0, "n": number}
    return record(json.dumps(body).encode(), json.dumps(chat(text)).encode(), request_id=f"r{number}", **changes)


def recorded(**changes: Any) -> Recorded:
    base = asked(0, **changes)
    fields = {name: base[name] for name in ("request_id", "route", "path", "headers", "model", "version")}
    return Recorded(
        **fields,
        fingerprint=base["fingerprint"],
        status=200,
        is_stream=False,
        duration_s=0.1,
        first_s=None,
        usage=None,
        body=changes.get("body", base["request"]["whole"]["text"].encode()),
        answer=base["answer"]["whole"]["text"].encode(),
    )


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other tests a server may take long to describe its model."""
    monkeypatch.setattr(server_module, "LOOK_S", 60.0)


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    made: list[ScriptedServer] = []
    yield made
    for server in made:
        server.close()


def run(
    server: ScriptedServer, records: list[dict[str, Any]], folder: Path, *, patience_s: float = 0.0, **target: Any
) -> Outcome:
    found = list(read(written(folder, *records), {}))

    async def ask() -> Outcome:
        asking = AskedServer(
            "the server", lambda limit_s: Connection(server.url, limit_s), timeout_s=60, patience_s=patience_s
        )
        try:
            return await replay(asking, found, Target(**target), lambda pair: None)
        finally:
            asking.close()

    return asyncio.run(ask())


def same(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
    return answered(chat("hi"))


def serving(servers: list[ScriptedServer], script: Script, **changes: Any) -> ScriptedServer:
    servers.append(ScriptedServer(script, **changes))
    return servers[-1]


def test_bodies_are_sent_as_they_were_in_the_last_class_and_past_the_cache(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    server = serving(servers, same)
    records = [asked(number, headers={"content-type": "application/json; charset=utf-8"}) for number in range(9)]
    outcome = run(server, records, tmp_path, concurrency=3)
    assert sorted(body for _, body, _ in server.asked) == sorted(
        one["request"]["whole"]["text"].encode() for one in records
    )
    for path, _, headers in server.asked:
        assert path == "/v1/chat/completions"
        assert headers["x-inferd-priority"] == "batch"
        assert "no-cache" in headers["cache-control"]
        assert headers["content-type"] == "application/json; charset=utf-8"
    assert len(outcome.pairs) == 9
    assert all(pair.is_equal and pair.is_same_version and not pair.is_broken for pair in outcome.pairs)


def test_an_answer_that_differs_is_broken_only_where_it_must_be_equal(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    server = serving(servers, lambda path, body: answered(chat("ho")))
    sampled = asked(2)
    sampled["request"] = record(b'{"model":"m","temperature":1}')["request"]
    records = [asked(0), asked(1, fingerprint="fp_2"), sampled]
    found = {pair.request_id: pair for pair in run(server, records, tmp_path).pairs}
    assert [found[f"r{number}"].is_broken for number in range(3)] == [True, False, False]
    assert not any(pair.is_equal for pair in found.values())


@pytest.mark.parametrize("alone", ["hi", "ho"])
def test_where_answers_depend_on_the_batch_a_request_that_differs_is_asked_again_alone(
    servers: list[ScriptedServer], tmp_path: Path, alone: str
) -> None:
    """The first answers are as if each had been computed in a batch, and the fourth answer is the one of r1, alone."""

    def script(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        is_second = json.loads(body)["n"] == 1
        return answered(chat(alone if len(server.asked) > 3 else "he" if is_second else "hi"))

    server = serving(servers, script)
    server.is_batch_invariant = False
    found = run(server, [asked(number) for number in range(3)], tmp_path, concurrency=1).pairs
    assert [json.loads(body)["n"] for _, body, _ in server.asked] == [0, 1, 2, 1]
    assert [pair.is_equal for pair in found] == [True, alone == "hi", True]
    assert not any(pair.is_broken for pair in found)


def test_a_server_that_goes_for_good_leaves_a_partial_outcome_with_a_sentence(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    server = serving(servers, same, goes_at=4)
    outcome = run(server, [asked(number) for number in range(9)], tmp_path, concurrency=1)
    assert len(outcome.pairs) == 3
    assert "is gone" in outcome.stopped
    assert "--patience" in outcome.stopped


def test_a_server_that_comes_back_is_asked_the_rest(servers: list[ScriptedServer], tmp_path: Path) -> None:
    server = serving(servers, same, goes_at=4, comes_back=True)
    outcome = run(server, [asked(number) for number in range(9)], tmp_path, patience_s=60, concurrency=2)
    assert outcome.stopped == ""
    assert sorted(pair.request_id for pair in outcome.pairs) == [f"r{number}" for number in range(9)]


def test_a_refusal_for_lack_of_room_is_repeated(servers: list[ScriptedServer], tmp_path: Path) -> None:
    refused = threading.Event()

    def script(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if not refused.is_set():
            refused.set()
            return answered({"error": {"message": "full"}}, 503, retry_after="0")
        return answered(chat("hi"))

    server = serving(servers, script)
    (pair,) = run(server, [asked(0)], tmp_path).pairs
    assert pair.is_equal
    assert len(server.asked) == 2


def test_a_request_that_fails_now_is_told_with_the_servers_sentence(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    server = serving(servers, lambda path, body: answered({"error": {"message": "the worker died"}}, 500))
    (pair,) = run(server, [asked(0)], tmp_path).pairs
    assert pair.error == "500: the worker died"
    assert pair.is_broken


def test_a_version_that_was_replaced_meanwhile_is_told(servers: list[ScriptedServer], tmp_path: Path) -> None:
    def script(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        server.fingerprint = "fp_9"
        return answered(chat("hi"))

    server = serving(servers, script)
    assert "has replaced 'm' meanwhile" in run(server, [asked(0)], tmp_path).stopped


def test_a_model_that_is_not_there_is_told_before_anything_is_asked(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    server = serving(servers, same)
    with pytest.raises(Unavailable, match="does not have the model 'x@3': it is not found"):
        run(server, [asked(0)], tmp_path, model="x@3")
    assert server.asked == []


def test_the_command_reports_what_it_found_and_leaves_a_partial_report(
    servers: list[ScriptedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serving(servers, same, goes_at=3)
    file, report, page = written(tmp_path, *map(asked, range(5))), tmp_path / "r.json", tmp_path / "r.html"
    words = ["replay", "--from", str(file), "--against", server.url, "--patience", "0", "--concurrency", "1"]
    assert main([*words, "--json", str(report), "--html", str(page)]) == 1
    shown = capsys.readouterr()
    assert "Not finished" in shown.out
    found = json.loads(report.read_text())
    assert (found["asked"], found["equal"]["count"]) == (2, 2)
    assert "Not finished" in page.read_text()
    assert main([*words[:-4], "--json", str(tmp_path / "none" / "r.json")]) == 1
    assert "its folder does not exist" in capsys.readouterr().err


def test_an_interrupted_replay_reports_what_was_asked(servers: list[ScriptedServer], tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def script(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if json.loads(body)["n"] == 2:
            begun.set()
            release.wait(60)
        return answered(chat("hi"))

    server, report = serving(servers, script), tmp_path / "r.json"
    words = ["--from", str(written(tmp_path, *map(asked, range(4)))), "--against", server.url, "--concurrency", "1"]
    process = subprocess.Popen([sys.executable, "-m", "inferd", "replay", *words, "--json", str(report)])
    try:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
    finally:
        release.set()
        process.kill()
        process.wait()
    found = json.loads(report.read_text())
    assert (found["asked"], found["stopped"]) == (2, "It was interrupted.")


def test_a_limit_of_differences_decides_the_exit_code(
    servers: list[ScriptedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        return answered(chat("hi" if json.loads(body)["n"] else "ho"))

    server = serving(servers, script)
    file = written(tmp_path, *[asked(number, fingerprint="fp_2") for number in range(4)])
    words = ["replay", "--from", str(file), "--against", server.url]
    assert [main([*words, *more]) for more in ([], ["--max-different", "0.25"], ["--max-different", "0.2"])] == [
        0,
        0,
        1,
    ]
    assert "3 of 4 answers are equal to the bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0}, False),
        ({"seed": 0}, False),
        ({"top_k": 1}, False),
        ({"parameters": {"seed": 3}}, False),
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"seed": None}, True),
    ],
)
def test_an_answer_is_random_unless_it_is_greedy_or_seeded(body: dict[str, Any], expected: bool) -> None:
    assert is_random(recorded(body=json.dumps(body).encode())) is expected


def test_predictions_are_never_random_and_another_model_is_asked_by_path_or_body() -> None:
    pattern = "/v2/models/{model}/versions/{version}/infer"
    infer = msgspec.structs.replace(recorded(), route=pattern, path="/v2/models/a b/versions/3/infer", body=b"\xff")
    assert not is_random(infer)
    assert asked_model(infer) == "a b@3"
    assert question(infer, None) == ("/v2/models/a%20b/versions/3/infer", b"\xff")
    assert question(infer, "digits@2") == ("/v2/models/digits@2/infer", b"\xff")
    path, body = question(recorded(), "digits@2")
    assert (path, json.loads(body)["model"]) == ("/v1/chat/completions", "digits@2")
    nameless = msgspec.structs.replace(recorded(), route="/predict", path="/predict", body=b'{"inputs": "x"}')
    assert question(nameless, "m") == ("/predict", b'{"inputs": "x"}')
    assert asked_model(nameless) == "m"
