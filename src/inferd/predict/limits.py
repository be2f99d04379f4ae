"""The limits of a model's batches, from its contract and its configuration."""

from __future__ import annotations

from typing import Final

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.batcher import Limits
from inferd.predict.contract import Contract
from inferd.predict.probe import MOST_ROWS

DEFAULT_MAX_ROWS: Final = MOST_ROWS
"""Rows computed together when neither the artifact nor the configuration sets a lower limit."""


def limits_for(contract: Contract, config: ModelConfig) -> Limits:
    """What bounds a batch: the configuration within what the artifact allows."""
    batching = config.batching
    most_rows = contract.max_batch_size or contract.max_items or 1
    usual = most_rows if batching.mode == "off" else min(most_rows, contract.typical_rows or DEFAULT_MAX_ROWS)
    wanted = batching.max_batch_size or usual
    if most_rows == 1 and wanted > 1 and (batching.mode != "off" or contract.max_batch_size):
        why = contract.not_batched or "its artifact has no batch dimension; export it with a dynamic first dimension"
        raise ModelLoadError(
            f"batching.max_batch_size is {wanted}, but the model computes one request at a time: {why}. Leave the "
            "setting out.",
            param="batching.max_batch_size",
        )
    if wanted > most_rows > 1:
        raise ModelLoadError(
            f"batching.max_batch_size is {wanted}, but the artifact computes at most {most_rows} rows together. Lower "
            "it, or export the model with a larger or dynamic batch dimension.",
            param="batching.max_batch_size",
        )
    budget_ms = batching.latency_budget_ms
    return Limits(
        mode="off" if most_rows == 1 else batching.mode,
        max_rows=wanted,
        cuts=batching.mode != "off",
        max_size=batching.max_batch_tokens or contract.max_size if contract.max_size else 0,
        max_delay_s=batching.max_delay_ms / 1000,
        preferred=batching.preferred_sizes,
        latency_budget_s=None if budget_ms is None else budget_ms / 1000,
        aging_every=config.queue.aging_every,
    )
