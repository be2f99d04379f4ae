"""Hints between gateways that share remote servers: the prompts that each server received, and the servers that fail.

A hint changes which server is tried first, and nothing else. A missing, old or wrong one costs a missed prefix or a
detour. Hints name servers by their identity (``Member.identity``) and prompts by 64-bit keys (``affinity.prefixes``);
they hold no text. Their size is bounded, whatever the traffic.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from inferd.router.choosing.affinity import KEY_BYTES
from inferd.router.choosing.suspects import MAX_SUSPECTS
from inferd.router.pool import Pool

MAX_KEYS: Final = 4096
"""Keys of prompts in the hints of one exchange, for all models together: 32 KiB."""

_log = logging.getLogger("inferd.router")


class ModelHints(msgspec.Struct, frozen=True, array_like=True):
    """The hints of one gateway about the remote servers of one model, by their identity."""

    prompts: dict[str, Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * MAX_KEYS)]] = {}
    """The keys of the prompts that a server received since the last exchange, 8 bytes each, little-endian."""

    suspects: Annotated[list[str], msgspec.Meta(max_length=MAX_SUSPECTS)] = []
    """The servers whose breaker is open, that do not answer, or that were ejected as slow."""


Hints = dict[str, ModelHints]
"""The hints of one gateway by model."""


class HintReport(msgspec.Struct, frozen=True, kw_only=True):
    """The hints since the start of a server. Of prompts their keys are counted, of suspects every repetition."""

    sent: int = 0  # to the other gateways
    received: int = 0  # from them, about servers that this one has
    unknown: int = 0  # from them, about servers or models that this one does not have
    used: int = 0  # requests that went to a server because of a hint about their prompt
    stale: int = 0  # exchanges of others that were replaced before this one read them
    unreadable: int = 0  # exchanges of others in another form


def num_hints(hints: Hints) -> int:
    """The prompts' keys and the suspects in hints."""
    return sum((_size(each) for each in hints.values()), 0)


def hints_of(pools: Mapping[str, Pool]) -> Hints:
    """What this gateway tells the others: about the models that have several replicas, some of them remote."""
    shared = {name: pool for name, pool in pools.items() if pool.fleet.has_remotes and pool.fleet.num_members > 1}
    hints = {}
    for name, pool in shared.items():
        recent = pool.placement.take_recent(MAX_KEYS // len(shared))
        suspects = sorted({member.identity for member in pool.fleet.remotes if member.is_suspect})
        if recent or suspects:
            hints[name] = ModelHints(
                {server: _packed(keys) for server, keys in recent.items()}, suspects[:MAX_SUSPECTS]
            )
    return hints


def adopt_hints(pools: Mapping[str, Pool], gateway: str, hints: Hints, now: float) -> int:
    """Note what another gateway told, and return how much of it (``num_hints``). Servers and models that this gateway
    does not have are left out."""
    adopted = 0
    for name, told in hints.items():
        pool = pools.get(name)
        if pool is None:
            continue
        members = {member.identity: member for member in pool.fleet.remotes}
        for server, packed in told.prompts.items():
            if server in members:
                keys = _keys(packed)
                pool.placement.received_elsewhere(members[server].index, keys)
                adopted += len(keys)
        known = [server for server in told.suspects if server in members]
        adopted += len(known)
        for server in pool.fleet.health.suspects.hear(gateway, known, now):
            index = members[server].index
            _log.info("%s/%d %s is tried last for a while: it fails at gateway %s", name, index, server, gateway)
    return adopted


def _size(hints: ModelHints) -> int:
    return len(hints.suspects) + sum((len(packed) // KEY_BYTES for packed in hints.prompts.values()), 0)


def _packed(keys: list[int]) -> bytes:
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _keys(packed: bytes) -> list[int]:
    keys = array("Q", packed[: len(packed) // KEY_BYTES * KEY_BYTES])
    if sys.byteorder == "big":
        keys.byteswap()
    return keys.tolist()
