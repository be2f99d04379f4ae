"""Files by content: the same ones are used where they are, others come in chunks, and a broken transfer goes on."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import ModelConfig, SpeculationConfig
from inferd.errors import ModelLoadError
from inferd.nodes.cache import KEPT_FREE_BYTES, Cache, first_unused
from inferd.nodes.files import CHUNK_BYTES, are_equal, chunk_digest, model_files, send_file, sha256_of, with_whole_paths
from inferd.nodes.messages import Chunk, ModelFile, Refused, Whole, to_fetcher_decoder
from inferd.worker.channel import Frames

Usage = namedtuple("Usage", "total used free")


class Pipe:
    """A reader that keeps what it is sent, and breaks after so many chunks."""

    def __init__(self, chunks: int = 10**9) -> None:
        self.left = chunks
        self.frames = Frames(to_fetcher_decoder)
        self.messages: list[Chunk | Whole | Refused] = []
        self.is_open = True

    def write(self, data: bytes) -> None:
        for messages in self.frames.feed(data):
            self.messages += messages
        self.left -= 1
        self.is_open = self.left > 0

    def finish(self) -> None:
        self.is_open = False

    async def drained(self) -> None: ...


def model(folder: Path) -> ModelConfig:
    """Settings that name files in every way."""
    (folder / "model" / "deep").mkdir(parents=True)
    (folder / "draft").mkdir()
    for name, size in {"model/config.json": 3, "model/deep/w.bin": 2_500_000, "draft/w": 5, "chat.jinja": 7}.items():
        (folder / name).write_bytes(hashlib.sha256(name.encode()).digest()[:1] * size)
    return ModelConfig(
        source=str(folder / "model"),
        chat_template=str(folder / "chat.jinja"),
        options={"deep": [str(folder / "model/config.json"), "not a file", 3]},
        speculation=SpeculationConfig(draft=str(folder / "draft")),
    )


def bring(cache: Cache, file: ModelFile, chunks: int = 10**9) -> bool:
    """What a node does with a transfer that may break; whether it was whole."""
    offset = cache.part_size(file)
    if not offset:
        cache.append(file, 0, b"")
    pipe = Pipe(chunks)
    asyncio.run(send_file(pipe, file, offset))
    for message in pipe.messages:
        if isinstance(message, Chunk):
            assert (message.offset, message.digest) == (offset, chunk_digest(message.data))
            cache.append(file, offset, message.data)
            offset += len(message.data)
        else:
            assert isinstance(message, Whole)
            cache.complete(file)
            return True
    return False


def test_a_model_is_rebuilt_from_its_files_content_under_settings_that_find_it(tmp_path: Path) -> None:
    config = with_whole_paths(model(tmp_path / "server"))
    files = model_files(config)
    cache = Cache(tmp_path / "node")
    missing = cache.missing(files)
    assert {file.sha256 for file in missing} == {file.sha256 for file in files}
    assert all(bring(cache, file) for file in missing)
    assert cache.missing(files) == []
    placed = cache.tree(config, files)
    shutil.rmtree(tmp_path / "server")
    root = tmp_path / "node" / "trees"
    for place in (placed.source, placed.chat_template, placed.speculation.draft, placed.options["deep"][0]):
        assert Path(str(place)).is_relative_to(root), place
    assert placed.options["deep"][1:] == ["not a file", 3]
    assert (Path(placed.source) / "deep" / "w.bin").stat().st_size == 2_500_000
    assert cache.tree(config, files) == placed, "a second worker uses the same folder"


def test_a_transfer_that_breaks_is_continued_where_it_ended(tmp_path: Path) -> None:
    files = model_files(model(tmp_path / "server"))
    large = max(files, key=lambda file: file.size)
    cache, tries = Cache(tmp_path / "node"), 0
    cache.missing(files)
    while not bring(cache, large, chunks=1):
        tries += 1
        assert cache.part_size(large) == min(tries * CHUNK_BYTES, large.size)
    assert large not in cache.missing(files)


def test_a_file_that_changed_on_the_way_is_not_used(tmp_path: Path) -> None:
    files = model_files(model(tmp_path / "server"))
    large = max(files, key=lambda file: file.size)
    cache = Cache(tmp_path / "node")
    cache.missing(files)
    Path(large.path).write_bytes(b"other bytes")
    with pytest.raises(ModelLoadError, match="other bytes on the server than it had"):
        bring(cache, large)
    assert cache.part_size(large) == 0
    assert large in cache.missing(files)


def test_a_full_disk_is_named_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model_files(model(tmp_path / "server"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, 10**6))
    with pytest.raises(ModelLoadError, match=r"cannot be kept in .*node: .* are to come and .* are free; make room"):
        Cache(tmp_path / "node").missing(files)
    # Some of the disk stays free.
    need = sum(file.size for file in {file.sha256: file for file in files}.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, need + KEPT_FREE_BYTES - 1))
    with pytest.raises(ModelLoadError, match="make room"):
        Cache(tmp_path / "node").missing(files)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, need + KEPT_FREE_BYTES))
    assert len(Cache(tmp_path / "node").missing(files)) == len({file.sha256 for file in files})


def test_a_file_that_is_gone_on_the_server_is_told(tmp_path: Path) -> None:
    (file, *_) = model_files(model(tmp_path / "server"))
    Path(file.path).unlink()
    pipe = Pipe()
    asyncio.run(send_file(pipe, file, 0))
    (said,) = pipe.messages
    assert isinstance(said, Refused)
    assert "cannot be read on the server" in said.message


def test_code_is_not_brought_to_another_place(tmp_path: Path) -> None:
    code = tmp_path / "server" / "mine.py"
    code.parent.mkdir()
    code.write_text("class Mine: ...")
    config = with_whole_paths(ModelConfig(source=f"{code}:Mine", allow_code=True))
    files = model_files(config)
    cache = Cache(tmp_path / "node")
    assert all(bring(cache, file) for file in cache.missing(files))
    code.write_text("class Other: ...")  # what a node has there
    assert not are_equal(model_files(config), files)
    with pytest.raises(ModelLoadError, match="Put the same files at the same place on the node"):
        cache.tree(config, files)


def test_paths_do_not_depend_on_the_folder_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = ModelConfig(
        source="model",
        chat_template="chat.jinja",
        options={"deep": ["model/config.json", "not a file", 3]},
        speculation=SpeculationConfig(draft="./draft"),
    )
    assert with_whole_paths(relative) == whole
    assert with_whole_paths(ModelConfig(source="demo")) == ModelConfig(source="demo")


@given(st.text(max_size=80))
def test_a_digest_that_is_none_names_no_file(text: str) -> None:
    if len(text) != 64:
        file = ModelFile("label", "/path", 1, text)
        with pytest.raises(ModelLoadError, match="is no digest of a file"):
            Cache(Path("/nowhere")).part_size(file)


def test_the_digest_of_a_file_is_read_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"other")
    assert sha256_of(path) == hashlib.sha256(b"other").hexdigest()


def test_a_folder_is_used_by_one_node_at_a_time(tmp_path: Path) -> None:
    first = Cache(tmp_path / "node")
    assert first.lock()
    second = Cache(tmp_path / "node")
    assert not second.lock()
    assert "another node uses it; name another one with --cache" in str(second.unusable("another node uses it"))


def test_a_node_without_a_name_of_its_own_finds_the_first_folder_that_none_uses(tmp_path: Path) -> None:
    caches = [first_unused(tmp_path) for _ in range(2)]
    assert len(caches) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert not Cache(tmp_path / "1").lock()
