"""The part of the observer that traces: gives the exporter what has ended and is sampled."""

from __future__ import annotations

import functools

from inferd.events import HttpServed
from inferd.observe.startup import LoadReport, StartReport
from inferd.observe.traces.context import is_sampled
from inferd.observe.traces.exporter import Counts, Exporter
from inferd.observe.traces.settings import Settings
from inferd.observe.traces.spans import DeviceOf, is_traced, no_device, spans_of, spans_of_load, spans_of_start

_Item = HttpServed | LoadReport | StartReport


class Tracer:
    """Where ended calls and loads go. Used from the gateway's loop; spans are made in the exporter's thread."""

    def __init__(self, settings: Settings, counts: Counts, device_of: DeviceOf = no_device) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        self._keeps_loads = not settings.sampler.is_off
        self._exporter: Exporter[_Item] = Exporter(settings, functools.partial(_spans, device_of), counts)

    def served(self, event: HttpServed) -> None:
        """Have the spans of an ended call sent, if the call is sampled."""
        if is_sampled(event.trace) and is_traced(event):
            self._exporter.put(event)

    def loaded(self, load: LoadReport) -> None:
        """Have the spans of a load sent. Loads are few, so all of them are, unless nothing is sampled."""
        if self._keeps_loads:
            self._exporter.put(load)

    def started(self, start: StartReport) -> None:
        """Have the spans of the server's start sent."""
        if self._keeps_loads:
            self._exporter.put(start)

    def close(self) -> None:
        """Send what waits, for a moment. Idempotent."""
        self._exporter.close()


def _spans(device_of: DeviceOf, item: _Item, offset_s: float) -> list[bytes]:
    match item:
        case HttpServed():
            return spans_of(item, offset_s, device_of)
        case LoadReport():
            return spans_of_load(item)
        case StartReport():
            return spans_of_start(item)
