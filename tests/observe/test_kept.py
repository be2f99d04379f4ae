"""Counters continue after a restart: what is saved is what was counted, and no file can stop or falsify a start."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.observe.test_dashboards import a_busy_moment
from tests.observe.test_observer import ended, read
from tests.server_process import running
from tests.worker.watching import until_now

from inferd.app.keeping import Keeping
from inferd.config import MetricsConfig, ObjectivesConfig
from inferd.events import HttpServed, ReplicaChanged
from inferd.observe import Observer
from inferd.observe import metrics as m
from inferd.observe.kept import KeptFile, KeptRow, UnreadableError, kept_rows, restore
from inferd.observe.series import Store

OBJECTIVES = {"tiny": ObjectivesConfig(availability=0.99, ttft_ms=300.0)}
KEPT = {row.name for row in m.TABLE if row.is_kept}


def an_observer(models: dict[str, int] | None = None) -> Observer:
    return Observer(models=models or {"tiny": 2}, objectives=OBJECTIVES, stream=io.StringIO(), wall=lambda: 0.0)


def busy(models: dict[str, int] | None = None) -> Observer:
    observer = an_observer(models)
    for number in range(3):
        for event in a_busy_moment(number):
            observer.emit(event)
    return observer


def grown(observer: Observer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of what is kept, but quantiles, which are of the last minute."""
    families = text_string_to_metric_families(observer.render_metrics().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        if KEPT & {family.name, f"{family.name}_total"}
        for sample in family.samples
        if "quantile" not in sample.labels
    }


def rows_of(observer: Observer) -> list[KeptRow]:
    return asyncio.run(observer.kept())


def test_all_that_grows_continues_and_grows_on(tmp_path: Path) -> None:
    before = busy()
    file = KeptFile(tmp_path / "metrics" / "1.bin")
    file.write(rows_of(before))
    after = an_observer()
    assert after.restore(file.read()) == 0
    nonzero = {series: value for series, value in grown(before).items() if value}
    assert {series: value for series, value in grown(after).items() if value} == nonzero
    after.emit(ended())
    ours = {"model": "tiny", "replica": "0"}
    counted = read(before, "inferd_requests_total", **ours, outcome="done")
    assert read(after, "inferd_requests_total", **ours, outcome="done") == counted + 1
    assert rows_of(after) != rows_of(before)


def test_what_is_of_now_or_of_the_process_is_not_kept() -> None:
    names = {row.name for row in rows_of(busy())}
    assert {"inferd_requests_total", "inferd_time_to_first_token_seconds", "inferd_http_request_size_bytes"} <= names
    assert not {row.name for row in m.TABLE if row.kind == "gauge" or row.name.startswith("process_")} & names
    assert all(sum(numbers) > 0 for row in rows_of(busy()) for _, numbers in row.series), "zeros need no place"


def test_restarts_of_workers_are_added_to_those_of_the_server_before() -> None:
    first, second = an_observer(), an_observer()
    changed = ReplicaChanged(model="tiny", replica=0, state="ready", restarts=2)
    first.emit(changed)
    second.restore(rows_of(first))
    second.emit(changed)
    second.emit(changed)
    assert read(second, "inferd_replica_restarts_total", model="tiny", replica="0") == 4


def test_series_without_a_place_are_dropped() -> None:
    rows = rows_of(busy({"tiny": 2}))
    num_series = sum(len(row.series) for row in rows)
    without = Observer(models={"other-name": 1}, stream=io.StringIO())
    of_tiny = sum("tiny" in labels for row in rows for labels, _ in row.series)
    assert without.restore(rows) == of_tiny
    assert 0 < of_tiny < num_series
    assert "tiny" not in without.render_metrics().decode()
    changed = [msgspec.structs.replace(row, buckets=(1.0,), labels=("a",)) for row in rows]
    assert an_observer().restore(changed) == num_series


def test_routes_of_before_count_among_those_of_now() -> None:
    first = an_observer()
    for number in range(300):
        first.emit(HttpServed(request_id="r", method="GET", route=f"/{number}", status=200, duration_s=0.1))
    second = an_observer()
    second.restore(rows_of(first))
    for number in range(300):
        second.emit(HttpServed(request_id="r", method="GET", route=f"/new/{number}", status=200, duration_s=0.1))
    routes = {dict(labels)["route"] for name, labels in grown(second) if name == "inferd_http_requests_total"}
    assert len(routes) == 257
    assert not any(route.startswith("/new/") for route in routes)


NUMBERS = st.floats() | st.integers(-5, 5).map(float)
ROWS = st.builds(
    KeptRow,
    name=st.sampled_from([row.name for row in m.TABLE]) | st.text(max_size=5),
    labels=st.sampled_from([("model", "replica"), ("model", "replica", "outcome"), ()]),
    buckets=st.sampled_from([(), m.FIRST_TOKEN_S.buckets]),
    series=st.lists(
        st.tuples(
            st.lists(st.sampled_from(["tiny", "0", "done", "x"]), max_size=4).map(tuple), st.lists(NUMBERS, max_size=25)
        ),
        max_size=3,
    ),
)


@given(st.lists(ROWS, max_size=4))
def test_no_content_of_a_file_makes_a_counter_negative_or_not_a_number(rows: list[KeptRow]) -> None:
    store = Store(m.TABLE)
    dropped = restore(store, rows, lambda metric, labels: True)
    continued = list(kept_rows(store))
    assert all(number >= 0 for row in continued for _, numbers in row.series for number in numbers)
    assert dropped + sum(len(row.series) for row in continued) <= sum(len(row.series) for row in rows)


@given(place=st.integers(0, 10_000), change=st.sampled_from(["cut", "flip", "more", "version"]))
def test_a_damaged_file_is_never_believed(place: int, change: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = KeptFile(tmp_path_factory.mktemp("kept") / "1.bin")
    file.write(rows_of(busy()))
    data = bytearray(file.path.read_bytes())
    at = place % len(data)
    match change:
        case "cut":
            del data[at:]
        case "flip":
            data[at] ^= 0x40
        case "more":
            data += b"x"
        case "version":
            data = bytearray(data.replace(b"metrics 1", b"metrics 2", 1))
    file.path.write_bytes(data)
    with pytest.raises(UnreadableError):
        file.read()


def keeping(observer: Observer, path: Path, config: MetricsConfig = MetricsConfig()) -> Keeping:
    return Keeping(observer, path, lambda: config)


def test_a_file_that_is_no_use_is_put_aside_with_a_line_and_the_start_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "1.bin"
    path.write_bytes(b"something else")
    observer = an_observer()
    one = keeping(observer, path)
    one.begin()
    (record,) = caplog.records
    assert "begin at zero" in record.getMessage()
    assert (tmp_path / "1.bin.unreadable").read_bytes() == b"something else"
    asyncio.run(one.close())
    assert KeptFile(path).read() == []


def test_a_folder_that_cannot_be_written_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    one = keeping(busy(), tmp_path / "file" / "1.bin")

    async def saves() -> None:
        one.begin()
        await one.save()
        await one.save()
        await one.close()

    asyncio.run(saves())
    assert [record.getMessage() for record in caplog.records if "cannot be saved" in record.getMessage()] == [
        caplog.records[-1].getMessage()
    ]


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "1.bin"
    asyncio.run(keeping(busy(), path).close())
    off = keeping(observer := an_observer(), path, MetricsConfig(keep=False))
    off.begin()
    before = path.read_bytes()
    assert not any(grown(observer).values())
    asyncio.run(off.close())
    assert path.read_bytes() == before


# -- a real server ---------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def counted(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("inferd_requests_total{"))


def ask(url: str, times: int) -> None:
    for _ in range(times):
        asked = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
        assert asked.status_code == 200, asked.text


def test_counters_survive_a_stop_and_all_but_the_last_interval_a_kill(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "inferd.yaml"
    text = f"""
        server: {{port: {port}, grace_s: 10}}
        state: {{data_dir: {tmp_path / "data"}}}
        metrics: {{keep_every_s: %s}}
        models: {{tiny: {{source: tiny}}}}
    """
    file.write_text(text % 3600)
    saved = tmp_path / "data" / "metrics" / f"{port}.bin"
    with running(file=file, data_dir=tmp_path / "data") as server:
        ask(server.url, 3)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    assert saved.exists(), "saved by the stop"
    file.write_text(text % 0.2)
    with running(file=file, data_dir=tmp_path / "data") as server:
        assert counted(server.url) == 3
        ask(server.url, 4)
        until_saved(saved, 7)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=10)
    with running(file=file, data_dir=tmp_path / "data") as server:
        assert counted(server.url) == 7


def until_saved(path: Path, wanted: float) -> None:
    def saved() -> float:
        requests = [row for row in KeptFile(path).read() if row.name == "inferd_requests_total"]
        return sum(numbers[0] for row in requests for _, numbers in row.series)

    until_now(lambda: saved() == wanted, "the counters are saved", 10)
