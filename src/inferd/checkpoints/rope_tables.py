"""Rotary position tables of every variant that checkpoints use.

Sources: Su et al. 2021 (RoPE), kaiokendev 2023 (linear), bloc97 2023 (dynamic NTK), Peng et al. 2023
(YaRN), Meta 2024 (llama3), Ding et al. 2024 (LongRoPE). Checked against transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inferd.checkpoints.rope import Rope


def tables(rope: Rope, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, dim / 2] float32, including the variant's attention factor. Raises ModelLoadError."""
    rope.check()
    frequencies, factor = _frequencies(rope, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _base(rope: Rope) -> Tensor:
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    return 1.0 / (rope.theta**steps)


def _frequencies(rope: Rope, num_positions: int) -> tuple[Tensor, float]:
    match rope.variant:
        case "default":
            return _base(rope), 1.0
        case "linear":
            return _base(rope) / rope.number("factor"), 1.0
        case "dynamic":
            return _dynamic(rope), 1.0
        case "llama3":
            return _llama3(rope), 1.0
        case "yarn":
            return _yarn(rope)
        case "longrope":
            return _longrope(rope, num_positions)
        case _:
            raise AssertionError(rope.variant)


def _dynamic(rope: Rope) -> Tensor:
    # transformers recomputes the base as the text grows beyond the trained length. A paged cache keeps
    # keys rotated once, so the length is fixed at the trained maximum, where the base is unchanged.
    return _base(rope)


def _llama3(rope: Rope) -> Tensor:
    base = _base(rope)
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    old = rope.original_max_position_embeddings or rope.max_position_embeddings
    wavelength = 2 * math.pi / base
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = torch.where(wavelength > old / low, base / factor, base)
    medium = (wavelength <= old / low) & (wavelength >= old / high)
    return torch.where(medium, blended, scaled)


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    original = rope.original_max_position_embeddings or rope.max_position_embeddings
    factor = rope.number("factor", rope.max_position_embeddings / original)
    dim, theta = rope.dim, rope.theta

    def grow(scale: float, by: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    usual = grow(factor)
    if rope.options.get("mscale") and rope.options.get("mscale_all_dim"):
        usual = grow(factor, rope.number("mscale")) / grow(factor, rope.number("mscale_all_dim"))
    fast, slow = rope.number("beta_fast", 32), rope.number("beta_slow", 1)

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(fast), dim_of(slow)
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = _base(rope)
    return base / factor * ramp + base * (1 - ramp), rope.number("attention_factor", usual)


def _longrope(rope: Rope, num_positions: int) -> tuple[Tensor, float]:
    original = rope.original_max_position_embeddings or rope.max_position_embeddings
    factors = rope.factors or ("long" if num_positions > original else "short")
    scale = rope.number("factor", rope.max_position_embeddings / original)
    usual = 1.0 if scale <= 1.0 or original < 2 else math.sqrt(1 + math.log(scale) / math.log(original))
    return _base(rope) / torch.tensor(rope.numbers(f"{factors}_factor")), rope.number("attention_factor", usual)
