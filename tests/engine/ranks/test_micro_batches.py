"""A step that is cut into micro-batches for the stages of a pipeline gives the bits of one process, for any cut."""

from __future__ import annotations

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
from tests.adapters import ATTENTION, write_adapter
from tests.engine.ranks.test_shares import NAMES, Others, configured
from tests.tiers import examples
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from inferd.checkpoints.adapter import read_adapter
from inferd.engine.adapters import load_adapter
from inferd.engine.model.divided import DividedDecoder
from inferd.engine.model.load import Decoder, load_model
from inferd.engine.model.pipe import micro_batches
from inferd.engine.model.share import Share
from inferd.engine.ranks.cut import READ_ROWS, cuts
from inferd.engine.ranks.rank import cache_of, load_share
from inferd.engine.runner import Runner
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import AdapterRows, LoadedAdapter

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


class Ranks:
    """The ranks of a replica as threads; one rank is a process with the whole model. Some rows use an adapter."""

    def __init__(self, folder: Path, tensor: int, stages: int, adapter: Path | None, **options: Any) -> None:
        config = msgspec.structs.replace(configured(tensor, stages, **options), hang_timeout_s=60)
        count = tensor * stages
        self._store = HashStore()
        self._pool = ThreadPoolExecutor(count)
        self._adapters: dict[Runner, LoadedAdapter] = {}

        def rank(number: int) -> Runner:
            decoder: Decoder
            if count == 1:
                decoder = load_model(folder, dtype=config.dtype, device=CPU, quantization=config.quantization)
            else:
                decoder, peers = load_share(folder, config, Share(number, tensor, stages), self._store, None)
                peers.join()
            assert isinstance(decoder, DividedDecoder)
            runner = Runner(decoder, cache_of(decoder, config, 4 * BLOCKS_EACH), "auto", CPU)
            if adapter is not None:
                files, others = read_adapter(adapter, decoder.config), Others(decoder.share)
                self._adapters[runner] = load_adapter("a", files, decoder, CPU, b"a", others)  # type: ignore[arg-type]
            return runner

        self.ranks = list(self._pool.map(rank, range(count)))

    def compute(self, parts: list[Part], wanted: list[int] | None = None, cut: list[int] | None = None) -> Tensor:
        def one(runner: Runner) -> Tensor:
            batch = batch_of(parts, wanted, cut)
            if runner in self._adapters:
                of = torch.arange(len(batch.token_ids), dtype=torch.int32) % 2 - 1
                batch.adapters = AdapterRows([self._adapters[runner]], of)
            with torch.inference_mode():
                return runner.compute(batch)

        hidden, *_ = self._pool.map(one, self.ranks)  # when all ranks have ended the step
        return hidden

    def close(self) -> None:
        self._pool.shutdown()


INT8 = {"dtype": "bfloat16", "quantization": "int8"}


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("qwen3", (1, 2), {}),
        ("gemma2", (1, 3), {"dtype": "bfloat16"}),
        ("qwen3", (1, 3), INT8),
        ("qwen3-moe", (1, 3), {}),
        ("mixtral", (2, 2), {"is_adapted": True}),
        ("gpt-neo", (2, 2), {}),
        ("olmo2", (2, 2), INT8),
        *(
            pytest.param(name, layout, options, marks=pytest.mark.soak)
            for name in NAMES
            for layout, options in (((1, 2), {}), ((1, 3), {"dtype": "bfloat16"}), ((2, 2), INT8))
        ),
    ],
)
def test_any_cut_of_any_step_gives_the_bits_of_the_whole_step(
    name: str, layout: tuple[int, int], options: dict[str, Any], tmp_path: Path, families: ModuleType
) -> None:
    """Those of one process, where sums are not divided (docs/parallel.md); elsewhere of ranks that do not cut."""
    tensor, stages = layout
    is_adapted, options = "is_adapted" in options, {key: options[key] for key in options if key != "is_adapted"}
    families.write_checkpoint(name, tmp_path / "base")
    adapter = None
    if is_adapted:
        adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", targets=ATTENTION)
    has_own_bits = tensor > 1 and "quantization" not in options
    whole = Ranks(tmp_path / "base", *(layout if has_own_bits else (1, 1)), adapter, **options)
    ranks = Ranks(tmp_path / "base", tensor, stages, adapter, **options)
    assert all(runner.keeps_rows for runner in ranks.ranks)

    @settings(max_examples=examples(12))
    @given(steps())
    def law(step: tuple[list[Part], list[Part], list[int] | None, list[int]]) -> None:
        before, parts, wanted, cut = step
        if before:
            whole.compute(before)
            ranks.compute(before)
        expected, found = whole.compute(parts, wanted), ranks.compute(parts, wanted, cut)
        needed = slice(None) if wanted is None else wanted
        assert torch.equal(found[needed], expected[needed])

    try:
        law()
    finally:
        whole.close()
        ranks.close()


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
