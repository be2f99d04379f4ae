"""Sums and parts through memory that ranks share, against the plain sums of all ranks' parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferd.engine.model.share import Share
from inferd.engine.ranks.peers import SharedStage, shared_memory
from inferd.engine.ranks.watch import Stopped
from inferd.native import compiled
from inferd.native.compiled import CODES, kernels

pytestmark = pytest.mark.skipif(
    not compiled.BUILT or not hasattr(os, "memfd_create"), reason="ranks share no memory here"
)
LEVELS = compiled.levels() or ["none"]
SLOT = 1 << 20  # bytes of a part that are exchanged at once
TIMEOUT_S = 60.0

R = TypeVar("R")


@contextmanager
def memory_of(ranks: int) -> Iterator[int]:
    memory = shared_memory(Share(0, ranks, 1))
    assert memory is not None
    try:
        yield memory
    finally:
        os.close(memory)


def together(ranks: int, does: Callable[[int], R]) -> list[R]:
    """What each rank finds; they run at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(does, range(ranks)))


def plain_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def noise(ranks: int, size: int, seed: int) -> list[Tensor]:
    """Parts whose sum depends on the order."""
    torch.manual_seed(seed)
    return [torch.randn(size) * 10 ** (rank % 3) for rank in range(ranks)]


sizes = st.one_of(st.integers(0, 70), st.sampled_from([SLOT // 4, SLOT // 4 + 1]))


@given(
    ranks=st.integers(2, 5),
    counts=st.lists(sizes, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    spins=st.booleans(),
)
@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("level", LEVELS)
def test_sums_and_parts_are_those_of_all_ranks(
    level: str, ranks: int, counts: list[int], seed: int, spins: bool
) -> None:
    """One exchange after the other, of any sizes, with ranks that look for each other and ranks that sleep."""
    rounds = [noise(ranks, size, seed + index) for index, size in enumerate(counts)]

    def rank(place: int) -> list[tuple[Tensor, Tensor, list[Tensor], list[Tensor]]]:
        stage = SharedStage(Share(place, ranks, 1), memory, TIMEOUT_S)
        if not spins:
            stage.meeting = kernels.Meeting(
                file=memory, offset=0, ranks=ranks, place=place, spin_s=0, timeout_s=TIMEOUT_S
            )
        found = []
        for parts in rounds:
            mine = parts[place]
            narrow = torch.empty(len(mine), dtype=torch.bfloat16)
            stage.meeting.sum(mine.data_ptr(), len(mine), CODES[torch.bfloat16], narrow.data_ptr(), 1)
            found.append((stage.sum(mine), narrow, stage.gather(mine), stage.collect(mine)))
        return found

    with compiled.using_level(level), memory_of(ranks) as memory:
        for place, results in enumerate(together(ranks, rank)):
            for parts, (total, narrow, gathered, collected) in zip(rounds, results, strict=True):
                expected = plain_sum(parts)
                assert torch.equal(total, expected)
                assert torch.equal(narrow, expected.bfloat16())
                assert torch.equal(torch.stack(gathered), torch.stack(parts))
                assert torch.equal(torch.stack(collected), torch.stack(parts if place == 0 else [parts[place]]))


@given(
    ranks=st.integers(2, 4),
    shapes=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 9), st.integers(1, 70)), st.sampled_from([(2, SLOT - 1), (5, SLOT // 2 + 3)])
        ),
        min_size=1,
        max_size=3,
    ),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
)
@settings(max_examples=12, deadline=None)
def test_parts_are_put_side_by_side(ranks: int, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Also those that are exchanged in pieces, which end within a row."""
    torch.manual_seed(0)
    rounds = [
        [(torch.rand(rows, row_bytes // dtype.itemsize + 1) * 200).to(dtype) for _ in range(ranks)]
        for rows, row_bytes in shapes
    ]

    def rank(place: int) -> list[Tensor]:
        stage = SharedStage(Share(place, ranks, 1), memory, TIMEOUT_S)
        return [stage.concat(parts[place]) for parts in rounds]

    with memory_of(ranks) as memory:
        for found in together(ranks, rank):
            assert all(torch.equal(one, torch.cat(parts, 1)) for one, parts in zip(found, rounds, strict=True))


def test_the_number_of_the_exchange_is_told_while_a_rank_waits() -> None:
    with memory_of(2) as memory, ThreadPoolExecutor(1) as pool:
        one, other = (SharedStage(Share(place, 2, 1), memory, TIMEOUT_S) for place in range(2))
        seen: list[int | None] = []
        for _ in range(2):
            assert one.waits_in is None
            waiting = pool.submit(one.sum, torch.ones(3))
            until(lambda: one.waits_in is not None)
            seen.append(one.waits_in)
            other.sum(torch.ones(3))
            assert torch.equal(waiting.result(), torch.full((3,), 2.0))
        assert all(before != after for before, after in pairwise(seen))


def test_a_rank_that_does_not_come_is_named() -> None:
    with memory_of(2) as memory:
        stage = SharedStage(Share(1, 2, 1), memory, 0.05)
        with pytest.raises(RuntimeError, match=r"rank 0 of the stage did not bring its part .* within 50 ms"):
            stage.sum(torch.ones(3))


def test_ranks_that_do_not_agree_on_a_size_do_not_add() -> None:
    with memory_of(2) as memory:
        stages = [SharedStage(Share(place, 2, 1), memory, TIMEOUT_S) for place in range(2)]

        def rank(place: int) -> str:
            with pytest.raises(RuntimeError) as refused:
                stages[place].sum(torch.ones(3 + place))
            return str(refused.value)

        assert all("bytes into exchange 1" in said for said in together(2, rank))


@pytest.mark.parametrize(("ranks", "place"), [(2, 2), (2, -1)])
def test_a_place_outside_the_stage_is_refused(ranks: int, place: int) -> None:
    with memory_of(ranks) as memory, pytest.raises(ValueError, match="a place is one of"):
        kernels.Meeting(file=memory, offset=0, ranks=ranks, place=place, spin_s=0, timeout_s=1)


def test_memory_that_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="could not be mapped"):
        kernels.Meeting(file=-1, offset=0, ranks=2, place=0, spin_s=0, timeout_s=1)


def test_the_shared_memory_keeps_its_size() -> None:
    """A rank cannot take memory away that another one reads, which would end that one with SIGBUS."""
    with memory_of(2) as memory:
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(memory, size)


@pytest.mark.parametrize("lacks", ["permission", "kernels", "system"])
def test_sums_go_over_gloo_where_memory_cannot_be_shared(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError("vm.memfd_noexec is 2")

    if lacks == "permission":
        monkeypatch.setattr(os, "memfd_create", refuse)
    elif lacks == "system":
        monkeypatch.delattr(os, "memfd_create")
    with compiled.using_level("none" if lacks == "kernels" else compiled.level()):
        assert shared_memory(Share(0, 2, 1)) is None


def test_stages_share_no_memory_where_nothing_is_divided_within_a_layer() -> None:
    assert shared_memory(Share(0, 1, 3)) is None


ADDS = """
import sys, torch
from inferd.engine.model.share import Share
from inferd.engine.ranks.peers import SharedStage
torch.set_num_threads(1)
stage = SharedStage(Share(int(sys.argv[1]), 2, 1), int(sys.argv[2]), 5.0)
stage.join()
print("adds", flush=True)
while True:
    assert torch.equal(stage.sum(torch.ones(4096)), torch.full((4096,), 2.0))
"""


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_within_sums_is_noticed(number: signal.Signals) -> None:
    """The other process waits asleep, and says which rank it waited for when its time is over."""
    with memory_of(2) as memory:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", ADDS, str(place), str(memory)],
                pass_fds=[memory],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place in range(2)
        ]
        try:
            for process in ranks:
                assert process.stdout is not None
                assert process.stdout.readline() == "adds\n", process.communicate()[1]
            os.kill(ranks[1].pid, number)
            if number is signal.SIGSTOP:
                stopped = Stopped(ranks[1].pid)
                until(stopped.is_lost)
            _, said = ranks[0].communicate(timeout=60)
            assert "rank 1 of the stage did not bring its part" in said
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


@pytest.mark.soak
def test_threads_that_meet_have_no_data_race(tmp_path: Path) -> None:
    """By ThreadSanitizer, with the ranks as threads of one process. A weaker order of the counter is a race that it
    finds."""
    kernels_folder = Path(__file__).parents[3] / "kernels"
    weaker = tmp_path / "weaker"
    weaker.mkdir()
    text = (kernels_folder / "meeting.h").read_text()
    strong = "mine.number.store(number, std::memory_order_seq_cst)"
    assert strong in text
    (weaker / "meeting.h").write_text(text.replace(strong, "mine.number.store(number, std::memory_order_relaxed)"))

    def said(*folders: Path) -> tuple[int, str]:
        program = tmp_path / "meetings"
        source = Path(__file__).with_name("meetings.cpp")
        options = ["-std=c++17", "-O1", "-fsanitize=thread", "-pthread", *(f"-I{folder}" for folder in folders)]
        subprocess.run(["g++", *options, str(source), "-o", str(program)], check=True, capture_output=True)
        ran = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=120)
        return ran.returncode, ran.stdout + ran.stderr

    try:
        status, found = said(kernels_folder)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs GCC with ThreadSanitizer")
    if "unexpected memory mapping" in found:
        pytest.skip("ThreadSanitizer does not know this system's addresses")
    assert (status, found.split()) == (0, [str(6 * sum(1 + index % 97 for index in range(200)))] * 3)
    assert "data race" in said(weaker, kernels_folder)[1]
