"""The table of experiments: what is injected, what must hold, and how the check is seen to fail.

An experiment is a function that gets a ``Field`` and asserts. It runs twice: as it is, and with its
``defect`` present, when it must fail with the words in ``red``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.experiments.field import Field

Run = Callable[[Field], None]
Tier = Literal["everyday", "thorough", "soak"]
"""Which of ``make test``, ``make test TIERS=all`` and ``make soak`` are the first to run it."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row with a program of its own."""

    id: str  # of the fault (F20) or the security item (SEC-16), with a letter where it has several
    injects: str
    holds: str
    control: str  # the defect, in words
    red: str  # what the control's failure says: a regular expression
    run: Run
    tier: Tier

    @property
    def row(self) -> str:
        """The fault or item itself."""
        return self.id.rstrip("abcdefgh")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """One row that tests elsewhere in the tree are: their places, and where their control is."""

    id: str
    injects: str
    holds: str
    tests: tuple[str, ...]
    control: str  # a test's place as well

    @property
    def row(self) -> str:
        return self.id.rstrip("abcdefgh")


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    id: str, *, injects: str, holds: str, control: str, red: str, tier: Tier = "soak"
) -> Callable[[Run], Run]:
    """Enter a function into the table."""

    def enter(run: Run) -> Run:
        assert id not in EXPERIMENTS, f"{id} is there twice"
        EXPERIMENTS[id] = Experiment(id, injects, holds, control, red, run, tier)
        return run

    return enter
