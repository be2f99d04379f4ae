"""Adapters on decoders of several families: the logits of transformers with the adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.adapters import ATTENTION, EVERY, merged, write_adapter
from tests.engine.model.test_one_call import arena, batch_of, contents

from inferd.checkpoints.adapter import read_adapter
from inferd.engine.adapters import load_adapter
from inferd.engine.model.load import load_model
from inferd.engine.native_decoder import native_decoder
from inferd.errors import ModelLoadError
from inferd.native import compiled
from inferd.native.low_rank import AdapterRows
from inferd.native.paged_attention import NativeAttention

CPU = torch.device("cpu")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets"),
    [("qwen3", EVERY), ("gemma3", EVERY), ("phi4-partial", FUSED), ("mixtral", ATTENTION)],
)
def test_an_adapter_gives_the_logits_of_transformers_with_it_merged(
    name: str, targets: tuple[str, ...], tmp_path: Path, families: ModuleType
) -> None:
    import transformers

    families.write_checkpoint(name, tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", rank=8, targets=targets, use_rslora=True)
    oracle = getattr(transformers, families.FAMILIES[name][1]).from_pretrained(
        merged(tmp_path / "base", folder, tmp_path / "merged"), dtype=torch.float32
    )
    decoder = load_model(tmp_path / "base", dtype="float32", device=CPU)
    adapter = load_adapter("a", read_adapter(folder, decoder.config), decoder, CPU, b"a")
    text = [(31 * i + 5) % 90 + 3 for i in range(23)]
    driver = families.Driver(decoder)
    table = driver.table(len(text))

    def forward(batch, attention):  # type: ignore[no-untyped-def]
        batch.adapters = AdapterRows([adapter], torch.zeros(len(batch.token_ids), dtype=torch.int32))
        return plain_forward(batch, attention)

    base = driver.logits([(text, 0, table)])[0]
    plain_forward = decoder.forward
    decoder.forward = forward  # type: ignore[assignment, method-assign]
    found = driver.logits([(text, 0, table)])[0]
    expected = families.expected(oracle, text)
    assert (found - expected).abs().max() < 2e-3 < 0.05 < (base - expected).abs().max()


@pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_the_bits_of_many_with_adapters(dtype: str, tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("qwen3", tmp_path / "base")
    decoder = load_model(tmp_path / "base", dtype=dtype, device=CPU)  # type: ignore[arg-type]
    adapters = [
        load_adapter(str(seed), read_adapter(folder, decoder.config), decoder, CPU, b"%d" % seed)
        for seed, rank in enumerate((8, 24))
        for folder in [write_adapter(tmp_path / str(seed), tmp_path / "base", seed=seed, rank=rank)]
    ]
    caches = [arena(decoder, in_bytes=False) for _ in range(2)]
    one = native_decoder(decoder, caches[1], 8)
    assert one is not None
    starts = [0, 0, 0]
    for level in compiled.levels():
        for counts in ([5, 1, 7], [1, 1, 1]):
            batch = batch_of(counts, starts, decoder.config.vocab_size)
            of = [i - 1 for i, count in enumerate(counts) for _ in range(count)]  # the first is the base's
            batch.adapters = AdapterRows(adapters, torch.tensor(of, dtype=torch.int32))
            with torch.inference_mode(), compiled.using_level(level):
                plain = decoder.forward(batch, NativeAttention(caches[0], batch))
                assert torch.equal(one.forward(batch), plain)
                batch.output_rows = batch.query_start[2:].long() - 1
                assert torch.equal(one.forward(batch)[batch.output_rows], plain[batch.output_rows])
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
    for a, b in zip(*map(contents, caches), strict=True):
        assert torch.equal(a, b)


def test_a_family_whose_layers_cannot_be_adapted_is_refused_by_name(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("gpt2", tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", targets=("c_attn",))
    decoder = load_model(tmp_path / "base", dtype="float32", device=CPU)
    with pytest.raises(ModelLoadError, match="not served for GPT2LMHeadModel"):
        read_adapter(folder, decoder.config)
