"""The heads of encoders: a vector per text, logits per text, logits per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inferd.checkpoints.weights import Weights
from inferd.predict.encoder.config import EncoderConfig
from inferd.predict.encoder.layers import Norm, Product
from inferd.predict.encoder.ragged import Ragged
from inferd.predict.encoder.sentence import Dense, Pooling

Head = Callable[[Tensor, Ragged], Tensor]
"""Rows [T, H] -> [S, n], or [T, n] where every token gets an answer."""


def pooled(hidden: Tensor, batch: Ragged, mode: Pooling) -> Tensor:
    """[T, H] -> [S, H], as sentence-transformers pools; special tokens count like any others."""
    if mode == "cls":
        return hidden[batch.starts[:-1]]
    if mode == "lasttoken":
        return hidden[batch.last_rows]
    out = torch.empty((batch.starts.shape[0] - 1, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
    text = 0
    for row, count, length in batch.groups:
        rows = hidden[row : row + count * length].view(count, length, -1)
        into = out[text : text + count]
        if mode == "max":
            into.copy_(rows.amax(1))
        elif mode == "weightedmean":
            weight = torch.arange(1, length + 1, dtype=hidden.dtype, device=hidden.device).view(1, length, 1)
            into.copy_((rows * weight).sum(1) / weight.sum())
        else:
            into.copy_(rows.sum(1) / (length if mode == "mean" else math.sqrt(length)))
        text += count
    return out


class Embedder:
    """Pooling, and the dense layers behind it. What it gives is not normalised yet."""

    def __init__(
        self, pooling: Sequence[Pooling], dense: Sequence[Dense], hidden_size: int, device: torch.device
    ) -> None:
        self._pooling = tuple(pooling)
        self.size = hidden_size * len(self._pooling)
        self._dense: list[tuple[Product, bool]] = []  # and whether tanh follows
        for layer in dense:
            weights = Weights(layer.folder, dtype=torch.float32, device=device)
            product = Product(
                weights, [("linear", layer.out_features)], layer.in_features, torch.float32, bias=layer.bias
            )
            self._dense.append((product, layer.activation == "tanh"))
            self.size = layer.out_features

    def __call__(self, hidden: Tensor, batch: Ragged) -> Tensor:
        parts = [pooled(hidden, batch, mode) for mode in self._pooling]
        vectors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        for product, has_tanh in self._dense:
            vectors = product.activated(vectors, "tanh") if has_tanh else product(vectors)
        return vectors


def sequence_head(config: EncoderConfig, weights: Weights) -> Head:
    """Logits [S, labels] of an encoder's own classifier."""
    hidden, labels, f32 = config.hidden_size, len(config.labels), torch.float32
    pooling: Pooling = "mean" if config.classifier_pooling == "mean" else "cls"
    names = _sequence_names(config)
    dense = Product(weights, [(names[0], hidden)], hidden, f32, bias=config.classifier_bias)
    classifier = Product(weights, [(names[1], labels)], hidden, f32)
    after = None
    if config.kind.family == "modernbert":
        after = Norm(weights, "head.norm", hidden, config.norm_eps, f32, bias=config.norm_bias)

    def head(rows: Tensor, batch: Ragged) -> Tensor:
        x = dense.activated(pooled(rows, batch, pooling), config.classifier_activation)
        return classifier(x if after is None else after(x)[0])

    return head


def _sequence_names(config: EncoderConfig) -> tuple[str, str]:
    match config.kind.family:
        case "distilbert":
            return "pre_classifier", "classifier"
        case "modernbert":
            return "head.dense", "classifier"
        case "bert" if config.kind.prefix == "bert.":
            return "model.pooler.dense", "classifier"
        case _:
            return "classifier.dense", "classifier.out_proj"


def token_head(config: EncoderConfig, weights: Weights) -> Head:
    """Logits [T, labels]."""
    hidden, f32 = config.hidden_size, torch.float32
    classifier = Product(weights, [("classifier", len(config.labels))], hidden, f32)
    if config.kind.family != "modernbert":
        return lambda rows, batch: classifier(rows)
    dense = Product(weights, [("head.dense", hidden)], hidden, f32, bias=config.classifier_bias)
    after = Norm(weights, "head.norm", hidden, config.norm_eps, f32, bias=config.norm_bias)
    return lambda rows, batch: classifier(after(dense.activated(rows, config.classifier_activation))[0])


def decoder_head(weights: Weights, labels: int, hidden: int) -> Head:
    """Logits [S, labels] from each text's last token."""
    score = Product(weights, [("score", labels)], hidden, torch.float32, bias=False)
    return lambda rows, batch: score(rows[batch.last_rows])
