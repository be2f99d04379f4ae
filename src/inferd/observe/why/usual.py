"""What is usual for a call of a model: medians over a sample of the calls before it.

Calls of a model are grouped by their size: the power of two of the prompt's tokens (for predictions of the bytes of the
request), and the power of four of the answer's tokens. Of each group a biased reservoir is kept (Aggarwal 2006, "On
biased reservoir sampling in the presence of stream evolution", VLDB): a new call replaces a random one, and only every
eighth call enters a full reservoir. So the sample reaches about 500 calls back, with recent ones more likely, and
200 slow calls in a row do not become what is usual. The medians are computed when a record is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple, TypeVar

from inferd.observe.why.record import Numbers, RequestRecord

SAMPLE: Final = 64
"""Calls in a full reservoir."""

FEWEST: Final = 8
"""Calls that a reservoir must have before anything is called usual."""

STRIDE: Final = 8
"""Of so many calls one enters a full reservoir."""

MAX_GROUPS: Final = 256
"""Groups that are kept; the one that was made first is dropped first."""

Key = TypeVar("Key")
Size = tuple[str, bool, int, int]
"""Model, whether it is a generated text, and the classes of the sizes of the request and of the answer."""


class Usual(NamedTuple):
    """What is usual for a call. ``parts``: seconds, for its own number of tokens."""

    total_s: float | None  # None: too few calls of this size
    parts: dict[str, float]  # empty: too few calls of this size
    size: float | None  # the median of the model's calls of every size, in tokens or bytes; None: too few
    high_size: float | None  # nine of ten calls of the model are not larger
    cached_share: float | None  # of the prompt's tokens, at this size


class _Sample:
    """Records of a group, and their medians, which are computed again when the records have changed."""

    __slots__ = ("_medians", "records")

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self._medians: _Medians | None = None

    def enter(self, record: RequestRecord, draw: float) -> None:
        if len(self.records) < SAMPLE:
            self.records.append(record)
        else:
            place = int(draw * SAMPLE * STRIDE)
            if place >= SAMPLE:
                return
            self.records[place] = record
        self._medians = None

    @property
    def medians(self) -> _Medians | None:
        """None: too few records."""
        if self._medians is None and len(self.records) >= FEWEST:
            self._medians = _medians_of(self.records)
        return self._medians


class UsualTimes:
    """Samples of calls, by their size. Adding one costs the same whatever was added before."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._random: Callable[[], float] = (rng or random.Random()).random
        self._sized: dict[Size, _Sample] = {}
        self._models: dict[tuple[str, bool], _Sample] = {}

    def add(self, record: RequestRecord, is_text: bool, request_size: int, answer_tokens: int) -> None:
        """Take in a call that was answered whole."""
        draw = self._random()
        _sample_of(self._sized, size_of(record.model, is_text, request_size, answer_tokens)).enter(record, draw)
        _sample_of(self._models, (record.model, is_text)).enter(record, draw)

    def of(self, record: RequestRecord, numbers: Numbers) -> Usual:
        is_text = record.is_text
        size = size_of(record.model, is_text, request_size_of(is_text, numbers), numbers.completion_tokens)
        sized, whole = self._sized.get(size), self._models.get((record.model, is_text))
        same = None if sized is None else sized.medians
        every = None if whole is None else whole.medians
        return Usual(
            None if same is None else same.total_s(numbers),
            {} if same is None else same.parts(numbers),
            None if every is None else every.size,
            None if every is None else every.high_size,
            None if same is None else same.cached_share,
        )

    def clear(self) -> None:
        self._sized.clear()
        self._models.clear()


def _sample_of(groups: dict[Key, _Sample], key: Key) -> _Sample:
    sample = groups.get(key)
    if sample is None:
        sample = groups[key] = _Sample()
        if len(groups) > MAX_GROUPS:
            del groups[next(iter(groups))]
    return sample


def size_of(model: str, is_text: bool, request_size: int, answer_tokens: int) -> Size:
    return model, is_text, request_size.bit_length(), answer_tokens.bit_length() // 2


def request_size_of(is_text: bool, numbers: Numbers) -> int:
    """The tokens of a prompt, and the bytes of another request."""
    return numbers.prompt_tokens if is_text else numbers.request_bytes


_PER_PROMPT_TOKEN: Final = frozenset(("tokenize", "prefill"))
_PER_ANSWER_TOKEN: Final = frozenset(("decode", "crowding", "others_prefill", "masks", "speculation", "slowed"))


class _Medians(NamedTuple):
    """The medians of a sample. Parts that grow with tokens are seconds per token."""

    part: dict[str, float]
    totals: list[tuple[float, float, float]]
    """Of each call: seconds that do not grow, seconds per token of the prompt, and per token of the answer."""
    size: float
    high_size: float
    cached_share: float | None

    def parts(self, own: Numbers) -> dict[str, float]:
        """The usual seconds of each part, for a call's own number of tokens."""
        prompt, answer = max(own.prompt_tokens, 1), max(own.completion_tokens, 1)
        return {
            name: seconds * (prompt if name in _PER_PROMPT_TOKEN else answer if name in _PER_ANSWER_TOKEN else 1)
            for name, seconds in self.part.items()
        }

    def total_s(self, own: Numbers) -> float:
        prompt, answer = max(own.prompt_tokens, 1), max(own.completion_tokens, 1)
        return median([fixed + by_prompt * prompt + by_answer * answer for fixed, by_prompt, by_answer in self.totals])


def _medians_of(sample: Sequence[RequestRecord]) -> _Medians:
    seen: dict[str, list[float]] = {}
    totals: list[tuple[float, float, float]] = []
    sizes: list[int] = []
    shares: list[float] = []
    for record in sample:
        numbers = record.numbers
        prompt, answer = max(numbers.prompt_tokens, 1), max(numbers.completion_tokens, 1)
        sums = [0.0, 0.0, 0.0]
        for name, seconds in record.seconds(numbers).items():
            if seconds:
                kind = 1 if name in _PER_PROMPT_TOKEN else 2 if name in _PER_ANSWER_TOKEN else 0
                rate = seconds / (1, prompt, answer)[kind]
                seen.setdefault(name, []).append(rate)
                sums[kind] += rate
        totals.append((sums[0], sums[1], sums[2]))
        sizes.append(request_size_of(record.is_text, numbers))
        if numbers.prompt_tokens:
            shares.append(numbers.cached_tokens / numbers.prompt_tokens)
    # A part that a call did not have took no time.
    part = {name: median([*rates, *(0.0,) * (len(sample) - len(rates))]) for name, rates in seen.items()}
    return _Medians(
        part, totals, median(sizes), sorted(sizes)[len(sizes) * 9 // 10], median(shares) if shares else None
    )
