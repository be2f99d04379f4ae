"""Which versions of a model are served. ``versions.py`` makes entries of the configuration from it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section


class VersionsConfig(Section, frozen=True, kw_only=True):
    """Which versions of a model with numbered subfolders are served: 1/, 2/, ..."""

    policy: Annotated[
        Literal["latest", "specific", "all"],
        Meta(description="latest: the highest numbers; specific: those in 'only'; all: every one."),
    ] = "latest"
    count: Annotated[int, Meta(description="How many versions are served by the policy latest.", ge=1)] = 1
    only: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...], Meta(description="The versions that the policy specific serves.")
    ] = ()
    aliases: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="Names for versions: with stable: 3, the name MODEL@stable is version 3."),
    ] = {}
    weights: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description=(
                "Share of each version in the requests for the model's own name: {3: 90, 4: 10}. Requests of one "
                "session or user stay with one version. Unset: the newest gets all."
            )
        ),
    ] = {}
