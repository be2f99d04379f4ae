"""Monitors of several servers on one database: who takes a reference, who adopts it, and what a change is told as."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.config import Config
from inferd.drift.monitors import BATCH, READERS, Monitors
from inferd.drift.reference import Reference, read_references
from inferd.errors import InvalidRequest, StateUnavailable
from inferd.events import DriftForgotten, DriftRead, Event, RequestEnded
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.state.thread import StateThread
from inferd.types import NUM_FEATURES, Facts, Usage

DRIFT = {"enabled": True, "first": 1000, "window": 100, "false_alarm_days": 1}


def config(*versions: str, **drift: Any) -> Config:
    models = {
        "m" if version == versions[0] else f"m@{version}": {
            "source": "x",
            "version": version,
            "drift": {**DRIFT, **drift},
        }
        for version in versions
    }
    return msgspec.convert({"models": {**models, "off": {"source": "x"}}}, Config)


def answered(label: str = "", *, model: str = "m", outcome: Any = "done", **fields: Any) -> RequestEnded:
    facts = Facts(label=label, score=0.5) if label else None
    return RequestEnded(model=model, replica=0, request_id="r", tenant="", outcome=outcome, facts=facts, **fields)


class Server:
    """One server's monitors, and the clock that all share."""

    def __init__(self, url: str | None, folder: Path, clock: list[float], epoch: float = 1000.0) -> None:
        """``epoch``: what the wall clock says when ``clock`` is 0."""
        self.events: list[Event] = []
        self.clock = clock
        self.state = StateThread(lambda: open_database(url, folder))
        self.state.start(open_database(url, folder))
        self.monitors = Monitors(self.state, self.events.append, lambda: clock[0], lambda: epoch + clock[0])
        self.random = random.Random(5)

    def ask(self, count: int, model: str = "m", cats: float = 0.5) -> None:
        """So many requests, one each second, with this part of cats among cats and dogs."""
        for _ in range(count):
            self.clock[0] += 1.0
            label = "cat" if self.random.random() < cats else "dog"
            self.monitors.ended(answered(label, model=model))

    def state_of(self, model: str = "m") -> str:
        return self.monitors.report(model).state

    def drifting(self, model: str = "m") -> set[str]:
        return {stream.stream for stream in self.monitors.report(model).streams if stream.is_drifting}

    def news(self) -> list[tuple[str, str, bool]]:
        return [
            (event.model, event.stream, event.is_drifting)
            for event in self.events
            if isinstance(event, DriftRead) and event.is_news
        ]


@pytest.fixture
def start(state_url: str, tmp_path: Path) -> Iterator[Callable[[], Server]]:
    clock = [0.0]
    servers: list[Server] = []

    def begin() -> Server:
        servers.append(Server(state_url, tmp_path, clock))
        return servers[-1]

    yield begin
    for server in servers:
        server.state.close()


def run(work: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await work

    return asyncio.run(wait())


def test_a_model_that_is_not_watched_costs_nothing_and_is_named_in_the_error(start: Callable[[], Server]) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    server.monitors.ended(answered("cat", model="off"))
    assert [report.model for report in server.monitors.reports()] == ["m"]
    with pytest.raises(InvalidRequest, match="'off' is not watched; that of m is"):
        server.monitors.report("off")


def test_the_first_requests_are_the_reference_and_later_ones_are_compared(start: Callable[[], Server]) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    server.ask(990)
    assert (server.state_of(), server.monitors.report("m").requests) == ("collecting", 990)
    with pytest.raises(InvalidRequest, match="990 of 1,000 requests were seen"):
        server.monitors.reference("m")
    server.ask(BATCH)
    assert server.state_of() == "watching"
    server.ask(3000)
    assert server.drifting() == set()
    server.ask(1000, cats=0.8)
    assert server.drifting() == {"label"}, "the score has not changed"
    assert server.news() == [("m", "label", True)]
    (told,) = [event for event in server.events if isinstance(event, DriftRead) and event.is_news]
    assert told.sentence.startswith("label is ")
    server.ask(6000)
    assert server.drifting() == set()
    told_as = [is_drifting for _, _, is_drifting in server.news()]
    assert told_as == [number % 2 == 0 for number in range(len(told_as))], "a change is told once"
    assert not told_as[-1]


@pytest.mark.parametrize(("labelled", "state"), [(4, "watching"), (2, "collecting")])
def test_what_half_of_the_first_requests_have_is_in_the_reference(
    start: Callable[[], Server], labelled: int, state: str
) -> None:
    """Also where a window is as long as all of them. ``labelled``: of five requests."""
    server = start()
    server.monitors.configure(config("1", window=1000), {})
    for number in range(1000 + BATCH):
        server.monitors.ended(answered("cat" if number % 5 < labelled else ""))
    assert server.state_of() == state


def test_a_report_has_the_earlier_windows_the_shares_of_values_and_when_drift_began(
    start: Callable[[], Server],
) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    server.ask(1000 + 24)  # the reference is complete with the 16th batch
    at = server.clock[0]
    server.ask(1600)
    before = server.monitors.report("m")
    assert not any(stream.is_drifting for stream in before.streams)
    server.ask(800, cats=0.9)
    report = server.monitors.report("m")
    label = next(stream for stream in report.streams if stream.stream == "label")
    assert [cell.words for cell in label.cells] == ["cat", "dog", "others"]
    assert sum(cell.share for cell in label.cells) == pytest.approx(1.0)
    smallest, middle, largest = label.readings
    assert (smallest.size, middle.size, largest.size) == (100, 400, 1600)
    assert [reading.past is not None and len(reading.past.at) for reading in label.readings] == [24, 6, 1]
    assert smallest.past is not None
    assert smallest.past.at == sorted(smallest.past.at)
    assert smallest.past.at[0] >= 1000.0 + at
    assert (smallest.past.p[-1], smallest.past.distance[-1]) == (smallest.p, smallest.distance)
    assert smallest.past.is_alarm.index(True) >= 16
    alarm_at = smallest.past.at[smallest.past.is_alarm.index(True)]
    assert (label.is_drifting, label.since) == (True, alarm_at)
    assert smallest.shares[0] == pytest.approx(0.9, abs=0.15)
    assert sum(smallest.shares) == pytest.approx(1.0)
    score = next(stream for stream in report.streams if stream.stream == "score")
    assert not score.is_drifting
    assert score.since is not None
    assert score.since < alarm_at, "it was like its reference since its first window"
    assert [cell.words for cell in score.cells] == ["below 0.5", "0.5", "above 0.5"]
    (listed,) = server.monitors.reports()
    assert [reading.past for reading in listed.streams[0].readings] == [None] * 3


def test_requests_without_an_answer_are_not_counted(start: Callable[[], Server]) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    for outcome in ("failed", "cancelled", "refused"):
        server.monitors.ended(answered("cat", outcome=outcome))
    assert server.monitors.report("m").requests == 0


def test_a_new_version_is_compared_with_the_reference_of_the_stable_one(start: Callable[[], Server]) -> None:
    server = start()
    server.monitors.configure(config("1", "2"), {})
    server.ask(500, "m@2", cats=0.9)
    assert server.state_of("m@2") == "waiting"
    server.ask(1000 + BATCH)
    assert (server.state_of("m"), server.state_of("m@2")) == ("watching", "watching")
    server.ask(600)
    server.ask(600, "m@2", cats=0.9)
    assert (server.drifting("m"), server.drifting("m@2")) == (set(), {"label"})
    assert server.monitors.reference("m@2").version == "1"


def test_a_restarted_server_and_another_one_go_on_with_the_stored_reference(start: Callable[[], Server]) -> None:
    first, second = start(), start()
    for server in (first, second):
        server.monitors.configure(config("1"), {})
    first.ask(1000 + BATCH)
    second.ask(100)
    run(first.monitors.look())
    run(second.monitors.look())
    third = start()
    third.monitors.configure(config("1"), {})
    run(third.monitors.look())
    assert first.monitors.reference("m") == second.monitors.reference("m") == third.monitors.reference("m")
    third.ask(600, cats=0.9)
    assert third.drifting() == {"label"}


def test_of_two_servers_that_take_one_the_first_to_store_it_decides(start: Callable[[], Server]) -> None:
    first, second = start(), start()
    for server, cats in ((first, 0.5), (second, 0.9)):
        server.monitors.configure(config("1"), {})
        server.ask(1000 + BATCH, cats=cats)
    assert first.monitors.reference("m") != second.monitors.reference("m")
    run(second.monitors.look())
    run(first.monitors.look())
    assert first.monitors.reference("m") == second.monitors.reference("m")
    first.ask(600, cats=0.5)
    assert first.drifting() == {"label"}


def test_a_reset_is_a_new_reference_at_every_server(start: Callable[[], Server]) -> None:
    first, second = start(), start()
    for server in (first, second):
        server.monitors.configure(config("1"), {})
    first.ask(1000 + BATCH)
    run(first.monitors.look())
    run(second.monitors.look())
    report = run(first.monitors.reset("m"))
    assert (report.state, report.requests) == ("collecting", 0)
    run(first.monitors.look())
    run(second.monitors.look())
    assert second.state_of() == "collecting"
    first.ask(1000 + BATCH, cats=0.9)
    run(first.monitors.look())
    run(second.monitors.look())
    second.ask(600, cats=0.9)
    assert second.drifting() == set()


def test_an_outage_of_the_database_loses_no_reference(start: Callable[[], Server], monkeypatch: Any) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    server.ask(1000 + BATCH)

    async def fails(job: Callable[[Database], Any]) -> Any:
        raise StateUnavailable("It is away.")

    with monkeypatch.context() as patched:
        patched.setattr(server.state, "call", fails)
        with pytest.raises(StateUnavailable):
            run(server.monitors.look())
        assert server.state_of() == "watching"
    run(server.monitors.look())
    other = start()
    other.monitors.configure(config("1"), {})
    run(other.monitors.look())
    assert other.state_of() == "watching"


def test_a_stored_reference_that_cannot_be_read_is_replaced(start: Callable[[], Server]) -> None:
    server = start()

    def spoil(database: Database) -> None:
        with database.transaction() as transaction:
            transaction.execute("INSERT INTO drift_references (model, reference) VALUES (?, ?)", ("m", b"{}"))

    run(server.state.call(spoil))
    server.monitors.configure(config("1"), {})
    run(server.monitors.look())
    assert server.state_of() == "collecting"
    server.ask(1000 + BATCH)
    run(server.monitors.look())
    other = start()
    other.monitors.configure(config("1"), {})
    run(other.monitors.look())
    assert other.monitors.reference("m") == server.monitors.reference("m")


def test_a_reference_of_a_file_needs_no_requests_and_is_not_reset(start: Callable[[], Server], tmp_path: Path) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    server.ask(1000 + BATCH)
    path = tmp_path / "reference.json"
    path.write_bytes(msgspec.json.encode(server.monitors.reference("m")))
    other = start()
    wanted = config("1", reference=str(path))
    other.monitors.configure(wanted, read_references(wanted))
    assert other.state_of() == "watching"
    with pytest.raises(InvalidRequest, match=r"is the file .*reference\.json"):
        run(other.monitors.reset("m"))
    other.ask(600, cats=0.9)
    assert other.drifting() == {"label"}


def test_a_changed_setting_keeps_the_reference_and_begins_new_windows(start: Callable[[], Server]) -> None:
    server = start()
    server.monitors.configure(config("1"), {})
    server.ask(1000 + BATCH)
    server.ask(500, cats=0.9)
    assert server.drifting() == {"label"}
    before = server.monitors.reference("m")
    server.monitors.configure(config("1"), {})
    assert server.drifting() == {"label"}, "nothing has changed"
    server.monitors.configure(config("1", window=200, watch=["score"]), {})
    assert server.monitors.reference("m") == before
    assert [(one.stream, one.readings) for one in server.monitors.report("m").streams] == [("score", [])]
    assert any(isinstance(event, DriftForgotten) for event in server.events)
    server.monitors.configure(config("2"), {})
    assert server.monitors.report("m").reference_version == "1", "another version, the same reference"
    server.monitors.configure(msgspec.convert({"models": {"m": {"source": "x"}}}, Config), {})
    assert server.monitors.reports() == []
    server.ask(BATCH)


def test_every_stream_is_read_of_the_requests_that_have_it() -> None:
    generated = answered(finish_reasons=("stop", "length"), usage=Usage(7, 9))
    predicted = RequestEnded(
        **{**msgspec.structs.asdict(answered()), "usage": Usage(3)},
    )
    predicted = msgspec.structs.replace(
        predicted, facts=Facts(rows=4, input=0.5, is_missing=True, label="a", score=0.9, output=2.0)
    )
    vector = array("f", [0.25] * NUM_FEATURES)
    embedded = msgspec.structs.replace(answered(), facts=Facts(output=2.5, embedding=vector.tobytes()))
    refused = msgspec.structs.replace(answered(), facts=Facts(rows=0, is_refusal=True, calls="cut"))
    asked = [generated, predicted, answered(), embedded, refused]
    found = {name: read(asked) for name, read in READERS.items()}
    assert found == {
        "input_tokens": [7, 3],
        "output_tokens": [9],
        "finish_reason": ["stop"],
        "refusal": ["yes"],
        "calls": ["cut"],
        "rows": [4, 1],
        "input": [0.5],
        "missing": ["yes"],
        "label": ["a"],
        "score": [0.9],
        "output": [2.0, 2.5],
        "embedding": [vector],
    }


def test_the_rate_of_a_model_is_divided_among_its_streams(start: Callable[[], Server]) -> None:
    """Over a day, with its one false alarm, the levels of all tests add up to one."""
    server = start()
    server.monitors.configure(config("1"), {})
    server.ask(1000 + BATCH)
    reference: Reference = server.monitors.reference("m")
    assert set(reference.streams) == {"rows", "label", "score"}
    server.events.clear()
    begun = server.clock[0]
    levels = 0.0
    for _ in range(30):
        server.clock[0] += 2000.0
        server.ask(100)
        levels += sum(stream.readings[0].level for stream in server.monitors.report("m").streams if stream.readings)
    assert levels == pytest.approx((server.clock[0] - begun) / 86_400 / 3, rel=0.05), "a third is of the smallest size"


def test_embeddings_that_lie_elsewhere_are_found_by_their_mean_and_the_reference_is_a_file(
    start: Callable[[], Server], tmp_path: Path
) -> None:
    server = start()
    server.monitors.configure(config("1"), {})

    def ask(count: int, shift: float) -> None:
        for _ in range(count):
            server.clock[0] += 1.0
            vector = array("f", [server.random.gauss(shift, 0.1) for _ in range(NUM_FEATURES)])
            facts = Facts(embedding=vector.tobytes())
            server.monitors.ended(msgspec.structs.replace(answered(), facts=facts))

    ask(1000 + BATCH, 0.0)
    assert set(server.monitors.reference("m").streams) == {"rows", "embedding"}
    ask(1600, 0.0)
    assert server.drifting() == set()
    ask(200, 0.05)
    assert server.drifting() == {"embedding"}
    (stream,) = [one for one in server.monitors.report("m").streams if one.stream == "embedding"]
    assert stream.measure == "mmd"
    assert stream.readings[0].distance > stream.readings[0].by_chance
    told = [event for event in server.events if isinstance(event, DriftRead) and event.is_news]
    assert told[-1].sentence == "embedding of the last 100 lie elsewhere than those of the reference"
    path = tmp_path / "saved"
    path.write_bytes(msgspec.json.encode(server.monitors.reference("m")))
    saved = config("1", reference=str(path))
    assert read_references(saved)["m"] == server.monitors.reference("m")
