"""The log's settings: its file, its level, the speed of a request, and the lines of decisions."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.events import (
    BreakerChanged,
    Event,
    HandedOver,
    HttpServed,
    ModelUnloaded,
    ReplicaChanged,
    RequestRefused,
    Retried,
)
from inferd.observe import Observer
from inferd.observe.decisions import MAX_LINES
from inferd.observe.plain import plain
from inferd.types import Timings, Usage
from inferd.worker.line_writer import CHECK_S, FileTarget, LineWriter, StreamTarget
from inferd.worker.log_lines import Words, neutral

HOSTILE = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(
    [
        "\x1b[2J\x1b]0;x\x07",
        "a\nb 12:00:00 forged",
        "\u202e\u2066evil",
        "\x7f\x9b31m",
        '"},{"level":"',
        "\r\n\t\0",
        "\ud800",
    ]
)


def served(**changes: Any) -> HttpServed:
    base: dict[str, Any] = {"request_id": "r", "method": "POST", "route": "/v1/completions", "status": 200}
    return HttpServed(**(base | {"duration_s": 0.25} | changes))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(*events: Event, now: Clock | None = None, **settings: Any) -> list[dict[str, Any]]:
    stream = io.StringIO()
    observer = Observer(models=["chat"], stream=stream, wall=lambda: 0.0, now=now or Clock(), **settings)
    for event in events:
        observer.emit(event)
    observer.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# -- settings ----------------------------------------------------------------------------------


def test_a_level_leaves_out_the_lines_below_it() -> None:
    events = (
        served(),
        served(status=404),
        served(status=500),
        ReplicaChanged(model="chat", replica=0, state="ready"),
        ReplicaChanged(model="chat", replica=0, state="died"),
        ModelUnloaded(model="chat", reason="idle"),
        RequestRefused(model="chat", reason="queue_full"),
    )
    assert len(lines_of(*events)) == 7
    assert [line["level"] for line in lines_of(*events, level="warning")] == ["warning", "error", "error", "warning"]
    assert [line["level"] for line in lines_of(*events, level="error")] == ["error", "error"]


def test_a_level_holds_for_pythons_logging_too() -> None:
    stream = io.StringIO()
    observer = Observer(stream=stream, level="warning")
    for level in (logging.INFO, logging.WARNING):
        record = logging.LogRecord("inferd.x", level, "", 0, "said", (), None)
        if record.levelno >= observer.log_handler.level:
            observer.log_handler.handle(record)
    observer.close()
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["level"] == "warning"


def test_the_speed_of_a_request_is_a_setting() -> None:
    event = served(usage=Usage(7, 11, 0), timings=Timings(first_token=0.5, finished=2.0))
    (line,) = lines_of(event, log_speed=True)
    assert line["speed"] == {"ttft_s": 0.5, "tpot_s": 0.15, "tokens_s": 5.5}
    assert "speed" not in lines_of(event)[0]
    assert "5.5 tokens/s  150.0 ms per token" in str(plain(json.dumps(line)))


def test_a_request_that_generated_nothing_has_no_speed() -> None:
    prediction = served(usage=Usage(0, 0, 0), timings=Timings(first_token=0.1, finished=0.2))
    refused = served(status=503)
    one = served(usage=Usage(3, 1, 0), timings=Timings(first_token=0.2, finished=0.2))
    found = lines_of(prediction, refused, one, log_speed=True)
    assert ["speed" in line for line in found] == [False, False, True]
    assert found[2]["speed"] == {"ttft_s": 0.2, "tokens_s": 5.0}


# -- decisions ---------------------------------------------------------------------------------


def test_every_decision_has_a_line() -> None:
    found = lines_of(
        RequestRefused(model="chat", reason="queue_full", tenant="t"),
        BreakerChanged(model="chat", replica=1, state="open", reason="5 failures"),
        Retried(model="chat", kind="retry", granted=False),
        HandedOver(model="chat", replica=0, seconds=0.5, failure="the receiver has no free memory"),
        ModelUnloaded(model="chat", reason="evicted", freed_bytes=7),
    )
    assert [(line["event"], line["level"]) for line in found] == [
        ("refused", "warning"),
        ("breaker", "warning"),
        ("retry", "warning"),
        ("hand_over", "warning"),
        ("unload", "info"),
    ]
    assert (found[0]["reason"], found[0]["tenant"]) == ("queue_full", "t")
    assert (found[1]["replica"], found[1]["reason"]) == (1, "5 failures")
    assert found[4]["freed_bytes"] == 7


@given(st.lists(st.tuples(st.floats(0, 0.7), st.sampled_from(["chat", "b"])), max_size=120))
def test_the_lines_of_decisions_and_their_counts_add_up(pauses: list[tuple[float, str]]) -> None:
    """However they are spread in time: a line for each, or a count of those without one; few in a second."""
    now, stream = Clock(), io.StringIO()
    observer = Observer(models=["chat", "b"], stream=stream, now=now, wall=now)
    for pause, model in pauses:
        now.now += pause
        observer.emit(RequestRefused(model=model, reason="queue_full"))
        observer.emit(served(route="/health"))
    observer.close()
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    for model in ("chat", "b"):
        refused = [line for line in found if line["event"] == "refused" and line["model"] == model]
        told = sum("reason" in line for line in refused) + sum(line.get("left_out", 0) for line in refused)
        assert told == sum(name == model for _, name in pauses)
        assert sum("reason" in line for line in refused) <= MAX_LINES * (1 + (now.now - 100.0) // 1.0 + 1)


def test_what_was_left_out_is_told_a_second_later_by_whatever_comes_next() -> None:
    now, stream = Clock(), io.StringIO()
    observer = Observer(models=["chat"], stream=stream, now=now, wall=now)
    for _ in range(MAX_LINES + 5):
        observer.emit(RequestRefused(model="chat", reason="queue_full"))
    now.now += 1.0
    observer.emit(served())
    observer.close()
    assert [json.loads(line).get("left_out") for line in stream.getvalue().splitlines()][-1] == 5


# -- the file ----------------------------------------------------------------------------------


def test_a_file_is_opened_again_after_it_was_renamed_or_removed(tmp_path: Path) -> None:
    now, path = Clock(), tmp_path / "inferd.log"
    target = FileTarget(str(path), now)
    target.write_lines("one\n")
    path.rename(tmp_path / "inferd.log.1")
    target.write_lines("two\n")  # the rename is noticed within a second
    now.now += CHECK_S
    target.write_lines("three\n")
    path.unlink()
    now.now += CHECK_S
    target.write_lines("four\n")
    target.close()
    assert (tmp_path / "inferd.log.1").read_text() == "one\ntwo\n"
    assert path.read_text() == "four\n"
    assert path.stat().st_mode & 0o007 == 0


def test_a_file_is_appended_to_also_after_copytruncate(tmp_path: Path) -> None:
    path = tmp_path / "inferd.log"
    path.write_text("before\n")
    target = FileTarget(str(path))
    target.write_lines("one\n")
    assert path.read_text() == "before\none\n"
    os.truncate(path, 0)
    target.write_lines("two\n")
    target.close()
    assert path.read_text() == "two\n"


def test_a_full_disk_drops_and_counts_lines_and_says_so_when_there_is_room_again() -> None:
    class Disk:
        is_full = True
        text = ""

        def write_lines(self, text: str) -> None:
            if self.is_full:
                tried.set()
                raise OSError(28, "No space left on device")
            self.text += text

        def close(self) -> None:
            pass

    disk, dropped, tried = Disk(), [], threading.Event()
    log = LineWriter(disk, lambda: dropped.append(1), gather_s=0.0)
    log.write("lost")
    assert tried.wait(10)
    while not dropped:
        pass
    disk.is_full = False
    log.write("kept")
    log.close()
    first, second = disk.text.splitlines()
    assert (json.loads(first)["event"], json.loads(first)["lines"], second) == ("lines_dropped", 1, "kept")
    assert len(dropped) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_device_without_space_slows_no_event() -> None:
    """A real file of the system that always answers ENOSPC."""
    observer = Observer(models=["chat"], stream=FileTarget("/dev/full"))
    for _ in range(100):
        observer.emit(served())
    observer.close()
    assert b"inferd_log_lines_dropped_total 100" in observer.render_metrics()


def test_a_named_pipe_whose_reader_stops_or_is_missing_blocks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device or address"):
        FileTarget(str(path)).open()
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    observer = Observer(models=["chat"], stream=FileTarget(str(path)))
    for _ in range(3000):  # about a megabyte, into a pipe of 64 KB
        observer.emit(served())
    observer.close()
    os.close(reading)
    page = dict(line.rsplit(" ", 1) for line in observer.render_metrics().decode().splitlines() if line[:1] != "#")
    assert float(page["inferd_log_lines_dropped_total"]) > 2000


def test_a_line_that_was_written_in_part_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "log", os.write
    target = FileTarget(str(path))

    def halved(fd: int, data: memoryview) -> int:
        if len(data) < 4:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", halved)
        with pytest.raises(OSError, match="No space"):
            target.write_lines("first line\n")
    target.write_lines("second\n")
    target.close()
    assert path.read_text().splitlines()[-1] == "second"


# -- hostile text ------------------------------------------------------------------------------


@given(HOSTILE, HOSTILE)
@example("x" * 1_000_000, "\x1b" * 1_000_000)
def test_no_text_of_a_client_reaches_the_log_or_a_terminal_as_it_is(one: str, two: str) -> None:
    events: tuple[Event, ...] = (
        served(request_id=one, tenant=two, key_id=one, model=two, error_code=one, error_text=two, path=one),
        RequestRefused(model=one, reason="queue_full", tenant=two),
        BreakerChanged(model="chat", replica=0, state="open", reason=one),
        ReplicaChanged(model="chat", replica=0, state="died", reason=one),
    )
    for is_plain in (False, True):
        stream = io.StringIO()
        observer = Observer(models=["chat"], stream=stream, plain=is_plain)
        for event in events:
            observer.emit(event)
        observer.close()
        written = stream.getvalue()
        assert all(line.isprintable() for line in written.split("\n"))
        assert len(written) < 40_000
        starts = [line for line in written.split("\n")[:-1] if not line.startswith("    ")]
        assert len(starts) == 4  # no line was forged
        if not is_plain:
            assert all(json.loads(line)["event"] in ("http", "refused", "breaker", "replica") for line in starts)


@given(HOSTILE)
def test_a_message_of_pythons_logging_is_harmless_for_a_terminal(text: str) -> None:
    record = logging.LogRecord("inferd", logging.WARNING, "", 0, "%s", (text,), None)
    for said in (Words("chat/0").format(record), neutral(text)):
        first, *rest = said.split("\n")
        assert first.isprintable()
        assert all(line.startswith("    ") and line.isprintable() for line in rest)


@pytest.mark.interpreted("replaces a method of the observer")
def test_an_observers_defect_ends_no_log_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    observer = Observer(models=["chat"], stream=stream, plain=True)
    observer.emit(None)  # type: ignore[arg-type]
    monkeypatch.setattr(observer, "_http_served", lambda event: 1 / 0)
    observer.emit(served())
    monkeypatch.undo()
    observer.emit(served())
    observer.close()
    assert "observer_failure" in stream.getvalue()
    assert "POST /v1/completions 200" in stream.getvalue()


def test_a_stream_target_writes_to_the_stream() -> None:
    stream = io.StringIO()
    StreamTarget(stream).write_lines("one\n")
    assert stream.getvalue() == "one\n"
