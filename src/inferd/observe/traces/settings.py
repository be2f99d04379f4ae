"""The settings of the exporter: the section ``tracing`` of the configuration, and OpenTelemetry's variables above it.

Sources: opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables and
opentelemetry.io/docs/specs/otel/protocol/exporter. A variable wins over the configuration's setting, as every variable
does. As the specification demands, an invalid variable is reported and ignored. An invalid setting of the configuration
stops the start.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from inferd import __version__
from inferd.config import TracingConfig
from inferd.errors import ConfigError
from inferd.observe.traces.context import Sampler

DEFAULT_ENDPOINT: Final = "http://localhost:4318"
PATH: Final = "/v1/traces"

_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_SAMPLERS: Final = ("always_on", "always_off", "traceidratio")
_REMEDY: Final = "use http/protobuf, which collectors take at port 4318"


class Settings(NamedTuple):
    """Where traces go, which of them, and within which bounds."""

    url: str
    headers: tuple[tuple[str, str], ...]
    sampler: Sampler
    resource: tuple[tuple[str, str], ...]  # attributes of the server itself
    is_compressed: bool = True
    timeout_s: float = 10.0  # of one request to the collector
    ca_file: str | None = None
    certificate: tuple[str, str | None] | None = None  # of this client, and its key
    max_queue: int = 2048  # ended requests whose spans wait to be sent
    max_batch: int = 512  # of them, in one request to the collector
    delay_s: float = 5.0  # between two requests to the collector, where it is not full before
    give_up_s: float = 30.0  # after the first try of a batch


class Found(NamedTuple):
    """What the configuration and the environment ask for."""

    settings: Settings | None  # None: no traces
    warnings: tuple[str, ...]


def settings_of(config: TracingConfig, env: Mapping[str, str]) -> Found:
    """Raises ConfigError for settings of the configuration that cannot be used."""
    reader = _Reader(env)
    endpoint = reader.text(f"{_PREFIX}ENDPOINT")
    url = reader.text(f"{_PREFIX}TRACES_ENDPOINT") or _joined(endpoint or config.endpoint)
    exporter = reader.text("OTEL_TRACES_EXPORTER")
    if exporter == "none" or reader.truth("OTEL_SDK_DISABLED"):
        return Found(None, tuple(reader.warnings))
    if exporter is not None and exporter != "otlp":
        reader.warn("OTEL_TRACES_EXPORTER", exporter, "use otlp or none")
    elif exporter == "otlp" and url is None:
        url = _joined(DEFAULT_ENDPOINT)
    if url is None:
        return Found(None, tuple(reader.warnings))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        reader.warnings.append(  # without the value: a URL may hold a password
            "OTEL_EXPORTER_OTLP_ENDPOINT is no URL such as http://localhost:4318; no traces are sent."
        )
        return Found(None, tuple(reader.warnings))
    protocol = reader.otlp("PROTOCOL")
    if protocol not in (None, "http/protobuf"):
        reader.warn("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, f"no traces are sent; {_REMEDY}")
        return Found(None, tuple(reader.warnings))
    settings = Settings(
        url,
        reader.headers("OTEL_EXPORTER_OTLP_HEADERS", reader.otlp("HEADERS")) or _own_headers(config, env),
        reader.sampler(config.sample_ratio),
        reader.resource(config.service_name),
        reader.compression(config.compression == "gzip"),
        reader.milliseconds(f"{_PREFIX}TRACES_TIMEOUT") or reader.milliseconds(f"{_PREFIX}TIMEOUT") or config.timeout_s,
        _readable(reader.otlp("CERTIFICATE"), "OTEL_EXPORTER_OTLP_CERTIFICATE")
        or _readable(config.ca_file, "tracing.ca_file"),
        reader.client_certificate(),
        reader.count("OTEL_BSP_MAX_QUEUE_SIZE", 2048),
        reader.count("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
        reader.milliseconds("OTEL_BSP_SCHEDULE_DELAY") or 5.0,
        reader.milliseconds("OTEL_BSP_EXPORT_TIMEOUT") or 30.0,
    )
    settings = settings._replace(max_batch=min(settings.max_batch, settings.max_queue))
    return Found(settings, tuple(reader.warnings))


def _joined(base: str | None) -> str | None:
    return None if base is None else base.rstrip("/") + PATH


def _own_headers(config: TracingConfig, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if config.headers_env is not None:
        where, text = f"The environment variable {config.headers_env}", env.get(config.headers_env)
        if text is None:
            raise ConfigError(f"{where} is not set; set it, or change tracing.headers_env.", param="headers_env")
    elif config.headers_file is not None:
        where = f"The file {config.headers_file!r}"
        try:
            text = Path(config.headers_file).expanduser().read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
            raise ConfigError(
                f"{where} cannot be read: {reason}; correct tracing.headers_file.", param="headers_file"
            ) from None
    else:
        return ()
    found = _pairs(text.strip())
    if not found:
        raise ConfigError(f"{where} holds no headers; write them as name=value,name=value.", param="tracing")
    return found


def _readable(file: str | None, name: str) -> str | None:
    """The path of a file that exists. Raises ConfigError: without the file no connection would be trusted."""
    if file is not None and not Path(file).expanduser().is_file():
        raise ConfigError(f"{name} is {file!r}, and there is no such file; correct the path.", param=name)
    return None if file is None else str(Path(file).expanduser())


def _pairs(text: str) -> tuple[tuple[str, str], ...] | None:
    """Pairs in the form of W3C baggage: name=value,name=value with percent-encoded values. None: they are invalid."""
    found = []
    for member in text.split(","):
        name, equals, value = member.partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not member.strip():
            continue
        if not equals or not name or not name.isascii() or not (name + value).isprintable() or " " in name:
            return None
        found.append((name, value))
    return tuple(found)


class _Reader:
    """OpenTelemetry's variables. An empty one counts as unset; an invalid one is noted in ``warnings``."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.warnings: list[str] = []

    def warn(self, variable: str, value: str | None, remedy: str) -> None:
        self.warnings.append(f"{variable} is {value!r}, which inferd does not support: {remedy}.")

    def text(self, variable: str) -> str | None:
        return self._env.get(variable, "").strip() or None

    def otlp(self, name: str) -> str | None:
        """The variable for traces, or the one for all signals."""
        return self.text(f"{_PREFIX}TRACES_{name}") or self.text(_PREFIX + name)

    def truth(self, variable: str) -> bool:
        value = self.text(variable)
        if value is not None and value.lower() not in ("true", "false"):
            self.warn(variable, value, "it is ignored; use true or false")
        return value is not None and value.lower() == "true"

    def count(self, variable: str, default: int) -> int:
        value = self.text(variable)
        if value is None:
            return default
        if not value.isascii() or not value.isdigit() or not int(value):
            self.warn(variable, value, "it is ignored; use an integer of at least 1")
            return default
        return int(value)

    def milliseconds(self, variable: str) -> float | None:
        """Seconds; None: the variable is unset."""
        found = self.count(variable, 0)
        return found / 1000 if found else None

    def headers(self, variable: str, text: str | None) -> tuple[tuple[str, str], ...]:
        found = _pairs(text or "")
        if found is None:  # the value may be a secret
            self.warnings.append(f"{variable} is ignored: it is no list such as name=value,name=value.")
        return found or ()

    def compression(self, default: bool) -> bool:
        value = self.otlp("COMPRESSION")
        if value not in (None, "gzip", "none"):
            self.warn("OTEL_EXPORTER_OTLP_COMPRESSION", value, "it is ignored; use gzip or none")
            return default
        return default if value is None else value == "gzip"

    def client_certificate(self) -> tuple[str, str | None] | None:
        certificate = _readable(self.otlp("CLIENT_CERTIFICATE"), "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE")
        key = _readable(self.otlp("CLIENT_KEY"), "OTEL_EXPORTER_OTLP_CLIENT_KEY")
        return None if certificate is None else (certificate, key)

    def sampler(self, ratio: float) -> Sampler:
        """The sampler. Without a variable: the caller's decision, and ``ratio`` of the other traces."""
        name, prefix = self.text("OTEL_TRACES_SAMPLER"), secrets.token_hex(4)
        if name is None:
            return Sampler(ratio, prefix=prefix)
        kind = name.lower().removeprefix("parentbased_")
        if kind not in _SAMPLERS:
            known = ", ".join((*_SAMPLERS, *(f"parentbased_{sampler}" for sampler in _SAMPLERS)))
            self.warn("OTEL_TRACES_SAMPLER", name, f"it is ignored; use one of {known}")
            return Sampler(ratio, prefix=prefix)
        ratio = self._ratio() if kind == "traceidratio" else 1.0 if kind == "always_on" else 0.0
        return Sampler(ratio, follows_parent=kind != name.lower(), prefix=prefix)

    def _ratio(self) -> float:
        value = self.text("OTEL_TRACES_SAMPLER_ARG")
        try:
            found = 1.0 if value is None else float(value)
        except ValueError:
            found = -1.0
        if not 0.0 <= found <= 1.0:
            self.warn("OTEL_TRACES_SAMPLER_ARG", value, "it is ignored; use a number from 0 to 1")
            return 1.0
        return found

    def resource(self, service_name: str) -> tuple[tuple[str, str], ...]:
        """Attributes of the server, of which ``service.name`` and those of the variable win."""
        text = self.text("OTEL_RESOURCE_ATTRIBUTES")
        given = _pairs(text or "")
        if given is None:
            self.warn("OTEL_RESOURCE_ATTRIBUTES", text, "it is ignored; use name=value,name=value")
        found = {
            "service.name": service_name,
            "service.version": __version__,
            "service.instance.id": secrets.token_hex(8),
            "telemetry.sdk.name": "inferd",
            "telemetry.sdk.language": "python",
            "telemetry.sdk.version": __version__,
        }
        found.update(given or ())
        name = self.text("OTEL_SERVICE_NAME")
        if name is not None:
            found["service.name"] = name
        return tuple(found.items())
