"""Small torch programs, exported by the tests themselves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


class Scores(torch.nn.Module):
    """Rows of 4 numbers to two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("offset", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = torch.softmax(self.linear(x) + self.offset, -1)
        return {"scores": scores, "total": x.sum(1)}


class Centred(torch.nn.Module):
    """Rows that know of each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class Sums(torch.nn.Module):
    """A running sum along the first dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


class Causal(torch.nn.Module):
    """Each step attends to itself and to those before it: [time, features]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x[None, None]
        attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(steps, steps, steps, is_causal=True)
        return attended[0, 0]


class LargeOnly(torch.nn.Module):
    """The largest number of the batch changes all rows, once it is above 100."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.where(x.max() > 100, x, torch.zeros_like(x))


class Steps(torch.nn.Module):
    """An LSTM in its default layout, over one sequence: [time, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.lstm(x.unsqueeze(1))[0]
        squeezed: torch.Tensor = states.squeeze(1)
        return squeezed


class Layers(torch.nn.Module):
    """A convolution, a norm, a transformer's layer: what common models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.pool = torch.nn.MaxPool2d(2)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.pool(torch.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        scores: torch.Tensor = self.head(self.layer(parts).mean(1))
        return scores.softmax(-1)


class Attends(torch.nn.Module):
    """Tokens and a mask of any length to a vector: its shapes are computed with powers and products of symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        scores = (x @ x.transpose(1, 2)).masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        y = scores.softmax(-1) @ x
        return {"vector": (y * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)}


def export_tokens(path: Path) -> Path:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=512)
    examples = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5))
    shapes: Any = ({0: batch, 1: length}, {0: batch, 1: length})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(Attends().eval(), examples, dynamic_shapes=shapes), path)
    return path


def export(module: torch.nn.Module, path: Path, *examples: torch.Tensor, is_dynamic: bool = True) -> Path:
    batch = torch.export.Dim("batch", min=1, max=512)
    shapes: Any = tuple({0: batch} for _ in examples) if is_dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.eval(), examples, dynamic_shapes=shapes), path)
    return path
