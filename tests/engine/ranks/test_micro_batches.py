"""A step that is cut into micro-batches for the stages of a pipeline gives the bits of one process, for any cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.ranks.test_shares import configured
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from inferd.engine.model.divided import DividedDecoder
from inferd.engine.model.load import load_model
from inferd.engine.model.pipe import micro_batches
from inferd.engine.model.share import Share
from inferd.engine.ranks.cut import READ_ROWS, cuts
from inferd.engine.ranks.rank import cache_of, load_share
from inferd.engine.runner import Runner
from inferd.native.attention import FlatBatch

CPU = torch.device("cpu")
BLOCKS_EACH, BLOCK = 3, 16  # of a sequence, and of its tokens


@dataclass(frozen=True)
class Part:
    """Rows of one sequence in a step: the tokens from ``start`` on."""

    sequence: int
    start: int
    count: int


def batch_of(parts: list[Part], wanted: list[int] | None = None, cut: list[int] | None = None) -> FlatBatch:
    places = [(part.sequence, at) for part in parts for at in range(part.start, part.start + part.count)]
    ends = [sum(part.count for part in parts[:index]) for index in range(len(parts) + 1)]
    tables = [[part.sequence * BLOCKS_EACH + block for block in range(BLOCKS_EACH)] for part in parts]
    return FlatBatch(
        token_ids=torch.tensor([3 + (sequence * 31 + at * 7) % 90 for sequence, at in places]),
        positions=torch.tensor([at for _, at in places]),
        query_start=torch.tensor(ends, dtype=torch.int32),
        seq_len=torch.tensor([part.start + part.count for part in parts], dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor([sequence * BLOCKS_EACH * BLOCK + at for sequence, at in places]),
        num_sequences=len(parts),
        output_rows=None if wanted is None else torch.tensor(wanted, dtype=torch.int64),
        cuts=cut or [],
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Part], list[Part], list[int] | None, list[int]]:
    """What was computed before, a step of any rows of some sequences, the rows that it needs, and any cut of it."""
    before, parts = [], []
    for sequence in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, 20))
        if start:
            before.append(Part(sequence, 0, start))
        parts.append(Part(sequence, start, draw(st.sampled_from([1, 1, 2, 5, 9, 27]))))
    rows = sum(part.count for part in parts)
    some = st.sets(st.integers(0, rows - 1)).map(sorted)
    wanted = draw(st.none() | some)
    cut = draw(st.sets(st.integers(1, rows - 1), max_size=6).map(sorted)) if rows > 1 else []
    return before, parts, wanted, cut


@given(steps())
def test_micro_batches_are_the_rows_of_a_step_in_order(
    step: tuple[list[Part], list[Part], list[int], list[int]],
) -> None:
    _, parts, wanted, cut = step
    whole = batch_of(parts, wanted, cut)
    found = micro_batches(whole)
    assert [len(each.token_ids) for each in found] == torch.diff(torch.tensor([0, *cut, len(whole.token_ids)])).tolist()
    for name in ("token_ids", "positions", "slots"):
        assert torch.equal(torch.cat([getattr(each, name) for each in found]), getattr(whole, name))
    first, needed = 0, []
    for each in found:
        starts = each.query_start.tolist()
        assert (starts[0], starts[-1], len(starts) - 1) == (0, len(each.token_ids), each.num_sequences)
        for index, table in enumerate(each.block_table.tolist()):
            mine = slice(starts[index], starts[index + 1])
            assert each.seq_len[index] == each.positions[mine][-1] + 1, "its last row sees itself and nothing behind"
            assert {int(slot) // BLOCK for slot in each.slots[mine]} <= set(table), "rows are of one sequence"
        needed += [] if each.output_rows is None else (each.output_rows + first).tolist()
        first += len(each.token_ids)
    assert wanted is None or needed == wanted


class Group:
    """The ranks of a pipeline as threads, beside one process with the whole model."""

    def __init__(self, folder: Path, stages: int, **options: Any) -> None:
        config = msgspec.structs.replace(configured(1, stages, **options), hang_timeout_s=60)
        whole = load_model(folder, dtype=config.dtype, device=CPU, quantization=config.quantization)
        assert isinstance(whole, DividedDecoder)
        self.alone = Runner(whole, cache_of(whole, config, 4 * BLOCKS_EACH), "auto", CPU)
        self._store = HashStore()
        self._pool = ThreadPoolExecutor(stages)

        def rank(number: int) -> Runner:
            decoder, peers = load_share(folder, config, Share(number, 1, stages), self._store, None)
            peers.join()
            return Runner(decoder, cache_of(decoder, config, 4 * BLOCKS_EACH), "auto", CPU)

        self.ranks = list(self._pool.map(rank, range(stages)))

    def compute(self, batch: FlatBatch) -> Tensor:
        def one(runner: Runner) -> Tensor:
            with torch.inference_mode():
                return runner.compute(batch)

        hidden, *_ = self._pool.map(one, self.ranks)  # when all ranks have ended the step
        return hidden

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, families: ModuleType) -> Iterator[Callable[..., Group]]:
    made: dict[str, Group] = {}

    def of(name: str, stages: int, **options: Any) -> Group:
        key = f"{name} {stages} {options}"
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            families.write_checkpoint(name, folder)
            made[key] = Group(folder, stages, **options)
        return made[key]

    yield of
    for each in made.values():
        each.close()


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [
        ("qwen3", 2, {}),
        ("gemma2", 3, {"dtype": "bfloat16"}),
        ("qwen3", 3, {"dtype": "bfloat16", "quantization": "int8"}),
    ],
)
def test_any_cut_of_any_step_gives_the_bits_of_one_process(
    name: str, stages: int, options: dict[str, Any], group: Callable[..., Group]
) -> None:
    ranks = group(name, stages, **options)
    assert all(runner.keeps_rows for runner in ranks.ranks)

    @settings(max_examples=40)
    @given(steps())
    def law(step: tuple[list[Part], list[Part], list[int] | None, list[int]]) -> None:
        before, parts, wanted, cut = step
        with torch.inference_mode():
            if before:
                ranks.alone.compute(batch_of(before))
                ranks.compute(batch_of(before))
            expected = ranks.alone.compute(batch_of(parts, wanted))
        found = ranks.compute(batch_of(parts, wanted, cut))
        assert torch.equal(found.isnan(), expected.isnan()), "rows that are not needed"
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())

    law()


def turns(rows: int, stages: int, count: int) -> float:
    """How long a step takes, in rows' arithmetic, where a turn of few rows takes ``READ_ROWS`` more."""
    return (count + stages - 1) * (READ_ROWS + rows / count)


@given(st.integers(1, 4096), st.integers(1, 8))
def test_steps_are_cut_where_it_pays(rows: int, stages: int) -> None:
    found = cuts(rows, stages)
    sizes = torch.diff(torch.tensor([0, *found, rows])).tolist()
    assert max(sizes) - min(sizes) <= 1
    best = min(turns(rows, stages, count) for count in range(1, max(rows // READ_ROWS, 1) + 1))
    assert turns(rows, stages, len(sizes)) <= min(1.02 * best, turns(rows, stages, 1))
    assert min(sizes) >= min(READ_ROWS, rows)
    if stages == 1:
        assert not found


def test_steps_are_not_cut_where_rows_may_lose_their_bits(tmp_path: Path, families: ModuleType) -> None:
    """GPT-2's activations are torch's."""
    families.write_checkpoint("gpt2", tmp_path)
    ranks = Group(tmp_path, 2)
    assert not any(runner.keeps_rows for runner in ranks.ranks)
    ranks.close()
