"""The proof over programs of torch.export: what it accepts computes each row by itself."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.predict.runtimes.loading import loaded
from tests.predict.runtimes.programs import Attends, Causal, Centred, LargeOnly, Layers, Scores, Sums, export
from tests.tiers import sample
from torch.nn import functional as f

from inferd.registry.rows.exported import prove
from inferd.registry.signature import exported_rows

Tensor = torch.Tensor
ROW = (4, 3)


class Program(torch.nn.Module):
    """One function of rows [rows, 4, 3], and weights."""

    def __init__(self, function: Callable[[Program, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = torch.nn.Linear(3, 5)
        self.conv = torch.nn.Conv1d(4, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.lstm = torch.nn.LSTM(3, 6, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(3, 3, batch_first=True)
        self.words = torch.nn.Embedding(10, 2)
        self.gru = torch.nn.GRU(3, 6, batch_first=True, bidirectional=True)
        self.rnn = torch.nn.RNN(3, 6, num_layers=2)
        self.places = torch.nn.Buffer(torch.tensor([2, 0]))
        self.borders = torch.nn.Buffer(torch.tensor([-1.0, 0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


PROVED: Mapping[str, Callable[[Program, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(x).relu(),
    "flatten": lambda m, x: x.flatten(1),
    "view": lambda m, x: x.view(-1, 12),
    "fold and unfold": lambda m, x: m.linear(x.reshape(-1, 3)).view(x.shape[0], 4, 5),
    "there and back": lambda m, x: x.permute(1, 0, 2).reshape(-1, 3).tanh().view(4, -1, 3).permute(1, 0, 2),
    "convolution": lambda m, x: f.max_pool1d(m.norm(m.conv(x)).relu(), 2),
    "lstm": lambda m, x: m.lstm(x)[0],
    "attention": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "softmax": lambda m, x: x.softmax(-1),
    "mean": lambda m, x: x.mean((1, 2)),
    "largest": lambda m, x: x.max(1).values,
    "cumsum": lambda m, x: x.cumsum(1),
    "select": lambda m, x: x[:, 0],
    "slice": lambda m, x: x[:, 1:3],
    "concat": lambda m, x: torch.cat([x, torch.zeros_like(x)], 1),
    "stack": lambda m, x: torch.stack([x, x + 1], 1),
    "embedding": lambda m, x: m.words(x.abs().long().clamp(0, 9)),
    "expand": lambda m, x: x.new_ones(1, 4, 1).expand(x.shape[0], 4, 3) + x,
    "zeros of each row": lambda m, x: torch.cat([x, torch.zeros(x.shape[0], 1, 3)], 1),
    "own row": lambda m, x: x[torch.arange(x.shape[0]), 1],
    "top": lambda m, x: x.topk(2, 1).values,
    "gather": lambda m, x: x.gather(1, x.argmax(1, keepdim=True)),
    "in place": lambda m, x: (x * 2).add_(1).relu_(),
    "where": lambda m, x: torch.where(x > 0, x, x * 2),
    "pad": lambda m, x: f.pad(x, (1, 1)),
    "pad each row": lambda m, x: f.pad(x, (0, 0, 2, 1)),
    "own row in another place": lambda m, x: x[torch.arange(x.shape[0])[None].expand(2, -1), 1].transpose(0, 1),
    "slice with a step": lambda m, x: x[:, ::2],
    "all of the rows": lambda m, x: torch.ops.aten.slice(x, 0, 0, 2**63 - 1).relu(),
    "repeat": lambda m, x: x.repeat(1, 2, 1),
    "squeeze": lambda m, x: x.sum(1, keepdim=True).squeeze(1),
    "split": lambda m, x: x.chunk(2, 1)[0],
    "einsum": lambda m, x: torch.einsum("bij,kj->bik", x, m.linear.weight),
    "einsum of each row with itself": lambda m, x: torch.einsum("bij,bkj->bik", x, x),
    "gru": lambda m, x: m.gru(x)[0],
    "rnn of columns": lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1),
    "last place": lambda m, x: x.select(2, -1),
    "each place": lambda m, x: x.unbind(1)[3],
    "narrow": lambda m, x: x.narrow(2, 1, 2),
    "chosen places": lambda m, x: x.index_select(2, m.places),
    "places turned": lambda m, x: x.flip(1, 2),
    "places rolled": lambda m, x: x.roll(1, 2),
    "unequal parts": lambda m, x: torch.split(x, [1, 3], 1)[1],
    "sorted places": lambda m, x: x.sort(2).values,
    "order of places": lambda m, x: x.argsort(1) + 0.0,
    "largest so far": lambda m, x: x.cummax(2).values,
    "sum of exponentials": lambda m, x: x.logsumexp((1, 2)),
    "variance": lambda m, x: x.var(-1, keepdim=True),
    "larger of two": lambda m, x: torch.max(x, -x),
    "layer norm": lambda m, x: f.layer_norm(x, (4, 3)),
    "group norm": lambda m, x: f.group_norm(x, 2),
    "triangle": lambda m, x: x.tril(),
    "matrices of each row": lambda m, x: x.bmm(x.transpose(-1, -2)),
    "product and sum": lambda m, x: torch.addmm(m.linear.bias, x[:, 0], m.linear.weight.T),
    "product and sum of each row": lambda m, x: torch.baddbmm(x, x.bmm(x.transpose(1, 2)), x),
    "pool": lambda m, x: f.avg_pool1d(x, 3, 1),
    "upsample": lambda m, x: f.interpolate(x, scale_factor=2.0),
    "buckets": lambda m, x: torch.bucketize(x, m.borders) + 0.0,
    "dropout that is off": lambda m, x: f.dropout(x, 0.5, training=False),
    "attention of heads": lambda m, x: f.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "attention with a mask": lambda m, x: f.scaled_dot_product_attention(x, x, x, torch.zeros(4, 4)),
    "the same number": lambda m, x: torch.full((x.shape[0], 4, 3), 2.0) * x,
    "repeat in more dimensions": lambda m, x: x.unsqueeze(1).repeat(1, 2, 1, 3),
    "stack behind": lambda m, x: torch.stack([x, -x], -1),
    "concat of constants": lambda m, x: x + torch.cat([m.linear.weight[:2], m.linear.weight[2:4]], 0),
    "squeeze of nothing": lambda m, x: x.squeeze(1),
    "turned matrix": lambda m, x: x[:, 0] @ m.linear.weight.t(),
    "gather of a constant": lambda m, x: m.linear.bias.expand(x.shape[0], 5).gather(1, x.argmax(1)) + 0.0,
    "number of columns": lambda m, x: x / x.shape[1],
    "own row of two": lambda m, x: x[torch.arange(x.shape[0]), torch.tensor(1), torch.tensor(2)],
}
MIXED: Mapping[str, Callable[[Program, Tensor], Tensor]] = {
    "mean of rows": lambda m, x: x - x.mean(0, keepdim=True),
    "mean of all": lambda m, x: x - x.mean(),
    "softmax over rows": lambda m, x: x.softmax(0),
    "cumsum of rows": lambda m, x: x.cumsum(0),
    "attention over rows": lambda m, x: m.attention(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    "reversed": lambda m, x: x.flip(0),
    "shifted": lambda m, x: x.roll(1, 0),
    "first row": lambda m, x: x + x[:1],
    "each with all": lambda m, x: x.flatten(1) @ x.flatten(1).T,
    "sorted": lambda m, x: x.sort(0).values,
    "number of rows": lambda m, x: x / x.shape[0],
    "padded rows": lambda m, x: f.pad(x, (0, 0, 0, 0, 1, 0)),
    "as many rows, but moved by padding": lambda m, x: f.pad(x, (0, 0, 0, 0, 1, -1)),
    "places": lambda m, x: x + torch.arange(x.shape[0])[:, None, None],
    "largest decides": lambda m, x: torch.where(x.max() > 2, x, -x),
    "wrong rows": lambda m, x: x[torch.arange(x.shape[0]).flip(0), 1],
    "convolution over rows": lambda m, x: m.conv(x.permute(2, 1, 0)).permute(2, 1, 0),
    "batch norm of a batch": lambda m, x: f.batch_norm(x, None, None, training=True),
    "softmax over swapped rows": lambda m, x: x.swapaxes(1, 2).swapaxes(0, 1).softmax(1).swapaxes(0, 1).swapaxes(1, 2),
    "buckets of other rows": lambda m, x: torch.bucketize(x[:, 0, 0].contiguous(), x[:, 0, 1].contiguous()) + 0.0,
    "written into all": lambda m, x: torch.zeros(4, 3).add_(x.sum(0)) + x,
    "narrow rows": lambda m, x: x + x.narrow(0, 0, 1),
    "chosen rows": lambda m, x: x + x.index_select(0, m.places[1:]),
    "one row": lambda m, x: x + x[0],
    "one row of columns": lambda m, x: x + x.transpose(0, 1).select(1, 0),
    "largest row so far": lambda m, x: x.cummax(0).values,
    "order of rows": lambda m, x: x.argsort(0) + 0.0,
    "best row": lambda m, x: x + x.topk(1, 0).values,
    "turned with the rows": lambda m, x: x.flip(1, 0),
    "group norm over rows": lambda m, x: f.group_norm(x.permute(1, 0, 2), 1).permute(1, 0, 2),
    "triangle of rows": lambda m, x: x.permute(1, 0, 2).tril().permute(1, 0, 2),
    "pool over rows": lambda m, x: f.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "matrices over rows": lambda m, x: (
        x.permute(1, 0, 2).bmm(x.permute(1, 2, 0)).bmm(x.permute(1, 0, 2)).permute(1, 0, 2)
    ),
    "sum over rows": lambda m, x: x + torch.einsum("bij->ij", x),
    "dropout": lambda m, x: f.dropout(x, 0.5, training=True),
    "random numbers": lambda m, x: x + torch.randn_like(x),
    "filled with the number of rows": lambda m, x: x + torch.full((4, 3), x.shape[0]),
    "bounded by the number of rows": lambda m, x: x.clamp(max=x.shape[0]),
    "numbers of rows from one": lambda m, x: x * torch.arange(1, x.shape[0] + 1)[:, None, None],
    "numbers of rows backwards": lambda m, x: x * torch.arange(x.shape[0] - 1, -1, -1)[:, None, None],
    "a row decides for all": lambda m, x: x * x.max().item(),
    "norm of a batch by its own numbers": lambda m, x: f.batch_norm(x, x.mean((0, 2)), x.var((0, 2))),
    "buckets of all rows": lambda m, x: torch.bucketize(x, x.flatten().sort().values) + 0.0,
    "weights from the rows": lambda m, x: f.linear(x, x.sum(0)),
    "words from the rows": lambda m, x: f.embedding(torch.zeros(4, dtype=torch.int64), x[:, 0]) + x.sum() * 0 + x,
    "attention of rows": lambda m, x: (lambda t: f.scaled_dot_product_attention(t, t, t))(x.transpose(0, 1)).transpose(
        0, 1
    ),
    "numbers of rows as columns": lambda m, x: x[:, torch.arange(x.shape[0]) % 4].sum(1),
    "repeated rows": lambda m, x: x.repeat(2, 1, 1)[1 : x.shape[0] + 1],
    "joined rows": lambda m, x: torch.cat([x.sum(0, keepdim=True), x], 0)[: x.shape[0]],
    "stacked rows": lambda m, x: torch.stack([x, x.flip(0)], 0).sum(0),
    "variance of rows": lambda m, x: x / (1 + x.var((0, 1))),
}


def program(path: Path, function: Callable[[Program, Tensor], Tensor]) -> tuple[Path, Program]:
    torch.manual_seed(0)
    module = Program(function).eval()
    return export(module, path, torch.randn(3, *ROW)), module


def differs(module: torch.nn.Module) -> bool:
    """Whether a row's output is another one beside other rows, in any order of three."""
    rows = (
        torch.randn(3, *ROW, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.1, 1.0, 9.0])[:, None, None]
    )
    with torch.inference_mode():
        alone = [module(rows[[row]]) for row in range(3)]
        for order in itertools.permutations(range(3)):
            together, expected = module(rows[list(order)]), torch.cat([alone[row] for row in order])
            if expected.shape != together.shape or not torch.allclose(expected, together, rtol=1e-4, atol=1e-5):
                return True
    return False


@pytest.mark.parametrize("name", sample(sorted(PROVED), *sorted(PROVED)[::5]))
def test_what_is_proved_is_what_torch_computes(tmp_path: Path, name: str) -> None:
    path, module = program(tmp_path / "m.pt2", PROVED[name])
    assert exported_rows(path).because == "proved", exported_rows(path)
    assert not differs(module)


@pytest.mark.parametrize("name", sample(sorted(MIXED), *sorted(MIXED)[::5]))
def test_what_mixes_rows_is_not_proved(tmp_path: Path, name: str) -> None:
    path, module = program(tmp_path / "m.pt2", MIXED[name])
    assert exported_rows(path).because is None
    assert differs(module)


@pytest.mark.parametrize(
    ("module", "example", "is_proved"),
    [
        (Scores(), torch.randn(2, 4), True),
        (Layers(), torch.randn(2, 1, 8, 8), True),
        (Causal(), torch.randn(2, 4), False),
        (Centred(), torch.randn(2, 4), False),
        (LargeOnly(), torch.randn(2, 4), False),
        (Sums(), torch.randn(2, 4), False),
    ],
)
def test_whole_programs(tmp_path: Path, module: torch.nn.Module, example: Tensor, is_proved: bool) -> None:
    path = export(module, tmp_path / "m.pt2", example)
    assert (exported_rows(path).because == "proved") is is_proved


def test_a_program_that_changes_its_buffers_keeps_a_state(tmp_path: Path) -> None:
    class Counts(torch.nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(1)
            return x + 1

    found = exported_rows(export(Counts(), tmp_path / "m.pt2", torch.randn(2, 4)))
    assert found.because is None


def test_what_is_malformed_is_not_proved(tmp_path: Path) -> None:
    import zipfile

    path, _ = program(tmp_path / "m.pt2", PROVED["linear"])
    with zipfile.ZipFile(path) as archive:
        name = next(one for one in archive.namelist() if one.endswith("/models/model.json"))
        document: dict[str, Any] = json.loads(archive.read(name))
    for node in document["graph_module"]["graph"]["nodes"]:
        node["inputs"] = []
    assert not any(type(value).__name__ == "Rows" for value in prove(document).values())
    (tmp_path / "cut.pt2").write_bytes(path.read_bytes()[:1000])
    assert exported_rows(tmp_path / "cut.pt2").because is None


def test_two_inputs_of_any_length_are_proved(tmp_path: Path) -> None:
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length", max=512)
    examples = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5))
    shapes: Any = ({0: rows, 1: length}, {0: rows, 1: length})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(Attends().eval(), examples, dynamic_shapes=shapes), tmp_path / "m.pt2")
    assert loaded(tmp_path / "m.pt2").contract.because == "proved"
