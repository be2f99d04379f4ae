"""Bytes of the KV cache for each token, by arithmetic. Knows no tensor and imports no torch.

The planner, the loader and the cache itself use these functions, so their figures agree.
"""

from __future__ import annotations

from typing import Literal

# Columns of a key that share a scale in a cache of 8-bit integers: channels of keys differ more than those of values.
KEY_GROUP = 32
_SCALE_BYTES = 4


def key_groups(head_dim: int) -> int:
    """Number of parts of a key that have a scale of their own in a cache of 8-bit integers."""
    return head_dim // KEY_GROUP if head_dim % KEY_GROUP == 0 else 1


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int, dtype: Literal["auto", "int8"] = "auto"
) -> int:
    """Bytes of one token's keys and values in all layers. ``itemsize``: of the model's number format."""
    of_a_head = 2 * head_dim * itemsize
    if dtype == "int8":
        of_a_head = 2 * head_dim + (key_groups(head_dim) + 1) * _SCALE_BYTES
    return num_layers * num_kv_heads * of_a_head


# The system clears a page when it is first written to, and a virtual machine's host may have to find it first. That is
# one or two milliseconds for a megabyte, or 4 % of a prompt's time with a model of 0.6B. So the blocks that are used
# first get their pages before the first request: those of 32 sequences of some hundred tokens. The rest costs no
# memory until it is used.
_AHEAD_TOKENS = 32 * 320
_AHEAD_BYTES = 1024 * 1024 * 1024


def ahead_bytes(bytes_per_token: int) -> int:
    """Bytes of a cache that get their pages before the first request. ``bytes_per_token``: in all layers."""
    return min(_AHEAD_TOKENS * bytes_per_token, _AHEAD_BYTES)
