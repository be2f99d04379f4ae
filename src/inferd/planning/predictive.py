"""The memory of a predictive model, and its inputs and outputs, from its files alone.

The size of the weights is read from the file's own tables, or is the file's size. The memory of a batch is an upper
estimate, because the layers of a model are not known before it is loaded. No model is opened, and no runtime's library
is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from inferd.checkpoints.safetensors import read_table, weight_files
from inferd.config import BatchingConfig, ModelConfig, Runtime
from inferd.machine.torch_build import cuda_build_bytes
from inferd.predict.encoder.checkpoint import read_checkpoint, read_options
from inferd.registry.artifact import Artifact, artifact_of
from inferd.registry.signature import Signature, read_signature
from inferd.types import TensorSpec

_WORKER_BYTES: Final[Mapping[Runtime, int]] = {
    "onnx": 80_000_000, "torch": 360_000_000, "sklearn": 170_000_000, "xgboost": 170_000_000, "lightgbm": 150_000_000,
    "encoder": 300_000_000, "python": 60_000_000, "pipeline": 90_000_000,
}  # fmt: skip
"""Resident memory of a worker with its library and a model of no size, measured on Linux with torch's CPU build."""

_TORCH_RUNTIMES: Final = ("torch", "encoder")

_LAYERS: Final = 16  # arrays of an input's size that a model holds at once, at most as a rule
_COPIES: Final = 3  # of an output: the model's, each request's part, its answer
_BATCH_BYTES: Final = 4 << 20  # of inputs, which a batch reaches before its rows are bounded by time
_ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "BF16": 2, "FP64": 8, "INT64": 8, "UINT64": 8,
    "BYTES": 64,
}  # fmt: skip
_TYPICAL_SIZE: Final = 128  # of a dimension of any size
_MOST_ROWS: Final = 256


class Predictive(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a predictive model, before it is loaded. Sizes in bytes."""

    weights_bytes: int
    headroom_bytes: int  # the process itself and a batch
    signature: Signature | None  # None: known when it is loaded
    rope_factors: str = ""  # a sentence, where LongRoPE's are chosen from


def plan_predictive(artifact: Artifact, config: ModelConfig) -> Predictive:
    """Raises ModelLoadError when the model's files are at fault."""
    if artifact.runtime == "pipeline":
        return _pipeline(config)
    rope_factors = ""
    if artifact.runtime == "encoder":
        # What the loader refuses is refused here, in the same words.
        checkpoint = read_checkpoint(
            Path(artifact.path),
            task=config.task,
            max_tokens=config.max_model_len,
            rope_factors=config.rope_factors,
            options=read_options(config.options),
        )
        rope_factors = checkpoint.rope_factors
    signature = read_signature(artifact)
    worker = worker_bytes(artifact.runtime)
    batch = _batch_bytes(signature, config.batching) if signature is not None else 0
    return Predictive(
        weights_bytes=_weights_bytes(artifact, signature, config),
        headroom_bytes=worker + batch,
        signature=signature,
        rope_factors=rope_factors,
    )


def worker_bytes(runtime: Runtime) -> int:
    """Resident memory of a worker with its library and a model of no size."""
    return _WORKER_BYTES.get(runtime, _WORKER_BYTES["python"]) + (
        cuda_build_bytes() if runtime in _TORCH_RUNTIMES else 0
    )


def _pipeline(config: ModelConfig) -> Predictive:
    """Its models share one process."""
    parts = []
    for settings in config.pipeline.models.values():
        part = msgspec.convert(settings, ModelConfig)
        artifact = artifact_of(part)
        if artifact.kind == "predict":
            parts.append((plan_predictive(artifact, part), worker_bytes(artifact.runtime)))
    own = worker_bytes("pipeline")
    return Predictive(
        weights_bytes=sum(plan.weights_bytes for plan, _ in parts),
        headroom_bytes=max([own, *(worker for _, worker in parts)]) + sum(plan.headroom_bytes - w for plan, w in parts),
        signature=None,
    )


def _weights_bytes(artifact: Artifact, signature: Signature | None, config: ModelConfig) -> int:
    if signature is not None:
        return signature.weights_bytes
    path = artifact.path
    if not isinstance(path, Path):
        return 0
    if artifact.runtime == "encoder":
        itemsize = 2 if config.dtype in ("bfloat16", "float16") else 4
        return sum(spec.count for file in weight_files(path) for spec in read_table(file).values()) * itemsize
    return path.stat().st_size if path.is_file() else 0


def _batch_bytes(signature: Signature, batching: BatchingConfig) -> int:
    able = signature.max_batch_size(batching.max_batch_size)
    has_rows = able > 0
    given = sum(_row_bytes(spec, has_rows=has_rows) for spec in signature.inputs)
    one = given * _LAYERS + sum(_row_bytes(spec, has_rows=has_rows) for spec in signature.outputs) * _COPIES
    rows = 1
    if has_rows:
        typical = min(max(_BATCH_BYTES // max(given, 1), 4), _MOST_ROWS)
        rows = batching.max_batch_size or min(typical, able)
    return rows * one


def _row_bytes(spec: TensorSpec, *, has_rows: bool) -> int:
    sizes = [_TYPICAL_SIZE if size == -1 else size for size in (spec.shape[1:] if has_rows else spec.shape)]
    return math.prod(sizes) * _ITEM_BYTES.get(spec.datatype, 4)
