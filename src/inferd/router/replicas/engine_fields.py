"""The settings of a model whose change needs another worker. The other settings change while the worker runs."""

from __future__ import annotations

from operator import attrgetter

from inferd.config import ModelConfig

ENGINE_FIELDS = (
    "source",
    "runtime",
    "task",
    "allow_code",
    "allow_pickle",
    "options",
    "version",
    "batching",
    "sequence",
    "inputs",
    "outputs",
    "preprocess",
    "postprocess",
    "pipeline",
    "dtype",
    "device",
    "max_model_len",
    "threads",
    "attention",
    "adapter_memory_bytes",
    "chat_template",
    "use_generation_config",
    "seed",
    "hang_timeout_s",
    "load_timeout_s",
    "memory_bytes",
    "priority",
    "scheduler",
    "kv_cache",
    "parallel",
    "speculation",
    "watermark",
    "objectives.tpot_ms",
    "quantization",
    "quantization_cache_bytes",
    "environment",
    "max_rows",
    "rope_factors",
    "drift.enabled",
    "verify",
)
"""Settings that a worker acts on, which it gets once, when it loads."""


_settings = attrgetter(*ENGINE_FIELDS)


def is_same_engine(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether a worker that was started with one configuration can serve the other."""
    return _settings(one) == _settings(other)
