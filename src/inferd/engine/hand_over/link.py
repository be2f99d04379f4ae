"""The engine's part in hand-overs: prompts that it computes for other workers, and blocks that it gets from them.

Knows sequences, blocks and requests. Everything here belongs to the loop thread; what may wait is in ``outgoing`` and
``receiver``.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from inferd.engine.hand_over.frames import Offer
from inferd.engine.hand_over.incoming import Incoming
from inferd.engine.hand_over.outgoing import Outgoing, Sending
from inferd.engine.hand_over.receiver import Receiver, RunOnLoop
from inferd.engine.scheduling.scheduler import Scheduler, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.native.kv_cache import KVCache
from inferd.types import GenerateRequest, Handed, Link

BeginSending = Callable[[Offer, int, str], Sending]
"""Begins a hand-over of an offer, of the prompt's tokens, to the receiver at an address."""


class _Prompt:
    """A prompt that is computed for another worker: its hand-over, and the blocks that were given to it."""

    __slots__ = ("num_blocks", "num_given", "sending", "sequence")

    def __init__(self, sequence: Sequence, num_blocks: int, sending: Sending) -> None:
        self.sequence = sequence
        self.num_blocks = num_blocks
        self.num_given = 0
        self.sending = sending


class EngineLink:
    """Hand-overs of one engine. ``fingerprint``: of the model; blocks of another one are refused. ``begin`` replaces
    the sending through sockets in tests."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        cache: KVCache,
        fingerprint: str,
        report: Callable[[Handed], None],
        begin: BeginSending | None = None,
    ) -> None:
        self._link = link
        self._scheduler = scheduler
        self._cache = cache
        self._layout = f"{fingerprint}, {cache.layout}"
        self._report = report
        self._begin = begin or self._begin_thread
        self._prompts: dict[str, _Prompt] = {}
        self.incoming = Incoming(scheduler, cache, self._layout)

    def listen(self, run_on_loop: RunOnLoop) -> None:
        """Get blocks from now on. Raises OSError."""
        receiver = Receiver(self._link.address, self._link.key, self.incoming, run_on_loop)
        threading.Thread(target=receiver.run, name="inferd-hand-over", daemon=True).start()

    def arrive(self, request: GenerateRequest, sequence: Sequence) -> None:
        """A request was added, with its first sequence."""
        self.incoming.arrive(request.id)
        if not request.hands_over_to:
            return
        size = self._scheduler.block_size
        num_blocks = (len(sequence.tokens) - 1) // size  # the last token is computed where its logits are wanted
        offer = Offer(
            hand_over=secrets.token_bytes(16),
            request_id=request.hands_over_for,
            layout=self._layout,
            keys=[sequence.block_key(i, size) for i in range(num_blocks)],
            tenant=sequence.tenant,
            weight=sequence.weight,
        )
        sending = self._begin(offer, len(sequence.tokens), request.hands_over_to)
        self._prompts[request.id] = _Prompt(sequence, num_blocks, sending)

    def scheduled(self, sequence: Sequence) -> int:
        """A sequence holds what it found in the cache. Tokens of it that came by a hand-over."""
        if not len(self.incoming):
            return 0
        num_tokens = self.incoming.num_handed(sequence.request_id) * self._scheduler.block_size
        self.incoming.release(sequence.request_id)
        return min(num_tokens, sequence.num_cached)

    def send_computed(self, step: Step) -> None:
        """Give the blocks that the step has filled to their hand-overs."""
        if not self._prompts:
            return
        for part in step.slices:
            prompt = self._prompts.get(part.sequence.request_id)
            if prompt is not None:
                self._give(prompt)

    def _give(self, prompt: _Prompt) -> None:
        sequence, first = prompt.sequence, prompt.num_given
        full = min(sequence.num_computed // self._scheduler.block_size, prompt.num_blocks)
        if full > first:
            prompt.sending.give(first, self._cache.read_blocks(sequence.blocks[first:full]))
            prompt.num_given = full

    def end(self, request_id: str) -> None:
        """A request has ended, for whatever reason."""
        self.incoming.release(request_id)
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            prompt.sending.finish(num_computed=max(prompt.sequence.num_prompt - prompt.sequence.num_cached, 0))

    def make_room(self, now: float) -> None:
        """Nothing could be scheduled: blocks that wait for requests are given up where sequences wait for memory."""
        if self._scheduler.has_work:
            self.incoming.release_all()
        else:
            self.incoming.expire(now)

    def _begin_thread(self, offer: Offer, num_tokens: int, address: str) -> Sending:
        outgoing = Outgoing(offer, num_tokens, address, self._link.key, self._report)
        threading.Thread(target=outgoing.run, name="inferd-send", daemon=True).start()
        return outgoing
