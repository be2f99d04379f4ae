"""A replica of several processes: it answers as one process, and ends as one when a rank is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.config import ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.load import create_backend
from inferd.engine.ranks.lead import Lead
from inferd.llm import LLM
from inferd.registry.source import resolve
from inferd.types import SamplingParams
from inferd.worker.log_lines import record_line

PROMPTS = ["Once upon a time", "Once upon a time there was a", "The little dog", "1 + 1 ="] * 2


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def answers(tensor: int, pipeline: int, **settings: Any) -> list[tuple[int, ...]]:
    config = ModelConfig(
        source="demo",
        threads=1,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        scheduler=SchedulerConfig(max_num_seqs=4),
        **settings,
    )
    engine = create_backend("m", config, lambda *_: None)
    if tensor * pipeline > 1:
        state = engine.set_adapters({"a": "folder"})["a"]
        assert state.failure is not None
        assert "do not work with ranks yet" in state.failure.message
    with LLM.over(engine) as llm:
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0))
    return [one.outputs[0].token_ids for one in found]


def test_processes_answer_as_one() -> None:
    """Batches, the prefix cache and guessed tokens pass through the ranks."""
    assert answers(2, 1) == answers(1, 1)


@pytest.mark.soak
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_every_layout_answers_as_one_process(layout: tuple[int, int], settings: dict[str, Any]) -> None:
    assert answers(*layout, **settings) == answers(1, 1, **settings)


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[tuple[Lead, threading.Event]]:
    """Rank 0's hold of one started rank, and what is set when the process of rank 0 would end."""
    ended = threading.Event()
    config = ModelConfig(source="demo", threads=1, parallel=ParallelConfig(tensor=2))
    made = Lead(config, resolve("demo"), 1, ended.set)
    yield made, ended
    made.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_group(
    lead: tuple[Lead, threading.Event], number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    made, ended = lead
    watching = threading.Thread(target=made.watch)
    watching.start()
    os.kill(made.pids[0], number)
    until(ended.is_set)
    watching.join()
    (line,) = [record for record in caplog.records if "the replica ends with all its ranks" in record.message]
    assert record_line(line, "m/0"), "the worker's log takes the record"
    until(lambda: not Path(f"/proc/{made.pids[0]}/fd/0").exists())
