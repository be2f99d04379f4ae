"""The health of a model's replicas: their circuit breakers, and the ejection of slow replicas.

Reports the outcomes of requests to ``breaker`` and ``outlier``, which hold the arithmetic. ``suspects`` has the remote
servers that fail at other gateways. The fleet decides which replicas get requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from inferd import clock
from inferd.config import RemoteConfig, RoutingConfig
from inferd.events import BreakerChanged, Emit
from inferd.router.choosing.outlier import Outliers
from inferd.router.choosing.suspects import Suspects
from inferd.router.replicas.member import Member
from inferd.router.replicas.replica import Kind


class Health:
    """The health of one model's replicas.

    ``members`` is the fleet's own mapping, which changes. ``notify`` is called when a breaker has changed.
    """

    def __init__(
        self,
        model: str,
        members: Mapping[int, Member],
        routing: RoutingConfig,
        emit: Emit,
        notify: Callable[[], None],
    ) -> None:
        self._model = model
        self._members = members
        self._emit = emit
        self._notify = notify
        self._return_timer: asyncio.TimerHandle | None = None  # for the end of the next ejection
        self._is_stopped = False
        self.ready_since: dict[int, float] = {}
        self.suspects = Suspects()
        self.configure(routing)

    def configure(self, routing: RoutingConfig) -> None:
        """Set other rules and forget the latencies."""
        kinds: tuple[Kind, ...] = ("local", "remote")  # workers are not compared with remote servers
        self._outliers = {kind: Outliers(routing) for kind in kinds}

    def answered(self, member: Member, seconds: float, begun_at: float, now: float) -> None:
        """Note that a replica began to answer, ``seconds`` after the dispatch at ``begun_at``."""
        if len(self._members) > 1:
            self._outliers[member.kind].note(member.index, seconds, now)
        if member.breaker is not None and member.breaker_state != "closed":
            member.breaker.success(now, begun_at)
            self._note_breaker(member)

    def waited(self, member: Member, seconds: float, now: float) -> None:
        """Note that a request dispatched ``seconds`` ago was given up before its answer began.

        Its client or its deadline gave it up, so the breaker counts neither a success nor a failure.
        """
        if len(self._members) > 1:
            self._outliers[member.kind].note_at_least(member.index, seconds, now)

    def failed(self, member: Member, begun_at: float | None, now: float, reason: str) -> None:
        """Note that a replica failed a request that was dispatched at ``begun_at``; None: not known."""
        if member.breaker is not None:
            member.breaker.failure(now, begun_at)
            self._note_breaker(member, reason)

    def request_began(self, member: Member, now: float) -> None:
        """Note that a request is dispatched to a replica."""
        if member.breaker is not None and member.breaker_state != "closed":
            member.breaker.begin(now)

    def _note_breaker(self, member: Member, reason: str = "") -> None:
        breaker = member.breaker
        if breaker is None or breaker.state == member.breaker_state:
            return
        member.breaker_state = breaker.state
        if breaker.state == "closed":  # its share of requests grows slowly again (slow start)
            self.ready_since[member.index] = clock.now()
        self._emit(BreakerChanged(model=self._model, replica=member.index, state=breaker.state, reason=reason))
        if breaker.state == "open" and isinstance(member.made_from, RemoteConfig) and member.made_from.probe:
            member.replica.probe()
        self._notify()

    def update_ejections(self, now: float) -> None:
        """Eject slow replicas, and readmit those whose ejection is over."""
        for kind, outliers in self._outliers.items():
            slow = outliers.ejected(now)
            for member in self._members.values():
                if member.kind == kind and (member.index in slow) != member.is_ejected:
                    member.is_ejected = not member.is_ejected
                    self._emit(
                        BreakerChanged(
                            model=self._model,
                            replica=member.index,
                            state="ejected" if member.is_ejected else member.breaker_state,
                            reason="its answers begin later than its peers'" if member.is_ejected else "",
                        )
                    )
            if slow and self._return_timer is None:  # without traffic no request would cause the next call
                left_s = max(0.0, outliers.next_return(now) - now)
                self._return_timer = asyncio.get_running_loop().call_later(left_s, self._on_return)

    def _on_return(self) -> None:
        self._return_timer = None
        if not self._is_stopped:
            self.update_ejections(clock.now())

    def forget(self, member: Member) -> None:
        """Forget a replica that is gone, as its index will be used again."""
        self.ready_since.pop(member.index, None)
        self._outliers[member.kind].forget(member.index)

    def halt(self) -> None:
        """Stop the timers."""
        self._is_stopped = True
        if self._return_timer is not None:
            self._return_timer.cancel()
