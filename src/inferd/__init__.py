"""inferd: one inference server for every model."""

from __future__ import annotations

__version__ = "0.1.0"
