"""Which matrices become which integers, and how many bytes these take: the rules that the loader and the planner share."""

from __future__ import annotations

import pytest

from inferd.native.forms import NARROW, UNTOUCHED, Form, Rule

PRODUCTS = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight", "h.0.attn.c_attn.weight")
TABLES = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "transformer.wte.weight",
    "embed_in.weight",
    "embed_out.weight",
)
NUMBERS = (
    "model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.mlp.gate.weight", "block_sparse_moe.router.weight", "wpe.weight", "model.layers.0.self_attn.q_proj.bias",
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "hidden_size", "products", "tables"),
    [
        ("int8", NARROW, "int8", "int8"),
        ("int4", NARROW, "int4/64", "int8"),
        ("int8", NARROW - 1, "int8/64", "int8/64"),
        ("int4", NARROW - 1, "int8/64", "int8/64"),
        ("fp8", NARROW, "fp8", "fp8"),
        ("fp8", NARROW - 1, "fp8", "fp8"),
        ("none", NARROW, None, None),
        ("auto", NARROW, None, None),
    ],
)
def test_products_take_what_is_asked_for_and_tables_eight_bits(
    asked: str, hidden_size: int, products: str | None, tables: str | None
) -> None:
    rule = Rule(asked, hidden_size)
    for names, expected in ((PRODUCTS, products), (TABLES, tables), (NUMBERS, None)):
        for name in names:
            form = rule.form(name)
            assert (None if form is None else form.name) == expected, name
            assert UNTOUCHED.form(name) is None


EIGHT, GROUPED, FOUR = Form(8, 0, False), Form(8, 64, False), Form(4, 64, True)
FLOATS = Form(8, 0, False, is_float=True)


def test_the_forms_of_a_rule_are_these() -> None:
    assert Rule("int8", NARROW).form(PRODUCTS[0]) == EIGHT
    assert Rule("int8", 1).form(PRODUCTS[0]) == GROUPED
    assert Rule("int4", NARROW).form(PRODUCTS[0]) == FOUR
    assert Rule("fp8", NARROW).form(PRODUCTS[0]) == FLOATS


@pytest.mark.parametrize(
    ("form", "packed", "whole"),
    [
        (EIGHT, 3 * 100, 3 * (100 + 4 + 4)),  # of each output a scale, and the sum of its integers
        (FLOATS, 3 * 100, 3 * (100 + 4)),
        (GROUPED, 3 * 2 * (64 + 2), 3 * (2 * (64 + 2) + 4)),  # the second of the groups is padded
        (FOUR, 3 * 2 * (32 + 3), 3 * (2 * (32 + 3) + 4)),
        (Form(4, 33, False), 3 * 4 * (20 + 2), 3 * (4 * (20 + 2) + 4)),  # 33 integers in five lanes of eight
        (Form(8, 30, True), 3 * 4 * (32 + 3), 3 * (4 * (32 + 3) + 4)),
    ],
)
def test_integers_take_these_bytes(form: Form, packed: int, whole: int) -> None:
    assert form.packed_bytes(3, 100) == packed
    assert form.nbytes(3, 100) == whole
    assert form.packed_bytes(3, 100, panel=16) == packed // 3 * 16
    assert form.packed_bytes(32, 100, panel=16) == packed // 3 * 32


def test_four_bits_with_their_scales_are_four_and_three_eighths() -> None:
    assert FOUR.packed_bytes(1, 6400) * 8 / 6400 == 4.375
