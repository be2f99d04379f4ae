"""Keeps batch work from delaying the first tokens of the other classes. Pure: steps and counts are arguments.

Two rules hold while other classes have had sequences within the last ``REMEMBERED`` steps:

- A step computes batch work for at most three quarters of the prefill that a first token of another class usually
  needs (``LIMIT_SHARE``), or for ``PAUSING_SHARE`` of it where a step with batch work pauses for such a token. While
  the token is due, only every ``SHARE_EVERY``-th step computes any, and never more than three quarters.
- Batch sequences are admitted only where slots and blocks stay free for as many sequences of other classes as there
  usually are, up to half of all. Otherwise batch sequences would be admitted and displaced over and over.

Both fade while no other class has sequences: the limit doubles every ``FADE_EVERY`` steps, and what is kept free is
forgotten within about as many. So a batch job that is alone soon fills the steps.
"""

from __future__ import annotations

SHARE_EVERY = 8
LEAST_BATCH = 8  # tokens of batch work that a step may always compute where no first token is due
LIMIT_SHARE = 0.75  # of a usual prefill; from 0.9 on, first tokens take more than twice as long in some simulations
PAUSING_SHARE = 2.5  # the same where steps may pause
FADE_EVERY = 256
REMEMBERED = 4096  # steps after which classes without sequences need no protection any more
_DECAY = 1.0 - 1.0 / 4096  # of the peak, per step with other classes
_FADE = 1.0 - 1.0 / FADE_EVERY  # the same without them
_SMOOTHING = 0.1  # weight of the newest value


class BatchGuard:
    """Knows what sequences of other classes usually need. ``step`` is the number of the current step."""

    __slots__ = ("_active_until", "_peak_others", "_usual_length", "_usual_prefill")

    def __init__(self) -> None:
        self._active_until = 0
        self._peak_others = 0.0  # decaying maximum of sequences of other classes at the same time
        self._usual_prefill = 0.0  # tokens computed for a first token of another class, smoothed
        self._usual_length = 0.0  # tokens of such a sequence at its end, smoothed

    def record_step(self, step: int, others: int) -> None:
        """``others``: sequences of other classes, waiting or running."""
        self._peak_others = max(self._peak_others * (_DECAY if others else _FADE), others)
        if others:
            self._active_until = step + REMEMBERED

    def record_prefill(self, tokens: int) -> None:
        """A sequence of another class was admitted with ``tokens`` left to compute."""
        self._usual_prefill = _smoothed(self._usual_prefill, tokens)

    def record_length(self, tokens: int) -> None:
        """A sequence of another class ended with ``tokens`` in all."""
        self._usual_length = _smoothed(self._usual_length, tokens)

    def is_active(self, step: int) -> bool:
        return step < self._active_until

    def limit(self, step: int, fixed_in_prefill: float, *, may_pause: bool = False) -> float:
        """Prefill tokens of batch work in a step where no first token is due.

        ``fixed_in_prefill``: prefill tokens that cost as much as the fixed part of a step. ``may_pause``: a first token
        waits for a part of the step alone.
        """
        passed = max(0, step - (self._active_until - REMEMBERED))  # steps without other classes
        return self._share(PAUSING_SHARE if may_pause else LIMIT_SHARE, fixed_in_prefill) * 2.0 ** (
            passed // FADE_EVERY
        )

    def allowance(self, step: int, limit: float, fixed_in_prefill: float, *, first_token_due: bool) -> float:
        """Prefill tokens of batch work in this step. The step of a first token does not pause for it."""
        if not first_token_due:
            return limit
        return 0 if step % SHARE_EVERY else min(limit, self._share(LIMIT_SHARE, fixed_in_prefill))

    def _share(self, share: float, fixed_in_prefill: float) -> float:
        """So much of a usual prefill, in its tokens."""
        return max(self._usual_prefill * share + fixed_in_prefill / 20, LEAST_BATCH)

    def admits(
        self,
        step: int,
        *,
        needed_blocks: int,
        available_blocks: int,
        num_blocks: int,
        block_size: int,
        num_running: int,
        num_others_running: int,
        max_num_seqs: int,
    ) -> bool:
        """Whether a batch sequence of ``needed_blocks`` leaves enough slots and blocks for other classes."""
        if not self.is_active(step) or not num_running:
            return True
        reserved_slots = min(self._peak_others + 1, max_num_seqs / 2) - num_others_running
        if reserved_slots <= 0:
            return True
        if num_running + reserved_slots >= max_num_seqs:
            return False
        reserved_blocks = min(reserved_slots * self._usual_length / block_size, num_blocks / 2)
        return needed_blocks + reserved_blocks <= available_blocks


def _smoothed(known: float, value: float) -> float:
    """The first value counts whole."""
    return known + (value - known) * (_SMOOTHING if known else 1.0)
