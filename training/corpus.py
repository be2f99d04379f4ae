"""The corpus: an endless, repeatable stream of dialogues in a fixed mixture of kinds.

Knows the mixture and how single exchanges join into conversations. The held-out side never appears in
the training side: a conversation is for training only when every exchange in it is.
Run ``python -m training.corpus`` to read some.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from random import Random

from .dialogue import Dialogue, Message, Split, render
from .kinds import arithmetic, facts, general, lists, objects, stories, tools, unknown

_Maker = Callable[[Random], Dialogue]
MIXTURE: tuple[tuple[_Maker, float], ...] = (
    (facts.sample, 7.0),
    (arithmetic.sample, 8.0),
    (general.sample, 8.0),
    (lists.sample, 3.0),
    (objects.sample, 3.0),
    (tools.sample, 1.8),
    (unknown.sample, 3.0),
    (stories.sample, 1.6),
)


def _one(rng: Random, split: Split) -> Dialogue:
    makers, weights = zip(*MIXTURE, strict=True)
    while True:
        dialogue: Dialogue = rng.choices(makers, weights)[0](rng)
        if dialogue.split == split:
            return dialogue


def exchanges(seed: int, split: Split) -> Iterator[Dialogue]:
    """Yield single exchanges of one side of the split, without end."""
    rng = Random(f"inferd {seed} {split}")
    while True:
        yield _one(rng, split)


def conversation(rng: Random, longer: float = 1.0) -> Dialogue:
    """Return a training conversation of one exchange or, with the probability given by ``longer``, often of several.

    Exchanges that bring tools or a system message stay alone or open the conversation.
    """
    first = _one(rng, "train")
    if first.raw:
        return first
    messages = list(first.messages)
    if messages[0].role != "system" and not first.tools:
        if rng.random() < 0.15:
            messages.insert(0, Message("system", rng.choice(general.SYSTEMS)))
        rounds = rng.choices((1, 2, 3, 5, 8, 20), (45, 20, 15, 12, 7, 1))[0] if rng.random() < longer else 1
        while rounds > 1:
            more = _one(rng, "train")
            if not more.raw and more.messages[0].role != "system" and not more.tools:
                messages += more.messages
                rounds -= 1
    return Dialogue(first.kind, messages, tools=first.tools)


def conversations(seed: int) -> Iterator[Dialogue]:
    """Yield training conversations without end."""
    rng = Random(f"inferd {seed} conversations")
    while True:
        yield conversation(rng)


def main() -> None:
    """Print samples of one side of the split."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--split", choices=("train", "held-out"), default="train")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = exchanges(options.seed, options.split)
    for _, dialogue in zip(range(options.count), source, strict=False):
        print(f"--- {dialogue.kind} [{dialogue.key}]")
        print("".join(text for text, _ in render(dialogue)))


if __name__ == "__main__":
    main()
