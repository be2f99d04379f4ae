"""A server's router with one replica of two ranks, of which one is lost while ten requests are under way.

    under_load.py kill|stop RANK    a signal reaches a rank
    under_load.py cut 1                  the connections between the stages are cut; needs a network namespace of its own

Prints one line of JSON: whether all answers are those of an undisturbed run, how often requests were retried, what was
left of the group, and the seconds until it was gone and until the replica was back.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.worker.watching import Witness, children, is_running, next_output, outputs_of, text_of, until

from inferd import clock
from inferd.config import Config, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.events import Retried
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, SamplingParams, TextPrompt

NUM_REQUESTS, NUM_RUNNING = 10, 4  # the others wait
SAMPLING = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def request(index: int) -> GenerateRequest:
    return GenerateRequest(
        id=f"r{index}",
        model="m",
        prompt=TextPrompt(text=f"Once upon a time there were {index} dogs"),
        sampling=SAMPLING,
        explicit=SamplingParams.__struct_fields__,
        arrived_at=clock.now(),
    )


def set_link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


async def main(fault: str, lost: int) -> dict[str, object]:
    parallel = ParallelConfig(pipeline=2) if fault == "cut" else ParallelConfig(tensor=2)
    model = ModelConfig(
        source="demo",
        threads=1,
        resume_streams=True,
        parallel=parallel,
        scheduler=SchedulerConfig(max_num_seqs=NUM_RUNNING),
    )
    witness = Witness()
    router = Router(Config(models={"m": model}), witness)
    await router.start()
    await router.settled()
    try:
        streams = [open_stream(router, request(index)) for index in range(NUM_REQUESTS)]
        whole = [text_of(outputs) for outputs in await asyncio.gather(*map(outputs_of, streams))]
        streams = [open_stream(router, request(index)) for index in range(NUM_REQUESTS)]
        first = await next_output(streams[0])
        (replica,) = router.replicas("m")
        assert isinstance(replica, LocalReplica)
        rank_0 = replica.pid
        assert rank_0 is not None
        group = [
            rank_0,
            *(pid for pid in children(rank_0) if b"ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()),
        ]
        assert len(group) == 2
        starts, began = witness.count("ready"), time.monotonic()
        if fault == "cut":
            set_link("down")
        else:
            os.kill(group[lost], SIGNALS[fault])
        answers = asyncio.gather(*map(outputs_of, streams))
        while any(map(is_running, group)) and time.monotonic() - began < 60:
            await asyncio.sleep(0.01)
        gone_s = time.monotonic() - began
        if fault == "cut":
            set_link("up")
        await until(lambda: witness.count("ready") > starts, "it is back", 60)
        back_s = time.monotonic() - began
        found = await asyncio.wait_for(answers, 120)
        ends = [outputs[-1].end for outputs in found]
        return {
            "equal": [text_of([*([first] if index == 0 else []), *outputs]) for index, outputs in enumerate(found)]
            == whole,
            "outcomes": sorted({end.outcome if end is not None else "none" for end in ends}),
            "retried": len([event for event in witness.events if isinstance(event, Retried)]),
            "left": [pid for pid in group if is_running(pid)],
            "gone_s": gone_s,
            "back_s": back_s,
        }
    finally:
        await router.stop()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))
