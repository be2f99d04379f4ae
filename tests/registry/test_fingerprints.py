"""The fingerprint of a version: other numbers have another one, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes import info

from inferd.config import ModelConfig
from inferd.config.generation import KVCacheConfig
from inferd.config.prediction import BatchingConfig, TensorConfig
from inferd.config.routing import QueueConfig
from inferd.registry.fingerprint import fingerprint_of, is_batch_invariant
from inferd.types import ModelInfo

CONFIG = ModelConfig(source="./a")
INFO = msgspec.structs.replace(info("m"), artifact="0123456789ab", fingerprint="fp_of_the_place", keeps_rows=True)
PREDICTS = msgspec.structs.replace(
    INFO, kind="predict", platform="onnxruntime_onnx", max_batch_size=8, keeps_rows=False
)


def of(info: ModelInfo = INFO, **settings: Any) -> str:
    return fingerprint_of(info, msgspec.structs.replace(CONFIG, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "./b"},
        {"replicas": 3},
        {"queue": QueueConfig(max_requests=3)},
        {"load": "on_demand"},
        {"version": "7"},
        {"drain_s": 3.0},
    ],
)
def test_places_copies_and_limits_change_no_answer(settings: dict[str, Any]) -> None:
    assert of(**settings) == of()
    assert of().startswith("fp_")


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"chat_template": Path("x.jinja")},
        {"options": {"a": 1}},
        {"kv_cache": KVCacheConfig(dtype="int8")},
        {"batching": BatchingConfig(mode="off")},
        {"outputs": (TensorConfig(name="y", datatype="FP32", shape=(1,)),)},
        {"threads": 2},
        {"seed": 4},
    ],
)
def test_settings_of_numbers_change_it(settings: dict[str, Any]) -> None:
    assert of(**settings) != of()


@pytest.mark.parametrize(
    "changes",
    [{"artifact": "ffff"}, {"dtype": "float16"}, {"kernels": "avx512"}, {"temperature": 0.5}, {"num_threads": 9}],
)
def test_files_and_kernels_change_it(changes: dict[str, Any]) -> None:
    assert of(msgspec.structs.replace(INFO, **changes)) != of()


def test_the_place_of_a_prediction_is_no_part_of_it_and_the_engines_settings_are() -> None:
    elsewhere = {"fingerprint": "fp_of_another_place"}
    assert of(msgspec.structs.replace(PREDICTS, **elsewhere)) == of(PREDICTS)
    assert of(msgspec.structs.replace(INFO, **elsewhere)) != of()


def test_files_that_are_not_known_have_none() -> None:
    assert (
        of(msgspec.structs.replace(INFO, artifact=""))
        == fingerprint_of(None, CONFIG)
        == fingerprint_of(INFO, None)
        == ""
    )


def test_answers_depend_on_the_batch_unless_the_kernels_or_the_settings_exclude_it() -> None:
    off = msgspec.structs.replace(CONFIG, batching=BatchingConfig(mode="off"))
    assert is_batch_invariant(INFO, CONFIG)
    by_torch = msgspec.structs.replace(INFO, keeps_rows=False)
    assert not is_batch_invariant(by_torch, CONFIG)
    assert not is_batch_invariant(by_torch, off)
    assert not is_batch_invariant(PREDICTS, CONFIG)
    assert is_batch_invariant(PREDICTS, off)
    assert is_batch_invariant(msgspec.structs.replace(PREDICTS, max_batch_size=0), CONFIG)
