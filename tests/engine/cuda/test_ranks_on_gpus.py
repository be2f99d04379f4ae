"""A model divided among CUDA devices, whose ranks exchange their parts over NCCL. `make gpu-check` runs these."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.ranks.test_groups import GROUP, ends_with_a_lost_rank, requests
from tests.engine.test_engine import run

from inferd.config import ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.load import create_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch has fewer than two CUDA devices here"),
]


def answers(tensor: int, pipeline: int, **settings: Any) -> list[list[int]]:
    config = ModelConfig(
        source="demo",
        device="cuda",
        max_model_len=128,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        scheduler=SchedulerConfig(max_num_seqs=4),
        **settings,
    )
    engine = create_backend("tiny", config, lambda *_: None)
    try:
        assert len(engine.info.rank_pids) == tensor * pipeline - 1
        return [answer.tokens() for answer in run(engine, *requests("", [""]))]
    finally:
        engine.close()


@pytest.mark.parametrize("attention", ["triton", "reference"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_ranks_answer_as_one_process(layout: tuple[int, int], attention: str) -> None:
    """In float32, in which sums in another order do not change these answers on processors."""
    if layout[0] * layout[1] > torch.cuda.device_count():
        pytest.skip("torch has too few CUDA devices here")
    settings: dict[str, Any] = {"dtype": "float32", "attention": attention}
    assert answers(*layout, **settings) == answers(1, 1, **settings)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_ranks_repeat_their_answers(quantization: str) -> None:
    assert answers(2, 1, quantization=quantization) == answers(2, 1, quantization=quantization)


def test_a_killed_rank_ends_the_group_within_a_second(tmp_path: Path) -> None:
    """Rank 0 waits for its device meanwhile, which waits for a kernel of NCCL."""
    command = [sys.executable, str(GROUP), "kill"]
    seconds = ends_with_a_lost_rank(command, tmp_path / "flag", "cuda", "the replica ends with all its ranks")
    print(f"the group was gone after {seconds:.2f} s")
    assert seconds <= 1


def test_a_rank_that_hangs_ends_the_group(tmp_path: Path) -> None:
    """Without a supervisor, which acts after ``hang_timeout_s``, the watchdog of torch's process group ends rank 0."""
    command = [sys.executable, str(GROUP), "hang"]
    ends_with_a_lost_rank(command, tmp_path / "flag", "cuda", "", -signal.SIGABRT)
