"""The terminal's form of the log."""

from __future__ import annotations

import io
import json

from inferd.events import HttpServed, ReplicaChanged
from inferd.observe import Observer
from inferd.observe.plain import plain
from inferd.types import Timings, Usage


def served(**changes: object) -> HttpServed:
    base: dict[str, object] = {
        "request_id": "r",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "duration_s": 0.25,
    }
    return HttpServed(**(base | changes))  # type: ignore[arg-type]


def shown(*events: HttpServed | ReplicaChanged) -> list[str]:
    stream = io.StringIO()
    observer = Observer(models=["chat"], stream=stream, plain=True, wall=lambda: 0.0)
    for event in events:
        observer.emit(event)
    observer.close()
    return stream.getvalue().splitlines()


def test_a_request_is_one_short_line() -> None:
    (line,) = shown(served(model="chat", usage=Usage(12, 28, 8), timings=Timings(first_token=0.01)))
    assert line == "00:00:00 POST /v1/completions 200 in 0.250 s  chat  12 (8 cached) + 28 tokens  first after 0.010 s"


def test_a_prediction_has_no_tokens_to_tell() -> None:
    (line,) = shown(served(route="/v2/models/m/infer", model="m", usage=Usage(0, 0, 0)))
    assert line == "00:00:00 POST /v2/models/m/infer 200 in 0.250 s  m"


def test_an_error_is_told_with_its_sentence_and_what_no_route_matches_with_its_path() -> None:
    (line,) = shown(served(status=400, error_code="invalid_value", error_text="max_tokens must be at least 1."))
    assert line == "00:00:00 POST /v1/completions 400 in 0.250 s  invalid_value: max_tokens must be at least 1."
    (line,) = shown(served(route="unmatched", path="/v1/chatt", status=404, error_code="route_not_found"))
    assert line == "00:00:00 POST /v1/chatt 404 in 0.250 s  route_not_found"


def test_probes_that_went_well_are_left_out_and_failures_are_not() -> None:
    assert (
        shown(served(route="/health/ready"), served(route="/metrics"), served(route="/health/ready", status=503)) == []
    )
    assert shown(served(route="/admin/status")) == []  # status --watch asks every second
    assert len(shown(served(route="/health/ready", status=500))) == 1


def test_replicas_tell_their_state_and_why() -> None:
    (line,) = shown(ReplicaChanged(model="chat", replica=0, state="died", reason="killed by SIGKILL"))
    assert line == "00:00:00 chat/0 died: killed by SIGKILL"


def test_an_entry_of_another_kind_is_shown_as_it_is() -> None:
    line = json.dumps({"ts": "1970-01-01T00:00:00.000Z", "event": "new", "x": 1})
    assert plain(line) == "00:00:00 " + line
