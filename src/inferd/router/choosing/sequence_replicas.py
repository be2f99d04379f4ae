"""The replicas that hold the states of sequences. All requests of a sequence go to the same replica."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from inferd.router.replicas.replica import Replica
from inferd.types import PredictRequest, Request

MAX_SEQUENCES: Final = 100_000
"""Sequences remembered; the least recently used are forgotten first."""


class SequenceReplicas:
    """The replica of each sequence, by tenant and the sequence's id."""

    __slots__ = ("_replicas",)

    def __init__(self) -> None:
        self._replicas: OrderedDict[tuple[str, str], Replica] = OrderedDict()

    def replica_of(self, request: Request) -> Replica | None:
        """The replica with the state of the request's sequence; None: every replica can compute the request."""
        if not isinstance(request, PredictRequest) or not request.sequence:
            return None
        return self._replicas.get((request.tenant, request.sequence))

    def note(self, request: Request, replica: Replica) -> None:
        """Note that the request is dispatched to the replica. The last request of a sequence ends the record."""
        if not isinstance(request, PredictRequest) or not request.sequence:
            return
        key = (request.tenant, request.sequence)
        if request.sequence_end:
            self._replicas.pop(key, None)
            return
        self._replicas[key] = replica
        self._replicas.move_to_end(key)
        if len(self._replicas) > MAX_SEQUENCES:
            self._replicas.popitem(last=False)
