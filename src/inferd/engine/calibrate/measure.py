"""Perplexity of a model over a text file, computed as it would be served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from inferd.checkpoints.architecture import DTypeName
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.model.load import load_model
from inferd.engine.perplexity import Perplexity, measuring, perplexity
from inferd.errors import InvalidRequest
from inferd.registry.source import check_folder, resolve


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises InvalidRequest."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{path} cannot be read as text: {error}. Give a UTF-8 text file.", param="data"
        ) from error


def measure(
    source: str,
    data: Path,
    *,
    context: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    dtype: DTypeName = "auto",
    quantization: Literal["auto", "none", "int8", "int4"] = "auto",
    progress: Callable[[str, int, int], None],
) -> Perplexity:
    """``source``: as in a model's settings. ``context``: at most the model's positions is used.

    Raises ModelLoadError and InvalidRequest.
    """
    text = read_text(data)
    folder = check_folder(resolve(source, progress))
    tokenizer = Tokenizer.load(folder)
    decoder = load_model(folder, dtype=dtype, device=torch.device("cpu"), quantization=quantization)
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    context = min(context, decoder.config.max_position_embeddings)
    runner = measuring(decoder, num_tokens=max(2048, 2 * context))
    return perplexity(runner, ids, context=context, stride=stride, leading=tokenizer.encode(""), progress=progress)
