"""What a claim's measurement is: its words, its baseline, figures, a picture, and whether it held. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import markdown


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured, and of what."""

    full: bool
    model: str  # a checkpoint folder or 'demo'
    threads: int
    text: Path | None = None  # for perplexity
    progress: Callable[[float, str], None] | None = None  # told how much of a claim is measured, and what comes next

    def pick(self, quick: int, full: int) -> int:
        return full if self.full else quick

    def say(self, done: int, total: int, what: str) -> None:
        """So many parts of ``total`` are measured; now ``what``."""
        if self.progress is not None:
            self.progress(done / total, what)


@dataclass(frozen=True, slots=True)
class Claim:
    """A measured claim. ``verdicts``: (held, sentence with its figure)."""

    name: str
    claim: str
    baseline: str
    head: list[str]
    rows: list[list[str]]
    picture: str  # SVG
    verdicts: list[tuple[bool, str]]
    data: dict[str, object] = field(default_factory=dict)

    def text(self) -> str:
        judged = "\n".join(f"- {'holds' if held else 'DOES NOT HOLD'}: {sentence}" for held, sentence in self.verdicts)
        return (
            f"# {self.name}\n\n{self.claim}\n\nBaseline: {self.baseline}\n\n{markdown(self.head, self.rows)}\n"
            f"![{self.name}]({self.name}.svg)\n\n{judged}\n"
        )

    def write(self, folder: Path) -> None:
        verdicts = [{"held": held, "sentence": sentence} for held, sentence in self.verdicts]
        found = {"claim": self.claim, "baseline": self.baseline, "figures": self.data, "verdicts": verdicts}
        (folder / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(self.text())
        (folder / f"{self.name}.svg").write_text(self.picture)


class NotYetError(Exception):
    """This inferd lacks what the claim is about; the message says what."""
