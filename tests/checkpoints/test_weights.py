"""safetensors files are checked before they are used, and read as they were written."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from inferd.checkpoints.weights import Weights
from inferd.errors import ModelLoadError

CPU = torch.device("cpu")


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(folder, dtype=dtype, device=CPU)


def write_raw(folder: Path, header: object, data: bytes = b"\0" * 16, *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_come_back_as_they_were_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "empty": torch.empty(0, 4, dtype=dtype)}
    save_file(saved, tmp_path / "model.safetensors")
    weights = opened(tmp_path, dtype)
    for name, tensor in saved.items():
        assert torch.equal(weights.read(name, *tensor.shape), tensor)
        assert torch.equal(weights.lend(name, *tensor.shape), tensor)


def test_data_at_an_odd_address_is_read(tmp_path: Path) -> None:
    header = json.dumps({"a": entry([2], 0, 8)}).encode()
    header += b" " * ((2 - len(header)) % 4 + 1)
    write_raw(tmp_path, header, struct.pack("<2f", 1.5, -2.0))
    assert opened(tmp_path).read("a", 2).tolist() == [1.5, -2.0]


def test_what_is_taken_outlives_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "model.safetensors")
    taken = opened(tmp_path).read("a", 4)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-16, 2)
        file.write(b"\xff" * 16)
    assert taken.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = opened(tmp_path)
    assert sorted(weights) == ["a", "b"]
    assert weights.total_bytes == 20
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 2 shards are missing: model-2\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", 7])
def test_a_shard_outside_the_folder_is_refused(name: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match="shard"):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'])
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        opened(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin, a pickle.*[Cc]onvert it to safetensors"):
        opened(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry([3], 0, 8)}, "shape"),
        ({"a": entry([8], 0, 32)}, "truncated"),
        ({"a": entry([1], -4, 0)}, "offsets"),
        ({"a": entry([1], 8, 4)}, "offsets"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "overlap"),
        ({"a": entry([2], 0, 8, "F31")}, "F31"),
        ({"a": entry([-2], 0, 8)}, "malformed"),
        ({"a": entry(["2"], 0, 8)}, "malformed"),
        ({"a": entry([2], 0, "8")}, "malformed"),
        ({"a": {"dtype": "F32"}}, "malformed"),
        ({"a": 3}, "malformed"),
        ([], "object"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_a_lying_header_is_named(header: object, words: str, tmp_path: Path) -> None:
    write_raw(tmp_path, header)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors.*{words}"):
        opened(tmp_path)


@pytest.mark.parametrize("length", [2**63, 10**9, 200])
def test_a_header_longer_than_its_file_is_named(length: int, tmp_path: Path) -> None:
    write_raw(tmp_path, {}, length=length)
    with pytest.raises(ModelLoadError, match="header claims"):
        opened(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 8, 20, 60, -1])
def test_a_truncated_file_is_named(size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a sound safetensors file.*Download it again"):
        opened(tmp_path)


@given(data=st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "model.safetensors").write_bytes(data)
    with suppress(ModelLoadError):  # anything else fails the test
        list(opened(folder))


def test_a_tensor_that_is_missing_mis_shaped_or_too_many_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    weights = opened(tmp_path)
    with pytest.raises(ModelLoadError, match="no tensor 'c'"):
        weights.read("c", 4)
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: tensor 'a' has shape \[4\], but config\.json asks for \[2, 2\]"
    ):
        weights.read("a", 2, 2)
    weights.read("a", 4)
    with pytest.raises(
        ModelLoadError, match=r"1 tensors that config\.json's architecture does not know, for example b"
    ):
        weights.check_all_read(lambda name: False)
    weights.check_all_read(lambda name: name == "b")


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    told: list[tuple[str, int, int]] = []
    weights = Weights(
        tmp_path,
        dtype=torch.bfloat16,
        device=CPU,
        progress=lambda phase, done, total: told.append((phase, done, total)),
    )
    weights.read("a", 4)
    weights.read("b", 2, 3)
    assert told == [("weights", 16, 40), ("weights", 40, 40)]
    assert weights.num_parameters == 10
    assert weights.num_bytes == 20
