"""Observation: every event of the server comes in here, and metrics and log lines go out.

Start with ``sink.py``: what each event means. ``metrics.py`` is the one table of metrics, ``aliases.py`` that of other
servers' names for them, and ``derived.py`` adds up those that are sums. ``series.py`` holds the values and writes them
for a scrape, in the format that ``accept.py`` chooses; ``requests.py`` counts the events of requests many at a time.
``logs.py`` and ``plain.py`` write the log. ``objectives.py`` counts the requests that meet an objective; ``alerts/``
and ``dashboards.py`` write the rules and charts that read the metrics elsewhere. Knows events and nothing of the rooms
that emit them; no other room names a metric.
"""

from __future__ import annotations

from inferd.observe.sink import MetricsPage, Observer

__all__ = ["MetricsPage", "Observer"]
