"""A replica of two ranks in this process, which computes answers until it ends; a fault comes after some steps.

    group.py hang FLAG       a rank hangs within a step, without a signal
    group.py cut FLAG        the connections between the ranks are cut; needs a network namespace of its own
    group.py rank FLAG ...   the other rank, which hangs when there is a file FLAG

Prints a line when the fault begins.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from inferd.config import ModelConfig, ParallelConfig, SpeculationConfig
from inferd.engine.load import create_backend
from inferd.engine.ranks import lead, rank
from inferd.engine.ranks.peers import GlooPeers
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

STEPS = 20


def main(fault: str, flag: Path) -> None:
    lead._COMMAND = (sys.executable, "-P", __file__, "rank", str(flag))  # type: ignore[assignment]
    config = ModelConfig(
        source="demo",
        threads=1,
        parallel=ParallelConfig(tensor=2),
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
    meet = GlooPeers._meet

    def hangs(self: GlooPeers, works: list[object]) -> None:
        if flag.exists():
            time.sleep(3600)
        meet(self, works)  # type: ignore[arg-type]

    GlooPeers._meet = hangs  # type: ignore[method-assign, assignment]
    rank.main()


if __name__ == "__main__":
    word, flag = sys.argv[1], Path(sys.argv[2])
    if word == "rank":
        del sys.argv[1:3]
        hanging_rank(flag)
    main(word, flag)
