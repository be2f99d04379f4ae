"""A running server whose model is a reference: it serves the registered files, follows promotions, and refuses files
that are not those that were registered."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
from onnx import TensorProto, helper
from tests.app.test_replaced_files import inferd
from tests.predict.live import serving
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}


def adding(path: Path, number: float) -> Path:
    """A model that adds a number."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "number"], ["y"])],
        "adding",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor("number", TensorProto.FLOAT, [1], [number])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    buffer = io.BytesIO()
    onnx.save_model(model, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def done(*words: str) -> None:
    code, shown = inferd("registry", *words)
    assert code == 0, shown


def promoted(folder: Path, number: int) -> Path:
    path = adding(folder / f"files-{number}" / "model.onnx", float(number))
    done("register", "adding", str(path))
    for action in ("validate", "approve", "promote"):
        done(action, f"adding@{number}")
    return path


def answer(client: httpx.Client) -> Any:
    found = client.post("/v2/models/m/infer", json={"inputs": [TENSOR]})
    assert found.status_code == 200, found.text
    return found.json()["outputs"][0]["data"]


@THOROUGH
def test_the_version_in_production_is_served_and_a_promotion_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = promoted(tmp_path, 1)
    with (
        serving(tmp_path, {"m": {"source": "registry:adding"}}, reload=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert answer(client) == [2.0, 3.0]
        # What is loaded is a copy: the registered files may go.
        adding(first, 9.0)
        assert answer(client) == [2.0, 3.0]
        second = promoted(tmp_path, 2)
        until_now(lambda: answer(client) == [3.0, 4.0], "the promoted version serves")
        # The way back is refused, as the files of version 1 are others now; the version that serves goes on.
        done("promote", "adding@1")
        log = tmp_path / "log"
        until_now(lambda: "tree-sha256" in log.read_text(), "the other files were refused")
        assert answer(client) == [3.0, 4.0]
        adding(first, 1.0)
        code, shown = inferd("reload")
        assert code == 0, shown
        until_now(lambda: answer(client) == [2.0, 3.0], "the version of before serves again")
        assert second.is_file()
