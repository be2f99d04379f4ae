"""Which prompts and answers are written to the disk. None unless tenants are named."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section


class PayloadsConfig(Section, frozen=True, kw_only=True):
    """Records of prompts and answers, in the folder payloads of state.data_dir. Off unless tenants are named."""

    tenants: Annotated[
        tuple[str, ...],
        Meta(description="Tenants whose calls are recorded; '*': every call, also without a key. None: off."),
    ] = ()
    models: Annotated[tuple[str, ...], Meta(description="Only calls of these models; none: of every model.")] = ()
    ratio: Annotated[
        float,
        Meta(
            description="Part of the conversations that is recorded, each whole or not at all; drawn by their session, "
            "user or first messages. A call without these is drawn by itself.",
            gt=0,
            le=1,
        ),
    ] = 1.0
    keep: Annotated[
        tuple[Literal["prompts", "answers", "replay"], ...],
        Meta(
            description="prompts, answers: redacted texts; replay: whole bodies for `inferd replay`, also of "
            "predictions, unless redaction would change them. None: sizes, digests and usage alone."
        ),
    ] = ()
    redact: Annotated[
        tuple[Literal["api_key", "email", "card", "phone"], ...],
        Meta(description="What is replaced in the texts; card: numbers with a valid checksum (Luhn)."),
    ] = ("api_key", "email", "card", "phone")
    patterns: Annotated[
        dict[str, str],
        Meta(
            description="Further regular expressions whose matches are replaced, by name. Every repetition needs a "
            "bound, so that the time of a search has one."
        ),
    ] = {}
    keep_days: Annotated[int, Meta(description="Days after which the records of an hour are deleted.", ge=1)] = 7
    max_bytes: Annotated[
        int, Meta(description="Size of one tenant's records; the oldest hours are deleted first.", ge=1024 * 1024)
    ] = 256 * 1024 * 1024
    max_text: Annotated[
        int, Meta(description="Characters that are kept of one prompt or answer; the rest is cut off.", ge=1)
    ] = 32_768
