"""The engine's part in hand-overs: prompts that it computes for other workers, and blocks that it gets from them.

Knows sequences, blocks and requests. Everything here belongs to the loop thread; what may wait is in ``outgoing`` and
``receiver``.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from inferd.engine.hand_over.contents import Contents
from inferd.engine.hand_over.frames import FRAME_BYTES, Offer
from inferd.engine.hand_over.incoming import Incoming
from inferd.engine.hand_over.outgoing import Outgoing, Sending
from inferd.engine.hand_over.receiver import Receiver, RunOnLoop
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import GenerateRequest, Handed, Link

MOST_GIVEN_BYTES: Final = 64 * 1024 * 1024
"""Of contents that are read between two steps. The rest of a long prompt, of which much was cached, waits for the
following ones."""

BeginSending = Callable[[Offer, int, str], Sending]
"""Begins a hand-over of an offer, of the prompt's tokens, to the receiver at an address."""


class _Prompt:
    """A prompt that is computed for another worker: its hand-over, and the blocks that were given to it.

    ``held``: once its request has ended, the blocks that were computed and not given yet. They keep a reference.
    """

    __slots__ = ("held", "num_blocks", "num_given", "sending", "sequence")

    def __init__(self, sequence: Sequence, num_blocks: int, sending: Sending) -> None:
        self.sequence = sequence
        self.num_blocks = num_blocks
        self.num_given = 0
        self.sending = sending
        self.held: list[int] | None = None

    def waiting(self, block_size: int) -> list[int]:
        """The blocks that were computed and not given."""
        if self.held is not None:
            return self.held
        full = min(self.sequence.num_computed // block_size, self.num_blocks)
        return self.sequence.blocks[self.num_given : full]


class EngineLink:
    """Hand-overs of one engine. ``fingerprint``: of the model; blocks of another one are refused. ``begin`` replaces
    the sending through sockets in tests."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        contents: Contents,
        fingerprint: str,
        report: Callable[[Handed], None],
        begin: BeginSending | None = None,
    ) -> None:
        self._link = link
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._contents = contents
        self._layout = f"{fingerprint}, {contents.layout}"
        self._report = report
        self._begin = begin or self._begin_thread
        self._prompts: dict[str, _Prompt] = {}
        self._ended: list[_Prompt] = []  # of which blocks are held
        self.incoming = Incoming(scheduler, contents, self._layout)

    @property
    def has_blocks_to_give(self) -> bool:
        """Whether blocks of ended requests wait to be given."""
        return bool(self._ended)

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

    def give_computed(self) -> None:
        """Give blocks that steps have filled to their hand-overs, prompts that have ended first: at most
        ``MOST_GIVEN_BYTES``, or one block."""
        if not self._prompts and not self._ended:
            return
        left = max(MOST_GIVEN_BYTES // self._contents.block_bytes, 1)
        for prompt in (*self._ended, *self._prompts.values()):
            left -= self._give(prompt, left)
        for prompt in [one for one in self._ended if not one.held]:
            self._ended.remove(prompt)
            self._finish(prompt)

    def _give(self, prompt: _Prompt, most: int) -> int:
        """Give up to ``most`` blocks of a prompt, and pass over those that the receiver does not want. Returns how many
        were read."""
        waiting = prompt.waiting(self._scheduler.block_size)
        unwanted = waiting[: max(prompt.sending.num_unwanted - prompt.num_given, 0)]
        blocks = waiting[len(unwanted) : len(unwanted) + most]
        each = max(FRAME_BYTES // self._contents.block_bytes, 1)
        for at in range(0, len(blocks), each):
            first = prompt.num_given + len(unwanted) + at
            self._contents.read(blocks[at : at + each], partial(prompt.sending.give, first))
        num_passed = len(unwanted) + len(blocks)
        prompt.num_given += num_passed
        if prompt.held is not None:
            self._pool.release(prompt.held[:num_passed])
            del prompt.held[:num_passed]
        return len(blocks)

    def end(self, request_id: str) -> None:
        """A request ends, for whatever reason, and still has its blocks. The rest of a prompt that was computed to its
        end is given between the next steps."""
        self.incoming.release(request_id)
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        waiting = prompt.waiting(self._scheduler.block_size)
        if waiting and prompt.num_given + len(waiting) == prompt.num_blocks:
            self._pool.share(waiting)
            prompt.held = waiting
            self._ended.append(prompt)
        else:
            self._finish(prompt)

    def _finish(self, prompt: _Prompt) -> None:
        num_computed = max(prompt.sequence.num_prompt - prompt.sequence.num_cached, 0)
        self._contents.after_reads(lambda: prompt.sending.finish(num_computed=num_computed))

    def make_room(self, now: float) -> None:
        """Nothing could be scheduled: blocks that wait for requests are given up where sequences wait for memory. Those
        that are left to give are not held for long."""
        self.give_computed()
        if self._scheduler.has_work:
            self.incoming.release_all()
        else:
            self.incoming.expire(now)

    def _begin_thread(self, offer: Offer, num_tokens: int, address: str) -> Sending:
        outgoing = Outgoing(offer, num_tokens, address, self._link.key, self._report)
        threading.Thread(target=outgoing.run, name="inferd-send", daemon=True).start()
        return outgoing
