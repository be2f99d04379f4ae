"""The trial at load: texts and integers differ from row to row, a third row is there, and every order is tried."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from inferd.predict.contract import Array, Contract, Tensors
from inferd.predict.runtimes.trial import try_rows
from inferd.types import TensorSpec


def contract(datatype: str) -> Contract:
    rows = (TensorSpec("y", "FP64", (-1, 1)),)
    return Contract(inputs=(TensorSpec("x", datatype, (-1, 1)),), outputs=rows, max_batch_size=8, because="declared")


def is_batchable(datatype: str, compute: Callable[[Array], Array]) -> bool:
    def answered(inputs: Tensors) -> dict[str, Array]:
        return {"y": np.asarray(compute(inputs["x"]), np.float64).reshape(-1, 1)}

    trial = try_rows(contract(datatype), answered, ())
    assert trial is not None
    assert trial.is_batchable == (not trial.reason)
    return trial.is_batchable


def texts(x: Array) -> list[bytes]:
    return [bytes(text) for text in x[:, 0]]


DEPENDENT: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "how many different texts there are": ("BYTES", lambda x: np.full(len(x), len(set(texts(x))))),
    "the text before": ("BYTES", lambda x: np.array([len(text) for text in (texts(x)[0], *texts(x)[:-1])])),
    "the length of the longest text": ("BYTES", lambda x: np.full(len(x), max(map(len, texts(x))))),
    "how many different integers there are": ("INT64", lambda x: np.full(len(x), len(np.unique(x)))),
    "bytes less their mean": ("UINT8", lambda x: x[:, 0] - x.mean()),
    "the row before the last one": ("FP32", lambda x: x[:, 0] + (x[-3, 0] if len(x) > 2 else 0)),
    "a smaller row behind a larger one behind a smaller one": (
        "FP32",
        lambda x: x[:, 0] + (len(x) == 3 and x[0, 0] < x[1, 0] > x[2, 0]),
    ),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_each_other_are_seen(name: str) -> None:
    assert not is_batchable(*DEPENDENT[name])


@pytest.mark.parametrize("datatype", ["BYTES", "INT64", "UINT8", "FP32"])
def test_rows_of_their_own_are_left_to_their_reason(datatype: str) -> None:
    is_text = datatype == "BYTES"
    assert is_batchable(
        datatype, lambda x: np.array(list(map(len, texts(x)))) if is_text else np.multiply(x[:, 0], 2.0)
    )
