"""The timeline of starts: every load has a record with its phases, also one that fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.events import LoadProgress, ReplicaChanged
from inferd.observe.startup import MAX_LOADS, LoadReport, StartReport, Startup


class Clock:
    """A monotonic clock that the test turns; the wall clock is 1000 s ahead of it."""

    def __init__(self) -> None:
        self.at = 10.0
        self.loads: list[LoadReport] = []
        self.starts: list[StartReport] = []
        self.startup = Startup(
            9.0, now=self.now, wall=lambda: self.at + 1000, on_load=self.loads.append, on_start=self.starts.append
        )

    def now(self) -> float:
        return self.at

    def change(self, state: str, *, replica: int = 0, **more: object) -> None:
        event = ReplicaChanged(model="chat", replica=replica, state=state, **more)  # type: ignore[arg-type]
        self.startup.changed(event)

    def progress(self, phase: str, at: float = 0.0) -> None:
        self.startup.progressed(LoadProgress(model="chat", replica=0, phase=phase, done=0, total=1, at=at))


def times(load: LoadReport | StartReport) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.begin_s, phase.seconds) for phase in load.phases]


def test_a_load_has_its_phases_in_order() -> None:
    clock = Clock()
    clock.change("starting")
    clock.at = 11.0
    clock.change("loading")
    clock.progress("weights", at=10.9)
    clock.at = 12.0
    clock.progress("weights", at=12.0)
    clock.progress("warm-up", at=12.5)
    clock.at = 13.0
    clock.change("ready")
    clock.at = 50.0
    clock.change("ready", rss_bytes=5)
    (load,) = clock.startup.loads()
    assert clock.loads == [load]
    assert (load.model, load.replica, load.state, load.cause, load.seconds) == ("chat", 0, "ready", "load", 3.0)
    assert load.begun_at == 1010.0
    assert times(load) == [("spawn", 0.0, 0.9), ("weights", 0.9, 1.6), ("warm-up", 2.5, 0.5)]


def test_a_load_under_way_is_shown_with_the_phase_that_it_is_in() -> None:
    clock = Clock()
    clock.change("starting")
    clock.at = 14.0
    (load,) = clock.startup.loads()
    assert (load.state, times(load)) == ("loading", [("spawn", 0.0, 4.0)])
    assert clock.loads == []


def test_a_load_that_fails_ends_in_the_phase_in_which_it_failed() -> None:
    clock = Clock()
    clock.change("starting")
    clock.progress("weights", at=11.0)
    clock.at = 12.0
    clock.change("failed", reason="No file.")
    clock.change("stopped")
    (load,) = clock.startup.loads()
    assert (load.state, load.reason) == ("failed", "No file.")
    assert times(load) == [("spawn", 0.0, 1.0), ("weights", 1.0, 1.0)]


def test_every_restart_has_a_record_of_its_own() -> None:
    clock = Clock()
    clock.change("starting")
    clock.change("ready")
    clock.at = 20.0
    clock.change("died", reason="killed")
    clock.change("starting", restarts=1)
    clock.at = 22.0
    clock.change("ready", restarts=1)
    latest, first = clock.startup.loads()
    assert (latest.cause, latest.restarts, latest.seconds) == ("restart", 1, 2.0)
    assert (first.cause, first.seconds) == ("load", 0.0)


def test_a_remote_server_loads_nothing() -> None:
    clock = Clock()
    clock.change("starting", is_remote=True)
    clock.change("ready", is_remote=True)
    assert clock.startup.loads() == []


def test_the_servers_own_start_ends_when_it_accepts_requests() -> None:
    clock = Clock()
    clock.startup.enter("state")
    clock.at = 12.0
    assert not clock.startup.start().is_over
    clock.startup.accepts()
    clock.at = 30.0
    clock.startup.accepts()
    start = clock.startup.report().gateway
    assert clock.starts == [start]
    assert (start.begun_at, start.seconds, start.is_over) == (1009.0, 3.0, True)
    assert times(start) == [("import", 0.0, 1.0), ("state", 1.0, 2.0)]


def test_the_number_of_records_is_bounded() -> None:
    clock = Clock()
    for number in range(MAX_LOADS + 50):
        clock.at += 1
        clock.change("starting", restarts=number)
        clock.change("died")
    loads = clock.startup.loads()
    assert len(loads) == MAX_LOADS
    assert loads[0].restarts == MAX_LOADS + 49


@given(st.lists(st.tuples(st.sampled_from(["weights", "import", "warm-up"]), st.floats(-5, 5)), max_size=20))
def test_phases_follow_each_other_and_add_up(steps: list[tuple[str, float]]) -> None:
    """Also where a worker's times come late or run backwards."""
    clock = Clock()
    clock.change("starting")
    for phase, later in steps:
        clock.at += max(0.0, later)
        clock.progress(phase, at=min(clock.at, clock.at + later))
    clock.change("ready")
    (load,) = clock.loads
    end = 0.0
    for found in load.phases:
        assert abs(found.begin_s - end) < 1e-5
        assert found.seconds >= 0
        end = found.begin_s + found.seconds
    assert abs(end - load.seconds) < 1e-4
