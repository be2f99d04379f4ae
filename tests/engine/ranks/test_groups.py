"""A replica of several processes: it answers as one process, and ends as one when a rank is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.adapters import write_adapter
from tests.engine.test_engine import make_request, run
from tests.worker.watching import children, interrupted, is_running, text_of

from inferd.answer_form import AnswerForm, Regex
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.load import create_backend
from inferd.engine.ranks.lead import EXIT_RANK_LOST, Lead
from inferd.engine.ranks.watch import STILL_LOOKS, Stillness
from inferd.events import Retried
from inferd.registry.source import resolve
from inferd.types import GenerateRequest, SamplingParams
from inferd.worker.log_lines import record_line

PROMPTS = ["Once upon a time", "Once upon a time there was a", "The little dog", "1 + 1 ="]
NAMES = (("a", 8), ("b", 24))  # of adapters, and their ranks


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def answers(tensor: int, pipeline: int, adapters: dict[str, str], **settings: Any) -> list[list[int]]:
    """Tokens of requests for the base and two adapters, of which one is loaded later; two of them have a mask."""
    first, second = adapters
    config = ModelConfig(
        source="demo",
        threads=1,
        max_model_len=128,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        scheduler=SchedulerConfig(max_num_seqs=4),
        kv_cache=KVCacheConfig(num_blocks=12),  # four answers of four blocks do not fit: some are preempted
        adapters={first: adapters[first]},
        **settings,
    )
    engine = create_backend("tiny", config, lambda *_: None)
    try:
        found = run(engine, *requests("before", ("", first)))
        engine.set_adapters(adapters)
        found += run(engine, *requests("beside", ("", second)))
        engine.set_adapters({second: adapters[second]})
        gc.collect()
        found += run(engine, *requests("after", ("", second)))
    finally:
        engine.close()
    return [answer.tokens() for answer in found]


def requests(name: str, adapters: Iterable[str]) -> Iterator[GenerateRequest]:
    for index, (adapter, prompt) in enumerate(itertools.product(adapters, PROMPTS)):
        form = AnswerForm(constraint=Regex(pattern="[a-h ]{20}", at="regex")) if index % 4 == 3 else AnswerForm()
        request = make_request(f"{name} {index}", prompt, max_tokens=40)
        yield msgspec.structs.replace(request, adapter=adapter, form=form)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(root / name, resolve("demo"), seed=rank, rank=rank)) for name, rank in NAMES}


def test_processes_answer_as_one(adapters: dict[str, str]) -> None:
    """Batches, preemption, the prefix cache, guessed tokens, masks and adapters pass through the ranks."""
    expected = answers(1, 1, adapters, dtype="float32")
    assert answers(2, 1, adapters, dtype="float32") == expected
    assert expected[: len(PROMPTS)] != expected[len(PROMPTS) : 2 * len(PROMPTS)], "the adapter changes answers"


@pytest.mark.soak
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_every_layout_answers_as_one_process(
    layout: tuple[int, int], settings: dict[str, Any], adapters: dict[str, str]
) -> None:
    """Parts of a layer are rounded before they are added, except in float32: there the nearly equal logits of random
    adapters and of masks are ordered otherwise, and the base's own answers are compared."""
    found, expected = answers(*layout, adapters, **settings), answers(1, 1, adapters, **settings)
    if layout[0] == 1 or settings.get("dtype") == "float32":
        assert found == expected
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        is_of_base, has_mask = index // len(PROMPTS) % 2 == 0, index % 4 == 3
        assert one == other or not is_of_base or has_mask


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


@pytest.mark.parametrize(
    ("does", "meetings", "is_lost"),
    [
        ("time.sleep(600)", itertools.repeat(7), True),
        ("time.sleep(600)", itertools.count(), False),  # rank 0 goes from sum to sum
        ("time.sleep(600)", itertools.repeat(None), False),  # rank 0 waits for no rank
        ("[None for _ in iter(int, 1)]", itertools.repeat(7), False),  # a long step
    ],
)
def test_a_group_is_lost_when_no_rank_works_on_what_rank_0_waits_for(
    does: str, meetings: Iterator[int | None], is_lost: bool
) -> None:
    code = f"import time; print(flush=True); {does}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            stillness = Stillness([process.pid])
            if is_lost:
                until(lambda: stillness.is_lost(next(meetings)))
            else:
                for _ in range(2 * STILL_LOOKS):
                    time.sleep(0.02)
                    assert not stillness.is_lost(next(meetings))
        finally:
            process.kill()


GROUP = Path(__file__).with_name("group.py")


def ends_with_a_lost_rank(command: list[str], flag: Path) -> None:
    process = subprocess.Popen([*command, str(flag)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # the fault begins
        ranks = children(process.pid)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == EXIT_RANK_LOST, said
    assert "one hangs, or a connection is cut" in said
    until(lambda: not any(is_running(pid) for pid in ranks))


@pytest.mark.soak
def test_a_rank_that_hangs_ends_the_group(tmp_path: Path) -> None:
    ends_with_a_lost_rank([sys.executable, str(GROUP), "hang"], tmp_path / "flag")


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_a_cut_connection_ends_the_group(tmp_path: Path) -> None:
    apart = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    ends_with_a_lost_rank([*apart, sys.executable, str(GROUP), "cut"], tmp_path / "flag")


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stream_goes_on_after_a_lost_rank(lost: int, number: signal.Signals) -> None:
    """The answer goes on in a replica that was started anew, and no process of the lost group is left."""

    async def lose(rank_0: int) -> None:
        group = [rank_0, *(pid for pid in children(rank_0) if "ranks.rank" in command_of(pid))]
        assert len(group) == 2
        began = time.monotonic()
        os.kill(group[lost], number)
        while any(is_running(pid) for pid in group):
            assert time.monotonic() - began < 60, "a process of the group is left"
            await asyncio.sleep(0.01)
        print(f"rank {lost}, {number.name}: the group was gone after {time.monotonic() - began:.2f} s")

    model = ModelConfig(source="demo", threads=1, resume_streams=True, parallel=ParallelConfig(tensor=2))
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    whole, outputs, witness = asyncio.run(interrupted(model, sampling, lose))
    assert text_of(outputs) == text_of(whole), outputs[-1].end
    assert [event.kind for event in witness.events if isinstance(event, Retried)] == ["continuation"]
    assert witness.count("ready") == 2


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
