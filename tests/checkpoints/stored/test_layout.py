"""How products are stored is told by the headers alone, and headers that do not fit each other are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from inferd.checkpoints.safetensors import Entry
from inferd.checkpoints.stored.declared import Method, Quantization, Scheme
from inferd.checkpoints.stored.layout import Layout, layouts, served_bytes
from inferd.errors import ModelLoadError


def table(**parts: str) -> dict[str, Entry]:
    """The tensors of the product ``m.x``, each as its number format and its shape: ``I32 4 16``."""
    found = {}
    for part, words in parts.items():
        dtype, *shape = words.split()
        found[f"m.x.{part}"] = Entry(dtype, tuple(map(int, shape)), 0)
    return found


def read(method: Method, parts: dict[str, str], **declared: Any) -> Layout:
    (layout,) = layouts(Quantization(method, f"{method}, a test", **declared), table(**parts), "here").values()
    return layout


GPTQ = {"qweight": "I32 4 16", "qzeros": "I32 2 2", "scales": "F16 2 16"}
AWQ = {"qweight": "I32 32 2", "qzeros": "I32 4 2", "scales": "BF16 4 16"}
PACKED = {"weight_packed": "I32 16 4", "weight_scale": "BF16 16 2"}
INT8 = {"weight": "I8 16 32", "weight_scale": "F32 16 1"}
EETQ = {"weight": "I8 64 16", "weight_scales": "F16 16"}
FP8 = {"weight": "F8_E4M3 16 32", "weight_scale": "F32"}
FOUR = {"schemes": (Scheme(("Linear",), 4, False),)}
EIGHT = {"schemes": (Scheme(("Linear",), 8, False),)}


@pytest.mark.parametrize(
    ("method", "parts", "declared", "told"),
    [
        # kind, outputs, inputs, bits, shape of the scales, block, zeros, order
        ("gptq", GPTQ, {}, ("gptq", 16, 32, 4, (16, 2), (1, 16), True, False)),
        ("gptq", {**GPTQ, "qzeros": "I32 2 4"}, {}, ("gptq", 16, 16, 8, (16, 2), (1, 8), True, False)),
        ("gptq", {**GPTQ, "g_idx": "I32 32"}, {}, ("gptq", 16, 32, 4, (16, 2), (1, 16), True, True)),
        ("gptq", {**GPTQ, "g_idx": "I64 32"}, {}, ("gptq", 16, 32, 4, (16, 2), (1, 16), True, True)),
        ("awq", AWQ, {}, ("awq", 16, 32, 4, (16, 4), (1, 8), True, False)),
        ("compressed-tensors", PACKED, FOUR, ("packed", 16, 32, 4, (16, 2), (1, 16), False, False)),
        ("compressed-tensors", PACKED, EIGHT, ("packed", 16, 16, 8, (16, 2), (1, 8), False, False)),
        ("compressed-tensors", {**PACKED, "weight_scale": "F16 16"}, FOUR, ("packed", 16, 32, 4, (16, 1), (1, 32), False, False)),
        (
            "compressed-tensors",
            {**PACKED, "weight_shape": "I64 2", "weight_zero_point": "I32 2 2", "weight_g_idx": "I32 32"},
            FOUR,
            ("packed", 16, 32, 4, (16, 2), (1, 16), True, True),
        ),
        ("compressed-tensors", INT8, {}, ("int8", 16, 32, 8, (16, 1), (1, 32), False, False)),
        ("compressed-tensors", {**INT8, "weight_scale": "F32 1"}, {}, ("int8", 16, 32, 8, (1, 1), (16, 32), False, False)),
        ("compressed-tensors", {**INT8, "weight_scale": "F32 16 4", "weight_zero_point": "I8 16 4"}, {}, ("int8", 16, 32, 8, (16, 4), (1, 8), True, False)),
        ("eetq", EETQ, {}, ("eetq", 16, 64, 8, (16, 1), (1, 64), False, False)),
        ("fp8", FP8, {}, ("fp8", 16, 32, 8, (1, 1), (16, 32), False, False)),
        ("fp8", {**FP8, "weight_scale": "BF16 16 1"}, {"block": (4, 4)}, ("fp8", 16, 32, 8, (16, 1), (1, 32), False, False)),
        ("fp8", {**FP8, "weight_scale": "F32 4 8"}, {"block": (4, 4)}, ("fp8", 16, 32, 8, (4, 8), (4, 4), False, False)),
        ("fp8", {**FP8, "weight_scale": "F32 4 8"}, {}, ("fp8", 16, 32, 8, (4, 8), (4, 4), False, False)),
        ("fp8", {"weight": "F8_E4M3 18 33", "weight_scale_inv": "F32 5 9"}, {"block": (4, 4)}, ("fp8", 18, 33, 8, (5, 9), (4, 4), False, False)),
    ],
)  # fmt: skip
def test_a_layout_is_read_from_headers(
    method: Method, parts: dict[str, str], declared: dict[str, Any], told: tuple[object, ...]
) -> None:
    made = read(method, parts, **declared)
    assert (
        *(made.kind, made.out_features, made.in_features, made.bits),
        *(made.scale_shape, made.block, made.has_zeros, made.has_order),
    ) == told
    assert sorted(made.parts) == sorted(parts)
    assert made.tensor("weight") == "m.x.weight"
    assert made.is_integer == (made.kind != "fp8")


def test_of_two_scales_of_float8_the_one_without_an_inverse_counts() -> None:
    both = read("fp8", {**FP8, "weight_scale": "F32 16 1", "weight_scale_inv": "F32 1"})
    assert both.scale_shape == (16, 1)


@pytest.mark.parametrize(
    ("method", "parts", "declared", "said"),
    [
        ("gptq", {**GPTQ, "qweight": "I64 4 16"}, {}, "qweight' (I64 [4, 16]) must be a matrix of I32"),
        ("gptq", {**GPTQ, "qweight": "I32 64"}, {}, "qweight' (I32 [64]) must be a matrix of I32"),
        ("gptq", {**GPTQ, "qzeros": "I32 2 3"}, {}, "qzeros' (I32 [2, 3]) does not hold 4 or 8 bits for each of 16 outputs"),
        ("gptq", {**GPTQ, "qzeros": "I32 2 1"}, {}, "does not hold 4 or 8 bits for each of 16 outputs"),
        ("gptq", {**GPTQ, "qweight": "I32 4 0", "scales": "F16 2 0"}, {}, "does not hold 4 or 8 bits for each of 0 outputs"),
        ("gptq", {**GPTQ, "qweight": "I32 0 16", "g_idx": "I32 0"}, {}, "qweight' (I32 [0, 16]) is empty"),
        ("gptq", {**GPTQ, "scales": "I8 2 16"}, {}, "scales' (I8 [2, 16]) must be [2, 16] of F16 or BF16"),
        ("gptq", {**GPTQ, "g_idx": "I32 16"}, {}, "g_idx' (I32 [16]) must be [32] of I32 or I64"),
        ("gptq", {**GPTQ, "qzeros": "I32 3 2", "scales": "F16 3 16"}, {}, "has 3 groups, which do not divide 32 inputs"),
        ("gptq", {**GPTQ, "qzeros": "I32 0 2", "scales": "F16 0 16"}, {}, "has 0 groups, which do not divide 32 inputs"),
        ("gptq", {"qweight": "I32 4 16", "scales": "F16 2 16"}, {}, "the checkpoint has no tensor 'm.x.qzeros'"),
        ("awq", {**AWQ, "qzeros": "I32 4 4"}, {}, "qzeros' (I32 [4, 4]) must be [4, 2] of I32"),
        ("awq", {**AWQ, "scales": "F16 5 16", "qzeros": "I32 5 2"}, {}, "has 5 groups, which do not divide 32 inputs"),
        ("compressed-tensors", PACKED, {}, "no group of config_groups says of how many bits it is"),
        ("compressed-tensors", {**PACKED, "weight_scale": "F16 16 3"}, FOUR, "has 3 groups, which do not divide 32 inputs"),
        ("compressed-tensors", {**PACKED, "weight_scale": "F16 15 2"}, FOUR, "has 15 rows, but the weight has 16"),
        ("compressed-tensors", {**PACKED, "weight_scale": "F16 15"}, FOUR, "has 15 elements, but the weight has 16 rows"),
        ("compressed-tensors", {**PACKED, "weight_scale": "I32 16 2"}, FOUR, "must be a number, a row of them or a matrix"),
        ("compressed-tensors", {**PACKED, "weight_scale": "F16 16 2 1"}, FOUR, "must be a number, a row of them or a matrix"),
        ("compressed-tensors", {**PACKED, "weight_scale": "F16 0"}, FOUR, "must be a number, a row of them or a matrix"),
        ("compressed-tensors", {**PACKED, "weight_shape": "I64 3"}, FOUR, "weight_shape' (I64 [3]) must be [2] of I64"),
        ("compressed-tensors", {**PACKED, "weight_zero_point": "I32 3 2"}, FOUR, "must be [2, 2] of I32"),
        ("compressed-tensors", {**PACKED, "weight_g_idx": "I32 16"}, FOUR, "must be [32] of I32 or I64"),
        ("compressed-tensors", {**INT8, "weight_scale": "F32 16 3"}, {}, "has 3 groups, which do not divide 32 inputs"),
        ("compressed-tensors", {**INT8, "weight_zero_point": "I8 15"}, {}, "must be I8, one for each of the 16 scales"),
        ("compressed-tensors", {**INT8, "weight_zero_point": "I32 16"}, {}, "must be I8, one for each of the 16 scales"),
        ("eetq", {**EETQ, "weight": "I8 32 16"}, {}, "must have a multiple of 64 inputs and an even number of outputs"),
        ("eetq", {"weight": "I8 64 15", "weight_scales": "F16 15"}, {}, "a multiple of 64 inputs and an even number"),
        ("eetq", {**EETQ, "weight_scales": "F16 15"}, {}, "weight_scales' (F16 [15]) must be [16] of F16"),
        ("eetq", {**EETQ, "weight_scales": "I8 16"}, {}, "weight_scales' (I8 [16]) must be [16] of F16"),
        ("fp8", {**FP8, "weight_scale": "F32 4 8"}, {"block": (8, 8)}, "weight of [16, 32] in blocks of [8, 8]"),
        ("fp8", {**FP8, "weight_scale": "F32 3 8"}, {}, "does not lie over a weight of [16, 32] in blocks."),
        ("fp8", {**FP8, "weight_scale": "F32 4 7"}, {}, "does not lie over a weight of [16, 32] in blocks."),
        ("fp8", {"weight": "F8_E4M3 16 32"}, {}, "has no tensor 'm.x.weight_scale_inv'"),
    ],
)  # fmt: skip
def test_headers_that_do_not_fit_each_other_are_refused(
    method: Method, parts: dict[str, str], declared: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(said)) as caught:
        read(method, parts, **declared)
    assert caught.value.message.startswith("here: ")


def test_what_is_not_quantised_is_no_product_and_something_must_be() -> None:
    plain = {**table(weight="BF16 4 4"), "norm.weight": Entry("F32", (4,), 0)}
    said = re.escape("here: config.json says the checkpoint is quantised (gptq, a test), but no tensor is.")
    with pytest.raises(ModelLoadError, match=said):
        layouts(Quantization("gptq", "gptq, a test"), plain, "here")
    assert layouts(Quantization("eetq", "eetq"), plain, "here") == {}, "it may be a request to quantise"


def test_the_memory_of_a_model_is_that_of_its_integers_scales_and_numbers() -> None:
    zeros, none = read("awq", AWQ), read("compressed-tensors", INT8)
    assert zeros.num_groups == 4
    assert zeros.held_bytes == 16 * 32 // 2 + 16 * 4 * 5
    assert none.held_bytes == 16 * 32 + 16 * 4
    whole = {
        **table(**AWQ),
        "m.x.input_scale": Entry("F32", (9,), 0),
        "m.x.bias": Entry("F16", (16,), 0),
        "norm.weight": Entry("F32", (5,), 0),
    }
    stored = {"m.x": zeros}
    assert served_bytes(whole, stored, 2) == zeros.held_bytes + (16 + 5) * 2
    assert served_bytes(whole, stored, 2, keeps=lambda layout: False) == (16 * 32 + 16 + 5) * 2
    float8 = read("fp8", FP8)
    assert served_bytes(table(**FP8), {"m.x": float8}, 4) == 16 * 32 * 4
