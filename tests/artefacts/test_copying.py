"""Copies that are hashed while they are made: the bytes that were hashed are the bytes that were written."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.artefacts.copying import copy_verified
from inferd.artefacts.manifest import CHUNK_BYTES, manifest_of
from inferd.errors import ModelLoadError


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    made = {}
    for number, size in enumerate((0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 6 * CHUNK_BYTES + 17)):
        path = tmp_path / f"source-{number}"
        path.write_bytes(os.urandom(size))
        made[f"folder/{number}" if number % 2 else f"{number}"] = path
    return made


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_copy_has_the_digests_of_its_sources(sources: dict[str, Path], tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    expected = {path: sha256(source) for path, source in sources.items()}
    made = copy_verified(sources, tmp_path / "copy", expected, lambda *one: seen.append(one))
    assert {file.path: file.sha256 for file in made.files} == expected
    assert manifest_of(tmp_path / "copy") == made
    assert all((tmp_path / "copy" / path).read_bytes() == source.read_bytes() for path, source in sources.items())
    total = sum(source.stat().st_size for source in sources.values())
    assert (seen[0], seen[-1]) == (("copy", 0, total), ("copy", total, total))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 255))
def test_a_wrong_byte_is_refused_and_nothing_is_left(contents: list[bytes], which: int, wrong: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources, expected = {}, {}
        for number, content in enumerate(contents):
            sources[f"{number}"] = folder / f"source-{number}"
            sources[f"{number}"].write_bytes(content)
            expected[f"{number}"] = hashlib.sha256(content).hexdigest()
        path = f"{which % len(contents)}"
        (folder / f"source-{path}").write_bytes(contents[which % len(contents)] + bytes([wrong]))
        with pytest.raises(ModelLoadError) as caught:
            copy_verified(sources, folder / "copy", expected)
        assert expected[path] in caught.value.message
        assert sha256(folder / f"source-{path}") in caught.value.message
        assert [one.name for one in folder.iterdir() if not one.name.startswith("source-")] == []


def test_a_missing_file_an_existing_target_and_names_that_lead_elsewhere_are_refused(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks the file weights\.bin"):
        copy_verified(sources, tmp_path / "copy", {"weights.bin": "0" * 64})
    assert not (tmp_path / "copy").exists()
    for name in ("../out", "/out", "a/../../out"):
        with pytest.raises(ModelLoadError, match="not relative"):
            copy_verified({name: sources["0"]}, tmp_path / "copy")
    with pytest.raises(ModelLoadError, match="differ by case"):
        copy_verified({"a": sources["0"], "A": sources["2"]}, tmp_path / "copy")
    copy_verified(sources, tmp_path / "copy")
    with pytest.raises(ModelLoadError, match="cannot be written"):
        copy_verified({"other": sources["0"]}, tmp_path / "copy")
    assert manifest_of(tmp_path / "copy").tree_digest == copy_verified(sources, tmp_path / "second").tree_digest


def test_a_source_that_changes_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "weights.bin"
    source.write_bytes(bytes(8 * CHUNK_BYTES))

    def change(phase: str, done: int, total: int) -> None:
        if done == CHUNK_BYTES:
            os.truncate(source, 9 * CHUNK_BYTES)

    with pytest.raises(ModelLoadError, match="changed while it was read"):
        copy_verified({"weights.bin": source}, tmp_path / "copy", None, change)
    assert not (tmp_path / "copy").exists()


def test_copies_cannot_be_written_by_accident(sources: dict[str, Path], tmp_path: Path) -> None:
    copy_verified(sources, tmp_path / "copy")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").rglob("*") if path.is_file()} == {0o400}
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
