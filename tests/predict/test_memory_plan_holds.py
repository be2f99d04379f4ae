"""One budget of memory: under a flood of large batches each replica stays within its plan, and none starves."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper
from tests.predict.encoder.tiny_encoders import write_encoder
from tests.predict.live import serving
from tests.tiers import THOROUGH

from inferd.cli.check import examine
from inferd.cli.running.control import find_server
from inferd.config.units import bytes_text
from inferd.gateway.control import ServerReport
from inferd.machine.torch_build import cuda_build_bytes

MORE = cuda_build_bytes()  # of each of the two models that torch computes
BUDGET = 1_300_000_000 + 2 * MORE
FRACTIONS = {
    name: part * 1000 // BUDGET / 1000
    for name, part in {"chat": 455_000_000 + MORE, "vectors": 455_000_000 + MORE, "pictures": 390_000_000}.items()
}
FLOODING = 20  # clients, whose requests together are more than the pictures' model may take

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is in /proc")


def convolution(path: Path) -> Path:
    """Pictures of 224 x 224 to a number: whose rows are large, and their layers larger."""
    weight = numpy_helper.from_array(np.ones((8, 3, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalMaxPool", ["c"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["y"]),
    ]
    nodes[-1].input.append("axes")
    axes = numpy_helper.from_array(np.array([1, 2, 3]), "axes")
    nodes[-1].attribute.append(helper.make_attribute("keepdims", 0))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 224, 224])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [weight, axes],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def peaks() -> dict[str, int]:
    """The most memory that each model's worker ever held, in bytes."""
    report = find_server(None, None, None, None).get("/admin/status", ServerReport)
    found = {}
    for model in report.models:
        text = Path(f"/proc/{model.replicas[0].pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("VmHWM:")]
        found[model.name] = int(line.split()[1]) * 1024
    return found


@THOROUGH  # tests/planning/test_model_plans.py compares the memory of one replica with its plan
def test_no_model_takes_more_than_the_plan_gives_it_and_none_starves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    sources = {
        "chat": "demo",
        "vectors": str(write_encoder(tmp_path / "vectors", "BertModel")),
        "pictures": str(convolution(tmp_path / "pictures.onnx")),
    }
    models: dict[str, dict[str, Any]] = {
        name: {"source": source, "memory_fraction": FRACTIONS[name], "threads": 1} for name, source in sources.items()
    }
    with serving(tmp_path, models, memory_bytes=BUDGET) as server:
        is_over = threading.Event()

        def post(path: str, **sent: Any) -> int:
            return httpx.post(server.url + path, timeout=120, **sent).status_code

        def pictures(_: int) -> list[int]:
            tensor = {"name": "x", "datatype": "FP32", "shape": [24, 3, 224, 224]}
            size = 24 * 3 * 224 * 224 * 4
            head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}).encode()
            headers = {
                "inference-header-content-length": str(len(head)),
                "content-type": "application/octet-stream",
            }
            return [post("/v2/models/pictures/infer", content=head + bytes(size), headers=headers)]

        def vectors(_: int) -> list[int]:
            texts = ["the cat is in the garden " * 4] * 800
            return [post("/v1/embeddings", json={"model": "vectors", "input": texts}) for _ in range(2)]

        def chat(_: int) -> list[int]:
            said: list[int] = []
            body = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 8}
            while not is_over.is_set() or not said:
                said.append(post("/v1/completions", json=body))
            return said

        with ThreadPoolExecutor(FLOODING + 6) as pool:
            chats = [pool.submit(chat, number) for number in range(2)]
            floods = [pool.submit(pictures, number) for number in range(FLOODING)]
            floods += [pool.submit(vectors, number) for number in range(4)]
            answered = [status for flood in floods for status in flood.result()]
            is_over.set()
            chatted = [status for one in chats for status in one.result()]
        assert set(answered) == {200}, "a flood waits, and is answered"
        assert set(chatted) == {200}
        assert len(chatted) > 5, "the chat went on meanwhile"
        held = peaks()
    for name, fraction in FRACTIONS.items():
        assert held[name] <= fraction * BUDGET, f"{name} held {held[name]}, its part is {fraction * BUDGET:.0f}"

    # One more does not fit, and the plan says what would be missing.
    more = {**models, "more": {"source": sources["pictures"], "memory_bytes": 300_000_000}}
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump({"server": {"memory_bytes": BUDGET}, "models": more}))
    (problem,) = examine(str(file), probe=False).problems
    assert f"is less than the {bytes_text(BUDGET + 300_000_000)} of the models that load at the start" in problem
