"""Loads a draft model: finds its files, checks it against the target's tokenizer, reads it.

It is loaded before the target's KV cache is planned, because the plan includes its blocks: one for each of the
target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from inferd.config import ModelConfig
from inferd.engine.model.load import Decoder, load_model
from inferd.engine.runner import Runner
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.speculation.draft_model import DraftModel
from inferd.errors import ModelLoadError
from inferd.native.kv_cache import KVCache
from inferd.native.kv_sizes import kv_bytes_per_token
from inferd.native.paged_attention import native_available
from inferd.registry.source import blaming, check_folder, resolve

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that has no cache yet."""

    decoder: Decoder
    device: torch.device

    @property
    def kv_bytes_per_token(self) -> int:
        dims = self.decoder.config
        return kv_bytes_per_token(
            num_layers=dims.num_layers,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            itemsize=self.decoder.dtype.itemsize,
        )

    def with_cache(self, config: ModelConfig, num_blocks: int, vocab_size: int) -> DraftModel:
        """The draft model with its own KV blocks, as many and as large as the target's."""
        dims, dtype = self.decoder.config, self.decoder.dtype
        cache = KVCache(
            num_layers=dims.num_layers,
            num_blocks=num_blocks,
            block_size=config.kv_cache.block_size,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            dtype=dtype,
            device=self.device,
        )
        attention = config.attention
        if attention != "reference":
            is_native = self.device.type == "cpu" and native_available(dtype, dims.head_dim)
            attention = "native" if is_native else "reference"
        runner = Runner(self.decoder, cache, attention, self.device, config.scheduler.max_num_batched_tokens)
        return DraftModel(
            runner,
            BlockPool(num_blocks),
            vocab_size,
            max_len=dims.max_position_embeddings,
            prefix_caching=config.scheduler.prefix_caching,
        )


def load_draft(
    config: ModelConfig, target: Path, num_tokens: int, device: torch.device, progress: Progress
) -> LoadedDraft | None:
    """The draft model of the model in the folder ``target``, which has ``num_tokens`` different tokens.

    None where it has no draft model or does not use it. Raises ModelLoadError where the two do not belong together.
    """
    settings = config.speculation
    if settings.draft is None or settings.method not in ("auto", "draft"):
        return None
    with blaming("speculation.draft"):
        folder = check_folder(resolve(settings.draft, progress))
    _check_tokens(target, folder)
    longest = config.max_model_len
    decoder = load_model(folder, dtype=config.dtype, device=device, progress=progress, num_positions=longest)
    if decoder.config.vocab_size < num_tokens:
        raise ModelLoadError(
            f"The draft model's {folder / 'config.json'} has vocab_size = {decoder.config.vocab_size}, "
            "but the model has "
            f"{num_tokens} different tokens. Set speculation.draft to a smaller model made with the same tokenizer.",
            param="speculation.draft",
        )
    return LoadedDraft(decoder, device)


def _check_tokens(target: Path, draft: Path) -> None:
    """A guess is a token id, so it must have the same text in both models."""
    one, other = target / "tokenizer.json", draft / "tokenizer.json"
    if not other.exists():  # a draft without a tokenizer is assumed to use the target's
        return
    if one.exists() and one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes():
        return
    if not one.exists() or _vocabulary(one) != _vocabulary(other):
        raise ModelLoadError(
            f"The draft model's {other} has other tokens than {one}, so its guesses would be wrong. "
            "Set speculation.draft to a smaller model of the same family, made with the same tokenizer.",
            param="speculation.draft",
        )


def _vocabulary(file: Path) -> object:
    content = json.loads(file.read_text(encoding="utf-8"))
    added = {(token["id"], token["content"]) for token in content.get("added_tokens", ())}
    return content.get("model", {}).get("vocab"), added
