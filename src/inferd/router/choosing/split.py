"""Whether the prompt of a request is computed by another replica than its answer. Pure: times are measured elsewhere.

A prompt that is computed beside running answers holds each of them up. A hand-over costs the request itself the wait
for the other replica and for the blocks. So a prompt is handed over where the seconds that it would take from other
answers are more than the seconds by which its own answer begins later:

    streams * prefill  >  waiting + overhead

``prefill`` is the measured time of the part of the prompt that is not cached, which either replica takes. ``waiting``
is the time of the prompts before it at the other replica, ``overhead`` what hand-overs took besides. Before anything is
measured, prompts are handed over, so that it is measured.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FIRST_TOKENS_PER_BYTE: Final = 0.25
PATIENCE: Final = 8.0
"""Times the expected time after which a hand-over is given up, within the two limits below."""

SHORTEST_S: Final = 5.0
LONGEST_S: Final = 60.0
_SHARE: Final = 0.2  # of a new measurement in the mean


class Decision(NamedTuple):
    """``is_split``: the prompt is computed elsewhere. ``why``: a sentence without a full stop."""

    is_split: bool
    why: str


class Costs:
    """What prompts and hand-overs took, as moving means."""

    __slots__ = ("num_measured", "overhead_s", "s_per_token", "tokens_per_byte")

    def __init__(self) -> None:
        self.num_measured = 0
        self.s_per_token = 0.0  # of a prompt's tokens that are computed
        self.overhead_s = 0.0  # of a hand-over besides its prompt's computation
        self.tokens_per_byte = FIRST_TOKENS_PER_BYTE  # of a prompt

    def record(
        self, *, num_bytes: int, num_tokens: int, num_computed: int, compute_s: float, overhead_s: float
    ) -> None:
        """A hand-over is complete. ``num_bytes``: of the prompt as the client sent it."""
        share = _SHARE if self.num_measured else 1.0
        if num_bytes:
            self.tokens_per_byte += share * (num_tokens / num_bytes - self.tokens_per_byte)
        if num_computed:
            self.s_per_token += share * (compute_s / num_computed - self.s_per_token)
        self.overhead_s += share * (overhead_s - self.overhead_s)
        self.num_measured += 1


def decide(
    costs: Costs, *, num_bytes: int, cached_bytes: int, streams: int, waiting_tokens: int, min_tokens: int
) -> Decision:
    """Whether a prompt of ``num_bytes`` is handed over to the replica of its answer.

    ``cached_bytes``: of them, those that this replica has probably cached. ``streams``: answers that it computes now.
    ``waiting_tokens``: of prompts that the other replica has to compute before.
    """
    tokens = round((num_bytes - cached_bytes) * costs.tokens_per_byte)
    if tokens < min_tokens:
        return Decision(False, f"about {tokens} tokens are not cached, and a hand-over begins at {min_tokens}")
    if not streams:
        return Decision(False, "no other answer is computed there that the prompt would hold up")
    if not costs.num_measured:
        return Decision(True, f"about {tokens} tokens beside {_answers(streams)}, and nothing is measured yet")
    held_up_s = streams * tokens * costs.s_per_token
    later_s = waiting_tokens * costs.s_per_token + costs.overhead_s
    what = (
        f"about {tokens} tokens would hold {_answers(streams)} up by {held_up_s:.3g} s together, and the hand-over "
        f"delays its own by {later_s:.3g} s"
    )
    return Decision(held_up_s > later_s, what)


def limit_s(costs: Costs, num_tokens: int) -> float:
    """Seconds after which a hand-over is given up, where so many tokens have to be computed for it."""
    if not costs.num_measured:
        return LONGEST_S
    return min(max(PATIENCE * (num_tokens * costs.s_per_token + costs.overhead_s), SHORTEST_S), LONGEST_S)


def _answers(count: int) -> str:
    return f"{count} answer{'s' * (count != 1)}"
