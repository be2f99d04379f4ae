"""A worker and its ranks, of which one is killed between two micro-batches of a step while there is a file FLAG.

    cut_step.py worker FLAG RANK ...    rank 0, which a supervisor starts
    cut_step.py rank FLAG RANK ...      another rank, which rank 0 or a node starts

RANK is the one that is lost. It is killed when it has handed the first micro-batch of a step over and others follow. It
removes FLAG and leaves the file FLAG.done, with the number of micro-batches.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from inferd.engine.model.pipe import Pipe
from inferd.engine.ranks import lead, rank
from inferd.worker.main import main as worker


def end_between_micro_batches(flag: Path, lost: int) -> None:
    begin, leave = Pipe.begin, Pipe.leave
    rows: list[int] = []

    def begins(self: Pipe, sizes: Sequence[int]) -> None:
        rows[:] = sizes
        begin(self, sizes)

    def leaves(self: Pipe, states: Tensor) -> None:
        leave(self, states)
        if len(rows) > 1 and self._share.rank == lost and flag.exists():
            flag.with_suffix(".done").write_text(str(len(rows)))
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    Pipe.begin = begins  # type: ignore[method-assign]
    Pipe.leave = leaves  # type: ignore[method-assign]


if __name__ == "__main__":
    kind, flag, lost = sys.argv[1:4]
    del sys.argv[1:4]
    lead._COMMAND = (sys.executable, "-P", __file__, "rank", flag, lost)
    end_between_micro_batches(Path(flag), int(lost))
    (worker if kind == "worker" else rank.main)()
