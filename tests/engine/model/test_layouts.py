"""Laws of the layout over devices: it divides the model, it is the smallest that fits, and layers stay within links."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.families import write_checkpoint
from torch.distributed import HashStore  # type: ignore[attr-defined]

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.footprint import used_tensors
from inferd.config import ModelConfig, ParallelConfig
from inferd.engine.model.layouts import Layout, choose, layouts, place
from inferd.engine.model.share import Share, indivisible
from inferd.engine.ranks.rank import load_share
from inferd.planning import shape

BASE = shape.named("8b").dims


def dims(heads: int, keys: int, inner: int, layers: int, architecture: str = "LlamaForCausalLM") -> DecoderConfig:
    return replace(
        BASE, architecture=architecture, num_heads=heads * keys, num_kv_heads=keys, intermediate_size=inner,
        num_layers=layers,
    )  # fmt: skip


DIMS = st.builds(
    dims,
    heads=st.integers(1, 4),
    keys=st.integers(1, 6),
    inner=st.sampled_from([12, 48, 60, 64, 100]),
    layers=st.integers(1, 6),
    architecture=st.sampled_from(["LlamaForCausalLM", "Olmo2ForCausalLM", "GPT2LMHeadModel"]),
)


@given(of=DIMS, counts=st.integers(1, 12), linked=st.integers(1, 12))
def test_possible_layouts_divide_the_model_in_the_order_of_preference(
    of: DecoderConfig, counts: int, linked: int
) -> None:
    found = list(layouts(of, range(1, counts + 1), linked))
    assert found[0] == Layout(tensor=1, pipeline=1)
    assert [(one.devices, -one.tensor) for one in found] == sorted((one.devices, -one.tensor) for one in found)
    for tensor, pipeline in itertools.product(range(1, counts + 1), repeat=2):
        divides = tensor * pipeline == 1 or (
            pipeline <= of.num_layers
            and not any(size % tensor for size in (of.num_heads, of.intermediate_size, of.hidden_size))
            and (of.num_kv_heads % tensor == 0 or tensor % of.num_kv_heads == 0)
        )
        assert (indivisible(of, tensor, pipeline) is None) == divides
        is_small = tensor * pipeline <= counts and tensor <= linked
        assert (Layout(tensor=tensor, pipeline=pipeline) in found) == (divides and is_small)


def placements(needs: Sequence[int], tensor: int, rooms: Sequence[int], linked: int) -> bool:
    """Whether any choice of devices fits: every one is tried."""

    def fits(stage: int, free: frozenset[int]) -> bool:
        if stage == len(needs):
            return True
        return any(
            fits(stage + 1, free - set(taken))
            for taken in itertools.combinations(sorted(free), tensor)
            if len({device // linked for device in taken}) == 1 and min(rooms[one] for one in taken) >= needs[stage]
        )

    return fits(0, frozenset(range(len(rooms))))


ROOMS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@given(
    needs=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    tensor=st.integers(1, 3),
    rooms=ROOMS,
    linked=st.integers(1, 4),
)
def test_ranks_are_placed_where_any_choice_of_devices_fits(
    needs: list[int], tensor: int, rooms: list[int], linked: int
) -> None:
    found = place(needs, tensor, rooms, linked)
    assert (found is not None) == placements(needs, tensor, rooms, linked)
    if found is not None:
        assert len(set(found)) == len(found) == tensor * len(needs), "a device has one rank of a replica"
        for stage, need in enumerate(needs):
            its = found[stage * tensor : (stage + 1) * tensor]
            assert all(rooms[device] >= need for device in its)
            assert len({device // linked for device in its}) == 1, "the ranks of a layer are linked"


@given(of=DIMS, size=st.integers(1, 40), fixed=st.integers(0, 3), rooms=ROOMS, linked=st.integers(1, 4))
def test_the_chosen_layout_has_the_fewest_devices_and_divides_layers_most(
    of: DecoderConfig, size: int, fixed: int, rooms: list[int], linked: int
) -> None:
    """``size`` is divided among all ranks, and each of them needs ``fixed`` of its own."""

    def needs(layout: Layout) -> list[int]:
        return [fixed - -size // layout.devices] * layout.pipeline

    possible = list(layouts(of, range(1, len(rooms) + 1), linked))
    found = choose(possible, needs, rooms, linked)
    fitting = [one for one in possible if placements(needs(one), one.tensor, rooms, linked)]
    if found is None:
        assert not fitting
    else:
        assert found.layout == min(fitting, key=lambda one: (one.devices, -one.tensor))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-biases", {}),
        ("phi3", {"quantization": "int8"}),
        ("mixtral", {"quantization": "int4", "dtype": "bfloat16"}),
        ("gemma2", {}),
        ("olmo2", {}),
        ("gpt2", {"quantization": "int8"}),
        ("gpt-neo", {"quantization": "int4", "dtype": "bfloat16"}),
        ("gpt-neox", {}),
    ],
)
def test_a_ranks_weights_are_planned_to_the_byte(name: str, settings: dict[str, str], tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    of = read_config(Source(tmp_path / "config.json"))
    tensors = used_tensors(tmp_path, of)
    chosen = {"dtype": "float32", "quantization": "none", **settings}
    for tensor, pipeline in [(1, 2), (2, 1), (2, 2)]:
        config = ModelConfig(source="m", parallel=ParallelConfig(tensor=tensor, pipeline=pipeline), **chosen)  # type: ignore[arg-type]
        for rank in range(tensor * pipeline):
            share = Share(rank, tensor, pipeline)
            decoder, _ = load_share(tmp_path, config, share, HashStore(), None)
            itemsize = decoder.dtype.itemsize
            assert share.weight_bytes(tensors, {}, of, itemsize, chosen["quantization"]) == decoder.weights_bytes
