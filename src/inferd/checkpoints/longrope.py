"""LongRoPE's two sets of factors (Ding et al. 2024), and which of them a model is served with. Knows no tensor.

transformers uses the short factors for a text of up to ``original_max_position_embeddings`` tokens and the long ones
beyond, text by text. The KV cache stores rotated keys before a text's final length is known, and shares them among
texts of any length. So one set holds for all texts. As in vLLM, the longest text that is served decides which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.errors import ModelLoadError

Asked = Literal["auto", "short", "long"]


def with_factors(config: DecoderConfig, asked: Asked, max_model_len: int | None) -> DecoderConfig:
    """The configuration with one set of factors, for texts of up to ``max_model_len`` tokens (None: no limit).

    A configuration without LongRoPE is returned unchanged. Raises ModelLoadError for an unknown choice.
    """
    original = _original(config)
    if original is None:
        if asked != "auto":
            raise ModelLoadError(
                f"rope_factors is {asked!r}, but the checkpoint ({config.architecture}) has no LongRoPE factors to "
                "choose "
                "from; leave it out.",
                param="rope_factors",
            )
        return config
    longest = config.max_position_embeddings
    if asked == "short":
        longest = min(longest, original)
        if max_model_len is not None and max_model_len > longest:
            raise ModelLoadError(
                f"rope_factors is 'short', which is for texts of up to {longest} tokens, but max_model_len is "
                f"{max_model_len}. Lower max_model_len, or set rope_factors to long.",
                param="rope_factors",
            )
    elif asked == "auto":
        asked = "long" if (max_model_len or longest) > original else "short"
    made = {
        id(rope): replace(rope, factors=asked) if rope.variant == "longrope" else rope
        for rope in config.ropes
        if rope is not None
    }
    ropes = tuple([None if rope is None else made[id(rope)] for rope in config.ropes])  # layers go on sharing them
    return replace(config, ropes=ropes, max_position_embeddings=longest)


def factors_of(config: DecoderConfig) -> Asked:
    """The chosen set; "auto" where the model has no LongRoPE."""
    return next((rope.factors for rope in config.ropes if rope is not None and rope.factors is not None), "auto")


def factors_text(config: DecoderConfig) -> str:
    """A sentence for operators about the chosen set; empty where there is no choice."""
    original, factors = _original(config), factors_of(config)
    if original is None or (original >= config.max_position_embeddings and factors == "short"):
        return ""
    if factors == "long":
        return (
            "LongRoPE's long factors are used for texts of every length; transformers takes the short ones up to "
            f"{original} "
            f"tokens. For these alone set max_model_len to {original} or less, or rope_factors to short"
        )
    return (
        f"LongRoPE's short factors are used, for texts of up to {original} tokens; for longer ones set max_model_len, "
        "or "
        "rope_factors to long"
    )


def _original(config: DecoderConfig) -> int | None:
    """Longest text, in tokens, that the short factors were made for; None: the model has no LongRoPE."""
    found = [
        rope.original_max_position_embeddings or rope.max_position_embeddings
        for rope in config.ropes
        if rope is not None and rope.variant == "longrope"
    ]
    return min(found) if found else None
