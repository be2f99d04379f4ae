"""Quantised weights are read as their formats mean them: against checkpoints written bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.checkpoints.stored import slow_formats as slow
from torch import Tensor

from inferd.checkpoints.stored.declared import Quantization, read_quantization
from inferd.checkpoints.weights import Weights
from inferd.errors import ModelLoadError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}


def declared(config: dict[str, Any], folder: Path = Path("nowhere")) -> Quantization:
    found = read_quantization(folder / "config.json", {"quantization_config": config})
    assert found is not None
    return found


def compressed(bits: int, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def opened(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], name: str = "m.x") -> Weights:
    save_file({f"{name}.{part}": tensor.contiguous() for part, tensor in tensors.items()}, folder / "model.safetensors")
    quantization = declared(config, folder)
    return Weights(folder, dtype=torch.float32, device=torch.device("cpu"), quantization=quantization)


def check(weights: Weights, expected: Tensor, *, bits: int, name: str = "m.x") -> None:
    """As integers and as numbers."""
    out, inputs = expected.shape
    found = weights.integers([(name, out)], inputs)
    assert found is not None
    assert found[0].bits == bits
    assert torch.allclose(found[0].dense(), expected, rtol=1e-6, atol=1e-8)
    assert torch.allclose(weights.lend(f"{name}.weight", out, inputs), expected, rtol=1e-6, atol=1e-8)
    weights.check_all_read(lambda _: False)


@given(
    st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 10**6)
)
def test_gptq(tmp_path_factory: Any, bits: int, version: int, groups: int, shuffled: bool, seed: int) -> None:
    grid = slow.random_grid(16, 32, groups, bits, seed=seed, shuffled=shuffled)
    config = {**GPTQ, "bits": bits, "checkpoint_format": "gptq_v2" if version == 2 else "gptq", "desc_act": shuffled}
    weights = opened(tmp_path_factory.mktemp("gptq"), slow.gptq(grid, version=version), config)
    check(weights, grid.weight(), bits=bits)


def test_symmetric_gptq_needs_no_zero_points(tmp_path: Path) -> None:
    grid = slow.random_grid(8, 16, 2, 4, seed=3, symmetric=True)
    found = opened(tmp_path, slow.gptq(grid, version=1), GPTQ).integers([("m.x", 8)], 16)
    assert found is not None
    assert found[0].zero is None
    assert found[0].order is None
    assert found[0].group_size == 8


def test_gptq_without_g_idx_has_groups_in_order(tmp_path: Path) -> None:
    grid = slow.random_grid(8, 16, 2, 4, seed=4)
    tensors = slow.gptq(grid, version=1)
    del tensors["g_idx"]
    check(opened(tmp_path, tensors, GPTQ), grid.weight(), bits=4)


def test_act_order_with_groups_of_different_sizes_is_read_as_numbers(tmp_path: Path) -> None:
    grid = slow.random_grid(8, 16, 2, 4, seed=5)
    uneven = slow.Grid(grid.value, grid.zero, grid.scale, [0] * 5 + [1] * 11, 4)
    weights = opened(tmp_path, slow.gptq(uneven, version=1), GPTQ)
    assert weights.integers([("m.x", 8)], 16) is None
    assert torch.allclose(weights.lend("m.x.weight", 8, 16), uneven.weight(), rtol=1e-6)


@given(st.sampled_from([1, 2, 4]), st.integers(0, 10**6))
def test_awq(tmp_path_factory: Any, groups: int, seed: int) -> None:
    grid = slow.random_grid(16, 16, groups, 4, seed=seed)
    check(opened(tmp_path_factory.mktemp("awq"), slow.awq(grid), AWQ), grid.weight(), bits=4)


@given(st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_pack_quantized(
    tmp_path_factory: Any, bits: int, groups: int, symmetric: bool, shuffled: bool, seed: int
) -> None:
    # 12 outputs: the zero points' last word is half full.
    grid = slow.random_grid(12, 16, groups, bits, seed=seed, symmetric=symmetric, shuffled=shuffled)
    weights = opened(tmp_path_factory.mktemp("packed"), slow.packed(grid, symmetric=symmetric), compressed(bits))
    check(weights, grid.weight(), bits=bits)


@pytest.mark.parametrize("scale_shape", [(6, 1), (6,), (1,), (6, 2)])
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
def test_int_quantized(tmp_path: Path, scale_shape: tuple[int, ...], form: str) -> None:
    values = torch.randint(-128, 128, (6, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(6))
    scale = torch.rand(scale_shape) + 0.1
    groups = scale_shape[1] if len(scale_shape) == 2 else 1
    spread = scale.reshape(-1, groups).expand(6, groups).repeat_interleave(8 // groups, 1)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}
    check(opened(tmp_path, tensors, compressed(8, form)), values.float() * spread, bits=8)


def test_int_quantized_with_zero_points(tmp_path: Path) -> None:
    values = torch.randint(-128, 128, (6, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(7))
    scale, zero = torch.rand(6, 1), torch.randint(-128, 128, (6, 1), dtype=torch.int8)
    tensors = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    expected = (values.float() - zero.float()) * scale
    check(opened(tmp_path, tensors, compressed(8, "int-quantized", symmetric=False)), expected, bits=8)
    wide = tensors | {"weight_zero_point": zero.int()}
    with pytest.raises(ModelLoadError, match=r"'m\.x\.weight_zero_point' \(I32 .* must be I8"):
        opened(tmp_path, wide, compressed(8, "int-quantized", symmetric=False))


@pytest.mark.parametrize(
    ("part", "shape", "config"),
    [
        ("weight_scale_inv", (2, 3), {"quant_method": "fp8", "weight_block_size": [4, 4]}),
        ("weight_scale_inv", (2, 3), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [5, 3]}),
        ("weight_scale", (), {"quant_method": "fp8", "activation_scheme": "static"}),
        ("weight_scale", (8, 1), {"quant_method": "fbgemm_fp8"}),
        ("weight_scale", (8, 1), compressed(8, "float-quantized", type="float", strategy="channel", group_size=None)),
        ("weight_scale", (1,), compressed(8, "naive-quantized", type="float", strategy="tensor", group_size=None)),
        (
            "weight_scale",
            (2, 3),
            compressed(8, "float-quantized", type="float", strategy="block", group_size=None, block_structure=[6, 4]),
        ),
    ],
)
def test_fp8(tmp_path: Path, part: str, shape: tuple[int, ...], config: dict[str, Any]) -> None:
    inputs = 8 if config.get("weight_block_size") == [5, 3] else 12
    draw = torch.Generator().manual_seed(8)
    weight = torch.randn(8, inputs, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=draw) + 0.1
    groups = config.get("config_groups", {}).get("group_0", {}).get("weights", {})
    block = config.get("weight_block_size") or groups.get("block_structure")
    expected = torch.empty(8, inputs)
    for o in range(8):
        for i in range(inputs):
            where = (o // block[0], i // block[1]) if block else (o, 0) if shape == (8, 1) else ()
            by = scale[where] if where else scale.flatten()[0]
            expected[o, i] = weight[o, i].float() * by
    weights = opened(tmp_path, {"weight": weight, part: scale}, config)
    assert weights.integers([("m.x", 8)], inputs) is None
    assert torch.allclose(weights.lend("m.x.weight", 8, inputs), expected)
    weights.check_all_read(lambda _: False)


def test_mixed_bits_are_told_apart_by_the_closest_target(tmp_path: Path) -> None:
    narrow, wide = (slow.random_grid(8, 16, 2, bits, seed=9, symmetric=True) for bits in (4, 8))
    tensors = {f"m.down_proj.{k}": v for k, v in slow.packed(wide, symmetric=True).items()}
    tensors |= {f"m.up_proj.{k}": v for k, v in slow.packed(narrow, symmetric=True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = compressed(4)
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "type": "int"}}
    weights = Weights(
        tmp_path, dtype=torch.float32, device=torch.device("cpu"), quantization=declared(config, tmp_path)
    )
    assert torch.allclose(weights.lend("m.up_proj.weight", 8, 16), narrow.weight())
    check(weights, wide.weight(), bits=8, name="m.down_proj")


def test_parts_of_one_form_are_read_together_and_others_are_not(tmp_path: Path) -> None:
    grids = [slow.random_grid(8, 16, groups, 4, seed=i) for i, groups in enumerate((2, 2, 4))]
    tensors = {f"m.{n}.{k}": v for n, g in zip("abc", grids, strict=True) for k, v in slow.gptq(g, version=1).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, dtype=torch.float32, device=torch.device("cpu"), quantization=declared(GPTQ))
    assert weights.integers([("m.a", 8), ("m.c", 8)], 16) is None
    assert weights.num_parameters == 0
    found = weights.integers([("m.a", 8), ("m.b", 8)], 16)
    assert found is not None
    assert [torch.allclose(one.dense(), g.weight()) for one, g in zip(found, grids, strict=False)] == [
        True,
        True,
    ]
    # 4 bits a weight, and a float32 scale and an int8 zero point for each of two groups.
    assert weights.num_bytes == 2 * (8 * 16 // 2 + 8 * 2 * 5)


def _without(part: str) -> Any:
    return lambda tensors: tensors.pop(part)


def _with(part: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.__setitem__(part, tensor)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_without("scales"), "no tensor 'm.x.scales'"),
        (_without("qzeros"), "no tensor 'm.x.qzeros'"),
        (_with("scales", torch.ones(3, 16).half()), r"'m.x.scales' \(F16 \[3, 16\]\) must be \[2, 16\]"),
        (_with("g_idx", torch.zeros(15, dtype=torch.int32)), r"'m.x.g_idx' .* must be \[32\]"),
        (_with("g_idx", torch.full((32,), 2, dtype=torch.int32)), "'m.x.g_idx' names group 2, but there are 2"),
        (_with("g_idx", torch.full((32,), -1, dtype=torch.int32)), "'m.x.g_idx' names group -1"),
        (_with("qweight", torch.zeros(4, 16)), "'m.x.qweight' .* must be a matrix of I32"),
        (_with("qzeros", torch.zeros(2, 3, dtype=torch.int32)), "'m.x.qzeros' .* does not hold 4 or 8 bits"),
        (_with("scales", torch.full((2, 16), torch.inf).half()), "scales of 'm.x' .* not finite"),
        (_with("qweight", torch.zeros(2, 16, dtype=torch.int32)), r"'m.x.g_idx' .* must be \[16\]"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_named(tmp_path: Path, break_it: Any, said: str) -> None:
    tensors = slow.gptq(slow.random_grid(16, 32, 2, 4, seed=10), version=1)
    break_it(tensors)
    with pytest.raises(ModelLoadError, match=said):
        opened(tmp_path, tensors, GPTQ).integers([("m.x", 16)], 32)


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    tensors = slow.packed(slow.random_grid(8, 16, 2, 4, seed=11), symmetric=True)
    tensors["weight_scale"] = torch.ones(8, 3)
    with pytest.raises(ModelLoadError, match=r"'m.x.weight_scale' .* has 3 groups, which do not divide 16"):
        opened(tmp_path, tensors, compressed(4))
    tensors["weight_scale"] = torch.ones(7, 2)
    with pytest.raises(ModelLoadError, match="has 7 rows, but the weight has 8"):
        opened(tmp_path, tensors, compressed(4))
    tensors["weight_scale"], tensors["weight_shape"] = torch.ones(8, 2), torch.tensor([8, 24])
    with pytest.raises(ModelLoadError, match=r"'m.x.weight_shape' says \[8, 24\]"):
        opened(tmp_path, tensors, compressed(4)).integers([("m.x", 8)], 16)


def test_fp8_scales_must_lie_over_the_weight(tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(8, 12).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)}
    with pytest.raises(ModelLoadError, match=r"'m.x.weight_scale_inv' .* blocks of \[4, 4\]"):
        opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [4, 4]})
    del tensors["weight_scale_inv"]
    with pytest.raises(ModelLoadError, match=r"no tensor 'm\.x\.weight_scale_inv'"):
        opened(tmp_path, tensors, {"quant_method": "fp8"})


def test_a_shape_other_than_the_configuration_s_is_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path, slow.gptq(slow.random_grid(16, 32, 2, 4, seed=12), version=1), GPTQ)
    with pytest.raises(ModelLoadError, match=r"'m.x' \(gptq\) is \[16, 32\], but config.json asks for \[16, 64\]"):
        weights.integers([("m.x", 16)], 64)


def test_a_bias_of_zeros_that_a_quantiser_left_is_no_stranger_but_another_is(tmp_path: Path) -> None:
    tensors = slow.gptq(slow.random_grid(16, 32, 2, 4, seed=13), version=1) | {"bias": torch.zeros(16)}
    weights = opened(tmp_path, tensors, GPTQ)
    weights.integers([("m.x", 16)], 32)
    weights.check_all_read(lambda _: False)
    weights = opened(tmp_path, tensors | {"bias": torch.ones(16)}, GPTQ)
    weights.integers([("m.x", 16)], 32)
    with pytest.raises(ModelLoadError, match=r"m\.x\.bias"):
        weights.check_all_read(lambda _: False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes"),
        ({"quant_method": "hqq"}, "quantised by hqq"),
        ({"quant_method": "mxfp4"}, "quantised by mxfp4"),
        ({"bits": 4}, "a method it does not name"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3 .* only 4 or 8"),
        ({"quant_method": "gptq", "bits": 2}, "bits is 2"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' layout"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin' layout"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "'gemv' layout"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv_fast"}, "'gemv_fast' layout"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:gptqmodel"}, "auto_round:gptqmodel"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt in 'NVFP4'"),
        ({"quant_method": "eetq", "weights": "int4"}, "by eetq in 'int4'"),
        (compressed(4, "marlin-24"), "in the format 'marlin-24'"),
        (compressed(4, "nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (compressed(2), "num_bits is 2"),
        (compressed(4, type="float"), "num_bits is 4"),
        ({**compressed(4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "stored sparse"),
        ({**compressed(4), "transform_config": {"config_groups": {}}}, "rotated"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is \\[128\\]"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_a_remedy(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        declared(config)
    assert caught.value.param == "quantization_config"
    if "must be" not in str(caught.value):
        assert "quantization: int8 or int4" in str(caught.value)


def test_the_file_that_first_checkpoints_have_beside_config_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": True}))
    found = read_quantization(tmp_path / "config.json", {})
    assert found is not None
    assert found.label == "gptq, int4, groups of 64, act-order"
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}))
    found = read_quantization(tmp_path / "config.json", {})
    assert found is not None
    assert found.label == "awq, int4, groups of 128"
    (tmp_path / "quant_config.json").unlink()
    assert read_quantization(tmp_path / "config.json", {}) is None


@given(st.sampled_from([2, 6, 16]), st.sampled_from([64, 128, 192]), st.integers(0, 10**6))
def test_eetq(tmp_path_factory: Any, out: int, inputs: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (out, inputs), generator=draw)
    scale = (torch.rand(out, generator=draw) * 0.02 + 0.001).half().float()
    config = {"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": ["lm_head"]}
    weights = opened(tmp_path_factory.mktemp("eetq"), slow.eetq(values.tolist(), scale), config)
    check(weights, values * scale.unsqueeze(1), bits=8)


def test_eetq_as_a_wish_alone_leaves_numbers(tmp_path: Path) -> None:
    weight = torch.randn(4, 64)
    weights = opened(tmp_path, {"weight": weight}, {"quant_method": "eetq"})
    assert weights.integers([("m.x", 4)], 64) is None
    assert torch.equal(weights.lend("m.x.weight", 4, 64), weight)


def test_eetq_of_a_width_that_its_kernels_do_not_take_is_named(tmp_path: Path) -> None:
    parts = {"weight": torch.zeros(96, 4, dtype=torch.int8), "weight_scales": torch.ones(4).half()}
    with pytest.raises(ModelLoadError, match=r"m\.x\.weight.* multiple of 64 inputs"):
        opened(tmp_path, parts, {"quant_method": "eetq"})


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptq", None])
def test_auto_round_in_gptq_s_layout(tmp_path: Path, packing: str | None) -> None:
    grid = slow.random_grid(16, 32, 4, 4, seed=11)
    config: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": False, "iters": 200}
    tensors = slow.gptq(grid, version=1)
    del tensors["g_idx"]  # which it does not write
    check(opened(tmp_path, tensors, config | ({"packing_format": packing} if packing else {})), grid.weight(), bits=4)


def test_auto_round_in_awq_s_layout(tmp_path: Path) -> None:
    grid = slow.random_grid(16, 32, 4, 4, seed=12)
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 8}
    check(opened(tmp_path, slow.awq(grid), config), grid.weight(), bits=4)


def test_awq_as_gptqmodel_describes_it(tmp_path: Path) -> None:
    grid = slow.random_grid(16, 32, 4, 4, seed=13)
    config = {"quant_method": "awq", "checkpoint_format": "gemm", "bits": 4, "group_size": 8, "pack_dtype": "int32"}
    check(opened(tmp_path, slow.awq(grid), config), grid.weight(), bits=4)


def test_modules_of_other_widths_and_none_are_told_by_their_tensors(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: some modules in 8 bits, some left as they were."""
    narrow, wide = slow.random_grid(16, 32, 4, 4, seed=14), slow.random_grid(16, 32, 2, 8, seed=15)
    tensors = {f"m.a.{part}": tensor for part, tensor in slow.gptq(narrow, version=1).items()}
    tensors |= {f"m.b.{part}": tensor for part, tensor in slow.gptq(wide, version=1).items()}
    tensors["m.c.weight"] = torch.ones(16, 32)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    dynamic = {"+:m\\.b": {"bits": 8, "group_size": 16}, "-:m\\.c": {}}
    quantization = declared({**GPTQ, "dynamic": dynamic}, tmp_path)
    weights = Weights(tmp_path, dtype=torch.float32, device=torch.device("cpu"), quantization=quantization)
    for name, bits, expected in (("m.a", 4, narrow.weight()), ("m.b", 8, wide.weight())):
        found = weights.integers([(name, 16)], 32)
        assert found is not None
        assert found[0].bits == bits
        assert torch.allclose(found[0].dense(), expected, rtol=1e-6, atol=1e-8)
    assert weights.integers([("m.c", 16)], 32) is None
    assert torch.equal(weights.read("m.c.weight", 16, 32), torch.ones(16, 32))


@pytest.mark.parametrize("is_beside", [False, True])
def test_modelopt_in_fp8(tmp_path: Path, is_beside: bool) -> None:
    weight = torch.randn(8, 16)
    stored = (weight / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = {"weight": stored, "weight_scale": torch.tensor(0.01), "input_scale": torch.tensor(1.0)}
    save_file({f"m.x.{part}": tensor for part, tensor in parts.items()}, tmp_path / "model.safetensors")
    said: dict[str, Any] = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
    if is_beside:
        beside = {"producer": {"name": "modelopt"}, "quantization": {**said, "exclude_modules": ["lm_head"]}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
        quantization = read_quantization(tmp_path / "config.json", {})
    else:
        quantization = declared({"quant_method": "modelopt", **said, "ignore": ["lm_head"]})
    weights = Weights(tmp_path, dtype=torch.float32, device=torch.device("cpu"), quantization=quantization)
    assert torch.allclose(weights.lend("m.x.weight", 8, 16), stored.float() * 0.01)


def test_a_configuration_without_quantised_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="but no tensor is"):
        opened(tmp_path, {"weight": torch.ones(2, 2)}, GPTQ)
