"""The smallest ONNX model that does something, for tests of what is around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper


def identity(path: Path, *, secret: str | None = None) -> Path:
    """y = x + w; with ``secret``, w lies in that file."""
    weight = numpy_helper.from_array(np.zeros(2, np.float32), "w")
    if secret is not None:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=secret)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [weight],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(proto.SerializeToString())
    return path
