"""Norms and gates in Triton against their torch forms, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no package for this machine")

from inferd.native import compiled, ops
from inferd.native.triton import rows, switch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in sigmoids that are 0


@pytest.fixture(autouse=True)
def _plain_otherwise() -> Iterator[None]:
    with compiled.using_level("none"):
        yield


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=TOLERANCE[b.dtype], atol=TOLERANCE[b.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 96, 300])
def test_norms_equal_their_torch_forms(dtype: torch.dtype, columns: int) -> None:
    x, residual = noise(3, columns, dtype=dtype), noise(3, columns, dtype=dtype, seed=1)
    weight = noise(columns, dtype=torch.float32, seed=2)
    assert_close(rows.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
    for a, b in zip(
        rows.add_rms_norm(x, residual, weight, 1e-5), ops.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert_close(a, b)


def test_a_norm_takes_heads_that_lie_apart() -> None:
    x = noise(2, 200, dtype=torch.float32)[:, 30:126].view(2, 4, 24)
    weight = noise(24, dtype=torch.float32, seed=2)
    assert_close(rows.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_equal_their_torch_forms(dtype: torch.dtype, activation: str) -> None:
    for columns in (7, 1030):
        x = noise(2, 2 * columns, dtype=dtype) * 3
        assert_close(rows.gate_and_mul(x, activation), ops.gate_and_mul(x, activation))


def test_operations_go_to_triton_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def watch(name: str) -> None:
        whole: Callable[..., object] = getattr(rows, name)

        def watched(*given: object) -> object:
            called.append(name)
            return whole(*given)

        monkeypatch.setattr(rows, name, watched)

    for name in ("rms_norm", "add_rms_norm", "gate_and_mul"):
        watch(name)
    x, weight = noise(2, 8, dtype=torch.float32), torch.ones(8)

    def compute() -> None:
        ops.rms_norm(x, weight, 1e-5)
        ops.add_rms_norm(x, x, weight, 1e-5)
        ops.gate_and_mul(x, "silu")

    compute()
    assert called == []
    with switch.on_cpu():
        compute()
    assert called == ["rms_norm", "add_rms_norm", "gate_and_mul"]
