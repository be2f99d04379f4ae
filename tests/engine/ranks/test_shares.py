"""A model divided among ranks computes what one process computes. The ranks are threads, which share memory or talk over
gloo."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from tests.adapters import ATTENTION, EVERY, write_adapter
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from inferd.checkpoints.adapter import read_adapter
from inferd.checkpoints.architecture import GPT
from inferd.checkpoints.decoder_config import FAMILIES
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig
from inferd.engine.adapters import load_adapter
from inferd.engine.model.cuts import Peers
from inferd.engine.model.divided import DividedDecoder
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.model.load import load_model
from inferd.engine.model.share import ALONE, Share, check_layout
from inferd.engine.native_decoder import native_decoder
from inferd.engine.ranks.peers import shared_memory
from inferd.engine.ranks.rank import cache_of, load_part, load_share
from inferd.engine.runner import Runner
from inferd.errors import ModelLoadError
from inferd.native import forms
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import AdapterRows, LoadedAdapter

PROMPT = [3 + 7 * i % 90 for i in range(37)]
ANSWER = 8  # tokens that are decoded one by one
NAMES = (
    *("llama-biases", "llama2-mha", "llama3-tied", "mistral-window", "qwen2", "qwen2-window", "qwen3", "qwen3-moe"),
    *("gemma2", "gemma3", "phi3", "phi4-partial", "smollm3", "granite", "mixtral", "olmo2"),
    *("gpt2", "gpt2-unscaled", "gpt-neo", "gpt-neox", "pythia-sequential"),
)
"""One or more of every native family."""
LAYOUTS = ((2, 1), (1, 3), (2, 2))
CPU = torch.device("cpu")


def batch_of(tokens: list[int], start: int) -> FlatBatch:
    """The rows from ``start`` on of one sequence, whose blocks are 0, 1, ..."""
    positions = list(range(start, len(tokens)))
    return FlatBatch(
        token_ids=torch.tensor(tokens[start:]),
        positions=torch.tensor(positions),
        query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
        seq_len=torch.tensor([len(tokens)], dtype=torch.int32),
        block_table=torch.arange(-(-len(tokens) // 16), dtype=torch.int32).unsqueeze(0),
        slots=torch.tensor(positions),
        num_sequences=1,
    )


class Meeting:
    """Where ranks learn the tokens of rank 0."""

    def __init__(self, count: int) -> None:
        self.tokens: list[int] = []
        self.barrier = threading.Barrier(count)


def answer_of(
    decoder: DividedDecoder,
    config: ModelConfig,
    peers: Peers | None = None,
    meet: Meeting | None = None,
    *,
    by_layers: bool = False,
    adapter: Path | None = None,
) -> tuple[list[int], Tensor]:
    """Greedy tokens after the prompt, and the logits of all rows. Every rank calls it; those of rank 0 count.

    ``by_layers``: computed layer by layer from Python, even where the kernels compute a step in one call.
    """
    cache = cache_of(decoder, config, 8)
    runner = Runner(decoder, cache, "auto", CPU)
    if by_layers:
        runner._native = None
    rows: list[LoadedAdapter] = []
    if adapter is not None:
        files = read_adapter(adapter, decoder.config)
        rows = [load_adapter("a", files, decoder, CPU, b"a", Others(decoder.share))]  # type: ignore[arg-type]
    tokens, found, start = list(PROMPT), [], 0
    share = decoder.share
    with torch.inference_mode():
        for _ in range(ANSWER):
            batch = batch_of(tokens, start)
            if rows:
                batch.adapters = AdapterRows(rows, torch.arange(len(batch.token_ids), dtype=torch.int32) % 2 - 1)
            hidden = runner.compute(batch)
            start = len(tokens)
            logits = torch.zeros(1, decoder.config.vocab_size)
            if share.is_first:  # rank 0 has the hidden states of the last stage, and sends them to its own
                if share.pipeline > 1 and share.tensor > 1:
                    assert peers is not None
                    own = hidden if share.rank == 0 else torch.zeros(len(batch.token_ids), decoder.config.hidden_size)
                    hidden = peers.gather(own.to(decoder.dtype))[0]
                logits = decoder.logits(hidden)
                found.append(logits)
            if meet is not None:  # the token reaches every rank
                if share.rank == 0:
                    tokens.append(int(logits[-1].argmax()))
                    meet.tokens.append(tokens[-1])
                meet.barrier.wait(30)
                if share.rank:
                    tokens.append(meet.tokens[-1])
                meet.barrier.wait(30)
            else:
                tokens.append(int(logits[-1].argmax()))
    return tokens[len(PROMPT) :], torch.cat(found) if found else torch.empty(0)


class Others:
    """The ranks beside one of a test, which load an adapter themselves."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def give(self, adapter: LoadedAdapter, pieces: object) -> None:
        pass


def alone(folder: Path, config: ModelConfig, adapter: Path | None = None) -> tuple[list[int], Tensor]:
    decoder = load_model(folder, dtype=config.dtype, device=CPU, quantization=config.quantization)
    assert isinstance(decoder, DividedDecoder)
    return answer_of(decoder, config, adapter=adapter)


def divided(
    folder: Path,
    config: ModelConfig,
    *,
    by_layers: bool = False,
    adapter: Path | None = None,
    shares_memory: bool = True,
    over: Callable[[Share, Store], Peers] | None = None,
) -> tuple[list[int], Tensor, list[DividedDecoder]]:
    """What rank 0 finds, and the decoders of all ranks. ``over``: makes other peers than those of ``load_share``."""
    parallel, store, meet = config.parallel, HashStore(), Meeting(config.parallel.count)
    memory = shared_memory(Share(0, parallel.tensor, parallel.pipeline)) if shares_memory else None

    def rank(number: int) -> tuple[tuple[list[int], Tensor], DividedDecoder]:
        share = Share(number, parallel.tensor, parallel.pipeline)
        peers: Peers
        if over is None:
            decoder, found = load_share(folder, config, share, store, memory)
            assert (found.meeting is None) == (memory is None)
            found.join()
            peers = found
        else:
            peers = over(share, store)
            decoder = load_part(folder, config, share, peers)
        return answer_of(decoder, config, peers, meet, by_layers=by_layers, adapter=adapter), decoder

    try:
        with ThreadPoolExecutor(parallel.count) as pool:
            results = list(pool.map(rank, range(parallel.count)))
    finally:
        if memory is not None:
            os.close(memory)
    return *results[0][0], [decoder for _, decoder in results]


def configured(tensor: int, pipeline: int, **settings: object) -> ModelConfig:
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    return ModelConfig(source="m", parallel=parallel, hang_timeout_s=60, **{"dtype": "float32", **settings})  # type: ignore[arg-type]


def check_family(name: str, folder: Path, families: ModuleType) -> None:
    families.write_checkpoint(name, folder)
    ids, logits = alone(folder, configured(1, 1))
    for tensor, pipeline in LAYOUTS:
        found_ids, found, _ = divided(folder, configured(tensor, pipeline))
        assert found_ids == ids, (tensor, pipeline)
        if tensor == 1:
            assert torch.equal(found, logits), "stages change no bit"
        else:
            assert float((found - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_divided_families_answer_as_one_process(name: str, tmp_path: Path, families: ModuleType) -> None:
    check_family(name, tmp_path, families)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama-biases", {}), ("gemma2", {"dtype": "bfloat16"}), ("qwen2", {"quantization": "int8"})],
)
def test_ranks_compute_in_one_call_what_they_compute_layer_by_layer(
    name: str, settings: dict[str, object], tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint(name, tmp_path)
    for tensor, pipeline in LAYOUTS:
        config = configured(tensor, pipeline, **settings)
        ids, logits, decoders = divided(tmp_path, config)
        for decoder in decoders:
            assert native_decoder(decoder, cache_of(decoder, config, 1), 1) is not None
        found_ids, found, _ = divided(tmp_path, config, by_layers=True)
        assert found_ids == ids
        assert torch.equal(found, logits)


def test_ranks_that_share_memory_compute_what_ranks_over_gloo_compute(tmp_path: Path, families: ModuleType) -> None:
    """To the bit, in one call of the kernels and layer by layer."""
    families.write_checkpoint("gemma2", tmp_path)
    formats = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]
    for (dtype, quantization), by_layers in itertools.product(formats, (False, True)):
        config = configured(2, 2, dtype=dtype, quantization=quantization)
        ids, logits, _ = divided(tmp_path, config, by_layers=by_layers)
        found_ids, found, _ = divided(tmp_path, config, by_layers=by_layers, shares_memory=False)
        assert found_ids == ids
        assert torch.equal(found, logits)


FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets", "settings"),
    [
        ("qwen3", EVERY, {}),
        ("phi3", FUSED, {}),
        ("mixtral", ATTENTION, {}),
        ("qwen3", EVERY, {"dtype": "bfloat16"}),
        ("qwen3", EVERY, {"quantization": "int8"}),
        ("phi3", FUSED, {"dtype": "bfloat16", "quantization": "int8"}),
    ],
)
def test_adapters_are_divided_as_the_products_that_they_change(
    name: str, targets: tuple[str, ...], settings: dict[str, object], tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint(name, tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", targets=targets)
    ids, logits = alone(tmp_path / "base", configured(1, 1, **settings), adapter)
    _, base = alone(tmp_path / "base", configured(1, 1, **settings))
    prompt, most = len(PROMPT), float(logits.abs().max())
    assert float((base[:prompt] - logits[:prompt]).abs().max()) > 0.02 * most
    for tensor, pipeline in LAYOUTS:
        found_ids, found, _ = divided(tmp_path / "base", configured(tensor, pipeline, **settings), adapter=adapter)
        if tensor == 1 or "quantization" in settings:
            assert torch.equal(found, logits)
        elif "dtype" not in settings:
            assert found_ids == ids
            assert float((found - logits).abs().max()) <= 1e-5 * most
        else:
            assert float((found[:prompt] - logits[:prompt]).abs().max()) <= 0.02 * most


def check_integers(name: str, folder: Path, families: ModuleType, **settings: object) -> None:
    """Every layout computes the bits of one process."""
    families.write_checkpoint(name, folder)
    ids, logits = alone(folder, configured(1, 1, **settings))
    for tensor, pipeline in LAYOUTS:
        found_ids, found, decoders = divided(folder, configured(tensor, pipeline, **settings))
        assert all("int" in decoder.quantization for decoder in decoders)
        assert found_ids == ids, (tensor, pipeline)
        assert torch.equal(found, logits), (tensor, pipeline)


# Those of all other families are thorough.
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "olmo2", "gpt2"])
def test_integers_have_the_bits_of_one_process(name: str, tmp_path: Path, families: ModuleType) -> None:
    check_integers(name, tmp_path, families, quantization="int8")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_integers_of_every_family_have_the_bits_of_one_process(
    name: str, quantization: str, dtype: str, tmp_path: Path, families: ModuleType
) -> None:
    check_integers(name, tmp_path, families, quantization=quantization, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "quantization", "dtype"),
    [("llama-biases", "int8", "float32"), ("phi3", "int8", "bfloat16"), ("mixtral", "int4", "bfloat16")],
)
def test_forms_of_wide_models_have_the_bits_of_one_process(
    name: str, quantization: str, dtype: str, tmp_path: Path, families: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bits with one scale for an output, and activations with a zero point; 4 bits in groups with zero points."""
    monkeypatch.setattr(forms, "NARROW", 0)
    check_integers(name, tmp_path, families, quantization=quantization, dtype=dtype)


# Of GPT-Neo's 80 inner columns a rank has 40, which fill no whole number of vectors.
@pytest.mark.parametrize(("name", "dtype"), [("mixtral", "bfloat16"), ("gemma2", "bfloat16"), ("gpt-neo", "float32")])
def test_numbers_differ_by_the_order_of_their_sums_alone(
    name: str, dtype: str, tmp_path: Path, families: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided as integers are, they have the bits of one process too: also where a router chooses experts."""
    monkeypatch.setattr(Share, "dividing", lambda self, *_: replace(self, by_outputs=self.tensor > 1))
    families.write_checkpoint(name, tmp_path)
    ids, logits = alone(tmp_path, configured(1, 1, dtype=dtype))
    found_ids, found, _ = divided(tmp_path, configured(2, 2, dtype=dtype))
    assert found_ids == ids
    assert torch.equal(found, logits)


def test_every_native_family_is_divided_here(families: ModuleType) -> None:
    tested = {families.FAMILIES[name][1] for name in NAMES}
    assert tested | {"Gemma3ForConditionalGeneration"} == {*FAMILIES, *GPT}, (
        "Gemma 3 with its vision, which is not read"
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", "float32"), ("none", "bfloat16"), ("int8", "float32"), ("int8", "bfloat16"), ("int4", "float32")],
)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_of_every_family_format_and_layout(
    name: str,
    quantization: str,
    dtype: str,
    is_wide: bool,
    tmp_path: Path,
    families: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An experiment: ``-rP`` prints the table. ``is_wide``: integers as in models whose hidden states are wide."""
    if is_wide:
        if quantization == "none":
            pytest.skip("numbers are the same")
        monkeypatch.setattr(forms, "NARROW", 0)
    families.write_checkpoint(name, tmp_path)
    ids, logits = alone(tmp_path, configured(1, 1, quantization=quantization, dtype=dtype))
    for tensor, pipeline in LAYOUTS:
        config = configured(tensor, pipeline, quantization=quantization, dtype=dtype)
        found_ids, found, decoders = divided(tmp_path, config)
        form = decoders[0].quantization
        apart = float((found - logits)[: len(PROMPT)].abs().max() / logits.abs().max())
        print(
            f"| {name} | {quantization} {form} | {dtype} | {tensor} x {pipeline} | {found_ids == ids} | {apart:.0e} |"
        )
        assert found_ids == ids
        if quantization != "none" or tensor == 1:
            assert torch.equal(found, logits)


@pytest.mark.soak  # gloo takes up to ten seconds to connect more than three
@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_more_ranks_than_key_value_heads_have_copies_of_them(name: str, tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint(name, tmp_path)  # 4 heads, 2 key-value heads
    ids, logits = alone(tmp_path, configured(1, 1))
    found_ids, found, decoders = divided(tmp_path, configured(4, 1))
    assert found_ids == ids
    assert float((found - logits).abs().max()) <= 1e-5 * float(logits.abs().max())
    assert [decoder.part.num_kv_heads for decoder in decoders] == [1, 1, 1, 1]
    queries = decoders[0].part.head_dim
    keys = [decoder.layers[0].qkv.weight[queries:] for decoder in decoders if isinstance(decoder, LlamaDecoder)]
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[0], keys[2])


def test_8_bit_caches_are_divided(tmp_path: Path, families: ModuleType) -> None:
    """Stages change no bit. A sum in another order may round an element of the cache to its other neighbour."""
    settings = {"kv_cache": KVCacheConfig(dtype="int8")}
    families.write_checkpoint("qwen3", tmp_path)
    ids, logits = alone(tmp_path, configured(1, 1, **settings))
    found_ids, found, _ = divided(tmp_path, configured(1, 3, **settings))
    assert found_ids == ids
    assert torch.equal(found, logits)
    _, found, _ = divided(tmp_path, configured(2, 1, **settings))
    prompt = len(PROMPT)
    apart = (found[:prompt] - logits[:prompt]).norm() / logits[:prompt].norm()
    assert float(apart) < 0.1


def test_integers_with_an_8_bit_cache_have_the_bits_of_one_process(tmp_path: Path, families: ModuleType) -> None:
    check_integers("qwen3", tmp_path, families, quantization="int8", kv_cache=KVCacheConfig(dtype="int8"))


def test_a_rank_reads_and_holds_its_own_part(tmp_path: Path, families: ModuleType) -> None:
    """Together the ranks read each divided byte once, and norms and biases once each."""
    families.write_checkpoint("llama2-mha", tmp_path)
    whole = load_model(tmp_path, dtype="float32", device=CPU)
    assert isinstance(whole, DividedDecoder)
    norms = (2 * whole.config.num_layers + 1) * whole.config.hidden_size * 4
    for tensor, pipeline in ((2, 1), (1, 3), (2, 3)):
        _, _, decoders = divided(tmp_path, configured(tensor, pipeline))
        assert sum(decoder.read_bytes for decoder in decoders) == whole.read_bytes + (tensor - 1) * norms
        assert sum(decoder.weights_bytes for decoder in decoders) == whole.weights_bytes + (tensor - 1) * norms
        if pipeline == 1:  # 97 tokens do not divide: the first parts have one more
            row = 2 * whole.config.hidden_size * 4
            for decoder in decoders:
                assert decoder.read_bytes <= (whole.read_bytes - norms) / tensor + norms + tensor * row


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "said"),
    [
        (
            "qwen3",
            3,
            1,
            "parallel.tensor is 3, but the model's 4 attention heads do not divide by it. Take one of 2, 4.",
        ),
        ("qwen3", 1, 4, "parallel.pipeline is 4, but the model has 3 layers"),
        ("gpt2", 3, 1, "the model's 4 attention heads do not divide by it. Take one of 2, 4."),
    ],
)
def test_layouts_that_are_not_possible_are_refused(
    name: str, tensor: int, pipeline: int, said: str, tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint(name, tmp_path)
    dims = load_model(tmp_path, dtype="float32", device=CPU).config
    with pytest.raises(ModelLoadError) as refused:
        check_layout(configured(tensor, pipeline), dims)
    assert said in refused.value.message
    assert refused.value.param == "parallel"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"device": "cuda", "parallel": ParallelConfig(pipeline=2, machines=2)},
            "parallel.machines is 2, but ranks on CUDA devices are on one machine. Leave machines out",
        ),
    ],
)
def test_what_does_not_work_with_ranks_is_refused(
    settings: dict[str, object], said: str, tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint("qwen3", tmp_path)
    dims = load_model(tmp_path, dtype="float32", device=CPU).config
    with pytest.raises(ModelLoadError) as refused:
        check_layout(msgspec.structs.replace(configured(2, 1), **settings), dims)
    assert said in refused.value.message


WRITTEN = Path(__file__).parents[2] / "checkpoints" / "stored" / "written"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("autoawq-gemm", 2),
        ("autoawq-gemm", 4),  # whose groups of inputs do not divide by it
        ("gptqmodel-gptq4-act-order", 2),
        ("gptqmodel-gptq8-asym", 2),
        ("llmcompressor-pack4-asym", 2),
        ("llmcompressor-w8a8-static", 2),
    ],
)
def test_integers_of_quantised_checkpoints_have_the_bits_of_one_process(name: str, tensor: int) -> None:
    folder = WRITTEN / name
    ids, logits = alone(folder, configured(1, 1))
    found_ids, found, decoders = divided(folder, configured(tensor, 1))
    whole = load_model(folder, dtype="float32", device=CPU)
    assert {decoder.quantization for decoder in decoders} == {whole.quantization}
    assert sum(decoder.weights_bytes for decoder in decoders) < 1.2 * whole.weights_bytes
    assert found_ids == ids
    assert torch.equal(found, logits)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llmcompressor-fp8", "auto"), ("gptqmodel-gptq4-act-order", "none"), ("autoawq-gemm", "none")],
)
def test_quantised_checkpoints_that_become_numbers_are_divided(name: str, quantization: str) -> None:
    folder = WRITTEN / name
    ids, logits = alone(folder, configured(1, 1, quantization=quantization))
    found_ids, found, decoders = divided(folder, configured(2, 1, quantization=quantization))
    assert {decoder.quantization for decoder in decoders} == {"none"}
    assert found_ids == ids
    assert float((found - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


def test_one_rank_alone_is_the_whole_model() -> None:
    assert (ALONE.count, ALONE.is_first, ALONE.is_last) == (1, True, True)
