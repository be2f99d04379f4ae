"""The configuration: file < environment < flags. No other room reads any of the three.

Every field carries its own documentation and limits; ``docs/configuration.md``, the JSON schema and the command line's
flags are derived from these structs. Each room receives only its own section. One file per subject: ``model.py`` is one
model, made of the sections in ``generation.py``, ``prediction.py``, ``pipelines.py``, ``routing.py``, ``remote.py`` and
``versions.py``; ``server.py`` is everything else; ``load.py`` reads, and ``rules.py`` says what must hold between
settings.
"""

from __future__ import annotations

from inferd.config.config import Config
from inferd.config.environment import stray_variables
from inferd.config.generation import KVCacheConfig, SchedulerConfig, SpeculationConfig
from inferd.config.load import load_config, model_name, single_model_config
from inferd.config.model import REMOTE_PREFIX, DType, ModelConfig, Runtime
from inferd.config.pipelines import PipelineConfig, StepConfig
from inferd.config.prediction import BatchingConfig, SequenceConfig, TensorConfig
from inferd.config.remote import RemoteConfig, RemoteSettings
from inferd.config.routing import BreakerConfig, ModelCacheConfig, QueueConfig, RetryConfig, RoutingConfig
from inferd.config.server import CacheConfig, ServerConfig, StateConfig, TenantConfig, TlsConfig
from inferd.config.versioning import VersionsConfig
from inferd.config.yaml_file import read_yaml

__all__ = [
    "REMOTE_PREFIX",
    "BatchingConfig",
    "BreakerConfig",
    "CacheConfig",
    "Config",
    "DType",
    "KVCacheConfig",
    "ModelCacheConfig",
    "ModelConfig",
    "PipelineConfig",
    "QueueConfig",
    "RemoteConfig",
    "RemoteSettings",
    "RetryConfig",
    "RoutingConfig",
    "Runtime",
    "SchedulerConfig",
    "SequenceConfig",
    "ServerConfig",
    "SpeculationConfig",
    "StateConfig",
    "StepConfig",
    "TenantConfig",
    "TensorConfig",
    "TlsConfig",
    "VersionsConfig",
    "load_config",
    "model_name",
    "read_yaml",
    "single_model_config",
    "stray_variables",
]
