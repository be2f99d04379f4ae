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
  7 waiting, 9 in flight; arrivals: 2.5 requests/s
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
