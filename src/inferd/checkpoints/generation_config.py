"""Sampling defaults that a checkpoint brings: generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """None: the checkpoint does not set the value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """The folder's defaults; none where the file does not exist. Raises ModelLoadError."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}. Correct or delete it.") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} must be a JSON object. Correct or delete it.")

    def number(name: str, low: float, high: float) -> float | None:
        value = data.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ModelLoadError(
                f"{path}: {name} is {value!r}, but must be a number from {low:g} to {high:g}. Correct it, "
                "or set use_generation_config to false.",
                param=name,
            )
        return value

    def whole(name: str, low: int) -> int | None:
        value = number(name, low, 2**31 - 1)
        if value is not None and value != int(value):
            raise ModelLoadError(
                f"{path}: {name} is {value!r}, but must be a whole number. Correct it, "
                "or set use_generation_config to false.",
                param=name,
            )
        return None if value is None else int(value)

    eos = data.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return GenerationDefaults(
        temperature=number("temperature", 0.0, 100.0),
        top_p=number("top_p", 0.0, 1.0) or None,
        top_k=whole("top_k", 0),
        min_p=number("min_p", 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 0.01, 100.0),
        max_new_tokens=whole("max_new_tokens", 1),
        eos_token_ids=tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0),
    )
