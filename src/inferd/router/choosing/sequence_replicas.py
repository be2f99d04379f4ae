"""Which replica has a sequence's state: its requests go there, and nowhere else."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from inferd.router.replicas.replica import Replica
from inferd.types import PredictRequest, Request

MAX_SEQUENCES: Final = 100_000
"""Sequences remembered; those that were not heard of for the longest are forgotten first."""


class SequenceReplicas:
    """Where sequences were begun."""

    __slots__ = ("_replicas",)

    def __init__(self) -> None:
        self._replicas: OrderedDict[tuple[str, str], Replica] = OrderedDict()

    def replica_of(self, request: Request) -> Replica | None:
        """The replica that has the state of the request's sequence; None: any will do."""
        if not isinstance(request, PredictRequest) or not request.sequence:
            return None
        return self._replicas.get((request.tenant, request.sequence))

    def note(self, request: Request, replica: Replica) -> None:
        """The request goes there."""
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
