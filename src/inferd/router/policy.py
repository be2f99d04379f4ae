"""Which replica takes the next request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A replica as the choice sees it."""

    @property
    def can_take(self) -> bool: ...
    @property
    def outstanding(self) -> int:
        """Sequences it has been given and has not finished."""


C = TypeVar("C", bound=Candidate)


def choose(replicas: Iterable[C]) -> C | None:
    """The replica with the least outstanding work among those that can take more; None: nobody can."""
    return min((replica for replica in replicas if replica.can_take), key=_outstanding, default=None)


def _outstanding(replica: Candidate) -> int:
    return replica.outstanding
