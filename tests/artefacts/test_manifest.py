"""Manifests and their digests, with ``sha256sum`` as the oracle, and every change of a folder that must show."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.artefacts import manifest as manifest_module
from inferd.artefacts import tree
from inferd.artefacts.manifest import HashedFile, Manifest, is_digest, manifest_of
from inferd.artefacts.tree import checked_name, find_files, open_file
from inferd.errors import ModelLoadError

Contents = dict[str, bytes]
# Letters around '/', whose place among them decides whether two orders of paths differ.
NAMES = st.text("ab-.0~é", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
FOLDERS = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=40), min_size=1, max_size=8
)


def write(folder: Path, contents: Contents) -> Path:
    """The folder with these files. A path that is a file and a folder at once stays a file."""
    folder.mkdir(exist_ok=True)
    for path, data in sorted(contents.items()):
        if any(parent.is_file() for parent in (folder / path).parents):
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / path).is_dir():
            (folder / path).write_bytes(data)
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", {"a/x": b"1", "a-b/y": b"22", "a.txt": b"333", "config.json": b"{}"})


@given(FOLDERS)
def test_the_tree_digest_is_what_sha256sum_says(contents: Contents) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name) / "model", contents)
        lines = "".join(
            f"{hashlib.sha256((folder / path).read_bytes()).hexdigest()}  {path}\n" for path in files_of(folder)
        )
        found = manifest_of(folder)
        assert found.tree_digest == f"tree-sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
        assert [file.path for file in found.files] == files_of(folder)


def test_the_digests_are_those_of_the_command_line_tools(model: Path) -> None:
    """The lines of sha256sum, hashed once more; and the hashes alone, for OMS's root digest."""
    listed = "find . -type f | sed 's,^./,,' | LC_ALL=C sort | xargs sha256sum"
    by_tools = subprocess.run(["bash", "-c", listed], cwd=model, capture_output=True, check=True).stdout
    assert manifest_of(model).tree_digest == f"tree-sha256:{hashlib.sha256(by_tools).hexdigest()}"
    hashes = b"".join(bytes.fromhex(line.split()[0].decode()) for line in by_tools.splitlines())
    assert manifest_of(model).digest == f"sha256:{hashlib.sha256(hashes).hexdigest()}"


def test_the_root_digest_is_that_of_the_specifications_vector() -> None:
    """ossf/model-signing-spec, test-vectors/v1.0/valid/key.bundle.json: two files by their digests, and the subject."""
    files = (
        HashedFile("signme-1", 0, "bc9a717db6064a32cbe9eae6fc40651dd6d36ef1757183f590eff2b1765d7ebc"),
        HashedFile("signme-2", 0, "32dcb1f8e1ae52d5963e56a6ba06ab58b424c15ed2a6b70d2feca1d089370028"),
    )
    subject = "92745110b1ab4368471cbe31664e10174e954b113a3df333db860317b2c6dec4"
    assert Manifest("model", files).digest == f"sha256:{subject}"


def test_the_order_of_the_reference_implementation_is_accepted_too(model: Path) -> None:
    by_parts = sorted(files_of(model), key=lambda path: path.split("/"))
    assert by_parts != files_of(model)
    hashes = b"".join(hashlib.sha256((model / path).read_bytes()).digest() for path in by_parts)
    found = manifest_of(model)
    assert found.has_digest(f"sha256:{hashlib.sha256(hashes).hexdigest()}")
    assert found.has_digest(found.digest)
    assert found.has_digest(found.tree_digest)
    assert not found.has_digest(f"sha256:{'0' * 64}")


@given(FOLDERS, st.data())
def test_every_change_of_a_folder_changes_its_tree_digest(contents: Contents, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name) / "model", contents)
        before = manifest_of(folder).tree_digest
        path = folder / data.draw(st.sampled_from(files_of(folder)))
        content = path.read_bytes()
        change = data.draw(st.sampled_from(["flip", "truncate", "append", "rename", "add", "remove", "swap", "link"]))
        if change == "flip" and content:
            at = data.draw(st.integers(0, len(content) - 1))
            path.write_bytes(
                content[:at] + bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))]) + content[at + 1 :]
            )
        elif change == "truncate" and content:
            path.write_bytes(content[:-1])
        elif change == "rename":
            path.rename(path.with_name(path.name + "z"))
        elif change == "add":
            (folder / "zz-added").write_bytes(content)
        elif change == "remove":
            path.unlink()
        elif change == "swap":
            other = folder / data.draw(st.sampled_from(files_of(folder)))
            if other.read_bytes() == content:
                return
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif change == "link":
            path.rename(Path(name) / "elsewhere")
            path.symlink_to(Path(name) / "elsewhere")
        else:
            path.write_bytes(content + b"\0")
        with contextlib.suppress(ModelLoadError):  # a link is refused, and a folder without a file
            assert manifest_of(folder).tree_digest != before


def test_a_single_file_is_its_name_and_content(model: Path) -> None:
    (only,) = manifest_of(model / "config.json").files
    assert (only.path, only.size, only.sha256) == ("config.json", 2, hashlib.sha256(b"{}").hexdigest())


def test_gits_files_and_the_signature_do_not_count_at_the_top_alone(model: Path) -> None:
    before = manifest_of(model)
    write(
        model, {".git/HEAD": b"x", ".gitignore": b"x", ".github/a/b": b"x", "model.sig": b"x", ".gitattributes": b"x"}
    )
    assert manifest_of(model) == before
    write(model, {"a/.gitignore": b"x"})
    assert manifest_of(model) != before
    assert manifest_of(model, ignored=("model.sig", "a/.gitignore")) == before
    assert manifest_of(model, ignored=()) != manifest_of(model)


def refusal(path: Path, max_files: int = tree.MAX_FILES) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find_files(path, max_files=max_files)
    assert caught.value.code == "model_not_verified"
    return caught.value.message


def test_what_can_be_taken_for_something_else_is_refused_by_name(model: Path) -> None:
    (model / "link").symlink_to(model / "config.json")
    assert "link is a symbolic link" in refusal(model)
    (model / "link").unlink()
    (model / "folder").symlink_to(model / "a")
    assert "folder is a symbolic link" in refusal(model)
    (model / "folder").unlink()
    os.mkfifo(model / "fifo")
    assert "fifo is no regular file" in refusal(model)
    assert "fifo is no regular file" in refusal(model / "fifo")
    (model / "fifo").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(model / "socket"))
        assert "socket is no regular file" in refusal(model)
    (model / "socket").unlink()
    write(model, {"Config.json": b"{}"})
    assert "'Config.json'" in refusal(model)
    assert "one name where case" in refusal(model)
    (model / "Config.json").unlink()
    write(model, {unicodedata.normalize(form, "é"): b"" for form in ("NFC", "NFD")})
    assert "Unicode normalisation" in refusal(model)


def test_folders_that_differ_by_case_are_refused(model: Path) -> None:
    write(model, {"A/z": b""})
    assert "'A'" in refusal(model)


@pytest.mark.parametrize("name", [b"\xff.bin", b"a\nb", b"a\\b", b"\x7f"])
def test_names_that_are_no_plain_text_are_refused(model: Path, name: bytes) -> None:
    with open(os.path.join(os.fsencode(model), name), "wb"):
        pass
    assert "rename the file" in refusal(model)


@pytest.mark.parametrize("name", ["../a", "/a", "a//b", "a/./b", "a/", "", ".", "a/..", "n" * 5000])
def test_paths_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ModelLoadError):
        checked_name(name)


def test_bounds_are_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "more than 3 files" in refusal(model, max_files=3)
    assert len(find_files(model, max_files=4)) == 4
    monkeypatch.setattr(tree, "MAX_DEPTH", 0)
    assert "more than 0 folders deep" in refusal(model)


def test_an_empty_folder_and_an_absent_one_are_refused(tmp_path: Path) -> None:
    assert "holds no file" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "absent")


def test_a_hubs_links_lead_to_its_blobs_alone(model: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    plain = manifest_of(model)
    (model / "config.json").rename(blobs / "abc")
    (model / "config.json").symlink_to(os.path.relpath(blobs / "abc", model))
    assert manifest_of(model, links_into=blobs) == plain
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ModelLoadError, match="no file below"):
        manifest_of(model, links_into=blobs)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """The last byte is written, and the time of change with it, when the first part has been read."""
    (tmp_path / "weights.bin").write_bytes(bytes(3 * manifest_module.CHUNK_BYTES))

    def change(phase: str, done: int, total: int) -> None:
        if done == manifest_module.CHUNK_BYTES:
            with (tmp_path / "weights.bin").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"x")
                file.flush()
                os.utime(file.fileno(), ns=(1, 1))

    with pytest.raises(ModelLoadError, match="changed while it was read"):
        manifest_of(tmp_path / "weights.bin", progress=change)


@pytest.mark.parametrize("size", [-1, 1])
def test_a_file_that_shrinks_or_grows_while_it_is_read_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(3 * manifest_module.CHUNK_BYTES))

    def change(phase: str, done: int, total: int) -> None:
        if done == manifest_module.CHUNK_BYTES:
            os.truncate(path, 3 * manifest_module.CHUNK_BYTES + size)

    with pytest.raises(ModelLoadError, match="changed while it was read"):
        manifest_of(path, progress=change)


def test_a_file_that_becomes_a_link_or_a_fifo_is_refused(model: Path, tmp_path: Path) -> None:
    found = find_files(model)
    for file in found:
        file.at.unlink()
    os.mkfifo(found[0].at)
    shutil.copyfile(__file__, tmp_path / "other")
    found[1].at.symlink_to(tmp_path / "other")
    with pytest.raises(ModelLoadError, match="no regular file"):
        open_file(found[0])  # and it waits for no writer
    with pytest.raises(ModelLoadError, match="symbolic link"):
        open_file(found[1])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        open_file(found[2])


def test_progress_is_the_sum_of_all_threads(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {f"{number}": bytes(2_000_000) for number in range(6)})
    seen: list[tuple[int, int]] = []
    threads = set()

    def note(phase: str, done: int, total: int) -> None:
        seen.append((done, total))
        threads.add(threading.get_ident())

    manifest_of(folder, threads=3, progress=note)
    assert seen[0] == (0, 12_000_000)
    assert seen[-1] == (12_000_000, 12_000_000)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("sha256:" + "a" * 64, True),
        ("tree-sha256:" + "0" * 64, True),
        ("sha256:" + "A" * 64, False),
        ("sha256:" + "a" * 63, False),
        ("a" * 64, False),
        ("sha512:" + "a" * 64, False),
    ],
)
def test_digests_have_one_spelling(text: str, is_one: bool) -> None:
    assert is_digest(text) is is_one
