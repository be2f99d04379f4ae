"""Opens the response cache that ``cache.url`` names: memory, or a Redis server."""

from __future__ import annotations

from inferd.cache.memory import MemoryCache
from inferd.cache.port import ResponseCache
from inferd.config import CacheConfig
from inferd.errors import ConfigError
from inferd.events import Emit, ignore


def open_cache(config: CacheConfig, emit: Emit = ignore) -> ResponseCache:
    """The cache for ``cache.url``, or memory without one. Connects at the first request.

    ``emit`` gets an event for each failure of a server: ``CacheLooked`` with the result ``error`` and no model.

    Raises:
        ConfigError: the package for Redis is missing, or the URL is not valid.
    """
    if config.url is None:
        return MemoryCache(config)
    try:
        from inferd.cache.redis import RedisCache
    except ImportError as error:
        raise ConfigError(
            f"cache.url names a Redis server, and the package {error.name!r} is not installed; "
            "install it with: pip install 'inferd[redis]'.",
            param="cache.url",
        ) from None
    try:
        return RedisCache(config, emit)
    except ValueError as error:  # the URL is not repeated: it may hold a password
        raise ConfigError(
            "cache.url is not the URL of a Redis server, such as redis://host:6379/0.", param="cache.url"
        ) from error
