"""OBSERVE: the end of the flow. Events in, metrics and log lines out."""

from __future__ import annotations

from inferd.observe.sink import Observer

__all__ = ["Observer"]
