"""The bundled models: where their files lie, and how they are served together.

Knows the names and the places. The language models are folders in the layout of a Hugging Face checkpoint, the
classifiers are one ONNX file each; ``docs/model-card.md`` says what they can do.
"""

from __future__ import annotations

from pathlib import Path

from inferd.errors import ModelNotFound

NAMES = ("demo", "demo-draft")
CLASSIFIERS = ("demo-digits", "demo-intents")
BUNDLE = Path(__file__).parent / "demo.yaml"
"""The configuration that ``inferd serve demo`` serves: the chat model and the classifiers with their steps."""


def path(name: str) -> Path:
    """Return the folder of a bundled model; ``ModelNotFound`` for a name that is not bundled."""
    if name not in (*NAMES, *CLASSIFIERS):
        raise ModelNotFound(
            f"There is no bundled model {name!r}; the bundled models are {', '.join((*NAMES, *CLASSIFIERS))}."
        )
    return Path(__file__).parent / name
