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
