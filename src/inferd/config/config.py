"""The whole configuration: its sections, each of which is given to its own room."""

from __future__ import annotations

from inferd.config.devices import DevicesConfig
from inferd.config.model import ModelConfig
from inferd.config.payloads import PayloadsConfig
from inferd.config.section import Section
from inferd.config.server import (
    CacheConfig,
    JobsConfig,
    MetricsConfig,
    NodesConfig,
    ServerConfig,
    StateConfig,
    TenantConfig,
)
from inferd.config.tracing import TracingConfig
from inferd.config.versioning import MlflowConfig, RegistryConfig


class Config(Section, frozen=True, kw_only=True):
    """All settings of ``inferd serve``."""

    server: ServerConfig = ServerConfig()
    nodes: NodesConfig = NodesConfig()
    state: StateConfig = StateConfig()
    cache: CacheConfig = CacheConfig()
    jobs: JobsConfig = JobsConfig()
    devices: DevicesConfig = DevicesConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    payloads: PayloadsConfig = PayloadsConfig()
    registry: RegistryConfig = RegistryConfig()
    mlflow: MlflowConfig = MlflowConfig()
    tenants: dict[str, TenantConfig] = {}
    models: dict[str, ModelConfig] = {}
