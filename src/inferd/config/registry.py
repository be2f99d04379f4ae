"""The registry of models' versions: what a version needs before it is approved and served."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section

EvidenceKind = Literal["equivalence", "golden", "replay"]


class RegistryConfig(Section, frozen=True, kw_only=True):
    """What the versions of models need on their way to production."""

    evidence: Annotated[
        tuple[EvidenceKind, ...],
        Meta(
            description="Reports that a version needs before it is validated, beside the digest of its files and the "
            "comparison of its contract: equivalence, golden, replay."
        ),
    ] = ()
    four_eyes: Annotated[
        bool, Meta(description="Whether another user or key than the one that registered a version has to approve it.")
    ] = False
    require_approval: Annotated[
        bool,
        Meta(
            description="Whether a source such as registry:churn@3 serves only versions that were approved. Rejected "
            "versions are never served."
        ),
    ] = False
