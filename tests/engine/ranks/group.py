"""A replica of two ranks in this process, which computes answers until it ends; a fault comes after some steps.

    group.py hang FLAG WAY        a rank of a divided layer hangs within a step, without a signal
    group.py kill FLAG WAY        a rank of a divided layer is killed
    group.py cut FLAG WAY         the connections between two stages are cut; needs a network namespace of its own
    group.py rank FLAG WAY ...    the other rank, which hangs before a sum when there is a file FLAG

WAY: memory, or collectives over gloo, over gloo on devices that are the CPU, or on CUDA devices (gloo, devices, cuda).
Prints a line when the fault begins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from inferd.config import ModelConfig, ParallelConfig, SpeculationConfig
from inferd.engine import load
from inferd.engine.cuda import load as cuda_load
from inferd.engine.cuda import memory as cuda_memory
from inferd.engine.cuda import steps as cuda_steps
from inferd.engine.load import create_backend
from inferd.engine.model.share import Share
from inferd.engine.ranks import collectives, lead, rank
from inferd.engine.ranks.collectives import CollectivePeers
from inferd.engine.ranks.peers import GroupPeers
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

STEPS = 20


def over_gloo(share: Share, store: Store, memory: int | None, timeout_s: float) -> CollectivePeers:
    """In place of ``GroupPeers``: what ranks on CUDA devices have."""
    return CollectivePeers(share, store, torch.device("cpu"), timeout_s)


def replaced(way: str) -> list[tuple[ModuleType, str, object]]:
    """What stands for what in every process of a group: modules, names and values."""
    found: list[tuple[ModuleType, str, object]] = []
    if way in ("gloo", "devices"):
        found += [(collectives, "GroupPeers", over_gloo)]
    if way == "devices":
        from tests.engine.cuda.fake_device import FakeDevice

        found += [(cuda_load, "CudaDevice", lambda where: FakeDevice())]
        # Triton's own attention has tests of its own, and takes long in the interpreter.
        found += [(module, "create_attention", attends) for module in (cuda_memory, cuda_steps)]
        found += [(load, "_attention", lambda config, decoder, device: "triton")]
    return found


def attends(kind: str, cache: KVCache, batch: FlatBatch) -> ReferenceAttention:
    return ReferenceAttention(cache, batch)


def main(fault: str, flag: Path, way: str) -> None:
    lead._COMMAND = (sys.executable, "-P", __file__, "rank", str(flag), way)
    config = ModelConfig(
        source="demo",
        threads=1,
        device="cuda" if way == "cuda" else "cpu",
        hang_timeout_s=10.0,
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
                if fault == "kill":
                    os.kill(engine.info.rank_pids[0], signal.SIGKILL)
                if fault == "cut":
                    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            engine.step(time.monotonic())
        while engine.due(time.monotonic()) is not None:
            engine.step(time.monotonic())


def hanging_rank(flag: Path, peers: type[GroupPeers] | type[CollectivePeers]) -> None:
    add = peers.sum

    def hangs(self: Any, partial: Tensor) -> Tensor:
        if flag.exists():
            time.sleep(3600)
        return add(self, partial)

    peers.sum = hangs  # type: ignore[method-assign]
    rank.main()


if __name__ == "__main__":
    word, flag, way = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    for module, name, value in replaced(way):
        setattr(module, name, value)
    if word == "rank":
        del sys.argv[1:4]
        hanging_rank(flag, GroupPeers if way == "memory" else CollectivePeers)
    main(word, flag, way)
