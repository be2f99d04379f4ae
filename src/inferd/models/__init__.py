"""The bundled models: where their folders lie.

Knows the names and the places; the files are in the layout of a Hugging Face checkpoint, and the model
card in ``docs/model-card.md`` says what they can do.
"""

from __future__ import annotations

from pathlib import Path

from inferd.errors import ModelNotFound

NAMES = ("demo", "demo-draft")


def path(name: str) -> Path:
    """Return the folder of a bundled model; ``ModelNotFound`` for a name that is not bundled."""
    if name not in NAMES:
        raise ModelNotFound(f"There is no bundled model {name!r}; the bundled models are {', '.join(NAMES)}.")
    return Path(__file__).parent / name
