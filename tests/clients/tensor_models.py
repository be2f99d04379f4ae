"""The models that Triton's own client examples ask for, and a few more, made in a moment and served for a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, helper

KEY_ID = re.compile(r"sk-inf-\S+")


def write_onnx(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[Any]]],
    outputs: Mapping[str, tuple[int, list[Any]]],
    constants: list[onnx.TensorProto] | None = None,
) -> None:
    """A model of a few nodes; inputs and outputs are their element type and shape."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        constants or [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))


def write_models(folder: Path) -> None:
    """``simple``, ``simple_string`` and ``simple_identity`` as in Triton's quick start; ``half``; ``scale`` in the
    versions 1 and 2, which multiply by their number."""
    node, row = helper.make_node, ["batch", 16]
    pair = [node("Add", ["a", "b"], ["sum"]), node("Sub", ["a", "b"], ["difference"])]
    plain = [
        node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    numbers, texts = (TensorProto.INT32, row), (TensorProto.STRING, row)
    two = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    write_onnx(folder / "simple" / "model.onnx", plain, dict.fromkeys(two[0], numbers), dict.fromkeys(two[1], numbers))
    write_onnx(
        folder / "simple_string" / "model.onnx",
        [
            node("Cast", ["INPUT0"], ["a"], to=TensorProto.INT32),
            node("Cast", ["INPUT1"], ["b"], to=TensorProto.INT32),
            *pair,
            node("Cast", ["sum"], ["OUTPUT0"], to=TensorProto.STRING),
            node("Cast", ["difference"], ["OUTPUT1"], to=TensorProto.STRING),
        ],
        dict.fromkeys(two[0], texts),
        dict.fromkeys(two[1], texts),
    )
    identity = [node("Identity", ["INPUT0"], ["OUTPUT0"])]
    write_onnx(folder / "simple_identity" / "model.onnx", identity, {"INPUT0": texts}, {"OUTPUT0": texts})
    half = (TensorProto.FLOAT16, ["batch", 4])
    write_onnx(folder / "half" / "model.onnx", identity, {"INPUT0": half}, {"OUTPUT0": half})
    for version in (1, 2):
        write_scale(folder / "scale", version)


def write_scale(folder: Path, version: int) -> None:
    """A version of a model that multiplies by its number."""
    write_onnx(
        folder / str(version) / "model.onnx",
        [helper.make_node("Mul", ["x", "by"], ["y"])],
        {"x": (TensorProto.FLOAT, ["batch", 3])},
        {"y": (TensorProto.FLOAT, ["batch", 3])},
        [helper.make_tensor("by", TensorProto.FLOAT, [1], [float(version)])],
    )


class Serving(NamedTuple):
    host: str  # and port
    key: str  # of an administrator


@contextlib.contextmanager
def serving(folder: Path, models: Mapping[str, object]) -> Iterator[Serving]:
    """``inferd serve`` with these models, one thread each, and a key for its administrator."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "server": {"port": 0, "grace_s": 5},
        "state": {"data_dir": str(folder / "state")},
        "models": {name: {"threads": 1, **model} for name, model in models.items()},  # type: ignore[dict-item]
    }
    (folder / "inferd.yaml").write_text(json.dumps(config))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(folder / "state")}
    made = subprocess.run(
        [sys.executable, "-m", "inferd", "keys", "create", "--tenant", "ops", "--scopes", "admin"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    key = KEY_ID.search(made.stdout + made.stderr)
    assert key is not None, made
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(folder / "inferd.yaml")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://(127\.0\.0\.1:\d+)", line):
                yield Serving(found[1], key[0])
                break
        else:
            raise AssertionError(said + (folder / "log").read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
