"""A watermark in generated text, and its detector: the green lists of Kirchenbauer et al. 2023 (arXiv:2301.10226).

The token before a position seeds a permutation of the vocabulary, by a secret key. Its first part, the green list, has
``bias`` added to its logits. A text has more green tokens than chance gives it, which the key's holder can count. The
lists are those of transformers' ``WatermarkingConfig`` with ``seeding_scheme="lefthash"`` and ``context_width=1``, so
its detector (on the CPU) finds this watermark, and the reverse.

Knows no requests. Not thread-safe.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.config import ModelConfig, WatermarkConfig
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.registry.source import check_folder, resolve

NAME: Final = "kgw"
MAX_KEY: Final = 2**63 - 1
_KEPT_BYTES: Final = 64 << 20  # of the green lists that were used last


class Score(NamedTuple):
    """How green a text is."""

    num_scored: int  # different pairs of a token and the one before it
    num_green: int  # of them
    z: float  # standard deviations above chance

    @property
    def p_value(self) -> float:
        """The probability that a text without the watermark is as green."""
        return 0.5 * math.erfc(self.z / math.sqrt(2))


class Watermark:
    """One key's green lists of a vocabulary."""

    def __init__(self, key: int, vocab_size: int, greenlist_ratio: float, bias: float) -> None:
        """``vocab_size``: of the model, as config.json has it."""
        self.bias, self.ratio = bias, greenlist_ratio
        self._key, self._vocab_size = key, vocab_size
        self._num_green = int(vocab_size * greenlist_ratio)
        self._generator = torch.Generator()
        self._lists: OrderedDict[int, np.ndarray] = OrderedDict()  # a bit for each token
        self._most_lists = max(16, _KEPT_BYTES * 8 // vocab_size)

    @property
    def identity(self) -> bytes:
        """A digest of everything that decides the lists and their weight."""
        said = f"{NAME}:{self._key}:{self._vocab_size}:{self.ratio}:{self.bias}"
        return hashlib.blake2b(said.encode(), digest_size=16).digest()

    def green(self, previous: int) -> Tensor:
        """Which tokens are green behind ``previous``: [vocab_size] bool on the CPU."""
        found = self._lists.get(previous)
        if found is None:
            self._generator.manual_seed(self._key * previous % (2**64 - 1))
            is_green = torch.zeros(self._vocab_size, dtype=torch.bool)
            is_green[torch.randperm(self._vocab_size, generator=self._generator)[: self._num_green]] = True
            found = self._lists[previous] = np.packbits(is_green.numpy())
            if len(self._lists) > self._most_lists:
                self._lists.popitem(last=False)
        else:
            self._lists.move_to_end(previous)
        return torch.from_numpy(np.unpackbits(found, count=self._vocab_size)).view(torch.bool)

    def add(self, logits: Tensor, previous: int, temperature: float) -> None:
        """Add the bias to the green tokens of one row of logits [v], v <= ``vocab_size``, in place.

        The logits are divided by ``temperature`` afterwards; 0: the greatest is taken. So the bias is that of the
        distribution from which the token is drawn, at every temperature.
        """
        green = self.green(previous)[: logits.shape[0]].to(logits.device, logits.dtype)
        logits.add_(green, alpha=self.bias * (temperature or 1.0))

    def score(self, token_ids: Sequence[int]) -> Score:
        """How green a text is. A pair that occurs again counts once: repetitions say nothing new."""
        pairs = sorted(set(itertools.pairwise(token_ids)))
        num_green, last, green = 0, -1, list[bool]()
        for previous, token in pairs:
            if previous != last:
                last, green = previous, self.green(previous).tolist()
            num_green += green[token]
        expected = self.ratio * len(pairs)
        spread = math.sqrt(expected * (1 - self.ratio))
        return Score(len(pairs), num_green, (num_green - expected) / spread if spread else 0.0)


def load_watermark(config: WatermarkConfig, vocab_size: int) -> Watermark:
    """Raises ModelLoadError for a key that cannot be read or is none."""
    path = Path(config.key_file).expanduser()
    try:
        said = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"watermark.key_file {config.key_file} cannot be read: {error}.") from error
    if not said.isdigit() or not 0 < int(said[:20]) <= MAX_KEY or len(said) > 19:
        raise ModelLoadError(
            f"watermark.key_file {config.key_file} must have one whole number from 1 to {MAX_KEY}; write one with: "
            "python -c 'import secrets; print(secrets.randbits(62) + 1)'."
        )
    return Watermark(int(said), vocab_size, config.greenlist_ratio, config.bias)


def score_text(model: ModelConfig, text: str) -> Score:
    """How green a text is by the watermark of a model, of which the tokenizer and config.json alone are read.

    Raises ModelLoadError; InvalidRequest for a text of fewer than two tokens.
    """
    assert model.watermark is not None
    folder = check_folder(resolve(model.source))
    watermark = load_watermark(model.watermark, read_config(Source(folder / "config.json")).vocab_size)
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)
    if len(ids) < 2:
        raise InvalidRequest(f"The text has {len(ids)} tokens, and at least 2 are needed to detect a watermark.")
    return watermark.score(ids)
