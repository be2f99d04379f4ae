"""A model divided among ranks computes what one process computes. The ranks are threads that talk over gloo."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.adapters import ATTENTION, EVERY, write_adapter
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from inferd.checkpoints.adapter import read_adapter
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig
from inferd.engine.adapters import load_adapter
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.model.load import load_model
from inferd.engine.model.share import ALONE, Share, check_layout
from inferd.engine.native_decoder import native_decoder
from inferd.engine.ranks.peers import GlooPeers
from inferd.engine.ranks.rank import cache_of, load_share
from inferd.engine.runner import Runner
from inferd.errors import ModelLoadError
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import AdapterRows, LoadedAdapter
from inferd.native.paged_attention import create_attention

PROMPT = [3 + 7 * i % 90 for i in range(37)]
ANSWER = 8  # tokens that are decoded one by one
EVERYDAY = ("llama-biases", "qwen3", "gemma2", "phi3", "mixtral")
OTHERS = (
    *("llama2-mha", "llama3-tied", "mistral-window", "qwen2", "qwen2-window", "qwen3-moe", "gemma3"),
    *("phi4-partial", "smollm3", "granite"),
)
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
    decoder: LlamaDecoder,
    config: ModelConfig,
    peers: GlooPeers | None = None,
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
            if by_layers:
                hidden = decoder.forward(batch, create_attention("auto", cache, batch))
            else:
                hidden = runner.compute(batch)
            start = len(tokens)
            logits = torch.zeros(1, decoder.config.vocab_size)
            if share.is_first:  # rank 0 has the hidden states of the last stage, and sends them to its own
                if share.pipeline > 1 and share.tensor > 1:
                    assert peers is not None
                    hidden = peers.gather(hidden)[0]
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
    assert isinstance(decoder, LlamaDecoder)
    return answer_of(decoder, config, adapter=adapter)


def divided(
    folder: Path, config: ModelConfig, *, by_layers: bool = False, adapter: Path | None = None
) -> tuple[list[int], Tensor, list[LlamaDecoder]]:
    """What rank 0 finds, and the decoders of all ranks."""
    parallel, store, meet = config.parallel, HashStore(), Meeting(config.parallel.count)

    def rank(number: int) -> tuple[tuple[list[int], Tensor], LlamaDecoder]:
        decoder, peers = load_share(folder, config, Share(number, parallel.tensor, parallel.pipeline), store)
        peers.join()
        return answer_of(decoder, config, peers, meet, by_layers=by_layers, adapter=adapter), decoder

    with ThreadPoolExecutor(parallel.count) as pool:
        results = list(pool.map(rank, range(parallel.count)))
    return *results[0][0], [decoder for _, decoder in results]


def configured(tensor: int, pipeline: int, **settings: object) -> ModelConfig:
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    return ModelConfig(source="m", parallel=parallel, hang_timeout_s=10, **{"dtype": "float32", **settings})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("name", EVERYDAY)
def test_divided_families_answer_as_one_process(name: str, tmp_path: Path, families: ModuleType) -> None:
    check_family(name, tmp_path, families)


@pytest.mark.parametrize(("name", "dtype"), [("llama-biases", "float32"), ("gemma2", "bfloat16")])
def test_ranks_compute_in_one_call_what_they_compute_layer_by_layer(
    name: str, dtype: str, tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint(name, tmp_path)
    for tensor, pipeline in LAYOUTS:
        config = configured(tensor, pipeline, dtype=dtype)
        ids, logits, decoders = divided(tmp_path, config)
        for decoder in decoders:
            assert native_decoder(decoder, cache_of(decoder, config, 1), 1) is not None
        found_ids, found, _ = divided(tmp_path, config, by_layers=True)
        assert found_ids == ids
        assert torch.equal(found, logits)


FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets", "dtype"),
    [
        ("qwen3", EVERY, "float32"),
        ("phi3", FUSED, "float32"),
        ("mixtral", ATTENTION, "float32"),
        ("qwen3", EVERY, "bfloat16"),
    ],
)
def test_adapters_are_divided_as_the_products_that_they_change(
    name: str, targets: tuple[str, ...], dtype: str, tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint(name, tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", targets=targets)
    ids, logits = alone(tmp_path / "base", configured(1, 1, dtype=dtype), adapter)
    _, base = alone(tmp_path / "base", configured(1, 1, dtype=dtype))
    prompt, most = len(PROMPT), float(logits.abs().max())
    assert float((base[:prompt] - logits[:prompt]).abs().max()) > 0.02 * most
    for tensor, pipeline in LAYOUTS:
        found_ids, found, _ = divided(tmp_path / "base", configured(tensor, pipeline, dtype=dtype), adapter=adapter)
        if tensor == 1:
            assert torch.equal(found, logits)
        elif dtype == "float32":
            assert found_ids == ids
            assert float((found - logits).abs().max()) <= 1e-5 * most
        else:
            assert float((found[:prompt] - logits[:prompt]).abs().max()) <= 0.02 * most


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_other_divided_families_answer_as_one_process(name: str, tmp_path: Path, families: ModuleType) -> None:
    check_family(name, tmp_path, families)


@pytest.mark.soak
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", EVERYDAY + OTHERS)
def test_integers_of_every_family_are_divided(
    name: str, quantization: str, tmp_path: Path, families: ModuleType
) -> None:
    """Stages change no bit. Parts of a layer are rounded for themselves, and are no further from the numbers."""
    families.write_checkpoint(name, tmp_path)
    prompt = len(PROMPT)
    numbers = alone(tmp_path, configured(1, 1))[1][:prompt]
    ids, logits = alone(tmp_path, configured(1, 1, quantization=quantization))
    for tensor, pipeline in LAYOUTS:
        found_ids, found, _ = divided(tmp_path, configured(tensor, pipeline, quantization=quantization))
        if tensor == 1:
            assert found_ids == ids
            assert torch.equal(found, logits)
        else:
            assert float((found[:prompt] - numbers).norm()) <= 1.3 * float((logits[:prompt] - numbers).norm())


@pytest.mark.soak  # gloo takes up to ten seconds to connect more than three
def test_more_ranks_than_key_value_heads_have_copies_of_them(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("qwen3", tmp_path)  # 4 heads, 2 key-value heads
    ids, logits = alone(tmp_path, configured(1, 1))
    found_ids, found, decoders = divided(tmp_path, configured(4, 1))
    assert found_ids == ids
    assert float((found - logits).abs().max()) <= 1e-5 * float(logits.abs().max())
    assert [decoder.part.num_kv_heads for decoder in decoders] == [1, 1, 1, 1]
    assert torch.equal(decoders[0].layers[0].qkv.weight[16:], decoders[1].layers[0].qkv.weight[16:])
    assert not torch.equal(decoders[0].layers[0].qkv.weight[16:], decoders[2].layers[0].qkv.weight[16:])


@pytest.mark.parametrize("settings", [{"kv_cache": KVCacheConfig(dtype="int8")}, {"quantization": "int8"}])
def test_integers_and_8_bit_caches_are_divided(
    settings: dict[str, object], tmp_path: Path, families: ModuleType
) -> None:
    """Stages change no bit; parts of a layer have scales of their own, so their logits are near."""
    families.write_checkpoint("qwen3", tmp_path)
    ids, logits = alone(tmp_path, configured(1, 1, **settings))
    found_ids, found, _ = divided(tmp_path, configured(1, 3, **settings))
    assert found_ids == ids
    assert torch.equal(found, logits)
    _, found, _ = divided(tmp_path, configured(2, 1, **settings))
    prompt = len(PROMPT)
    apart = (found[:prompt] - logits[:prompt]).norm() / logits[:prompt].norm()
    assert float(apart) < 0.1


def test_a_rank_reads_and_holds_its_own_part(tmp_path: Path, families: ModuleType) -> None:
    """Together the ranks read each divided byte once, and norms and biases once each."""
    families.write_checkpoint("llama2-mha", tmp_path)
    whole = load_model(tmp_path, dtype="float32", device=CPU)
    assert isinstance(whole, LlamaDecoder)
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
        ("olmo2", 2, 1, "Take pipeline instead"),
        ("gpt2", 2, 1, "cannot be divided among ranks yet"),
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
        ({"device": "cuda"}, "Set device to cpu"),
    ],
)
def test_what_does_not_work_with_ranks_is_refused(
    settings: dict[str, object], said: str, tmp_path: Path, families: ModuleType
) -> None:
    families.write_checkpoint("qwen3", tmp_path)
    dims = load_model(tmp_path, dtype="float32", device=CPU).config
    with pytest.raises(ModelLoadError) as refused:
        check_layout(configured(2, 1, **settings), dims)
    assert said in refused.value.message


WRITTEN = Path(__file__).parents[2] / "checkpoints" / "stored" / "written"


@pytest.mark.parametrize(
    "name",
    [
        "autoawq-gemm",
        "gptqmodel-gptq8-asym",
        "llmcompressor-fp8",
        "llmcompressor-pack4-asym",
        "llmcompressor-w8a8-static",
    ],
)
def test_quantised_checkpoints_are_divided(name: str) -> None:
    """Their integers stay as they are. An activation's scale is of a group, or of a rank's part of the inputs."""
    folder = WRITTEN / name
    ids, logits = alone(folder, configured(1, 1))
    found_ids, found, decoders = divided(folder, configured(2, 1))
    whole = load_model(folder, dtype="float32", device=CPU)
    assert {decoder.quantization for decoder in decoders} == {whole.quantization}
    assert sum(decoder.weights_bytes for decoder in decoders) < 1.2 * whole.weights_bytes
    prompt, most = len(PROMPT), float(logits.abs().max())
    apart = float((found[:prompt] - logits[:prompt]).abs().max()) / most
    if name == "llmcompressor-w8a8-static":
        assert apart < 0.05
    else:
        assert found_ids == ids
        assert apart <= 1e-5


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [("gptqmodel-gptq4-act-order", 2, "has its inputs in act-order"), ("autoawq-gemm", 4, "groups of inputs")],
)
def test_groups_that_ranks_would_share_are_refused(name: str, tensor: int, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as refused:
        load_share(WRITTEN / name, configured(tensor, 1), Share(0, tensor, 1), HashStore())
    assert refused.value.param == "parallel"


def test_one_rank_alone_is_the_whole_model() -> None:
    assert (ALONE.count, ALONE.is_first, ALONE.is_last) == (1, True, True)
