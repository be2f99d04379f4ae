"""The configuration: file < environment < flags. No other room reads any of the three.

Start with ``config.py`` and ``model.py``: the sections. Each field carries its documentation and its limits, and the
page of settings, the JSON schema and the command line's flags are derived from them. ``load.py`` reads the three
sources, ``tree.py`` checks every field, and ``rules.py`` checks what must hold between settings. Each room is given its
own section; this room knows none of them, no socket and no model's files.
"""

from __future__ import annotations

from inferd.config.config import Config
from inferd.config.devices import DevicesConfig
from inferd.config.environment import stray_variables
from inferd.config.generation import (
    KVCacheConfig,
    ObjectivesConfig,
    ParallelConfig,
    RolesConfig,
    SchedulerConfig,
    SpeculationConfig,
    WatermarkConfig,
)
from inferd.config.load import load_config, model_name, single_model_config
from inferd.config.model import REMOTE_PREFIX, DType, ModelConfig, Runtime
from inferd.config.payloads import PayloadsConfig
from inferd.config.pipelines import PipelineConfig, StepConfig
from inferd.config.prediction import BatchingConfig, SequenceConfig, TensorConfig
from inferd.config.remote import RemoteConfig, RemoteSettings
from inferd.config.routing import (
    BreakerConfig,
    ModelCacheConfig,
    PlacementConfig,
    QueueConfig,
    RetryConfig,
    RoutingConfig,
    ScalingConfig,
)
from inferd.config.server import (
    AliasDialect,
    CacheConfig,
    MetricsConfig,
    NodesConfig,
    ServerConfig,
    ServerDevicesConfig,
    StateConfig,
    TenantConfig,
    TlsConfig,
)
from inferd.config.tracing import TracingConfig
from inferd.config.versioning import (
    DriftConfig,
    DriftStream,
    RolloutConfig,
    SignatureConfig,
    VerifyConfig,
    VersionsConfig,
)
from inferd.config.yaml_file import read_yaml

__all__ = [
    "REMOTE_PREFIX",
    "AliasDialect",
    "BatchingConfig",
    "BreakerConfig",
    "CacheConfig",
    "Config",
    "DType",
    "DevicesConfig",
    "DriftConfig",
    "DriftStream",
    "KVCacheConfig",
    "MetricsConfig",
    "ModelCacheConfig",
    "ModelConfig",
    "NodesConfig",
    "ObjectivesConfig",
    "ParallelConfig",
    "PayloadsConfig",
    "PipelineConfig",
    "PlacementConfig",
    "QueueConfig",
    "RemoteConfig",
    "RemoteSettings",
    "RetryConfig",
    "RolesConfig",
    "RolloutConfig",
    "RoutingConfig",
    "Runtime",
    "ScalingConfig",
    "SchedulerConfig",
    "SequenceConfig",
    "ServerConfig",
    "ServerDevicesConfig",
    "SignatureConfig",
    "SpeculationConfig",
    "StateConfig",
    "StepConfig",
    "TenantConfig",
    "TensorConfig",
    "TlsConfig",
    "TracingConfig",
    "VerifyConfig",
    "VersionsConfig",
    "WatermarkConfig",
    "load_config",
    "model_name",
    "read_yaml",
    "single_model_config",
    "stray_variables",
]
