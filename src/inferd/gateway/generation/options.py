"""What a request for generation asks for beside its prompts and its sampling."""

from __future__ import annotations

import msgspec

from inferd.answer_form import AnswerForm
from inferd.types import AnswerSet


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a request for generation, which its dialect has checked."""

    stream: bool = False
    priority: int | None = None  # as in ``Request``
    timeout: float | None = None  # seconds
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    form: AnswerForm | None = None
    lowers_max_tokens: bool = False  # as in ``GenerateRequest``
    return_prompt_ids: bool = False
    # A remote replica gets the client's body, if the request has one prompt. Only dialects that remote servers speak
    # may allow it.
    may_relay: bool = False
    answer_sets: tuple[AnswerSet, ...] = ()  # as in ``GenerateRequest``
    relays_usage: bool = False  # a relayed stream keeps its usage
