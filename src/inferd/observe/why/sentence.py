"""One sentence that says where the time of a call went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inferd.observe.why.causes import Case, Cause
from inferd.observe.why.words import counted, seconds_text

MOST_CAUSES: Final = 3
MOST_PARTS: Final = 2
LEAST_PART: Final = 0.1  # of the total


PARTS: Final = {
    "receive": "receiving the request",
    "admission": "in the gateway before the queue",
    "load_wait": "until a replica could work",
    "queue": "in the queue",
    "lost_attempts": "at replicas that failed",
    "hand_over": "while another replica computed the prompt",
    "remote": "at another server",
    "tokenize": "tokenizing the prompt",
    "schedule_wait": "until its first step",
    "prefill": "computing the prompt",
    "prefill_shared": "for other requests in the steps of the prompt",
    "decode": "generating the answer",
    "crowding": "for other requests' tokens in its steps",
    "others_prefill": "for other requests' prompts in its steps",
    "preempted": "preempted",
    "recomputed": "computing again what a preemption dropped",
    "masks": "for the masks of structured output",
    "speculation": "saved by guessed tokens",
    "slowed": "for steps slower than fitted",
    "decode_inputs": "decoding the inputs",
    "batch_wait": "until its batch began",
    "compute": "computing the batch",
    "encode": "writing the answer",
    "send": "sending the answer",
    "rest": "between these parts",
}
"""What the seconds of each part were spent on, behind a duration."""


def sentence_of(case: Case, causes: Sequence[Cause]) -> str:
    """Such as "4.1 s, usually 1.2 s: 2.6 s in the queue behind 31 requests of another tenant (class normal)."

    Without causes it names the longest parts.
    """
    numbers, usual_s = case.numbers, case.usual.total_s
    head = seconds_text(numbers.total)
    if numbers.status >= 400:
        code = f", {case.record.error_code}" if case.record.error_code else ""
        head += f" until it failed (status {numbers.status}{code})"
    elif usual_s is not None:
        head += f", usually {seconds_text(usual_s)}"
    reasons = [cause.sentence for cause in causes[:MOST_CAUSES]] or _longest_parts(case)
    return f"{head}: {'; '.join(reasons)}." if reasons else f"{head}."


def _longest_parts(case: Case) -> list[str]:
    took = dict(case.seconds)
    if "decode" in took:  # as it was: without the steps that accepted guesses saved
        took["decode"] += took.pop("speculation", 0.0)
    ranked = sorted(took.items(), key=lambda part: -part[1])[:MOST_PARTS]
    return [
        f"{seconds_text(seconds)} {_words(case, name)}"
        for name, seconds in ranked
        if seconds > 0 and seconds >= LEAST_PART * case.numbers.total
    ]


def _words(case: Case, name: str) -> str:
    numbers = case.numbers
    if name == "decode" and numbers.completion_tokens:
        return f"generating {counted(numbers.completion_tokens, 'token')}"
    if name == "prefill" and numbers.computed_tokens:
        return f"computing {counted(numbers.computed_tokens, 'token')} of the prompt"
    return PARTS[name]
