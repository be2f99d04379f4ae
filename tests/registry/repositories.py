"""Model repositories as people keep them for Triton, made here."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

SIMPLE = """
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] label_filename: "labels.txt" } ]
output { name: "OUTPUT1" data_type: TYPE_INT32 dims: 16 }
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
instance_group [ { count: 2 kind: KIND_CPU } ]
model_warmup [ { name: "w" } ]
"""
TRIPLE = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 16 }
output { name: "OUT" data_type: TYPE_FP32 dims: 16 }
parameters { key: "FACTOR" value { string_value: "3" } }
dynamic_batching { }
"""
TRIPLE_CODE = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.factor = int(config["parameters"]["FACTOR"]["string_value"])
        declared = pb_utils.get_output_config_by_name(config, "OUT")
        self.dtype = pb_utils.triton_string_to_numpy(declared["data_type"])
        self.sizes = []

    def execute(self, requests):
        self.sizes.append(len(requests))
        answers = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if (rows < 0).any():
                error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                answers.append(pb_utils.InferenceResponse([], error))
            else:
                out = pb_utils.Tensor("OUT", (rows * self.factor).astype(self.dtype))
                answers.append(pb_utils.InferenceResponse([out]))
        return answers
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "A" data_type: TYPE_INT32 dims: [16] }, { name: "B" data_type: TYPE_INT32 dims: [16] } ]
output [ { name: "TRIPLED" data_type: TYPE_FP32 dims: [16] } ]
ensemble_scheduling { step [
  { model_name: "simple" model_version: -1 input_map { key: "INPUT0" value: "A" } input_map { key: "INPUT1" value: "B" }
    output_map { key: "OUTPUT0" value: "sum" } },
  { model_name: "triple" model_version: -1 input_map { key: "IN" value: "sum" }
    output_map { key: "OUT" value: "TRIPLED" } } ] }
"""


def simple_model(path: Path) -> Path:
    """Sum and difference of two inputs, as in Triton's own examples."""

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.INT32, ["rows", 16])

    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    inputs, outputs = [value("INPUT0"), value("INPUT1")], [value("OUTPUT0"), value("OUTPUT1")]
    graph = helper.make_graph(nodes, "simple", inputs, outputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def repository(folder: Path) -> Path:
    """An ONNX model, a Python one, and an ensemble of both."""
    simple_model(folder / "simple/1/model.onnx")
    labels = "\n".join(f"class{place}" for place in range(16))
    (folder / "both/1").mkdir(parents=True)
    return write(
        folder,
        {
            "simple/config.pbtxt": SIMPLE,
            "simple/labels.txt": labels,
            "triple/config.pbtxt": TRIPLE,
            "triple/1/model.py": TRIPLE_CODE,
            "both/config.pbtxt": ENSEMBLE,
        },
    )
