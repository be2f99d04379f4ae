"""A text has the same bits alone and beside any others, in every encoder that says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.predict.encoder.test_encoder_families import ENCODERS, load
from tests.predict.encoder.tiny_encoders import VOCABULARY, write_encoder
from torch import Tensor

from inferd.native import compiled
from inferd.predict.contract import object_array
from inferd.predict.encoder.config import ACTIVATIONS
from inferd.predict.encoder.layers import Product, gated
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes.encoder import EncoderRuntime

needs_kernels = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")


class Matrices:
    """Random weights by any name."""

    def read(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape)

    lend = read


def check_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    alone = torch.cat([function(row.unsqueeze(0)) for row in rows])
    for count in (2, 3, 7, len(rows)):
        for first in range(0, len(rows) - count + 1, count):
            assert torch.equal(function(rows[first : first + count]), alone[first : first + count]), (first, count)


@needs_kernels
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_takes_each_row_alone(name: str) -> None:
    """37 values leave a part of a vector at the end of each row, and another one at the end of each tensor."""
    torch.manual_seed(0)
    product = Product(Matrices(), [("up", 37)], 16, torch.float32)  # type: ignore[arg-type]
    check_rows(lambda rows: product.activated(rows, name), torch.randn(100, 16))
    check_rows(lambda rows: gated(rows, name), torch.randn(100, 2 * 37) * 3)


def texts(number: int) -> list[list[int]]:
    """Token ids, some texts of one token."""
    drawn = random.Random(number)
    return [[drawn.randrange(len(VOCABULARY)) for _ in range(drawn.choice((1, 1, 2, 5, 9)))] for _ in range(24)]


def vectors(runtime: EncoderRuntime, ids: list[list[int]]) -> npt.NDArray[np.float32]:
    made = object_array([np.asarray(one, "<i4").tobytes() for one in ids])
    item = Item(request_id="r", inputs={"token_ids": made}, rows=len(ids))
    runtime.prepare(item)
    (result,) = runtime.predict([item])
    assert isinstance(result, Result)
    return result.outputs["embedding"]  # type: ignore[return-value]


DECODERS = ["Qwen3Model", "MixtralModel", "Gemma2Model"]
CASES = [
    *((name, activation) for name in ENCODERS for activation in ACTIVATIONS),
    *((name, "") for name in DECODERS),
]
EVERYDAY = {("BertModel", "silu"), ("ModernBertModel", "gelu")}
FIELDS = {"ModernBertModel": "hidden_activation", "DistilBertModel": "activation"}


@needs_kernels
@pytest.mark.parametrize(
    ("architecture", "activation"),
    [pytest.param(*case, marks=() if case in EVERYDAY else pytest.mark.soak) for case in CASES],
)
def test_a_text_has_its_bits_in_any_batch(architecture: str, activation: str, tmp_path: Path) -> None:
    wide = "hidden_dim" if architecture == "DistilBertModel" else "intermediate_size"
    chosen: dict[str, Any] = {FIELDS.get(architecture, "hidden_act"): activation} if activation else {}
    write_encoder(tmp_path, architecture, **{wide: 44}, **chosen)
    for dtype in ("float32", "bfloat16"):
        runtime = load(tmp_path, dtype=dtype)
        assert runtime.contract.keeps_rows
        ids = texts(3)
        alone = np.concatenate([vectors(runtime, [one]) for one in ids])
        for count in (2, 3, 8, 24):
            for first in range(0, len(ids) - count + 1, count):
                assert np.array_equal(vectors(runtime, ids[first : first + count]), alone[first : first + count])


@needs_kernels
def test_an_encoder_promises_no_bits_that_torch_computes(tmp_path: Path) -> None:
    heads = write_encoder(tmp_path / "heads", "BertModel", hidden_size=36)
    assert not load(heads).contract.keeps_rows, "heads of 18 are torch's"
    for architecture in ("BertModel", "ModernBertModel", "Qwen3Model"):
        folder = write_encoder(tmp_path / architecture, architecture)
        for level in ("none", "generic"):
            with compiled.using_level(level):
                assert not load(folder).contract.keeps_rows, (architecture, level)
