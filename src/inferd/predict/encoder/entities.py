"""Labels per token to entities of a text: one per token, or neighbours joined by the BIO scheme. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from inferd.predict.encoder.texts import Encoded

OUTSIDE = "O"


class Entity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a text and its class; ``start`` and ``end`` count characters."""

    score: float
    word: str
    start: int
    end: int
    entity: str | None = None  # the token's own label
    entity_group: str | None = None  # of joined tokens, without B- and I-
    index: int | None = None  # of the token


def entities(
    text: str, encoded: Encoded, probabilities: npt.NDArray[np.float32], labels: Sequence[str], *, is_joined: bool
) -> list[Entity]:
    """``probabilities`` [tokens, labels]. Tokens labelled O and special ones are no entities."""
    assert encoded.offsets is not None
    assert encoded.special is not None
    best = probabilities.argmax(axis=1)
    found: list[Entity] = []
    tokens: list[tuple[int, str, float, int, int]] = []
    for index, ((start, end), special) in enumerate(zip(encoded.offsets, encoded.special, strict=True)):
        if not special:
            label = labels[best[index]]
            tokens.append((index, label, float(probabilities[index, best[index]]), start, end))
    if not is_joined:
        for index, label, score, start, end in tokens:
            if label != OUTSIDE:
                found.append(Entity(score, text[start:end], start, end, entity=label, index=index))
        return found
    group: list[tuple[int, str, float, int, int]] = []
    for token in tokens:
        if group and (not _continues(group[-1][1], token[1])):
            _close(text, group, found)
            group = []
        group.append(token)
    _close(text, group, found)
    return found


def _close(text: str, group: list[tuple[int, str, float, int, int]], found: list[Entity]) -> None:
    if not group or _class_of(group[0][1]) == OUTSIDE:
        return
    start, end = group[0][3], group[-1][4]
    score = sum(token[2] for token in group) / len(group)
    found.append(Entity(score, text[start:end], start, end, entity_group=_class_of(group[0][1])))


def _continues(before: str, label: str) -> bool:
    """As transformers' strategy "simple": the same class, and no new beginning."""
    return _class_of(before) == _class_of(label) and not label.startswith("B-")


def _class_of(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label
