"""The composition root: every part is built here once, wired, run, changed while it runs, and taken down."""

from __future__ import annotations

from inferd.app.reload import ConfigSource
from inferd.app.root import run, serve

__all__ = ["ConfigSource", "run", "serve"]
