"""Remote servers as replicas of a model."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from inferd.config.patterns import BASE_URL
from inferd.config.section import Section


class RemoteSettings(Section, frozen=True, kw_only=True):
    """How requests are sent to a remote server."""

    model: Annotated[str | None, Meta(description="The model's name on the remote server; unset: its name here.")] = (
        None
    )
    api_key_env: Annotated[str | None, Meta(description="Environment variable that holds the API key.")] = None
    api_key_file: Annotated[
        str | None, Meta(description="File that holds the API key; read again when it changes.")
    ] = None
    weight: Annotated[float, Meta(description="Its share of requests, relative to other replicas'.", gt=0)] = 1.0
    fallback: Annotated[bool, Meta(description="Used only while no other replica can take a request.")] = False
    max_in_flight: Annotated[int, Meta(description="Requests it gets at the same time.", ge=1)] = 256
    region: Annotated[
        str | None, Meta(description="Its region; requests of a tenant with another region do not go there.")
    ] = None
    connect_timeout_s: Annotated[float, Meta(description="Longest time for a connection.", gt=0)] = 5.0
    first_byte_timeout_s: Annotated[
        float,
        Meta(
            description=(
                "Longest time from the last byte of the sent request to the first byte of the answer. The wait in the "
                "queue does not count."
            ),
            gt=0,
        ),
    ] = 120.0
    idle_timeout_s: Annotated[float, Meta(description="Longest pause within an answer.", gt=0)] = 60.0
    ca_file: Annotated[str | None, Meta(description="Certificates to trust instead of the system's.")] = None
    probe: Annotated[bool, Meta(description="Check the server by GET /models: at the start, and while it fails.")] = (
        True
    )


class RemoteConfig(RemoteSettings, frozen=True, kw_only=True):
    """A remote server as one more replica."""

    url: Annotated[str, Meta(description="Base URL of an OpenAI-compatible API: https://host/v1.", pattern=BASE_URL)]
