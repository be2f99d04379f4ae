"""The duty of a replica that computes requests together, beside the part of its capacity that is used, in simulated
time: ``python -m bench.scaling_utilization``.

The engine's scheduler and its ledger of steps run with steps that take a fixed time and some for each token, with a
fifth of noise. Arrivals are Poisson, lengths exponential. First requests always wait: the rate of ends is what the
replica serves at most. Then arrivals are parts of this rate. Prints a table in Markdown: the arrivals over that rate,
the time with requests, and the duty, of the last three quarters of the time. Exit status 1: a duty differs from its part
of the capacity by more than ``CLOSE``.
"""

from __future__ import annotations

import random
import sys
from typing import Final, NamedTuple

from tests.engine.scheduling.test_accounting import Clockwork

from bench.report import markdown

CLOSE: Final = 0.05
PARTS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
SEQUENCES: Final = 64


class Replica(NamedTuple):
    """Seconds of a step and of its tokens, the mean tokens of prompts and answers, blocks of 4 tokens, and the seconds
    that are simulated."""

    fixed_s: float
    prefill_s: float
    decode_s: float
    prompt: int
    answer: int
    num_blocks: int = 100_000
    seconds: float = 300.0


REPLICAS: Final = {
    "CPUs, short prompts": Replica(0.037, 0.0015, 0.0063, 30, 60, seconds=1500.0),
    "CPUs, longer prompts": Replica(0.037, 0.0015, 0.0063, 400, 20, seconds=1500.0),
    "GPU": Replica(0.010, 0.00002, 0.00005, 200, 200),
    "GPU, prompts of 3,000 tokens": Replica(0.010, 0.00006, 0.00005, 3000, 30),
    "GPU, 2,000 blocks": Replica(0.010, 0.00002, 0.00005, 400, 100, num_blocks=2000),
}


class Served(NamedTuple):
    """Requests that ended in a second, and the parts of the time with requests, and of full steps for the same work."""

    per_s: float
    busy: float
    duty: float


def serve(replica: Replica, rate: float | None) -> Served:
    """``rate``: arrivals per second; None: some always wait."""
    clockwork = Clockwork(num_blocks=replica.num_blocks, max_num_batched_tokens=512, max_num_seqs=SEQUENCES)
    clockwork.fixed_s, clockwork.prefill_s, clockwork.decode_s = replica.fixed_s, replica.prefill_s, replica.decode_s
    clockwork.noise, drawn = random.Random(1), random.Random(1)
    began = next_at = clockwork.now
    busy = used = 0.0
    num_added = 0
    while clockwork.now < began + replica.seconds:
        if rate is not None and not clockwork.open:
            clockwork.now = max(clockwork.now, next_at)
        while next_at <= clockwork.now if rate is not None else len(clockwork.open) < SEQUENCES + 8:
            lengths = [max(2, int(drawn.expovariate(1 / mean))) for mean in (replica.prompt, replica.answer)]
            clockwork.add(*lengths)
            num_added += 1
            next_at += drawn.expovariate(rate or 1.0)
        at = clockwork.now
        step = clockwork.step()
        if at >= began + replica.seconds / 4:
            busy += clockwork.now - at
            used += (clockwork.now - at) * clockwork.ledger.utilization(step, step.fullness)
    span_s = clockwork.now - began
    return Served((num_added - len(clockwork.open)) / span_s, busy / (0.75 * span_s), used / (0.75 * span_s))


def main() -> int:
    rows, is_close = [], True
    for name, replica in REPLICAS.items():
        most = serve(replica, None).per_s
        for part in PARTS:
            served = serve(replica, part * most)
            share = served.per_s / most
            is_close &= abs(served.duty - share) <= CLOSE
            rows.append([name, f"{share:.2f}", f"{served.busy:.2f}", f"{served.duty:.2f}"])
    print(markdown(["replica", "of what it serves at most", "time with requests", "duty"], rows))
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
