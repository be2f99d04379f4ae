"""The models that are measured, made here: only their shapes matter, so weights are random."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[np.float32]


class _Graph:
    """Nodes and weights, one after the other."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, [*inputs], [name], **attributes))
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        scale = (2.0 / max(1, int(np.prod(shape[1:])))) ** 0.5
        values: Array = (self._random.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def save(self, path: Path, shape: list[str | int], size: int) -> None:
        """With the last node's output as the model's: ``y``, so many numbers for each row of ``x``."""
        self.nodes[-1].output[0] = "y"
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", size])],
            self.weights,
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_mlp(path: Path) -> None:
    """64 -> 100 -> 10, as scikit-learn's MLPClassifier on its digits."""
    graph = _Graph(0)
    hidden = graph.node("Relu", graph.node("MatMul", "x", graph.weight(64, 100)))
    graph.node("Softmax", graph.node("MatMul", hidden, graph.weight(100, 10)), axis=-1)
    graph.save(path, ["n", 64], 10)


def write_wide_mlp(path: Path) -> None:
    """64 -> 3,500 -> 3,500 -> 10: 50 MB that a batch reads once, however many rows it has."""
    graph = _Graph(2)
    hidden = graph.node("Relu", graph.node("MatMul", "x", graph.weight(64, 3500)))
    hidden = graph.node("Relu", graph.node("MatMul", hidden, graph.weight(3500, 3500)))
    graph.node("MatMul", hidden, graph.weight(3500, 10))
    graph.save(path, ["n", 64], 10)


def write_resnet18(path: Path) -> None:
    """He et al. 2015 (https://arxiv.org/abs/1512.03385), batch norm folded into the convolutions."""
    graph = _Graph(1)

    def conv(x: str, size: int, inputs: int, outputs: int, stride: int) -> str:
        pad = size // 2
        weights, bias = graph.weight(outputs, inputs, size, size), graph.weight(outputs)
        return graph.node("Conv", x, weights, bias, kernel_shape=[size] * 2, strides=[stride] * 2, pads=[pad] * 4)

    x = graph.node("Relu", conv("x", 7, 3, 64, 2))
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    width = 64
    for outputs in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and outputs != 64 else 1
            aside = conv(x, 1, width, outputs, stride) if stride == 2 else x
            y = graph.node("Relu", conv(x, 3, width, outputs, stride))
            x = graph.node("Relu", graph.node("Add", conv(y, 3, outputs, outputs, 1), aside))
            width = outputs
    flat = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    graph.node("Gemm", flat, graph.weight(512, 1000), graph.weight(1000))
    graph.save(path, ["n", 3, 224, 224], 1000)


MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}


def write_encoder(folder: Path, sizes: dict[str, int]) -> None:
    """A sentence encoder with random weights."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.BertModel(transformers.BertConfig(vocab_size=30522, **sizes)).save_pretrained(folder)
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3} | {f"word{i}": i + 4 for i in range(2000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def infer_body(path: Path, shape: list[int]) -> None:
    """A KServe v2 request in JSON, one row."""
    data = np.random.default_rng(2).random(int(np.prod(shape))).round(4).tolist()
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": data}
    path.write_text(json.dumps({"inputs": [tensor]}, separators=(",", ":")))


def binary_body(path: Path, shape: list[int]) -> int:
    """Likewise with the binary extension, both ways; the length of its JSON part."""
    values = np.random.default_rng(2).random(shape).astype("<f4").tobytes()
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": len(values)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}, separators=(",", ":")).encode()
    path.write_bytes(head + values)
    return len(head)


def grpc_body(path: Path, shape: list[int], model: str) -> None:
    """A ModelInferRequest as gRPC frames it, tensors raw."""
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.grpc._utils import _get_inference_request

    tensor = InferInput("x", shape, "FP32")
    tensor.set_data_from_numpy(np.random.default_rng(2).random(shape).astype(np.float32))
    request = _get_inference_request(
        inputs=[tensor],
        model_name=model,
        model_version="",
        request_id="",
        outputs=[InferRequestedOutput("y")],
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )
    data: bytes = request.SerializeToString()
    path.write_bytes(b"\0" + len(data).to_bytes(4, "big") + data)


def embedding_body(path: Path) -> None:
    """One text of 24 tokens, two of them special."""
    path.write_text(json.dumps({"model": "minilm", "input": " ".join(f"word{i}" for i in range(22))}))
