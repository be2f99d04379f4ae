"""Traces of requests, sent to a collector."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section


class TracingConfig(Section, frozen=True, kw_only=True):
    """Where spans are sent. The variables ``OTEL_*`` of OpenTelemetry replace these settings."""

    endpoint: Annotated[
        str | None,
        Meta(
            description="Base URL of a collector that takes OTLP over HTTP, to which /v1/traces is added: "
            "http://localhost:4318. Unset: no traces.",
        ),
    ] = None
    sample_ratio: Annotated[
        float,
        Meta(
            description="Share of the traces that begin here which are kept; a caller's decision is followed.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    headers_env: Annotated[
        str | None,
        Meta(description="Environment variable that holds headers for the collector: name=value,name=value."),
    ] = None
    headers_file: Annotated[
        str | None, Meta(description="File that holds headers for the collector, in the same form.")
    ] = None
    compression: Annotated[Literal["gzip", "none"], Meta(description="Encoding of what is sent.")] = "gzip"
    timeout_s: Annotated[float, Meta(description="Longest time for one request to the collector.", gt=0)] = 10.0
    ca_file: Annotated[str | None, Meta(description="Certificates to trust instead of the system's.")] = None
    service_name: Annotated[str, Meta(description="The server's name in traces.", min_length=1)] = "inferd"
