"""A step as one call of the kernels computes what it computes layer by layer, to the bit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.model.llama import FeedForward, LlamaDecoder
from inferd.engine.model.load import Decoder, load_model
from inferd.engine.native_decoder import NativeDecoder, native_decoder
from inferd.native import compiled, ops
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import NativeAttention
from inferd.native.quantized import QuantizedWeight

# One of each switch: biases, windows, partial and missing rotation, norms of heads and of all heads, before and behind, soft caps,
# multipliers, merged checkpoints.
COVERED = [
    "llama2-mha",
    "llama-biases",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi4-partial",
    "smollm3-window",
    "olmo2",
    "granite",
]
LEFT_TO_PYTHON = ["qwen3-moe", "mixtral", "gpt2"]
pytestmark = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")

# Steps of a few sequences, each a list of how many tokens every sequence is given: chunks, single tokens, none.
STEPS = st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 7, 19]), min_size=3, max_size=3), min_size=1, max_size=4)
_BLOCK, _BLOCKS_EACH = 4, 20


def load(name: str, folder: Path, families: ModuleType, dtype: str = "float32") -> Decoder:
    if not (folder / "config.json").exists():
        families.write_checkpoint(name, folder)
    return load_model(folder, dtype=dtype, device=torch.device("cpu"))  # type: ignore[arg-type]


def batch_of(counts: list[int], starts: list[int], vocab: int) -> FlatBatch:
    """So many tokens of each sequence from where it is; its blocks are its own, in descending order."""
    active = [i for i, count in enumerate(counts) if count]
    rows = [(i, position) for i in active for position in range(starts[i], starts[i] + counts[i])]
    tables = [[(i + 1) * _BLOCKS_EACH - 1 - j for j in range(_BLOCKS_EACH)] for i in active]
    ends = torch.tensor([0, *(counts[i] for i in active)]).cumsum(0).to(torch.int32)
    return FlatBatch(
        token_ids=torch.tensor([(31 * i + 17 * position) % vocab for i, position in rows]),
        positions=torch.tensor([position for _, position in rows]),
        query_start=ends,
        seq_len=torch.tensor([starts[i] + counts[i] for i in active], dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor([tables[active.index(i)][p // _BLOCK] * _BLOCK + p % _BLOCK for i, p in rows]),
        num_sequences=len(active),
    )


def arena(decoder: Decoder, *, in_bytes: bool) -> KVCache:
    config = decoder.config
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=3 * _BLOCKS_EACH,
        block_size=_BLOCK,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=torch.device("cpu"),
        in_bytes=in_bytes,
    )
    for memory in contents(cache):
        memory.zero_()
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]


def check(decoder: Decoder, steps: list[list[int]], *, in_bytes: bool = False) -> None:
    """Both ways over arenas of their own: hidden states, keys and values."""
    caches = [arena(decoder, in_bytes=in_bytes) for _ in range(2)]
    one = native_decoder(decoder, caches[1], 8)
    assert one is not None
    starts = [0, 0, 0]
    with torch.inference_mode():
        for counts in steps:
            if not any(counts):
                continue
            batch = batch_of(counts, starts, decoder.config.vocab_size)
            plain = decoder.forward(batch, NativeAttention(caches[0], batch))
            assert torch.equal(one.forward(batch), plain)
            check_wanted(one, batch, plain)
            check_parts(one, batch, plain)
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
    for a, b in zip(*map(contents, caches), strict=True):
        assert torch.equal(a, b)


def check_wanted(one: NativeDecoder, batch: FlatBatch, plain: torch.Tensor) -> None:
    """Again, for the last row of each sequence but the first: the same bits there, and nothing that could be mistaken elsewhere."""
    batch.output_rows = batch.query_start[2:].long() - 1
    found = one.forward(batch)
    assert torch.equal(found[batch.output_rows], plain[batch.output_rows])
    others = torch.ones(len(found), dtype=torch.bool)
    others[batch.output_rows] = False
    assert found[others].isnan().all()


def check_parts(one: NativeDecoder, batch: FlatBatch, plain: torch.Tensor) -> None:
    """Again, as calls between which other steps are computed: the same bits."""
    layers = one.begin(batch)
    for _ in one.parts[1:]:
        assert layers.advance(lambda: True) is None
        one.forward(batch)
    found = layers.advance(lambda: True)
    assert found is not None
    assert torch.equal(found[batch.output_rows], plain[batch.output_rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COVERED)
def test_one_call_gives_the_bits_of_many(name: str, dtype: str, tmp_path: Path, families: ModuleType) -> None:
    decoder = load(name, tmp_path, families, dtype)

    @given(steps=STEPS, level=st.sampled_from(compiled.levels()), in_bytes=st.booleans())
    @settings(max_examples=8, deadline=None)
    def law(steps: list[list[int]], level: str, in_bytes: bool) -> None:
        with compiled.using_level(level):
            check(decoder, steps, in_bytes=in_bytes)

    law()


def quantised(
    linear: ops.Linear, bits: int, group_size: int, dtype: torch.dtype, *, ordered: bool = False
) -> ops.Linear:
    """Some integers of the same shape; which does not matter."""
    made = torch.Generator().manual_seed(linear.out_features)
    groups = -(-linear.in_features // group_size) if group_size else 1
    most = 2 ** (bits - 1)
    values = torch.randint(-most, most, (linear.out_features, linear.in_features), generator=made).to(torch.int8)
    scale = (torch.rand((linear.out_features, groups), generator=made) + 0.5) / (8 * most)
    order = torch.randperm(linear.in_features, generator=made) if ordered else None
    return ops.Linear.quantized(QuantizedWeight(values, scale, None, bits, group_size, order), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("bits", "group_size", "ordered"), [(8, 0, False), (8, 16, True), (4, 16, False), (4, 16, True)]
)
def test_one_call_takes_quantised_weights(
    bits: int, group_size: int, ordered: bool, dtype: str, tmp_path: Path, families: ModuleType
) -> None:
    decoder = load("qwen3", tmp_path, families, dtype)
    assert isinstance(decoder, LlamaDecoder)
    for layer in decoder.layers:
        parts = layer.feed_forward
        assert isinstance(parts, FeedForward)
        layer.qkv, layer.out, parts.gate_up, parts.down = (
            quantised(x, bits, group_size, decoder.dtype, ordered=ordered)
            for x in (layer.qkv, layer.out, parts.gate_up, parts.down)
        )
    for level in compiled.levels():
        with compiled.using_level(level):
            check(decoder, [[19, 1, 0], [1, 7, 2], [1, 1, 1]])


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_other_decoders_are_computed_from_python(name: str, tmp_path: Path, families: ModuleType) -> None:
    decoder = load(name, tmp_path, families)
    assert native_decoder(decoder, families.Driver(decoder).cache, 8) is None


def test_without_the_kernels_there_is_no_one_call(tmp_path: Path, families: ModuleType) -> None:
    decoder = load("qwen3", tmp_path, families)
    with compiled.using_level("none"):
        assert native_decoder(decoder, families.Driver(decoder).cache, 8) is None


def test_a_step_that_no_memory_was_left_for_harms_no_later_one(tmp_path: Path, families: ModuleType) -> None:
    decoder = load("qwen2", tmp_path / "qwen2", families)
    assert isinstance(decoder, LlamaDecoder)
    batch = batch_of([7, 2, 0], [0, 0, 0], decoder.config.vocab_size)
    found = []
    for is_refused in (False, True):
        made = native_decoder(
            decoder, arena(decoder, in_bytes=False), 1 << 16
        )  # so much that it is unmapped when freed
        assert made is not None
        if is_refused:
            with pytest.raises(MemoryError):
                made.plan.reserve(1 << 44)
        with torch.inference_mode():
            found.append(made.forward(batch))
    assert torch.equal(*found)
