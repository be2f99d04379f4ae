"""Quantised weights on disk: found again as they were, or made again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from inferd.checkpoints.weight_cache import WeightCache


def tensors() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "a.data": torch.randint(0, 255, (1001,), generator=made, dtype=torch.uint8),
        "a.scale": torch.randn(64, generator=made),
        "b.total": torch.randint(-9, 9, (64,), generator=made, dtype=torch.int32),
    }


def keep(at: Path, key: str = "k", limit: int = 1 << 20) -> Path:
    kept = WeightCache(at, key, limit)
    for name, tensor in tensors().items():
        assert kept.find(name) is None
        kept.hold(name, tensor)
    kept.finish()
    kept.join()
    return kept.path


def test_what_was_kept_is_found_byte_for_byte_under_its_own_key_only(tmp_path: Path) -> None:
    path = keep(tmp_path)
    kept = WeightCache(tmp_path, "k", 1 << 20)
    for name, tensor in tensors().items():
        found = kept.find(name)
        assert found is not None
        assert torch.equal(found, tensor)
    assert WeightCache(tmp_path, "another", 1 << 20).find("a.data") is None
    assert set(load_file(path)) >= set(tensors())  # a safetensors file that any reader takes
    assert [path] == list(tmp_path.iterdir())


def test_a_file_that_has_everything_is_not_written_again(tmp_path: Path) -> None:
    path = keep(tmp_path)
    before = path.stat().st_ino
    kept = WeightCache(tmp_path, "k", 1 << 20)
    for name, tensor in tensors().items():
        assert kept.find(name) is not None
        kept.hold(name, tensor)
    kept.finish()
    kept.join()
    assert path.stat().st_ino == before


@given(at=st.floats(0, 1), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, at: float, bit: int) -> None:
    for left in tmp_path.iterdir():  # by the example before
        left.unlink()
    path = keep(tmp_path)
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)
    kept = WeightCache(tmp_path, "k", 1 << 20)
    for name, tensor in tensors().items():
        found = kept.find(name)
        assert found is None or torch.equal(found, tensor)


@pytest.mark.parametrize("left", [0, 7, 100, 900, -1])
def test_a_file_that_was_cut_off_is_said_and_replaced(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    with caplog.at_level(logging.WARNING):
        kept = WeightCache(tmp_path, "k", 1 << 20)
        found = [kept.find(name) for name in tensors()]
    if left != -1:  # the last byte is padding
        assert found == [None, None, None]
        assert "the weights are quantised again" in caplog.text
    for name, tensor in tensors().items():
        kept.hold(name, tensor)
    kept.finish()
    kept.join()
    assert path.read_bytes() == whole or left == -1


def test_a_damaged_tensor_makes_the_whole_file_new_and_later_starts_find_it(tmp_path: Path) -> None:
    path = keep(tmp_path)
    whole = path.read_bytes()
    found = whole.find(tensors()["b.total"].numpy().tobytes())
    path.write_bytes(whole[:found] + b"\xff" * 8 + whole[found + 8 :])
    kept = WeightCache(tmp_path, "k", 1 << 20)
    assert kept.find("a.data") is not None
    assert kept.find("b.total") is None
    for name, tensor in tensors().items():
        kept.hold(name, tensor)
    kept.finish()
    kept.join()
    assert path.read_bytes() == whole


def test_the_folder_is_bounded_and_loses_what_was_not_used_for_longest(tmp_path: Path) -> None:
    size = keep(tmp_path, "probe").stat().st_size
    (tmp_path / "old.part").write_bytes(b"x")
    os.utime(tmp_path / "old.part", (1, 1))
    paths = []
    for i, key in enumerate("abc"):
        paths.append(keep(tmp_path, key, limit=10 * size))
        os.utime(paths[-1], (1000 + i, 1000 + i))
    WeightCache(tmp_path, "a", 1 << 20)  # used: now the newest
    keep(tmp_path, "d", limit=3 * size)
    left = {path.name for path in tmp_path.iterdir()}
    assert paths[0].name in left
    assert not {paths[1].name, "old.part"} & left
    assert len(left) <= 3


def test_a_file_that_vanishes_during_eviction_does_not_stop_a_new_entry(tmp_path: Path) -> None:
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert keep(tmp_path).exists()


def test_more_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    assert not keep(tmp_path, limit=100).exists()


def test_a_cache_that_cannot_be_written_is_logged_and_does_not_fail_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with caplog.at_level(logging.WARNING):
        assert not keep(in_the_way / "folder").is_file()
    assert "not kept" in caplog.text
