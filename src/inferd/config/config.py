"""The whole configuration: its sections, each of which is given to its own room."""

from __future__ import annotations

from inferd.config.model import ModelConfig
from inferd.config.section import Section
from inferd.config.server import CacheConfig, ServerConfig, StateConfig, TenantConfig


class Config(Section, frozen=True, kw_only=True):
    """All settings of ``inferd serve``."""

    server: ServerConfig = ServerConfig()
    state: StateConfig = StateConfig()
    cache: CacheConfig = CacheConfig()
    tenants: dict[str, TenantConfig] = {}
    models: dict[str, ModelConfig] = {}
