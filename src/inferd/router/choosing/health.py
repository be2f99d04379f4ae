"""How a model's replicas fare: each one's breaker, and who is set aside because its answers begin later than its peers'.

Knows what became of requests; the arithmetic is ``breaker``'s and ``outlier``'s, and who may get requests the fleet's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from inferd import clock
from inferd.config import RemoteConfig, RoutingConfig
from inferd.events import BreakerChanged, Emit
from inferd.router.choosing.outlier import Outliers
from inferd.router.replicas.member import Member
from inferd.router.replicas.replica import Kind


class Health:
    """``members`` are the fleet's of every moment; ``ring``: one of them may get requests again."""

    def __init__(
        self,
        model: str,
        members: Mapping[int, Member],
        routing: RoutingConfig,
        emit: Emit,
        ring: Callable[[], None],
    ) -> None:
        self._model = model
        self._members = members
        self._emit = emit
        self._ring = ring
        self._next_look: asyncio.TimerHandle | None = None  # when one that was set aside comes back
        self._is_stopped = False
        self.ready_since: dict[int, float] = {}
        self.configure(routing)

    def configure(self, routing: RoutingConfig) -> None:
        """Measure anew, by these rules."""
        kinds: tuple[Kind, ...] = ("local", "remote")  # a worker here is not measured by a cloud's machines
        self._outliers = {kind: Outliers(routing) for kind in kinds}

    def answered(self, member: Member, seconds: float, begun_at: float, now: float) -> None:
        """It began to answer a request, so many seconds after it got it."""
        if len(self._members) > 1:
            self._outliers[member.kind].note(member.index, seconds, now)
        if member.breaker is not None and member.breaker_state != "closed":
            member.breaker.success(now, begun_at)
            self._note_breaker(member)

    def waited(self, member: Member, seconds: float, now: float) -> None:
        """A request that it got so many seconds ago was given up, by its client or by its deadline, before it began to
        answer: no success, and no failure of which the breaker is to know."""
        if len(self._members) > 1:
            self._outliers[member.kind].note_at_least(member.index, seconds, now)

    def failed(self, member: Member, begun_at: float | None, now: float, reason: str) -> None:
        if member.breaker is not None:
            member.breaker.failure(now, begun_at)
            self._note_breaker(member, reason)

    def begin(self, member: Member, now: float) -> None:
        """It is given a request."""
        if member.breaker is not None and member.breaker_state != "closed":
            member.breaker.begin(now)

    def _note_breaker(self, member: Member, reason: str = "") -> None:
        breaker = member.breaker
        if breaker is None or breaker.state == member.breaker_state:
            return
        member.breaker_state = breaker.state
        if breaker.state == "closed":  # it came back, and gets its share little by little
            self.ready_since[member.index] = clock.now()
        self._emit(BreakerChanged(model=self._model, replica=member.index, state=breaker.state, reason=reason))
        if breaker.state == "open" and isinstance(member.made_from, RemoteConfig) and member.made_from.probe:
            member.replica.probe()
        self._ring()

    def look(self, now: float) -> None:
        """Set the slow ones aside, and let those back whose time is over."""
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
            if slow and self._next_look is None:  # without traffic nobody else would see that it is back
                left_s = max(0.0, outliers.next_return(now) - now)
                self._next_look = asyncio.get_running_loop().call_later(left_s, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        if not self._is_stopped:
            self.look(clock.now())

    def forget(self, member: Member) -> None:
        """It has left: its index is given again."""
        self.ready_since.pop(member.index, None)
        self._outliers[member.kind].forget(member.index)

    def halt(self) -> None:
        self._is_stopped = True
        if self._next_look is not None:
            self._next_look.cancel()
