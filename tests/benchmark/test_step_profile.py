"""Two readings of the metrics are a profile of the steps between them."""

from __future__ import annotations

import asyncio

import pytest

from inferd.benchmark.load import Target
from inferd.benchmark.report import profile_rows
from inferd.benchmark.step_profile import Reading, between, parse, read
from inferd.errors import Unavailable
from inferd.events import StepDone
from inferd.observe.sink import Observer
from inferd.types import StepParts, StepStats


def test_what_the_observer_writes_is_read_back() -> None:
    observer = Observer(models={"m": 2, "other": 1}, access_log=False)
    for model, replica in (("m", 0), ("m", 1), ("other", 0)):
        stats = StepStats(step_sequences=1, step_s=0.5, parts=StepParts(forward=0.25, send=0.125))
        observer.emit(StepDone(model=model, replica=replica, stats=stats))
    lines = observer.render_metrics().decode().splitlines()
    observer.close()
    reading = parse(lines, "m")
    assert (reading.steps, reading.step_s) == (2, 1.0)
    assert {name: seconds for name, seconds in reading.parts_s.items() if seconds} == {"forward": 0.5, "send": 0.25}


def test_the_profile_is_of_the_steps_between_and_adds_up() -> None:
    before = Reading(10, 5.0, {"forward": 4.0, "send": 1.0})
    after = Reading(14, 9.0, {"forward": 7.0, "send": 1.4, "text": 0.2})
    profile = between(before, after)
    assert (profile.steps, profile.step_s) == (4, 1.0)
    assert profile.parts_s == pytest.approx({"forward": 0.75, "send": 0.1, "text": 0.05, "other": 0.2})
    rows = {row[0]: row[1] for row in profile_rows([profile])}
    assert rows["steps"] == "4"
    assert rows["together"] == "1100.000 ms"
    assert rows["forward"] == "750.000 ms  68.2 %"


async def read_from(body: bytes) -> Reading:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /metrics ")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        return await read(Target(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m"))


def test_counters_are_read_from_a_server_and_one_without_them_is_told() -> None:
    body = b'inferd_step_part_seconds_total{model="m",replica="0",part="text"} 0.5\n'
    assert asyncio.run(read_from(body)).parts_s == {"text": 0.5}
    with pytest.raises(Unavailable, match="has no step times of 'm'"):
        asyncio.run(read_from(b"vllm:num_requests_running 1\n"))


def test_a_profile_has_no_part_that_is_less_than_nothing() -> None:
    profile = between(Reading(0, 0.0, {}), Reading(2, 1.0, {"forward": 1.5, "send": 4.0}))
    assert profile.parts_s == {"forward": 0.75, "send": 2.0, "other": 0.0}


def test_no_step_between_is_no_division_by_zero() -> None:
    assert between(Reading(1, 1.0, {}), Reading(1, 1.0, {})).step_s == 0.0
