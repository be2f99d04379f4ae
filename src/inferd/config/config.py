"""The whole configuration: its sections, which each room gets by themselves."""

from __future__ import annotations

from inferd.config.model import ModelConfig
from inferd.config.section import Section
from inferd.config.server import CacheConfig, ServerConfig, StateConfig, TenantConfig


class Config(Section, frozen=True, kw_only=True):
    """Everything ``inferd serve`` can be told."""

    server: ServerConfig = ServerConfig()
    state: StateConfig = StateConfig()
    cache: CacheConfig = CacheConfig()
    tenants: dict[str, TenantConfig] = {}
    models: dict[str, ModelConfig] = {}
