"""The dispatch of requests to replicas with roles: which prompts another replica computes, and what that took."""

from __future__ import annotations

from typing import Final

from inferd import clock
from inferd.config import RolesConfig
from inferd.events import Emit, HandedOver
from inferd.router.choosing.affinity import new_bytes, size_of
from inferd.router.choosing.split import Costs, Decision, decide, limit_s
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.member import Member
from inferd.router.replicas.prompts import has_prompt_alone
from inferd.router.replicas.replica import LocalReplica
from inferd.router.ticket import Ticket
from inferd.types import GenerateRequest, Handed, HandOver

_ALONE: Final = Decision(False, "the prompt and the answer of such a request are computed together")


class HandOvers:
    """The hand-overs of one model. ``costs``: what they took so far."""

    __slots__ = ("_emit", "_fleet", "_model", "costs")

    def __init__(self, model: str, fleet: Fleet, emit: Emit) -> None:
        self._model = model
        self._fleet = fleet
        self._emit = emit
        self.costs = Costs()

    def dispatch(self, ticket: Ticket, member: Member, roles: RolesConfig | None, seen_bytes: int) -> None:
        """Send a request to a replica, or its prompt to another one first. ``seen_bytes``: of the prompt, those that
        the replica received before."""
        replica = member.replica
        ticket.hand_over = None  # of an earlier attempt
        if roles is None or not isinstance(replica, LocalReplica) or replica.role != "decode":
            replica.dispatch(ticket)
            return
        other, decision, num_bytes = self._decide(ticket, replica, roles, seen_bytes)
        if other is None or not decision.is_split:
            ticket.hand_over = HandOver(why=decision.why)
            replica.dispatch(ticket)
            return
        began_at, source = clock.now(), other

        def ended(handed: Handed) -> None:
            self._record(ticket, source, handed, decision, num_bytes, clock.now() - began_at)

        num_tokens = max(round(new_bytes(num_bytes, seen_bytes) * self.costs.tokens_per_byte), 0)
        longest_s = limit_s(self.costs, num_tokens + other.prompts.num_tokens)
        replica.dispatch_after(ticket, other.prompts, num_tokens, longest_s, ended)

    def _decide(
        self, ticket: Ticket, replica: LocalReplica, roles: RolesConfig, seen_bytes: int
    ) -> tuple[LocalReplica | None, Decision, int]:
        """Where the prompt may be computed, whether it should be, and its size."""
        request = ticket.request
        if not has_prompt_alone(request) or ticket.worker_deaths:
            return None, _ALONE, 0
        assert isinstance(request, GenerateRequest)
        other = self._source_for(replica)
        if other is None:
            return None, Decision(False, "no replica that computes prompts for this one is ready"), 0
        num_bytes = size_of(request)
        decision = decide(
            self.costs,
            num_bytes=num_bytes,
            cached_bytes=num_bytes - new_bytes(num_bytes, seen_bytes),
            streams=replica.num_answers,
            waiting_tokens=other.prompts.num_tokens,
            min_tokens=roles.min_tokens,
        )
        return other, decision, num_bytes

    def _source_for(self, replica: LocalReplica) -> LocalReplica | None:
        """The replica that can compute a prompt for this one and has the fewest tokens to compute."""
        able = [
            member.replica
            for member in self._fleet.members
            if member.role == "prefill"
            and isinstance(member.replica, LocalReplica)
            and not member.is_leaving
            and member.replica.can_take
            and is_same_kind(member.replica, replica)
        ]
        return min(able, key=lambda each: each.prompts.num_tokens) if able else None

    def _record(
        self, ticket: Ticket, source: LocalReplica, handed: Handed, decision: Decision, num_bytes: int, seconds: float
    ) -> None:
        ticket.hand_over = HandOver(
            decision.why, source.index, seconds, handed.num_blocks, handed.num_bytes, handed.failure
        )
        if not handed.failure:
            self.costs.record(
                num_bytes=num_bytes,
                num_tokens=handed.num_tokens,
                num_computed=handed.num_computed,
                compute_s=handed.compute_s,
                overhead_s=max(seconds - handed.compute_s, 0.0),
            )
        self._emit(
            HandedOver(
                model=self._model,
                replica=source.index,
                seconds=seconds,
                num_blocks=handed.num_blocks,
                num_bytes=handed.num_bytes,
                failure=handed.failure,
            )
        )


def is_same_kind(one: LocalReplica, other: LocalReplica) -> bool:
    """Whether two replicas have the same model in the same number format and layout of ranks, on one machine."""
    return (
        one.node == other.node
        and one.info is not None
        and other.info is not None
        and one.info.fingerprint == other.info.fingerprint
        and one.info.block_size == other.info.block_size
        and one.info.layout == other.info.layout
    )
