"""What loading takes of several: a device, a kind of attention, the tokens that end answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from inferd.config import KVCacheConfig, ModelConfig
from inferd.engine import load
from inferd.errors import ModelLoadError
from inferd.native import compiled
from inferd.native.triton import switch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def attention(device: torch.device, asked: str = "auto", *, head_dim: int = 64, cache: str = "auto") -> str:
    config = ModelConfig(source="m", attention=asked, kv_cache=KVCacheConfig(dtype=cache))  # type: ignore[arg-type]
    decoder = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(head_dim=head_dim))
    return load._attention(config, cast(Any, decoder), device)


@pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")
def test_a_processor_takes_the_compiled_attention_where_it_computes_the_heads() -> None:
    assert [attention(CPU, head_dim=size) for size in (63, 64, 66, 258)] == [
        "reference",
        "native",
        "native",
        "reference",
    ]
    assert [attention(CPU, head_dim=size, cache="int8") for size in (64, 66)] == ["native", "reference"]


@pytest.mark.parametrize(("has_triton", "taken"), [(True, "triton"), (False, "reference")])
def test_a_gpu_takes_tritons_attention_where_triton_computes(
    has_triton: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "takes_device", lambda device: has_triton)
    assert attention(CUDA) == taken


def test_the_attention_that_is_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [attention(CPU, asked) for asked in ("reference", "native")] == ["reference", "native"]
    assert attention(CUDA, "reference") == "reference"
    with pytest.raises(ModelLoadError, match="'native', which computes on cpu only, but the device is cuda"):
        attention(CUDA, "native")
    monkeypatch.setattr(switch, "installed", lambda: False)
    with pytest.raises(ModelLoadError, match="Triton is not installed"):
        attention(CUDA, "triton")
    monkeypatch.setattr(switch, "installed", lambda: True)
    assert attention(CUDA, "triton") == "triton"


@pytest.mark.parametrize(
    ("count", "taken", "refused"),
    [
        (0, {"auto": "cpu", "cpu": "cpu"}, {"cuda": "has 0 CUDA", "cuda:0": "has 0 CUDA", "mps": "Use auto, cpu"}),
        (2, {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda:1"}, {"cuda:2": "has 2 CUDA", "x": "no device"}),
    ],
)  # fmt: skip
def test_a_device_that_is_there_is_taken_and_others_are_refused(
    count: int, taken: dict[str, str], refused: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert {wanted: str(load._device(wanted)) for wanted in taken} == taken
    for wanted, problem in refused.items():
        with pytest.raises(ModelLoadError, match=problem):
            load._device(wanted)


@pytest.mark.parametrize(("own", "ends"), [(None, {1, 2, 3}), (0, {0, 1, 2, 3}), (2, {1, 2, 3})])
def test_the_tokens_that_end_answers_are_those_of_all_files(own: int | None, ends: set[int]) -> None:
    checkpoint = SimpleNamespace(
        decoder=SimpleNamespace(config=SimpleNamespace(eos_token_ids=(2, 3))),
        tokenizer=SimpleNamespace(eos_token_id=own),
    )
    defaults = SimpleNamespace(eos_token_ids=(1,))
    assert load._eos_ids(cast(Any, checkpoint), cast(Any, defaults)) == ends
