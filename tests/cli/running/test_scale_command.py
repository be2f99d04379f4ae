"""``inferd scale``: the numbers of replicas, and with ``--explain`` what they were decided by."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from tests.cli.running.test_asking_servers import data_dir, http, saying

from inferd.autoscale.controller import Change, NeedReport, ScalingReport
from inferd.cli.main import main
from inferd.gateway.admin.scaling import ScalingList

__all__ = ["data_dir"]

BUSY = ScalingReport(
    model="chat",
    min=1,
    max=8,
    desired=3,
    ready=2,
    starting=1,
    leaving=4,
    rule="queue",
    reason="requests wait",
    needs=[NeedReport(name="load", replicas=3, text="5 requests at once")],
    waiting=7,
    in_flight=9,
    deferred=40,
    requests_per_s=2.5,
    served_per_s=1.25,
    duty=0.4,
    ready_s=0.75,
    changes=[Change(at=0.0, before=2, after=3, rule="queue", reason="they waited")],
)
QUIET = ScalingReport(model="other", min=0, max=1, rule="idle", reason="no request")
SHORT = """\
chat: 2 ready, 1 starting, 4 leaving; desired 3 of 1 to 8
  queue: requests wait
"""
WHEN = datetime.fromtimestamp(0).astimezone().strftime("%Y-%m-%d %H:%M:%S")  # of this machine's time zone
LONG = f"""\
  7 waiting, 9 in flight, 40 of batch work; arrivals: 2.5 requests/s
  one replica serves: 1.25 requests/s
  ready replicas work at: 40 % of what they can; from start to ready: 0.75 s
  load needs 3: 5 requests at once
  changes, the last first:
    {WHEN}  2 to 3, queue: they waited
"""
UNKNOWN = """\
other: 0 ready, 0 starting; desired 0 of 0 to 1
  idle: no request
  0 waiting, 0 in flight; arrivals: not measured
  one replica serves: not measured until requests wait
  ready replicas work at: not measured; from start to ready: not measured until one starts
"""


@pytest.mark.parametrize(
    ("words", "answer", "shown"),
    [
        ([], ScalingList(data=[BUSY]), SHORT),
        (["--explain"], ScalingList(data=[BUSY, QUIET]), SHORT + LONG + UNKNOWN),
        (["chat"], BUSY, SHORT),
        ([], ScalingList(data=[]), "No model of this server has scaling; their numbers of replicas are fixed.\n"),
    ],
    ids=["all", "explained", "one", "none"],
)
def test_the_numbers_of_replicas_are_shown_and_explained_where_that_is_asked(
    data_dir: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    answer: msgspec.Struct,
    shown: str,
) -> None:
    with saying(data_dir, http(200, msgspec.json.encode(answer))) as asked:
        assert main(["scale", *words]) == 0
    assert capsys.readouterr().out == shown
    path = b"/admin/scaling/chat" if "chat" in words else b"/admin/scaling"
    assert asked[-1].startswith(b"GET " + path + b" HTTP/1.1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max", "3"], "--max is for a simulation: add --simulate TRACE, or set models.NAME.scaling.max for the"),
        (["chat", "--queue-ms", "9"], "or set models.chat.scaling.target.queue_ms for the server."),
        (["--slots", "1"], "--slots is for a simulation: add --simulate TRACE."),
        (["chat", "--simulate", "TRACE"], "The model 'chat' is for a server that runs, and --simulate asks none"),
        (["--json", "--simulate", "TRACE"], "--json is for a server that runs, and --simulate asks none"),
        (["--simulate", "TRACE", "--model-seconds", "nan"], "'nan' is not a number."),
    ],
    ids=["max", "target", "default", "model", "json", "nan"],
)
def test_what_would_have_no_effect_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    assert main(["scale", *(str(trace) if word == "TRACE" else word for word in words)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_simulation_tells_its_changes_and_the_times_beside_fixed_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "drawn.svg"
    trace.write_text("".join(f'{{"timestamp": {100 * number}}}\n' for number in range(50)))
    words = ["--model-seconds", "0.5", "--max", "3", "--picture", str(picture)]
    assert main(["scale", "--simulate", str(trace), *words]) == 0
    said = capsys.readouterr().out
    assert " 3 replicas, " in said
    assert "50 requests in 5 s, 0.5 s each in the mean" in said
    assert [line.split()[0] for line in said.splitlines() if "fixed" in line or line.startswith("scaled")] == [
        "scaled",
        "1",
        "3",
    ]
    assert picture.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("lines", "words", "said"),
    [
        (
            '{"timestamp": 0}\n{"timestamp": 1760000000000}',
            [],
            "comes 1.76e+09 s after the first one comes, and 604,800",
        ),
        ('{"timestamp": 0, "seconds": 1e9}', ["--slots", "8"], "ends 1.125e+09 s after the first one comes"),
        ('{"timestamp": 0, "seconds": 1e308}\n' * 9, [], "ends inf s after"),
        ('{"timestamp": 0}', ["--picture", "/nowhere/drawn.svg"], "cannot be written to /nowhere/drawn.svg (No such"),
    ],
    ids=["arrivals", "work", "overflow", "picture"],
)
def test_a_simulation_that_cannot_be_made_or_kept_is_told_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: list[str], said: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(lines)
    assert main(["scale", "--simulate", str(trace), *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
