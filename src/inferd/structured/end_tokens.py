"""The tokens of a vocabulary that a search for the end of an answer tries (``closing``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from inferd.structured.names import Place

_LONGEST_RUN: Final = 16  # bytes of a token of one kind of character
_FEW: Final = b"0aA1- .,:/@_)"  # characters that are tried before others


class EndTokens:
    """The tokens of a vocabulary that are tried on the way to an end."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Iterable[int]) -> None:
        closing = sorted((-len(data), i) for i, data in enumerate(tokens) if data and not data.strip(b'"}]'))
        self._in_strings = _Ids([i for _, i in closing if tokens[i].startswith(b'"')])
        self._behind_values = _Ids([i for _, i in closing if not tokens[i].startswith(b'"')])
        self._special = _Ids(sorted(special_ids))
        single: dict[int, int] = {}
        runs: dict[tuple[int, int], int] = {}
        for i, data in enumerate(tokens):
            if len(data) == 1:
                single.setdefault(data[0], i)
            elif 1 < len(data) <= _LONGEST_RUN and (kind := _kind_of(data)):
                runs.setdefault((-len(data), kind), i)
        order = dict.fromkeys([*_FEW, *range(0x21, 0x7F), 0x0A, *range(256)])
        characters = [single[byte] for byte in order if byte in single]
        longest = [runs[key] for key in sorted(runs)]
        mixed = [i for pair in zip(characters, longest, strict=False) for i in pair]
        self._others = _Ids(list(dict.fromkeys([*mixed, *characters, *longest])))

    def closing(self, mask: np.ndarray, place: Place | None) -> list[int]:
        """The tokens of a mask that close a string, a list or an object, and those that are no text."""
        found = self._special.within(mask)
        if place is not None and place.beside is None:
            found += (self._in_strings if place.is_text else self._behind_values).within(mask)
        return found

    def others(self, mask: np.ndarray) -> list[int]:
        """Other tokens of a mask; where it has none of the usual ones, any."""
        found = self._others.within(mask)
        if found:
            return found
        ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        return ids


class _Ids:
    """A list of tokens, of which those in a mask are asked for."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids, dtype=np.int64)
        self._words, self._shifts = self._ids // 32, (self._ids % 32).astype(np.uint32)

    def within(self, mask: np.ndarray) -> list[int]:
        found: list[int] = self._ids[(mask[self._words] >> self._shifts & np.uint32(1)).astype(bool)].tolist()
        return found


def _kind_of(data: bytes) -> int:
    kinds = (data.isdigit(), data.isalpha() and data.islower(), data.isalpha() and data.isupper(), not data.strip(b" "))
    return next((number for number, is_kind in enumerate(kinds, 1) if is_kind), 0)
