"""The receiver's books of hand-overs: which blocks are reserved, which have come, and how long they are kept.

Knows frames, blocks and their contents. Does not know sockets. Everything here belongs to the loop thread.

A reception goes through three states, and each block that it holds has exactly one reference from it:

    open       blocks are reserved, and contents are taken
    settled    its request has come, or its sender is done: no content is taken, and what did not come is released
    over       its request was scheduled or ended, or the lease is over: everything is released

What came has a key by then, so a released block stays in the prefix cache, where the request finds it.
"""

from __future__ import annotations

from typing import Final

from inferd.engine.hand_over.contents import Contents
from inferd.engine.hand_over.frames import Blocks, Done, Frame, Grant, Offer, Receipt, Refusal
from inferd.engine.scheduling.scheduler import Scheduler

LEASE_S: Final = 30.0
"""Seconds after the last frame for which blocks are kept for a request that does not come."""

MOST_SHARE: Final = 0.5
"""Of all blocks: the most that receptions may hold together."""


class Reception:
    """One hand-over. ``blocks``: of the prompt's first keys, in order; those before ``first`` were in the cache."""

    __slots__ = ("blocks", "first", "has_come", "is_open", "offer", "until")

    def __init__(self, offer: Offer, hits: list[int], fresh: list[int], until: float) -> None:
        self.offer = offer
        self.blocks = [*hits, *fresh]
        self.first = len(hits)
        self.has_come = [False] * len(fresh)
        self.is_open = True
        self.until = until

    @property
    def num_usable(self) -> int:
        """The prompt's first blocks that are there, without a gap."""
        gap = next((i for i, has_come in enumerate(self.has_come) if not has_come), len(self.has_come))
        return self.first + gap


class Incoming:
    """All receptions of one engine. ``layout``: what an offer must have, as the sender's."""

    def __init__(self, scheduler: Scheduler, contents: Contents, layout: str) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._contents = contents
        self._layout = layout
        self._by_request: dict[str, Reception] = {}
        self._by_name: dict[bytes, Reception] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def take(self, frame: Frame | None, now: float) -> Frame | None:
        """A frame came; what is answered. None as a frame: one that was changed on its way."""
        self.expire(now)
        match frame:
            case Offer():
                return self._reserve(frame, now)
            case Blocks():
                self._land(frame, now)
            case Done(name):
                reception = self._by_name.get(name)
                if reception is None:
                    return Receipt(name, 0)
                usable = reception.num_usable
                self._settle(reception)
                return Receipt(name, usable)
        return None

    def close(self, name: bytes) -> None:
        """The connection of a hand-over has ended."""
        reception = self._by_name.get(name)
        if reception is not None:
            self._settle(reception)

    def arrive(self, request_id: str) -> None:
        """The request itself came: it computes whatever is not there."""
        reception = self._by_request.get(request_id)
        if reception is not None:
            self._settle(reception)

    def num_handed(self, request_id: str) -> int:
        """Blocks that came for a request by its hand-over."""
        reception = self._by_request.get(request_id)
        return 0 if reception is None else sum(reception.has_come)

    def release(self, request_id: str) -> None:
        """The request holds what it uses, or has ended. Idempotent."""
        reception = self._by_request.pop(request_id, None)
        if reception is not None:
            self._settle(reception)
            del self._by_name[reception.offer.hand_over]
            self._pool.release(reception.blocks)

    def expire(self, now: float) -> None:
        """Release the blocks of requests that did not come."""
        for request_id in [name for name, one in self._by_request.items() if one.until <= now]:
            self.release(request_id)

    def release_all(self) -> None:
        """Release every block: requests that run need them."""
        for request_id in tuple(self._by_request):
            self.release(request_id)

    # -- parts ------------------------------------------------------------------------------

    def _reserve(self, offer: Offer, now: float) -> Grant | Refusal:
        if offer.layout != self._layout:
            return Refusal(offer.hand_over, f"the blocks are of another kind: {offer.layout!r} is not {self._layout!r}")
        if offer.hand_over in self._by_name:
            return Refusal(offer.hand_over, "the hand-over was offered before")
        self.release(offer.request_id)  # of an earlier attempt
        hits: list[int] = []
        for key in offer.keys:
            block = self._pool.find(key)
            if block is None:
                break
            hits.append(block)
        self._pool.share(hits)
        held = sum(len(one.blocks) for one in self._by_request.values())
        most = int(self._pool.num_blocks * MOST_SHARE) - held - len(hits)
        # Every sequence that runs may need a block in this step.
        spare = self._scheduler.num_reservable - len(self._scheduler.running)
        count = min(len(offer.keys) - len(hits), most, spare)
        if count <= 0 and len(hits) < len(offer.keys):
            self._pool.release(hits)
            return Refusal(offer.hand_over, "the receiver has no free memory")
        reception = Reception(offer, hits, self._pool.allocate(count), now + LEASE_S)
        self._by_request[offer.request_id] = self._by_name[offer.hand_over] = reception
        return Grant(offer.hand_over, len(hits), count)

    def _land(self, frame: Blocks, now: float) -> None:
        reception = self._by_name.get(frame.hand_over)
        if reception is None or not reception.is_open:
            return  # late
        reception.until = now + LEASE_S
        places: list[int] = []
        contents: list[bytes] = []
        for place, content in enumerate(frame.contents, frame.first - reception.first):
            is_wanted = 0 <= place < len(reception.has_come) and not reception.has_come[place]
            if is_wanted and len(content) == self._contents.block_bytes:
                places.append(place)
                contents.append(content)
        if not places:
            return
        offer, first = reception.offer, reception.first
        self._contents.write([reception.blocks[first + place] for place in places], contents)
        for place in places:
            reception.has_come[place] = True
            block, key = reception.blocks[first + place], offer.keys[first + place]
            self._pool.publish(block, key, offer.tenant, offer.weight)

    def _settle(self, reception: Reception) -> None:
        """Take no more contents, and release the blocks that did not come."""
        if not reception.is_open:
            return
        reception.is_open = False
        hits, fresh = reception.blocks[: reception.first], reception.blocks[reception.first :]
        came = [block for block, has_come in zip(fresh, reception.has_come, strict=True) if has_come]
        self._pool.release([b for b, has_come in zip(fresh, reception.has_come, strict=True) if not has_come])
        reception.blocks = [*hits, *came]
