"""inferd: one inference server for every model."""

from __future__ import annotations

__version__ = "0.1.0"

_LAZY = {"LLM": "inferd.llm", "SamplingParams": "inferd.types"}

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Import ``LLM`` and ``SamplingParams`` at their first use, because a server needs neither."""
    if name not in _LAZY:
        raise AttributeError(f"module 'inferd' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
