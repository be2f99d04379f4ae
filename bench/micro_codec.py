"""What reading and writing a KServe v2 request costs the worker: microseconds for each, the best of many rounds.

python bench/micro_codec.py                  64 numbers in, 10 out
python bench/micro_codec.py --size 150528    a picture
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable

import numpy as np

from inferd.predict.codecs.v2 import V2Codec
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, PredictRequest, TensorSpec

ROUNDS = 60


def microseconds(work: Callable[[], object], number: int) -> float:
    return min(timeit.repeat(work, number=number, repeat=ROUNDS)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="numbers of the input")
    parser.add_argument("--outputs", type=int, default=10, help="numbers of the output")
    options = parser.parse_args()
    codec, random = V2Codec(), np.random.default_rng(0)
    contract = Contract(
        inputs=(TensorSpec("x", "FP32", (-1, options.size)),),
        outputs=(TensorSpec("y", "FP32", (-1, options.outputs)),),
        max_batch_size=64,
    )
    info = ModelInfo(
        name="m",
        source="m",
        architecture="",
        dtype="float32",
        max_model_len=0,
        vocab_size=0,
        num_parameters=0,
        num_blocks=0,
        block_size=0,
        max_num_seqs=0,
        kind="predict",
        inputs=contract.inputs,
        outputs=contract.outputs,
        max_batch_size=64,
    )
    numbers = random.normal(size=(1, options.size)).astype(np.float32)
    result = Result(outputs={"y": random.normal(size=(1, options.outputs)).astype(np.float32)})
    tensor = {"name": "x", "shape": [1, options.size], "datatype": "FP32"}
    head = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": numbers.nbytes}}],
        "parameters": {"binary_data_output": True},
    }
    binary = json.dumps(head).encode()
    requests = {
        "JSON, 4 digits": (
            json.dumps(
                {"inputs": [{**tensor, "data": [round(value, 4) for value in numbers.ravel().tolist()]}]}
            ).encode(),
            -1,
        ),
        "JSON, all digits": (json.dumps({"inputs": [{**tensor, "data": numbers.ravel().tolist()}]}).encode(), -1),
        "JSON, nested": (json.dumps({"inputs": [{**tensor, "data": numbers.tolist()}]}).encode(), -1),
        "binary": (binary + numbers.tobytes(), len(binary)),
    }
    number = max(1, 100_000 // options.size)
    print(f"{options.size} numbers in, {options.outputs} out; microseconds\n{'':20}{'read':>10}{'write':>10}")
    for name, (body, header_bytes) in requests.items():
        request = PredictRequest(id="r", model="m", dialect="v2", body=body, header_bytes=header_bytes)
        question = codec.decode(request, contract)
        read = microseconds(lambda: codec.decode(request, contract), number)  # noqa: B023
        write = microseconds(lambda: codec.encode(request, question, result, info), number)  # noqa: B023
        print(f"{name:20}{read:10.2f}{write:10.2f}")


if __name__ == "__main__":
    main()
