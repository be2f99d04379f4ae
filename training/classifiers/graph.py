"""Small ONNX graphs, node by node, so that a file says nothing but its model.

Knows ``onnx``; does not know what is learnt. The last node is a LinearClassifier, which carries the classes' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Floats = npt.NDArray[np.float32]
_OPSETS = (("", 17), ("ai.onnx.ml", 3))
_TEXT_OPSETS = (*_OPSETS, ("com.microsoft", 1))  # onnxruntime's Tokenizer
TOKENS = "[a-z0-9']+"


def perceptron(hidden: tuple[Floats, Floats], last: tuple[Floats, Floats], labels: Sequence[str], about: str) -> bytes:
    """``pixels`` [rows, n] -> one hidden layer of rectifiers -> ``label`` [rows], ``probabilities`` [rows, k].

    ``hidden`` and ``last`` are weights [inputs, outputs] and biases.
    """
    weights, biases = hidden
    nodes = [
        helper.make_node("Gemm", ["pixels", "hidden.weight", "hidden.bias"], ["summed"]),
        helper.make_node("Relu", ["summed"], ["hidden"]),
        _classifier("hidden", last, labels),
    ]
    tensors = [
        numpy_helper.from_array(weights.astype(np.float32), "hidden.weight"),
        numpy_helper.from_array(biases.astype(np.float32), "hidden.bias"),
    ]
    taken = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["rows", weights.shape[0]])
    return _written("digits", nodes, taken, len(labels), tensors, _OPSETS, about)


def bag_of_words(
    vocabulary: Sequence[tuple[str, ...]],
    weights: Floats,
    last: tuple[Floats, Floats],
    labels: Sequence[str],
    about: str,
) -> bytes:
    """``text`` [rows] in lower case -> words and pairs of words, weighted, each row of length one -> the classes.

    ``vocabulary`` holds the single words first; ``weights`` [n] are the inverse document frequencies.
    """
    num_words = sum(len(entry) == 1 for entry in vocabulary)
    nodes = [
        helper.make_node(
            "Tokenizer",
            ["text"],
            ["tokens"],
            domain="com.microsoft",
            mark=0,
            pad_value="#",
            mincharnum=1,
            tokenexp=TOKENS,
        ),
        helper.make_node(
            "TfIdfVectorizer",
            ["tokens"],
            ["counts"],
            mode="TFIDF",
            min_gram_length=1,
            max_gram_length=2,
            max_skip_count=0,
            ngram_counts=[0, num_words],
            ngram_indexes=list(range(len(vocabulary))),
            pool_strings=[word for entry in vocabulary for word in entry],
            weights=weights.tolist(),
        ),
        helper.make_node("LpNormalization", ["counts"], ["features"], axis=1, p=2),
        _classifier("features", last, labels),
    ]
    taken = helper.make_tensor_value_info("text", TensorProto.STRING, ["rows"])
    return _written("intents", nodes, taken, len(labels), [], _TEXT_OPSETS, about)


def _classifier(source: str, last: tuple[Floats, Floats], labels: Sequence[str]) -> onnx.NodeProto:
    weights, biases = last
    return helper.make_node(
        "LinearClassifier",
        [source],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        classlabels_strings=list(labels),
        coefficients=weights.T.astype(np.float32).ravel().tolist(),
        intercepts=biases.astype(np.float32).tolist(),
        multi_class=0,
        post_transform="SOFTMAX",
    )


def _written(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    taken: onnx.ValueInfoProto,
    num_classes: int,
    tensors: Sequence[onnx.TensorProto],
    opsets: Sequence[tuple[str, int]],
    about: str,
) -> bytes:
    given = [
        helper.make_tensor_value_info("label", TensorProto.STRING, ["rows"]),
        helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", num_classes]),
    ]
    graph = helper.make_graph(list(nodes), name, [taken], given, list(tensors))
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets],
        ir_version=9,
        producer_name="inferd",
        doc_string=about,
    )
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def save(content: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{path}: {len(content):,} bytes")
