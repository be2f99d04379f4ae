"""Loading a predictive model: from its configuration to a backend that is ready. Recognise, load, probe, warm up."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import msgspec

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.machine import placement
from inferd.predict.backend import PredictBackend
from inferd.predict.batcher import Batcher, Limits
from inferd.predict.codecs.registry import codec_for
from inferd.predict.contract import Contract
from inferd.predict.estimate import BatchCost
from inferd.predict.limits import limits_for
from inferd.predict.probe import MOST_ROWS, probe
from inferd.predict.runtime import Runtime
from inferd.registry.artifact import Artifact, artifact_of
from inferd.registry.rows.verdict import CLAIM, Verdict
from inferd.registry.signature import onnx_state_rows
from inferd.types import MemoryPlan, ModelInfo

Progress = Callable[[str, int, int], None]
Load = Callable[[str, Path | str, ModelConfig, Progress], Runtime]

_RUNTIMES: Final[dict[str, str]] = {
    name: f"inferd.predict.runtimes.{name}"
    for name in ("onnx", "torch", "sklearn", "xgboost", "lightgbm", "encoder", "python", "triton_python", "pipeline")
}
_PROBED: Final = frozenset({"onnx", "torch", "sklearn", "xgboost", "lightgbm"})
"""Runtimes that compute a function of their inputs and nothing else: trying them changes nothing."""


def create_backend(name: str, config: ModelConfig, progress: Progress) -> PredictBackend:
    """Load the predictive model ``config.source`` names. Raises ModelLoadError with the remedy."""
    return load_predictor(name, artifact_of(config, progress), config, progress)


def load_predictor(name: str, artifact: Artifact, config: ModelConfig, progress: Progress) -> PredictBackend:
    """Load a model whose files have been recognised."""
    began = clock.now()
    runtime = load_runtime(name, artifact, config, progress)
    loaded = clock.now()
    contract, cost = runtime.contract, BatchCost()
    limits = limits_for(contract, config)
    if artifact.runtime in _PROBED and limits.mode != "off":
        progress("warm-up", 0, 1)
        limits = _tried(runtime, limits, cost, config)
        progress("warm-up", 1, 1)
    codec_for("v2")  # its import is long, and would delay the first request
    seconds = {"runtime": round(loaded - began, 4), "warm_up": round(clock.now() - loaded, 4)}
    info = model_info(name, config, artifact, contract, limits)
    info = msgspec.structs.replace(info, load_s=seconds)
    batcher = Batcher(limits, cost)
    return PredictBackend(
        *(runtime, batcher, info),
        max_rows=config.max_rows,
        audit=config.batching.audit,
        facts=config.drift.enabled,
    )


def _tried(runtime: Runtime, limits: Limits, cost: BatchCost, config: ModelConfig) -> Limits:
    """The limits, with the number of rows that pays when the configuration names none. The measured times go to
    ``cost``."""
    contract, wanted = runtime.contract, config.batching.max_batch_size
    most = wanted or min(contract.max_batch_size, MOST_ROWS)
    probed = probe(runtime, most, likely=limits.max_rows, memory_bytes=config.memory_bytes)
    if probed is None:
        return limits
    probed.teach(cost)
    if wanted is not None:
        return limits
    preferred = [size for size in limits.preferred if size <= contract.max_batch_size]
    return msgspec.structs.replace(limits, max_rows=max([probed.rows, *preferred]))


def import_runtime(runtime: str) -> None:
    """Import what a runtime needs, and no code of models. Raises ImportError."""
    if runtime in _RUNTIMES:
        importlib.import_module(_RUNTIMES[runtime])


def load_runtime(name: str, artifact: Artifact, config: ModelConfig, progress: Progress) -> Runtime:
    """The model itself, by its runtime's own file. Raises ModelLoadError."""
    place = _RUNTIMES.get(artifact.runtime)
    if place is None:
        raise ModelLoadError(f"The runtime {artifact.runtime!r} makes no predictions.", param="runtime")
    load = cast(Load, importlib.import_module(place).load)
    runtime = load(name, artifact.path, config, progress)
    if config.sequence.states:
        from inferd.predict.sequences import Sequences

        rows = _sequence_rows(artifact, runtime.contract, config)
        runtime = Sequences(name, runtime, config, rows=rows, is_tried=artifact.runtime in _PROBED)
    if config.inputs or config.outputs or config.sequence.controls:
        from inferd.predict.declared import declared

        runtime = declared(name, runtime, config)
    if config.preprocess or config.postprocess:
        from inferd.predict.pipelines.build import around

        return around(name, runtime, config)
    return runtime


def _sequence_rows(artifact: Artifact, contract: Contract, config: ModelConfig) -> Verdict:
    """Whether the rows of several sequences may be computed together."""
    if contract.because is not None:
        return Verdict(contract.because, is_open=True)
    if artifact.runtime == "onnx" and isinstance(artifact.path, Path):
        return onnx_state_rows(artifact.path, config.sequence.states)
    doubt = "the rows of its sequences may depend on each other"
    return Verdict(None, f"{doubt}; {CLAIM} declares that they do not", is_open=True)


def model_info(name: str, config: ModelConfig, artifact: Artifact, contract: Contract, limits: Limits) -> ModelInfo:
    has_rows = contract.max_batch_size > 0
    kernels = _kernels() if contract.platform == "inferd_encoder" else ""
    return ModelInfo(
        name=name,
        source=config.source,
        architecture=contract.platform,
        dtype=contract.dtype,
        max_model_len=contract.max_tokens,
        vocab_size=0,
        num_parameters=contract.num_parameters,
        num_blocks=0,
        block_size=0,
        max_num_seqs=1 if limits.mode == "off" else limits.max_rows,  # what there is more of waits in the worker
        fingerprint=_fingerprint(artifact),
        attention="none",
        memory=MemoryPlan(),
        kind="predict",
        platform=contract.platform,
        tasks=contract.tasks,
        inputs=contract.inputs,
        outputs=contract.outputs,
        max_batch_size=limits.max_rows if has_rows else 0,
        not_batched=contract.not_batched,
        is_stateful=contract.is_stateful,
        version=config.version,
        num_threads=contract.num_threads,
        is_decoupled=contract.is_decoupled,
        kernels=kernels,
        keeps_rows=contract.keeps_rows,
    )


def _kernels() -> str:
    """The instruction set of the compiled kernels. The encoder has imported them."""
    from inferd.native import compiled

    return compiled.level()


def num_threads(config: ModelConfig) -> int:
    """Compute threads of one replica."""
    return config.threads or placement.num_threads(config.num_local)


def _fingerprint(artifact: Artifact) -> str:
    """A digest of what decides the answers: the file's identity (name, size, first bytes), not every byte."""
    digest = hashlib.blake2b(digest_size=6)
    digest.update(f"{artifact.runtime}:{artifact.path}".encode())
    path = Path(artifact.path)
    if path.is_file():
        with path.open("rb") as file:
            digest.update(f"{path.stat().st_size}".encode() + file.read(65536))
    return "fp_" + digest.hexdigest()
