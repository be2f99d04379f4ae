"""The fingerprint of a served version: a digest of everything that decides its answers, equal for equal answers.

It covers the content of the model's files, the settings that change numbers, the kernels and the versions of the
libraries that compute. It does not cover where the files lie, how many replicas there are, queues or limits.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec

from inferd import __version__
from inferd.config import ModelConfig
from inferd.types import ModelInfo

_SETTINGS: Final = (
    *("runtime", "task", "options", "environment", "dtype", "quantization", "device", "max_model_len", "rope_factors"),
    *("attention", "chat_template", "use_generation_config", "seed", "threads", "batching", "sequence", "inputs"),
    *("outputs", "preprocess", "postprocess", "pipeline", "kv_cache", "speculation"),
)
"""Settings of a model that may change a number of its answers."""

_LIBRARIES: Final = ("torch", "onnxruntime", "scikit-learn", "xgboost", "lightgbm", "numpy", "tokenizers")


def fingerprint_of(info: ModelInfo | None, config: ModelConfig | None) -> str:
    """ "fp_" and 24 hexadecimal digits; empty: the files' content is not known, as of a remote server or a model of the
    hub that was not loaded yet."""
    if info is None or config is None or not info.artifact or config.remotes:
        return ""
    settings = {name: getattr(config, name) for name in _SETTINGS}
    parts = [
        *(__version__, *_libraries(), info.artifact, info.kind, info.platform, info.architecture, info.dtype),
        *(info.quantization, info.attention, info.kernels, info.num_threads, info.max_model_len),
        info.fingerprint if info.kind == "generate" else "",  # that of a prediction names the file's place
        *(info.temperature, info.top_p),
    ]
    data = msgspec.json.encode([parts, settings], order="sorted", enc_hook=str)
    return "fp_" + hashlib.blake2b(data, digest_size=12).hexdigest()


def is_batch_invariant(info: ModelInfo, config: ModelConfig) -> bool:
    """Whether an answer never depends on the requests that are computed together with it, so that equal fingerprints
    mean equal bits. False: it is not known for certain; the last digits of numbers may differ."""
    is_alone = info.kind == "predict" and (config.batching.mode == "off" or info.max_batch_size <= 1)
    return info.keeps_rows or is_alone


@functools.cache
def _libraries() -> tuple[str, ...]:
    return tuple(f"{name} {_version(name)}" for name in _LIBRARIES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
