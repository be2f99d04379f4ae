"""How long requests and answers are in real traffic: quantiles of public traces, and lengths drawn from them. Knows no engine.

Of Azure's two services (AzurePublicDataset, LLM inference trace 2023, CC BY 4.0), Mooncake's conversation trace (FAST 2025, Apache-2.0)
and ShareGPT as AIBrix replays it (Apache-2.0); in tokens. Between quantiles lengths are equally likely.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Tokens at each of ``LEVELS``."""

    prompts: tuple[int, ...]
    answers: tuple[int, ...]

    def mean_answer(self) -> float:
        pieces = zip(LEVELS, LEVELS[1:], self.answers, self.answers[1:], strict=False)
        return sum((high - low) * (a + b) / 2 for low, high, a, b in pieces)


TRAFFIC = {
    "Azure, code": Traffic(
        (3, 17, 75, 146, 378, 763, 1059, 1439, 1874, 2395, 3137, 4996, 7294, 7436, 7436, 7436, 7437),
        (6, 6, 6, 7, 8, 9, 11, 13, 16, 19, 28, 53, 84, 157, 244, 316, 1899),
    ),
    "Azure, chat": Traffic(
        (2, 40, 181, 309, 389, 403, 446, 1019, 1071, 1139, 1357, 4076, 4086, 4098, 4122, 4149, 14050),
        (7, 16, 38, 49, 70, 86, 97, 114, 161, 375, 398, 422, 449, 539, 598, 643, 1000),
    ),
    "ShareGPT": Traffic(
        (8, 33, 74, 100, 145, 182, 223, 263, 302, 348, 418, 525, 648, 769, 789, 831, 2415),
        (0, 1, 6, 9, 14, 20, 25, 34, 46, 66, 101, 179, 266, 424, 559, 754, 925),
    ),
    "Mooncake, chat": Traffic(
        (891, 894, 901, 973, 1708, 3473, 5212, 7210, 9872, 13544, 18290, 27925, 40331, 69283, 89562, 107381, 124847),
        (1, 3, 10, 24, 98, 216, 299, 356, 402, 451, 510, 605, 709, 910, 1164, 1754, 2000),
    ),
}


def at(quantiles: Sequence[float], level: float) -> float:
    """The length that the share ``level`` of all are below."""
    i = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[i - 1], LEVELS[i]
    return quantiles[i - 1] + (quantiles[i] - quantiles[i - 1]) * (level - low) / (high - low)


def requests(name: str, count: int, mean_answer: float, longest: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, answer) in tokens, scaled alike so that answers have ``mean_answer`` tokens on average. A prompt longer than three
    quarters of ``longest`` and an answer longer than one are cut, so that a small model has room for the longest of both."""
    draw, traffic = random.Random(seed), TRAFFIC[name]
    scale = mean_answer / traffic.mean_answer()
    found = []
    for _ in range(count):
        prompt, answer = (round(at(lengths, draw.random()) * scale) for lengths in (traffic.prompts, traffic.answers))
        found.append((min(max(prompt, 1), longest * 3 // 4), min(max(answer, 1), longest // 4)))
    return found
