"""Where the measured accuracies of the classifiers are kept: ``docs/model-scores-classifiers.json``, for the card and its test."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "model-scores-classifiers.json"
MODELS = ROOT / "src" / "inferd" / "models"


def read() -> dict[str, dict[str, float]]:
    """Of each classifier: what was measured, and how many examples of that were right, from 0 to 1."""
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return found


def write(name: str, scores: dict[str, float]) -> None:
    found = read() | {name: {what: round(score, 4) for what, score in scores.items()}}
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n")
    for what, score in scores.items():
        print(f"{name}, {what}: {score:.1%}")
