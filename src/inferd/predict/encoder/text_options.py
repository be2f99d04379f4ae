"""The options of a request for a text model, beside its texts. Knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from inferd.errors import InvalidRequest
from inferd.predict.encoder.sentence import Sentence
from inferd.predict.encoder.texts import KEEP, Cut, Side


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields are the parameters' names; what a request does not say is None."""

    dimensions: int | None = None  # of the vectors, from the front (Kusupati et al. 2022)
    normalize: bool | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None  # -1: what the model reads
    truncation_side: Side | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    raw_scores: bool | None = None  # logits
    aggregation_strategy: Literal["none", "simple"] | None = None


NONE: Final = TextOptions()
_NAMES: Final = frozenset(TextOptions.__struct_fields__)


def text_options_of(parameters: Mapping[str, object]) -> TextOptions:
    """The options among a request's parameters; other parameters are ignored. Raises InvalidRequest."""
    if not parameters:
        return NONE
    known = {name: value for name, value in parameters.items() if name in _NAMES}
    if not known:
        return NONE
    try:
        return msgspec.convert(known, TextOptions)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at ")
        name = at.strip("`$.") or None
        raise InvalidRequest(f"Invalid value for {name!r}: {what}. Correct it or leave it out.", param=name) from None


def cut_of(text_options: TextOptions, max_tokens: int) -> Cut:
    """Raises InvalidRequest for a length that the model does not have."""
    side = text_options.truncation_side or "right"
    to = text_options.truncate_prompt_tokens
    if to is None:
        return Cut(max_tokens, side) if text_options.truncate else KEEP
    if to == -1:
        return Cut(max_tokens, side)
    if not 1 <= to <= max_tokens:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 (what the model reads) or from 1 to {max_tokens}, not {to}.",
            param="truncate_prompt_tokens",
        )
    return Cut(to, side)


def dimensions_of(text_options: TextOptions, size: int) -> int:
    """Raises InvalidRequest for more than there are."""
    requested = text_options.dimensions
    if requested is None:
        return size
    if not 1 <= requested <= size:
        raise InvalidRequest(
            f"dimensions must be from 1 to {size} for this model, not {requested}.", param="dimensions"
        )
    return requested


def prompt_of(text_options: TextOptions, sentence: Sentence) -> str:
    """The prefix of every text; empty: none. Raises InvalidRequest for a name that the model does not have."""
    if text_options.prompt is not None:
        return text_options.prompt
    name = text_options.prompt_name if text_options.prompt_name is not None else sentence.default_prompt
    if name is None:
        return ""
    prompt = sentence.prompts.get(name)
    if prompt is None:
        known = ", ".join(map(repr, sentence.prompts)) or "none"
        raise InvalidRequest(f"The model has no prompt named {name!r}; it has {known}.", param="prompt_name")
    return prompt
