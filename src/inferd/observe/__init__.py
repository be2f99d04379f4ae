"""Observation: every event of the server comes in here, and metrics and log lines go out.

Start with ``sink.py``: what each event means. ``metrics.py`` is the one table of metrics, ``series.py`` holds their
values and writes them for a scrape, and ``requests.py`` counts the events of requests many at a time. ``logs.py`` and
``plain.py`` write the log. Knows events and nothing of the rooms that emit them; no other room names a metric.
"""

from __future__ import annotations

from inferd.observe.sink import Observer

__all__ = ["Observer"]
