"""What quantising a checkpoint produced: its folder, its sizes, and its measured quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inferd.engine.calibrate.rounding import Form
from inferd.engine.calibrate.tuning import Divergence
from inferd.engine.calibrate.wish import Wish
from inferd.engine.perplexity import Perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Sizes are bytes of files."""

    folder: Path
    wish: Wish
    form: Form
    source: str
    architecture: str
    before_bytes: int
    after_bytes: int
    bits_per_weight: float  # of the products that were quantised, scales included
    num_quantised: int  # parameters
    before: Perplexity | None = None
    after: Perplexity | None = None
    context: int = 0  # of the measurement
    data: str = ""
    data_digest: str = ""
    num_calibration: int = 0  # tokens
    wide: tuple[str, ...] = ()  # products that have 8 bits where the others have 4
    wide_share: float = 0.0  # of the weights
    divergence: Divergence | None = None  # what tuning brought

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after.change(self.before)
