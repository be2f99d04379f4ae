"""The settings in which gateways of one group must agree, a digest of each. Pure.

A setting is named by its path: ``models.chat.source``, ``tenants.acme.rpm``, ``server.max_body_bytes``. Only settings
that differ from their defaults are in the result. What belongs to one machine (ports, log files, devices) is left out.
A digest says whether two values are equal and does not hold the value. Credentials within URLs are removed first, so
that a digest is no oracle for a password.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final
from urllib.parse import urlsplit

import msgspec

from inferd.config import Config

OWN_SECTIONS: Final = frozenset({"nodes", "devices", "tracing"})
"""Sections that describe one machine."""

OWN_SETTINGS: Final = frozenset(
    {
        *(f"server.{field}" for field in ("host", "port", "grpc_port", "tls", "reload", "memory_bytes", "devices")),
        *(f"server.{field}" for field in ("access_log", "log_format", "log_level", "log_file", "log_speed")),
        *(f"server.{field}" for field in ("request_records", "max_connections")),
        "state.url",  # gateways that compare themselves have one database
        "state.data_dir",
    }
)
"""Settings that describe one machine, one process or its log."""


def compared_settings(config: Config) -> dict[str, str]:
    """The digest of each setting that must be equal at every gateway, by its path. 16 hexadecimal digits each."""
    return {path: _digest(value) for path, value in _settings(config)}


def _settings(config: Config) -> Iterator[tuple[str, object]]:
    for section in msgspec.structs.fields(config):
        value = getattr(config, section.name)
        if section.name in OWN_SECTIONS:
            continue
        if isinstance(value, dict):
            for name, entry in value.items():
                yield f"{section.name}.{name}", None  # that it exists, also where all its settings are defaults
                yield from _changed(f"{section.name}.{name}", entry)
        else:
            yield from _changed(section.name, value)


def _changed(place: str, entry: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(entry):
        path, value = f"{place}.{field.name}", getattr(entry, field.name)
        if path in OWN_SETTINGS or value == _default(field):
            continue
        yield path, _without_credentials(value) if path == "cache.url" else value


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _without_credentials(url: str) -> str:
    """The store that a URL names: its scheme, host, port and path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"


def _digest(value: object) -> str:
    return blake2b(msgspec.json.encode(value, enc_hook=str, order="deterministic"), digest_size=8).hexdigest()
