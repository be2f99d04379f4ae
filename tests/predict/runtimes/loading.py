"""Runtimes for tests: loaded from files by their own loaders, asked with plain arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inferd.config import ModelConfig
from inferd.errors import InferdError
from inferd.predict.contract import Tensors
from inferd.predict.load import load_runtime
from inferd.predict.runtime import Item, Result, Runtime
from inferd.registry.artifact import artifact_of
from inferd.registry.source import silent


def loaded(path: Path | str, **settings: Any) -> Runtime:
    """As a worker loads it. Raises ModelLoadError."""
    config = ModelConfig(source=str(path), **{"threads": 1, **settings})
    return load_runtime("m", artifact_of(config), config, silent)


Values = npt.NDArray[Any]
"""An array as numpy's own assertions take it."""


def item(inputs: Tensors, name: str = "r") -> Item:
    first = next(iter(inputs.values()))
    return Item(request_id=name, inputs=dict(inputs), rows=first.shape[0] if first.ndim else 1)


def answered(runtime: Runtime, inputs: Tensors) -> dict[str, Values]:
    """What the runtime says of one request. Raises what it refuses with."""
    one = item(inputs)
    runtime.prepare(one)
    (result,) = runtime.predict([one])
    if isinstance(result, InferdError):
        raise result
    assert isinstance(result, Result)
    return {name: np.asarray(array) for name, array in result.outputs.items()}


def texts(*values: bytes | str) -> Values:
    made = np.empty(len(values), dtype=np.object_)
    made[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return made
