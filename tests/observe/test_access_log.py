"""The log: one line of JSON per request, safe whatever clients send, and writing it never blocks."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.events import HttpServed, ReplicaChanged
from inferd.observe import Observer
from inferd.observe.logs import http_line, replica_line
from inferd.types import Timings, Usage
from inferd.worker.line_writer import LineWriter, StreamTarget
from inferd.worker.timestamp import timestamp


def served(request_id: str = "req-1", **changes: Any) -> HttpServed:
    return HttpServed(
        request_id=request_id, method="POST", route="/v1/chat/completions", status=200, duration_s=0.5, **changes
    )


def test_a_line_has_the_request_its_outcome_its_tokens_and_its_timings() -> None:
    line = json.loads(
        http_line(
            served(
                model="tiny",
                tenant="t",
                key_id="k1",
                outcome="done",
                finish_reasons=("stop",),
                usage=Usage(3, 2, 1),
                timings=Timings(dispatched=0.1, finished=0.5),
            ),
            wall_s=1_700_000_000.25,
        )
    )
    assert line["ts"] == "2023-11-14T22:13:20.250Z"
    assert (line["level"], line["event"], line["request_id"], line["status"]) == ("info", "http", "req-1", 200)
    assert line["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    assert line["timings"] == {"dispatched": 0.1, "finished": 0.5}
    assert line["finish_reasons"] == ["stop"]
    assert (line["tenant"], line["key_id"]) == ("t", "k1")


def test_an_error_has_its_sentence_and_a_path_that_nothing_matches_is_told() -> None:
    line = json.loads(http_line(served(error_code="route_not_found", error_text="Nothing.", path="/x"), wall_s=0.0))
    assert (line["error_code"], line["error"], line["path"]) == ("route_not_found", "Nothing.", "/x")
    assert {"error", "path"}.isdisjoint(json.loads(http_line(served(), wall_s=0.0)))


@given(st.text(), st.text(), st.text())
def test_whatever_a_client_sends_is_one_line_of_printable_json(request_id: str, tenant: str, model: str) -> None:
    line = http_line(served(request_id, tenant=tenant, model=model), wall_s=0.0)
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    assert found["request_id"] == request_id[:256]
    assert found["tenant"] == tenant[:256]


@given(st.text())
def test_the_reason_of_a_replicas_change_is_one_line_too(reason: str) -> None:
    line = replica_line(ReplicaChanged(model="m", replica=0, state="died", reason=reason), wall_s=0.0)
    assert line.isprintable()
    assert json.loads(line)["reason"] == reason


@pytest.mark.parametrize(
    ("status", "level"), [(200, "info"), (404, "warning"), (499, "warning"), (500, "error"), (503, "warning")]
)
def test_levels_follow_the_status(status: int, level: str) -> None:
    event = HttpServed(request_id="", method="GET", route="/", status=status, duration_s=0)
    assert json.loads(http_line(event, 0.0))["level"] == level


def test_no_access_log_writes_no_request_line() -> None:
    stream = io.StringIO()
    observer = Observer(models=["tiny"], access_log=False, stream=stream)
    observer.emit(served())
    observer.close()
    assert stream.getvalue() == ""
    assert (
        b'inferd_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1'
        in observer.render_metrics()
    )


def test_a_reader_that_stops_reading_blocks_no_emit_and_dropped_lines_are_counted() -> None:
    """A real pipe without a reader: emitting far more than it holds returns, and the rest is dropped."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        observer = Observer(models=["tiny"], stream=stream)
        for _ in range(20_000):  # 7 MB, into a pipe of 64 KB and a queue of 4096 lines
            observer.emit(served())
        text = observer.render_metrics().decode()
        (line,) = [line for line in text.splitlines() if line.startswith("inferd_log_lines_dropped_total")]
        dropped = float(line.split()[1])
        assert 10_000 < dropped < 16_000
        # The reader comes back: everything that was not dropped arrives, whole.
        received: list[bytes] = []
        reader = threading.Thread(target=_read_all, args=(reading, received))
        reader.start()
        observer.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        reader.join()
    lines = [json.loads(line) for line in b"".join(received).splitlines()]
    assert sum(line["lines"] for line in lines if line["event"] == "lines_dropped") == dropped
    kept = [line for line in lines if line["event"] == "http"]
    assert len(kept) == 20_000 - dropped
    assert all(line["request_id"] == "req-1" for line in kept)


def _read_all(fd: int, received: list[bytes]) -> None:
    while data := os.read(fd, 65536):
        received.append(data)
    os.close(fd)


def test_a_reader_that_is_gone_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    dropped = []
    with os.fdopen(writing, "w") as stream:
        log = LineWriter(StreamTarget(stream), lambda: dropped.append(1))
        log.write("one")
        log.close()
    assert dropped == [1]


def test_a_line_after_closing_is_counted_as_dropped() -> None:
    stream, dropped = io.StringIO(), []
    log = LineWriter(StreamTarget(stream), lambda: dropped.append(1))
    log.write("kept")
    log.close()
    log.close()
    log.write("late")
    assert (stream.getvalue(), dropped) == ("kept\n", [1])


def test_a_line_that_comes_while_the_writer_falls_asleep_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the writer saw that none waits, and before the writer can be woken."""

    class Falling(threading.Event):
        is_late = False

        def clear(self) -> None:
            super().clear()
            if not self.is_late:
                self.is_late = True
                log._lines.append("late")

    stream, dropped = Recorded(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: None)
        log = LineWriter(StreamTarget(stream), lambda: dropped.append(1))
    log._wake = Falling()
    log._writing.start()
    assert stream.is_written.wait(10)
    log.write("later")
    log.close()
    assert (stream.getvalue(), dropped) == ("late\nlater\n", [])


class Recorded(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.is_written = threading.Event()

    def flush(self) -> None:
        self.is_written.set()


def test_a_process_leaves_at_once_though_its_log_is_stuck() -> None:
    """The writer is stuck in a full pipe: the process must still end, and without a fatal error."""
    program = (
        "from inferd.observe import Observer\n"
        "from inferd.events import HttpServed\n"
        "observer = Observer(models=['tiny'])\n"
        "for _ in range(8000):\n"
        "    observer.emit(HttpServed(request_id='r', method='GET', route='/', status=200, duration_s=0.1))\n"
        "observer.close()\n"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=writing)
    os.close(writing)
    assert process.wait(timeout=30) == 0  # nothing was read meanwhile
    received: list[bytes] = []
    _read_all(reading, received)
    assert b"Fatal" not in b"".join(received)


def test_timestamps_are_in_utc() -> None:
    assert timestamp(0.0) == "1970-01-01T00:00:00.000Z"


def test_log_records_join_the_log_without_what_an_exception_quotes() -> None:
    stream = io.StringIO()
    observer = Observer(models=["tiny"], stream=stream)
    logger = logging.getLogger("inferd.test-of-the-log")
    logger.propagate = False
    logger.addHandler(observer.log_handler)
    try:
        raise ValueError("the canary, a prompt's text")
    except ValueError:
        logger.exception("request %s failed\r\n", "req-1")
    finally:
        logger.removeHandler(observer.log_handler)
    observer.close()
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["message"], found["error"]) == ("error", "request req-1 failed\r\n", "ValueError")
    assert "test_access_log.py" in found["places"][0]
    assert "canary" not in line
