"""What ranks on CUDA devices exchange, over gloo: the same class with another library, on processors."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.engine.ranks import group
from tests.engine.ranks.test_groups import GROUP, adapters, answers, ends_with_a_lost_rank
from tests.engine.ranks.test_shares import alone, configured, divided
from tests.tiers import THOROUGH
from torch._C._distributed_c10d import HashStore, Store

from inferd.engine.model.share import Share
from inferd.engine.ranks import collectives, lead
from inferd.engine.ranks.collectives import CollectivePeers
from inferd.engine.ranks.peers import added

__all__ = ["adapters"]  # a fixture


def joined(share: Share, store: Store) -> CollectivePeers:
    peers = group.over_gloo(share, store, None, 60)
    peers.join()
    return peers


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("olmo2", {}),
        pytest.param("qwen3", {}, marks=THOROUGH),
        pytest.param("gemma2", {"dtype": "bfloat16"}, marks=THOROUGH),
        ("mixtral", {"quantization": "int8"}),
    ],
)
def test_ranks_compute_the_bits_of_ranks_on_processors(
    name: str, settings: dict[str, object], tmp_path: Path, families: ModuleType
) -> None:
    """In every layout; stages and integers keep those of one process too."""
    families.write_checkpoint(name, tmp_path)
    ids, logits = alone(tmp_path, configured(1, 1, **settings))
    for tensor, pipeline in ((2, 1), (1, 3), (2, 2)):
        config = configured(tensor, pipeline, **settings)
        found_ids, found, _ = divided(tmp_path, config, shares_memory=False, over=joined)
        twin_ids, twin, _ = divided(tmp_path, config, shares_memory=False)
        assert found_ids == twin_ids
        assert torch.equal(found, twin)
        if tensor == 1 or "quantization" in settings:
            assert found_ids == ids
            assert torch.equal(found, logits)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_large_sum_has_the_bits_of_a_small_one(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are added in the order of the ranks, whichever rank adds them."""
    monkeypatch.setattr(collectives, "WHOLE_BYTES", 200)
    store = HashStore()
    partials = [torch.randn(ranks, 7, 9, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]

    def sums(rank: int) -> list[torch.Tensor]:
        peers = joined(Share(rank, ranks), store)
        return [peers.sum(partials[rank][0, :5]), peers.sum(partials[rank])]

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(sums, range(ranks)))
    small, large = (added([partial[cut] for partial in partials]) for cut in ((0, slice(5)), slice(None)))
    assert small.nbytes <= collectives.WHOLE_BYTES < large.nbytes
    for one, other in found:
        assert torch.equal(one, small)
        assert torch.equal(other, large)


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        pytest.param((2, 1), "devices", marks=pytest.mark.soak),
        pytest.param((1, 2), "devices", marks=THOROUGH),
        pytest.param((2, 2), "devices", marks=pytest.mark.soak),
        pytest.param((2, 1), "gloo", marks=pytest.mark.soak),
    ],
)
def test_processes_answer_as_one(
    layout: tuple[int, int], way: str, adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, preemption, the prefix cache, guessed tokens, masks and adapters pass through the ranks, also on devices
    that are the CPU."""
    expected = answers(1, 1, adapters, dtype="float32")
    for module, name, value in group.replaced(way):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(lead, "_COMMAND", (sys.executable, "-P", str(GROUP), "rank", str(tmp_path / "never"), way))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    assert answers(*layout, adapters, dtype="float32") == expected


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "why"), [("kill", "the replica ends with all its ranks"), ("hang", "no rank works on the step")]
)
def test_a_lost_rank_ends_the_group(fault: str, why: str, tmp_path: Path) -> None:
    seconds = ends_with_a_lost_rank([sys.executable, str(GROUP), fault], tmp_path / "flag", "gloo", why)
    print(f"{fault}: the group was gone after {seconds:.2f} s")
