"""A replica of two ranks in this process, which computes answers until it ends; a fault comes after some steps.

    group.py hang FLAG       a rank of a divided layer hangs within a step, without a signal
    group.py cut FLAG        the connections between two stages are cut; needs a network namespace of its own
    group.py rank FLAG ...   the other rank, which hangs before a sum when there is a file FLAG

Prints a line when the fault begins.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from torch import Tensor

from inferd.config import ModelConfig, ParallelConfig, SpeculationConfig
from inferd.engine.load import create_backend
from inferd.engine.ranks import lead, rank
from inferd.engine.ranks.peers import GroupPeers
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

STEPS = 20


def main(fault: str, flag: Path) -> None:
    lead._COMMAND = (sys.executable, "-P", __file__, "rank", str(flag))
    config = ModelConfig(
        source="demo",
        threads=1,
        parallel=ParallelConfig(pipeline=2) if fault == "cut" else ParallelConfig(tensor=2),
        speculation=SpeculationConfig(method="none"),
    )
    engine = create_backend("m", config, lambda *_: None)
    for number in range(10_000):
        sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        prompt = TokenPrompt(token_ids=[5, 6, 7, 8])
        request = GenerateRequest(id=str(number), model="m", prompt=prompt, sampling=sampling)
        engine.add(engine.prepare(request), time.monotonic())
        for step in range(100):
            if number == 0 and step == STEPS:
                print("fault", flush=True)
                flag.touch()
                if fault == "cut":
                    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            engine.step(time.monotonic())
        while engine.due(time.monotonic()) is not None:
            engine.step(time.monotonic())


def hanging_rank(flag: Path) -> None:
    add = GroupPeers.sum

    def hangs(self: GroupPeers, partial: Tensor) -> Tensor:
        if flag.exists():
            time.sleep(3600)
        return add(self, partial)

    GroupPeers.sum = hangs  # type: ignore[method-assign]
    rank.main()


if __name__ == "__main__":
    word, flag = sys.argv[1], Path(sys.argv[2])
    if word == "rank":
        del sys.argv[1:3]
        hanging_rank(flag)
    main(word, flag)
