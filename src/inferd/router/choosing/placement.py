"""The placement of a request: which replicas can take it, and which of these gets it.

Knows which replica holds the state of a sequence, and which replicas received which prompt prefixes, from this gateway
or by the hints of another one. ``policy`` makes the choice among the able replicas. The fleet decides which replicas
may get requests at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Final

from inferd.config import ModelConfig
from inferd.router.choosing.affinity import (
    CHUNK_BYTES,
    PrefixIndex,
    continuation_of,
    indexed_bytes,
    last_seen,
    new_bytes,
    prefixes,
    text_of,
)
from inferd.router.choosing.policy import LEAST_PART, choose
from inferd.router.choosing.sequence_replicas import SequenceReplicas
from inferd.router.choosing.split import FIRST_TOKENS_PER_BYTE
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.member import Member
from inferd.router.ticket import Ticket
from inferd.types import PredictRequest

MAX_PREFIXES: Final = 20_000
MAX_RECENT: Final = 1024
"""Prompts that are remembered until other gateways are told of them; the latest ones."""


class Placement:
    """The placement of one model's requests.

    ``config`` is the current configuration of the model. ``abandoned`` has the ids of requests of which a replica still
    computes an earlier attempt (``Retries.abandoned``).
    """

    __slots__ = (
        "_abandoned",
        "_fleet",
        "_heard",
        "_prefixes",
        "_random",
        "_recent",
        "config",
        "num_by_hints",
        "seen_bytes",
        "sequence_replicas",
    )

    def __init__(self, config: ModelConfig, fleet: Fleet, abandoned: Collection[str], random: Random) -> None:
        self.config = config
        self._fleet = fleet
        self._abandoned = abandoned
        self._random = random
        self._prefixes = PrefixIndex(MAX_PREFIXES)
        self._recent: deque[tuple[str, list[int]]] = deque(maxlen=MAX_RECENT)
        self._heard: dict[int, int] = {}  # prefixes that were known by hints first, and the index of their server
        self.num_by_hints = 0  # requests that went to a server for a prefix of which a hint told
        self.sequence_replicas = SequenceReplicas()
        self.seen_bytes = 0  # of the prompt that was placed last: those that its replica had received before

    def able(self, ticket: Ticket, available: Iterable[Member]) -> list[Member]:
        """The replicas of ``available`` that can take the request; those of last resort only where no other can."""
        request = ticket.request
        request_id, region = request.id, request.region
        able = []
        for member in available:
            if member.replica.accepts(ticket) and (not region or member.region == region):
                able.append(member)
        if ticket.failed_replicas:
            able = [member for member in able if member.replica not in ticket.failed_replicas]
        holder = self.sequence_replicas.replica_of(request)
        if holder is not None and any(member.replica is holder for member in self._fleet.members):
            able = [member for member in able if member.replica is holder]
        if request_id in self._abandoned:  # a replica that still computes an earlier attempt has the id in use
            able = [member for member in able if member.replica.ticket(request_id) is None]
        if len(able) > 1:
            return [member for member in able if not member.is_last_resort] or able
        return able

    def choose(self, ticket: Ticket, able: Sequence[Member], now: float) -> Member:
        """The replica for a request; ``able`` has those that can take it, at least one."""
        self.seen_bytes = 0
        uses_prefixes = self.uses_prefixes
        if len(able) == 1 and not uses_prefixes:
            return able[0]
        request = ticket.request
        text = text_of(request, ticket.relay) if uses_prefixes and not request.is_copy else b""
        return self._preferred(able, now, request.tenant, text, request.session)

    def new_tokens(self, ticket: Ticket) -> int:
        """The tokens of a request's prompt, about, that the replica of the last choice has not received before."""
        if isinstance(ticket.request, PredictRequest):
            return 0
        return int(new_bytes(ticket.request.num_bytes, self.seen_bytes) * FIRST_TOKENS_PER_BYTE)

    @property
    def uses_prefixes(self) -> bool:
        """Whether requests prefer the replica that has probably cached their prompt.

        That needs several replicas with a prefix cache. Remote servers are assumed to have one.
        """
        config = self.config
        if not config.routing.prefix_affinity or self._fleet.num_members < 2:
            return False
        return config.scheduler.prefix_caching or not config.num_local

    def _preferred(self, able: Sequence[Member], now: float, tenant: str, text: bytes, session: str = "") -> Member:
        if len(text) < CHUNK_BYTES:
            return able[0] if len(able) == 1 else self.pick(able, now, session=session)
        keys = prefixes(tenant, text)
        prompt_bytes = indexed_bytes(keys)
        seen = self._prefixes.best(keys)
        most = max([seen.get(member.index, 0) for member in able])
        continuation = continuation_of(keys, most) if self._fleet.has_remotes else None
        chosen = self.pick(
            able, now, prefer=seen, prompt_bytes=prompt_bytes, continuation=continuation, session=session
        )
        self.seen_bytes = seen.get(chosen.index, 0)
        if self._heard and self.seen_bytes >= LEAST_PART * prompt_bytes:
            self._count_hint(keys, chosen.index)
        self._prefixes.note(keys, chosen.index)
        if chosen.kind == "remote":
            self._recent.append((chosen.identity, keys))
        return chosen

    def pick(
        self,
        able: Sequence[Member],
        now: float,
        *,
        prefer: Mapping[int, int] | None = None,
        prompt_bytes: int = 0,
        continuation: int | None = None,
        session: str = "",
    ) -> Member:
        """The replica by the policy (``policy.choose``), without a look at prompts."""
        routing = self.config.routing
        chosen = choose(
            able,
            random=self._random,
            now=now,
            prefer=prefer,
            prompt_bytes=prompt_bytes,
            continuation=continuation,
            session=session,
            slack=routing.affinity_slack,
            ready_since=self._fleet.health.ready_since,
            slow_start_s=routing.slow_start_s,
        )
        assert chosen is not None, "every able replica can take a request"
        return chosen

    def take_recent(self, max_keys: int) -> dict[str, list[int]]:
        """The keys of prompts that remote servers received since the last call, by the server's identity: the latest
        prompts, at most ``max_keys`` keys."""
        taken: dict[str, dict[int, None]] = {}
        left = max_keys
        while self._recent and left > 0:
            identity, keys = self._recent.pop()
            known = taken.setdefault(identity, {})
            new = [key for key in keys if key not in known][:left]
            known.update(dict.fromkeys(new))
            left -= len(new)
        self._recent.clear()
        return {identity: list(keys) for identity, keys in taken.items()}

    def received_elsewhere(self, index: int, keys: Sequence[int]) -> None:
        """Note prompts that a remote server received from another gateway."""
        for key in self._prefixes.learn(keys, index):
            self._heard.pop(key, None)  # the latest is evicted last
            self._heard[key] = index
        while len(self._heard) > MAX_PREFIXES:
            del self._heard[next(iter(self._heard))]

    def _count_hint(self, keys: Sequence[int], index: int) -> None:
        """Count a request of which the longest known prefix was known by a hint; each prefix once."""
        key = last_seen(keys, self.seen_bytes)
        if self._heard.get(key) == index:
            del self._heard[key]
            self.num_by_hints += 1

    def forget(self, index: int) -> None:
        """Note that the replica's prefix cache is empty: it was restarted or replaced."""
        self._prefixes.forget(index)
