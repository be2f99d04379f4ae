"""Loading a predictive model: what is tried before the first request, and what the model's info says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.predict.runtimes.programs import Scores, export
from tests.predict.small_onnx import identity

from inferd.config import BatchingConfig, ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.backend import PredictBackend
from inferd.predict.load import create_backend, load_runtime
from inferd.predict.probe import MOST_ROWS
from inferd.registry.artifact import artifact_of
from inferd.registry.source import silent

CLASS = """
from typing import Annotated
import numpy as np
from numpy.typing import NDArray

class Doubles:
    max_batch_size = 8

    def predict(self, x: Annotated[NDArray[np.float32], (-1, 2)]) -> Annotated[NDArray[np.float32], (-1, 2)]:
        return 2 * x
"""


def loaded(path: Path | str, **batching: Any) -> tuple[PredictBackend, list[tuple[int, int]]]:
    """The loaded model, and what was told of its trial."""
    told: list[tuple[int, int]] = []

    def tell(phase: str, done: int, total: int) -> None:
        if phase == "warm-up":
            told.append((done, total))

    config = ModelConfig(source=str(path), threads=1, allow_code=True, batching=BatchingConfig(**batching))
    return create_backend("m", config, tell), told


def test_a_model_is_tried_where_its_requests_are_computed_together(tmp_path: Path) -> None:
    path = identity(tmp_path / "m.onnx")
    backend, told = loaded(path)
    assert told == [(0, 1), (1, 1)]
    assert set(backend.info.load_s) == {"runtime", "warm_up"}
    assert all(0 <= seconds < 60 for seconds in backend.info.load_s.values())
    assert loaded(path, mode="off")[1] == []


def test_the_first_batches_have_the_times_of_the_trial_as_their_estimate(tmp_path: Path) -> None:
    path = identity(tmp_path / "m.onnx")
    assert 0 < loaded(path)[0]._batcher.cost.seconds(4) < 10
    assert loaded(path, mode="off")[0]._batcher.cost.seconds(4) == 0


def test_the_first_request_waits_for_no_import(tmp_path: Path) -> None:
    path = identity(tmp_path / "m.onnx")
    code = (
        "import sys; from inferd.config import ModelConfig; from inferd.predict.load import create_backend; "
        f"create_backend('m', ModelConfig(source={str(path)!r}, threads=1), lambda *_: None); "
        "assert 'inferd.predict.codecs.v2' in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_programs_of_users_are_not_tried(tmp_path: Path) -> None:
    """An example could do what a request does: write, send, count."""
    file = tmp_path / "doubles.py"
    file.write_text(CLASS)
    backend, told = loaded(f"{file}:Doubles")
    assert backend.info.max_batch_size == 8
    assert told == []


def test_the_rows_of_a_batch_are_those_that_are_named_else_those_that_pay(tmp_path: Path) -> None:
    path = identity(tmp_path / "m.onnx")
    assert loaded(path, max_batch_size=7)[0].info.max_batch_size == 7
    assert loaded(path)[0].info.max_batch_size in range(1, MOST_ROWS + 1)
    info = loaded(path, mode="off")[0].info
    assert (info.max_batch_size > 1, info.max_num_seqs) == (True, 1), "the rows of one request, and the requests"
    info = loaded(path, preferred_sizes=(2, 4 * MOST_ROWS))[0].info
    assert (info.max_batch_size, info.max_num_seqs) == (4 * MOST_ROWS, 4 * MOST_ROWS)


def test_a_preferred_size_that_the_artifact_does_not_compute_is_left_out(tmp_path: Path) -> None:
    path = export(Scores(), tmp_path / "m.pt2", torch.randn(2, 4))  # of at most 512 rows
    assert loaded(path, preferred_sizes=(512,))[0].info.max_batch_size == 512
    assert loaded(path, preferred_sizes=(513,))[0].info.max_batch_size <= MOST_ROWS


def test_a_model_s_fingerprint_is_that_of_its_file(tmp_path: Path) -> None:
    path = identity(tmp_path / "m.onnx")
    before = loaded(path)[0].info.fingerprint
    assert before.startswith("fp_")
    assert loaded(path)[0].info.fingerprint == before
    shutil.copy(path, tmp_path / "copy.onnx")
    assert loaded(tmp_path / "copy.onnx")[0].info.fingerprint != before
    path.write_bytes(path.read_bytes() + b"\x12\x01a")  # the producer, by another name
    assert loaded(path)[0].info.fingerprint != before


def test_a_model_that_writes_is_no_predictive_one() -> None:
    config = ModelConfig(source="demo")
    with pytest.raises(ModelLoadError, match="makes no predictions"):
        load_runtime("m", artifact_of(config), config, silent)
