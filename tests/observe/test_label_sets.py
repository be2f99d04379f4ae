"""Labels have closed sets of values: however many are tried, no series and no memory is added for them."""

from __future__ import annotations

import gc
import io
import tracemalloc
from collections.abc import Callable

import pytest
from tests.observe.test_observer import ended

from inferd.events import Event, HttpServed, QueueChanged, ReplicaChanged, RequestRefused, Retried
from inferd.observe import Observer
from inferd.observe.series import Distribution, Value
from inferd.observe.statistics import ModelTally
from inferd.window import Window

NUM_TRIED = 3_000


def served(**changes: str) -> HttpServed:
    values = {"request_id": "r", "method": "GET", "route": "/", **changes}
    return HttpServed(status=200, duration_s=0.1, **values)  # type: ignore[arg-type]


TRIED: dict[str, Callable[[int], list[Event]]] = {
    "model": lambda number: [
        ended(model=f"model-{number}"),
        served(model=f"model-{number}"),
        RequestRefused(model=f"model-{number}", reason="queue_full"),
        QueueChanged(model=f"model-{number}", waiting=1, in_flight=1),
        Retried(model=f"model-{number}", kind="retry", granted=True),
        ReplicaChanged(model=f"model-{number}", replica=0, state="ready"),
    ],
    "tenant": lambda number: [ended(tenant=f"tenant-{number}"), served(tenant=f"tenant-{number}")],
    "route": lambda number: [served(route=f"/route/{number}")],
    "method": lambda number: [served(method=f"METHOD{number}")],
    "error": lambda number: [ended(outcome="failed", error_kind=f"kind-{number}")],
    "request": lambda number: [ended(request_id=f"r-{number}"), served(request_id=f"r-{number}")],
}


COUNTING = (Value, Distribution, Window, ModelTally)


def num_counting() -> int:
    """The objects that hold numbers, one for each series, window and model."""
    gc.collect()
    return sum(type(one) in COUNTING for one in gc.get_objects())


@pytest.mark.parametrize("label", TRIED)
def test_thousands_of_values_of_a_label_add_nothing(label: str) -> None:
    observer = Observer(models={"tiny": 1}, access_log=False, stream=io.StringIO())

    def tell(numbers: range) -> int:
        """The length of the page when these values have been told."""
        for number in numbers:
            for event in TRIED[label](number):
                observer.emit(event)
        return len(observer.render_metrics().splitlines())

    lines, before = tell(range(600)), num_counting()
    assert before > 100
    assert tell(range(600, NUM_TRIED)) == lines
    assert num_counting() <= before
    observer.close()


@pytest.mark.parametrize("label", ["tenant", "route", "method", "error", "request"])
def test_thousands_of_values_of_a_label_take_no_memory(label: str) -> None:
    """But for the ring of recent requests, which is bounded and holds their routes and ids."""
    observer = Observer(models={"tiny": 1}, access_log=False, stream=io.StringIO())
    for number in range(NUM_TRIED):
        if number == 600:
            observer.render_metrics()
            gc.collect()
            tracemalloc.start()
        for event in TRIED[label](number):
            observer.emit(event)
    observer.render_metrics()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    observer.close()
    assert grown < 200 * NUM_TRIED
