"""What the decoders of all families do with other ranks: partial sums and the vocabulary's parts.

``Share`` says what a rank holds; ``Peers`` carries what ranks exchange. Without ranks none of it costs anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.checkpoints.weights import Weights
from inferd.engine.model.cuts import Peers
from inferd.engine.model.pipe import Pipe
from inferd.engine.model.share import Share
from inferd.native import ops
from inferd.native.attention import Attention, FlatBatch


class Joined:
    """The second product of attention or of feed-forward, of which each rank of a stage has a part.

    Divided by inputs, its parts are sums that are added. They are float32 until then, so the result is rounded once, as
    without ranks. Divided by outputs (``Share.by_outputs``), the inputs of all ranks are put together before it, and
    their outputs behind it.
    """

    __slots__ = ("_peers", "_share")

    def __init__(self, share: Share, peers: Peers | None) -> None:
        self._share, self._peers = share, peers if share.tensor > 1 else None

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """(outputs, inputs) of this rank's part. ``outputs``: of the product; ``inputs``: those that this rank has."""
        return (outputs // self._share.tensor, inputs * self._share.tensor) if self._is_gathered else (outputs, inputs)

    @property
    def is_biased(self) -> bool:
        """Whether this rank adds a bias to its part: the bias of a sum is added once."""
        return self._is_gathered or self._share.place == 0

    @property
    def format(self) -> torch.dtype | None:
        """Of the part's result; None: the model's."""
        return None if self._peers is None or self._is_gathered else torch.float32

    def inputs(self, x: Tensor) -> Tensor:
        """``x`` [T, n] of this rank -> what its part of the product takes."""
        return self._peers.concat(x) if self._peers is not None and self._is_gathered else x

    def outputs(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """``y``: the result of this rank's part -> the whole [T, H] in ``dtype``."""
        if self._peers is None:
            return y
        return self._peers.concat(y) if self._is_gathered else self._peers.sum(y).to(dtype)

    @property
    def _is_gathered(self) -> bool:
        return self._share.by_outputs


class WholeNorm:
    """RMS norms of queries and keys over all heads (OLMo 2), of which each rank has some.

    Each rank norms all of them, as one process does, and keeps its own.
    """

    __slots__ = ("_eps", "_every", "_keys", "_peers", "_queries", "widths")

    def __init__(self, whole: DecoderConfig, share: Share, peers: Peers) -> None:
        self._peers, self._eps = peers, whole.norm_eps
        self.widths = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
        self._every = share.copies(whole)  # of so many ranks one after the other all have the same keys
        parts = share.tensor, share.tensor // self._every
        places = share.place, share.place // self._every
        self._queries, self._keys = (
            slice(width // of * at, width // of * (at + 1))
            for width, of, at in zip(self.widths, parts, places, strict=True)
        )

    def __call__(self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, its heads x D], k [T, its key heads x D], and the weights of all columns -> the same shapes."""
        parts = self._peers.gather(torch.cat((q, k), dim=1))
        queries = torch.cat([part[:, : q.shape[1]] for part in parts], dim=1)
        keys = torch.cat([part[:, q.shape[1] :] for part in parts[:: self._every]], dim=1)
        return (
            ops.rms_norm(queries, q_weight, self._eps)[:, self._queries].contiguous(),
            ops.rms_norm(keys, k_weight, self._eps)[:, self._keys].contiguous(),
        )


class DividedDecoder(ABC):
    """All of a model, or one rank's share of it. A family adds its layers and ``forward``."""

    num_passed: ClassVar[int] = 1
    """Tensors [T, H] that a stage passes to the next one."""

    def __init__(self, config: DecoderConfig, weights: Weights, share: Share, peers: Peers | None) -> None:
        self.config = config
        self.share, self._peers = share, peers
        self.part = share.config(config)
        self.dtype, self.device = weights.dtype, weights.device
        self.pipe: Pipe | None = None  # of a model in stages
        if share.pipeline > 1:
            assert peers is not None
            self.pipe = Pipe(share, peers, self.num_passed, config.hidden_size, self.dtype, self.device)
        self._embedding: ops.Linear | None = None
        self._head: ops.Linear | None = None

    @abstractmethod
    def forward(self, batch: FlatBatch, attention: Attention, entering: Tensor | None = None) -> Tensor:
        """Hidden states [T, H] after the final norm; [n, T, H] of a stage that is not the last.

        ``entering`` [n, T, H]: what the stage before made of the batch; None: this is the first.
        """

    @abstractmethod
    def products(self) -> Iterator[ops.Linear]:
        """The products of this rank's layers."""

    @property
    def keeps_rows(self) -> bool:
        """Whether a row has the same bits in any batch, where the attention gives it the same bits: every product is
        the kernels'. Torch's sums depend on the number of rows."""
        head = [] if self._head is None else [self._head]
        return all(linear.described is not None for linear in (*self.products(), *head))

    def _count(self, weights: Weights) -> None:
        """Take over the counts, when all weights were read."""
        self.num_parameters, self.weights_bytes = weights.num_parameters, weights.num_bytes
        self.read_bytes = weights.read_bytes
        self.quantization = weights.quantization

    @property
    def embedding(self) -> ops.Linear:
        assert self._embedding is not None, "a later stage has no embedding"
        return self._embedding

    @property
    def peers(self) -> Peers | None:
        """The ranks that add partial sums of layers with this one; None: nothing is divided within a layer."""
        return self._peers if self.share.tensor > 1 else None

    def embedded(self, ids: Tensor) -> Tensor:
        """[T] -> [T, H], not scaled."""
        if self.share.tensor == 1:
            return self.embedding.rows(ids)
        assert self._peers is not None
        mine = self.share.tokens(self.config.vocab_size)
        is_own = (ids >= mine.start) & (ids < mine.stop)
        rows = self.embedding.rows((ids - mine.start) * is_own)
        masked = rows.masked_fill(~is_own.unsqueeze(1), 0)
        return self._peers.sum(masked.float()).to(self.dtype)  # exact: all but one are 0

    @property
    def head(self) -> ops.Linear:
        """The product that gives logits, before ``logits_divisor`` and ``final_softcap``."""
        assert self._head is not None, "a later stage has no head"
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        """With ranks, every rank of the first stage calls it with the same ``hidden``; rank 0 has the logits."""
        logits = self.head(hidden, torch.float32)
        if self.share.tensor > 1:
            assert self._peers is not None
            width = -(-self.config.vocab_size // self.share.tensor)
            padded = F.pad(logits, (0, width - logits.shape[1])) if logits.shape[1] < width else logits
            logits = torch.cat(self._peers.collect(padded), dim=1)[:, : self.config.vocab_size]
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        if self.config.final_softcap is not None:
            logits = torch.tanh(logits / self.config.final_softcap) * self.config.final_softcap
        return logits
