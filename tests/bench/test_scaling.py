"""The measurements of scaling: what they read from a log and from a trace, and what the controller counts there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bench.scaling_live import first_token_at, second_replica
from bench.scaling_sizes import Asked, ByWork, read

from inferd.autoscale.simulate import View


def ended(at: float, scheduled: float, first_token: float, finished: float) -> dict[str, Any]:
    """The line of a request that came ``finished`` seconds before ``at``."""
    timings = {"scheduled": scheduled, "first_token": first_token, "finished": finished}
    ts = datetime.fromtimestamp(at, UTC).isoformat()
    return {"ts": ts, "event": "http", "duration_s": finished, "timings": timings}


def test_the_second_replica_s_first_token_is_that_of_the_first_request_beside_another_one() -> None:
    alone = [ended(10.0, 0.5, 0.6, 1.0), ended(11.0, 1.0, 1.2, 2.0)]  # one replica, one after the other
    assert first_token_at(alone, 9.0) is None
    beside = ended(11.5, 0.8, 1.25, 2.0)  # in work from 10.3 on, while the last one is until 11.0
    assert first_token_at([*alone, beside], 9.0) == pytest.approx(10.75)
    assert first_token_at([*alone, beside], 10.4) is None, "it was in work before the replica was ready"
    refused = {"ts": beside["ts"], "event": "http", "duration_s": 0.0}
    assert first_token_at([refused], 9.0) is None


def test_the_first_line_of_each_state_counts() -> None:
    lines: list[dict[str, Any]] = [
        {"event": "replica", "replica": replica, "state": state, "ts": ts}
        for ts, replica, state in (("a", 0, "ready"), ("b", 1, "starting"), ("c", 1, "ready"), ("d", 1, "ready"))
    ]
    assert {state: line["ts"] for state, line in second_replica(lines).items()} == {"starting": "b", "ready": "c"}


def test_work_is_counted_by_the_sizes_of_the_requests() -> None:
    rule = ByWork([1.0, 4.0, 2.0, 8.0], mean_s=0.5)
    counted: list[View] = []

    def scaler(view: View) -> tuple[int, str]:
        counted.append(view)
        return 1, ""

    rule._scaler = scaler  # type: ignore[assignment]
    view = View(
        now=9.0,
        accepted=4,
        ended=1,
        waiting=2,
        in_flight=1,
        busy=1,
        ready=1,
        starting=0,
        oldest_wait_s=0.0,
        idle_s=0.0,
        slots=16,
        ready_s=5.0,
        limit=16,
        work_s=0.75,  # one and a half mean requests
    )
    assert rule(view) == (1, "")
    (seen,) = counted
    assert (seen.accepted, seen.waiting, seen.ended, seen.in_flight) == (15.0, 10.0, 1.5, 3.5)


def test_both_forms_of_traces_are_read_and_begin_at_0(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.5000000,396,109\n"
    )
    assert read(azure, 2.0) == [Asked(0.0, 374.0, 44.0), Asked(2.0, 396.0, 109.0)]
    mooncake.write_text(
        '{"timestamp": 3000, "input_length": 5, "output_length": 6}\n'
        '{"timestamp": 1000, "input_length": 7, "output_length": 8}\n'
    )
    assert read(mooncake, 1.0) == [Asked(0.0, 7, 8), Asked(2.0, 5, 6)]
