"""Small images, tokenizers and models, made here."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from inferd.predict.contract import Array


def picture(width: int, height: int, channels: int = 3, seed: int = 0) -> Array:
    """Pixels that differ everywhere."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def file_of(pixels: Array, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    flat = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    Image.fromarray(np.ascontiguousarray(flat)).save(file, format, **options)
    return file.getvalue()


def png(pixels: Array) -> bytes:
    return file_of(pixels, "PNG")


def tokenizer_file(folder: Path) -> Path:
    """A tokenizer of words, with a place for what it does not know."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "good": 1, "bad": 2, "film": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    return path
