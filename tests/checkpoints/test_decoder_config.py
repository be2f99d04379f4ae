"""config.json is read with every complaint naming the file and the field."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.families import FAMILIES as WRITTEN

from inferd.checkpoints.architecture import GPT, read_config, supported_architectures
from inferd.checkpoints.decoder_config import DecoderConfig, Source, read_llama
from inferd.checkpoints.gpt_config import read_gpt
from inferd.checkpoints.rope_tables import tables
from inferd.errors import ModelLoadError

PLAIN: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    # the names of GPT-2 and GPT-Neo
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "num_heads": 4,
    "num_layers": 4,
}


def read(folder: Path, architecture: str, **changes: Any) -> DecoderConfig:
    """The config of PLAIN with changes; a change to ``...`` leaves the field out."""
    fields = {k: v for k, v in {**PLAIN, **changes}.items() if v is not ...}
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": [architecture], **fields}))
    source = Source(path)
    return read_gpt(source, architecture) if architecture in GPT else read_llama(source, architecture)


@pytest.mark.parametrize("architecture", supported_architectures())
def test_every_architecture_reads_a_plain_config(architecture: str, tmp_path: Path) -> None:
    config = read(tmp_path, architecture, sliding_window=8)
    assert config.architecture == architecture
    assert (config.num_layers, config.hidden_size, config.eos_token_ids) == (4, 48, (2,))
    assert len(config.windows) == len(config.ropes) == 4


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [..., "many", 0, -3, 2.5, True, [], 2**40])
def test_a_missing_or_ill_typed_size_is_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{name}") as caught:
        read(tmp_path, "LlamaForCausalLM", **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"hidden_act": "relu"}),
        ("LlamaForCausalLM", {"rope_theta": -1}),
        ("LlamaForCausalLM", {"rope_parameters": [1]}),
        ("LlamaForCausalLM", {"partial_rotary_factor": 2.0}),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}),
        ("MistralForCausalLM", {"sliding_window": -4}),
        ("Gemma2ForCausalLM", {"sliding_window": ...}),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "use_bidirectional_attention": True}),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"]}),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["chunked_attention"] * 4}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}),
        ("GraniteForCausalLM", {"logits_scaling": 0}),
        ("GPTNeoForCausalLM", {"attention_types": [[["global"], 3]]}),
        ("GPTNeoForCausalLM", {"attention_types": [["global", "local"]]}),
        ("GPT2LMHeadModel", {"n_embd": 50}),
        ("GPT2LMHeadModel", {"activation_function": "snake"}),
    ],
)
def test_what_cannot_be_served_is_named(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    gemma = {"sliding_window": 8} if architecture.startswith("Gemma") else {}
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, architecture, **{**gemma, **changes})
    assert caught.value.param is not None
    assert "config.json" in caught.value.message


JUNK: list[Any] = [
    None, False, True, 0, -1, 1, 3, 2**70, 0.5, float("nan"), float("inf"), "", "x", [], [0], ["x"], [[1, 2]], [["global"], 4], [[["global"], 4]],
    {}, {"x": 1}, {"rope_type": "linear"}, {"rope_type": "yarn", "factor": 0}, {"rope_type": "yarn", "factor": 2**70}, {"rope_theta": "x"},
    {"rope_theta": 1, "rope_type": "yarn", "factor": 2}, {"full_attention": 3, "sliding_attention": {}}, {"original_max_position_embeddings": "x"},
]  # fmt: skip
FIELDS = [
    *PLAIN,
    *[
        "rope_parameters",
        "rope_scaling",
        "partial_rotary_factor",
        "sliding_window",
        "layer_types",
        "use_sliding_window",
        "max_window_layers",
        "no_rope_layers",
    ],
    *[
        "no_rope_layer_interval",
        "attention_types",
        "window_size",
        "mlp_only_layers",
        "decoder_sparse_step",
        "eos_token_id",
        "dtype",
        "hidden_act",
        "text_config",
    ],
    *[
        "query_pre_attn_scalar",
        "attention_multiplier",
        "logits_scaling",
        "tie_word_embeddings",
        "attention_bias",
        "n_inner",
        "original_max_position_embeddings",
    ],
    *[
        "activation_function",
        "hidden_activation",
        "sliding_window_pattern",
        "rope_local_base_freq",
        "final_logit_softcapping",
        "norm_topk_prob",
        "quantization_config",
    ],
]


@pytest.mark.parametrize("architecture", supported_architectures())
def test_no_value_breaks_the_reader(architecture: str, tmp_path: Path) -> None:
    """Whatever stands in a field, the outcome is a config with tables, or a ModelLoadError."""
    read(tmp_path, architecture, sliding_window=8, use_sliding_window=True)
    source = Source(tmp_path / "config.json")
    sound = source.data
    for field in FIELDS:
        for value in JUNK:
            source.data = {**sound, field: value}
            with suppress(ModelLoadError):
                config = read_gpt(source, architecture) if architecture in GPT else read_llama(source, architecture)
                rope = config.ropes[0]
                if rope is not None and ("rope" in field or field.endswith("position_embeddings")) and rope.dim < 4096:
                    assert tables(rope, 4, torch.device("cpu"))[0].shape == (4, rope.dim // 2)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"'])
def test_a_file_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        Source(tmp_path / "config.json")


def test_older_and_newer_rope_fields_say_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    older = read(tmp_path, "LlamaForCausalLM", rope_theta=5000.0, rope_scaling={"type": "yarn", **scaling})
    newer = read(
        tmp_path,
        "LlamaForCausalLM",
        rope_theta=...,
        rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **scaling},
    )
    assert older.ropes[0] is not None
    assert newer.ropes[0] is not None
    for a, b in zip(
        tables(older.ropes[0], 64, torch.device("cpu")), tables(newer.ropes[0], 64, torch.device("cpu")), strict=True
    ):
        assert torch.equal(a, b)


def test_yarn_stretches_the_positions_that_are_served(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(tmp_path, "Qwen2ForCausalLM", rope_scaling=yarn).max_position_embeddings == 512


def test_gemma3_takes_the_older_rope_fields(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "Gemma3ForCausalLM",
        sliding_window=8,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=9000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert [(r.variant, r.theta) for r in config.ropes if r is not None] == [("default", 9000.0), ("linear", 1e6)] * 2
    assert config.windows == (8, None, 8, None)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("Olmo2ForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (8,) * 4),
        ("SmolLM3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None, 8)),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, (8, None, 8, None)),
        ("GPTNeoForCausalLM", {"window_size": 8}, (None, 8, None, 8)),
    ],
)
def test_windows_are_those_the_family_looks_at(
    architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, architecture, **changes).windows == windows


def test_a_nested_text_config_is_the_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**PLAIN, "sliding_window": 8}})
    )
    assert read_llama(Source(tmp_path / "config.json"), "Gemma3ForConditionalGeneration").hidden_size == 48


# Fields that every config.json of their families has, in whose place inferd takes no default of a family's own.
ALWAYS_TOLD = {
    "attn_logit_softcapping", "eos_token_id", "final_logit_softcapping", "head_dim", "num_key_value_heads",
    "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted({model: name for name, (_, model, _) in WRITTEN.items()}.values()))
def test_a_field_that_is_left_out_has_the_value_that_transformers_gives_it(family: str, tmp_path: Path) -> None:
    kind, model, _ = WRITTEN[family]
    told: dict[str, Any] = json.loads(getattr(transformers, kind)().to_json_string(use_diff=False))
    path = tmp_path / "config.json"

    def of(fields: dict[str, Any]) -> DecoderConfig:
        path.write_text(json.dumps({**fields, "architectures": [model]}))
        return read_config(Source(path))

    whole, num_optional = of(told), 0
    for name in told.keys() - ALWAYS_TOLD:
        try:
            found = of({other: value for other, value in told.items() if other != name})
        except ModelLoadError:
            continue  # it is needed
        assert found == whole, name
        num_optional += 1
    assert num_optional > 10
