"""The difference of two configurations: what changed, and what cannot change while a server runs. Pure."""

from __future__ import annotations

from inferd.config import Config
from inferd.errors import ConfigError

# What sockets, the database, the log and the exporter of traces were opened with.
_FIXED_SERVER = ("host", "port", "grpc_port", "auth", "log_format", "log_file", "log_level")
_FIXED_SECTIONS = ("state", "cache", "jobs", "tracing", "nodes")
_FIXED_DEVICES = ("enabled", "interval_s", "simulated")  # the others are prices


def refuse_empty(config: Config) -> None:
    """Raises ConfigError where there is nothing to serve: more often a mistake than meant."""
    if not config.models:
        raise ConfigError(
            "The configuration names no model. Add one below 'models:', for example  chat: {source: demo}.",
            param="models",
        )


def needs_restart(old: Config, new: Config) -> list[str]:
    """What cannot change while a server runs, a sentence each."""
    sentences = []
    for field in _FIXED_SERVER:
        before, after = getattr(old.server, field), getattr(new.server, field)
        if before != after:
            sentences.append(f"server.{field}: changing {before!r} to {after!r} needs a restart.")
    if (old.server.tls.certificate is None) != (new.server.tls.certificate is None):
        sentences.append("server.tls: beginning or ending to use TLS needs a restart; another certificate does not.")
    sentences += [
        f"devices.{field}: changing it needs a restart."
        for field in _changed(old.devices, new.devices)
        if field in _FIXED_DEVICES
    ]
    for section in _FIXED_SECTIONS:
        # Without values: the URLs may hold passwords.
        changed = _changed(getattr(old, section), getattr(new, section))
        sentences += [f"{section}.{field}: changing it needs a restart." for field in changed]
    return sentences


def refuse_restarts(old: Config, new: Config) -> None:
    """Raises ConfigError that lists everything which cannot change in place."""
    sentences = needs_restart(old, new)
    if len(sentences) == 1:
        raise ConfigError(sentences[0])
    if sentences:
        raise ConfigError(
            "\n  - ".join([f"{len(sentences)} settings cannot change while the server runs:", *sentences])
        )


def changed_settings(old: Config, new: Config) -> list[str]:
    """What changed beside the models, a sentence each."""
    sentences = [
        f"server.{field} is now {getattr(new.server, field)!r}."
        for field in _changed(old.server, new.server)
        if field not in (*_FIXED_SERVER, "tls")  # of which more is known when it is read
    ]
    for section in ("devices", "metrics", "payloads"):
        before, after = getattr(old, section), getattr(new, section)
        sentences += [f"{section}.{field} is now {getattr(after, field)!r}." for field in _changed(before, after)]
    for name in sorted(old.tenants.keys() | new.tenants.keys()):
        was, is_now = old.tenants.get(name), new.tenants.get(name)
        if was is None:
            sentences.append(f"tenant {name} was added.")
        elif is_now is None:
            sentences.append(f"tenant {name} was removed.")
        elif was != is_now:
            fields = ", ".join(f"{field} = {getattr(is_now, field)}" for field in _changed(was, is_now))
            sentences.append(f"tenant {name} changed: {fields}.")
    return sentences


def _changed(before: object, after: object) -> list[str]:
    """The fields in which two sections of one type differ."""
    fields: tuple[str, ...] = getattr(type(before), "__struct_fields__", ())
    return [field for field in fields if getattr(before, field) != getattr(after, field)]
