"""A replica of several processes: it answers as one process, and ends as one when a rank is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.adapters import write_adapter
from tests.engine.test_engine import make_request, run
from tests.tiers import THOROUGH, sample
from tests.worker.watching import children, interrupted, is_running, text_of

from inferd.answer_form import AnswerForm, Regex
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.load import create_backend
from inferd.engine.model.cuts import AdapterPiece
from inferd.engine.ranks.lead import Lead, _bytes
from inferd.engine.ranks.messages import build
from inferd.engine.ranks.watch import EXIT_RANK_LOST, STILL_LOOKS, Stillness
from inferd.errors import ModelLoadError
from inferd.events import Retried
from inferd.native.low_rank import LoadedAdapter
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


def test_a_plan_may_want_no_row() -> None:
    """As in a step that computes only the beginning of a prompt."""
    nothing = torch.from_numpy(np.array([], dtype=np.int64))
    assert (nothing.stride(), _bytes(nothing)) == ((0,), b"")
    assert _bytes(torch.from_numpy(np.array([1], dtype=np.int64))) == b"\1" + bytes(7)


def test_processes_answer_as_one(adapters: dict[str, str]) -> None:
    """Batches, preemption, the prefix cache, guessed tokens, masks and adapters pass through the ranks."""
    expected = answers(1, 1, adapters, dtype="float32")
    assert answers(2, 1, adapters, dtype="float32") == expected
    assert expected[: len(PROMPTS)] != expected[len(PROMPTS) : 2 * len(PROMPTS)], "the adapter changes answers"


@THOROUGH
def test_stages_answer_as_one_process_where_every_step_is_cut(
    adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with micro-batches of three rows. Rank 0 alone decides where a step is cut."""
    expected = answers(1, 1, adapters)
    found = cut_every_step(monkeypatch)
    assert answers(1, 2, adapters) == expected
    assert max(map(len, found)) > 10


def cut_every_step(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Into micro-batches of three rows. Returns where steps will have been cut."""
    found: list[list[int]] = []

    def cut(num_rows: int, stages: int) -> list[int]:
        cut_at = list(range(1, num_rows, 3))
        if stages > 1:
            found.append(cut_at)
        return cut_at

    monkeypatch.setattr("inferd.engine.ranks.lead.cuts", cut)
    return found


@pytest.mark.parametrize("name", sample(["gpt2", "olmo2", "mixtral"], "gpt2"))
def test_processes_of_decoders_without_one_call_answer_as_one(
    name: str, tmp_path: Path, families: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in stages, where every step is cut into micro-batches of three rows."""
    cuts = cut_every_step(monkeypatch)
    monkeypatch.setitem(families.BASE, "vocab_size", 2048)  # of the tokenizer
    families.write_checkpoint(name, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("demo") / file, tmp_path)
    found = []
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2)):
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        config = ModelConfig(source=str(tmp_path), threads=1, dtype="float32", max_model_len=96, parallel=parallel)
        engine = create_backend("tiny", config, lambda *_: None)
        try:
            assert engine.info.keeps_rows
            found.append([answer.tokens() for answer in run(engine, *requests("", [""]))])
        finally:
            engine.close()
    assert found[0] == found[1] == found[2]
    assert max(map(len, cuts)) > 3


@pytest.mark.soak
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_every_layout_answers_as_one_process(
    layout: tuple[int, int], settings: dict[str, Any], adapters: dict[str, str]
) -> None:
    """Stages and integers keep every bit. In bfloat16 sums in another order may round otherwise, so the nearly equal
    logits of random adapters and of masks may be ordered otherwise, and the base's own answers are compared."""
    found, expected = answers(*layout, adapters, **settings), answers(1, 1, adapters, **settings)
    if layout[0] == 1 or settings:
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


def test_a_group_whose_watch_fails_ends(
    lead: tuple[Lead, threading.Event], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> bool:
        raise OSError("no process can be read")

    monkeypatch.setattr(Stillness, "is_lost", fail)
    made, ended = lead
    made.watch()  # or the watch while it loads, whichever comes first
    until(ended.is_set)
    assert "the watch of its ranks failed; the replica ends" in caplog.text


def test_a_rank_that_is_stopped_while_it_loads_is_named(lead: tuple[Lead, threading.Event]) -> None:
    made, ended = lead
    os.kill(made.pids[0], signal.SIGSTOP)
    with pytest.raises(ModelLoadError, match=rf"Rank 1 .*process {made.pids[0]}\) was stopped by a signal") as failed:
        made.loaded(b"")
    assert failed.value.param == "parallel"
    assert not ended.is_set()


def test_a_rank_that_is_stopped_does_not_hold_up_an_adapter(lead: tuple[Lead, threading.Event]) -> None:
    """Its part is larger than what the connection holds."""
    made, _ = lead
    adapter = LoadedAdapter("a", b"", 1, {})
    piece = AdapterPiece(0, 0, 0, 1.0, torch.zeros(8, 1 << 20), torch.zeros(8, 8))
    os.kill(made.pids[0], signal.SIGSTOP)
    with pytest.raises(ModelLoadError, match=r"Rank 1 .* was stopped by a signal"):
        made.give(adapter, lambda share: [piece])


def refused_load(digest: bytes = b"") -> str:
    """What rank 0 is told where a rank cannot be part of its group."""
    made = Lead(ModelConfig(source="demo", threads=1, parallel=ParallelConfig(tensor=2)), resolve("demo"), 1)
    try:
        with pytest.raises(ModelLoadError) as refused:
            made.loaded(digest)
    finally:
        made.close()
    return refused.value.message


def test_a_rank_of_another_version_or_with_other_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inferd's files were replaced while the server ran."""
    monkeypatch.setattr("inferd.engine.ranks.lead.build", lambda: "inferd 0.0.9, kernels avx2 7.7")
    said = refused_load()
    assert f"rank 1: it would run {build()}, but rank 0 runs inferd 0.0.9, kernels avx2 7.7" in said
    assert said.endswith("Restart the server.")


def test_a_checkpoint_that_changes_under_a_rank_is_refused() -> None:
    """Rank 0 has read other files than rank 1 has."""
    assert refused_load(b"other files") == "The checkpoint's files changed while ranks read them; load it again."


def test_groups_meet_in_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other group and no other user can have taken the place where ranks find each other."""
    monkeypatch.setattr("inferd.engine.ranks.lead._COMMAND", (sys.executable, "-c", "pass"))
    config = ModelConfig(source="demo", threads=1, parallel=ParallelConfig(tensor=2))
    one, other = Lead(config, resolve("demo"), 1), Lead(config, resolve("demo"), 1)
    try:
        assert one.folder != other.folder
        assert [stat.S_IMODE(lead.folder.stat().st_mode) for lead in (one, other)] == [0o700, 0o700]
    finally:
        one.close()
        other.close()
    assert not one.folder.exists()


def test_a_rank_that_does_nothing_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.ranks.lead._COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    config = ModelConfig(source="demo", threads=1, parallel=ParallelConfig(tensor=2), hang_timeout_s=0.5)
    made = Lead(config, resolve("demo"), 1)
    try:
        with pytest.raises(ModelLoadError, match=r"Rank 1 .* has not worked for 0.5 s \(hang_timeout_s\)"):
            made.loaded(b"")
    finally:
        made.close()


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


def ends_with_a_lost_rank(
    command: list[str],
    flag: Path,
    way: str,
    said_why: str = "one hangs, or a connection is cut",
    code: int = EXIT_RANK_LOST,
) -> float:
    """Seconds from the fault to the end of rank 0. ``way``: see group.py."""
    process = subprocess.Popen([*command, str(flag), way], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # the fault begins
        ranks, began = children(process.pid), time.monotonic()
        _, said = process.communicate(timeout=120)
        seconds = time.monotonic() - began
    finally:
        process.kill()
    assert process.returncode == code, said
    assert said_why in said
    until(lambda: not any(is_running(pid) for pid in ranks))
    return seconds


@pytest.mark.soak
def test_a_rank_that_hangs_ends_the_group(tmp_path: Path) -> None:
    ends_with_a_lost_rank([sys.executable, str(GROUP), "hang"], tmp_path / "flag", "memory")


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_a_cut_connection_ends_the_group(tmp_path: Path) -> None:
    apart = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    ends_with_a_lost_rank([*apart, sys.executable, str(GROUP), "cut"], tmp_path / "flag", "memory")


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


UNDER_LOAD = Path(__file__).with_name("under_load.py")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        ("kill", 0),
        ("kill", 1),
        ("stop", 0),
        ("stop", 1),
        pytest.param(
            "cut",
            1,
            marks=pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
        ),
    ],
)
def test_no_request_is_lost_with_a_rank(fault: str, lost: int) -> None:
    """Four answers are computed and six requests wait when a rank is lost."""
    command = [sys.executable, str(UNDER_LOAD), fault, str(lost)]
    if fault == "cut":
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    print(f"{fault}, rank {lost}: gone after {found['gone_s']:.2f} s, back after {found['back_s']:.2f} s")
    assert found["equal"], found
    assert (found["outcomes"], found["left"]) == (["done"], [])
    assert found["retried"] > 0, "the fault met no request"


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
