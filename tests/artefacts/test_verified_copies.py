"""Verified copies: what is loaded is what was hashed, whatever happens to the source, the copy and other processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from tests.artefacts.signers import key, private_pem, public_pem
from tests.artefacts.test_manifest import files_of, write

from inferd.artefacts import store as store_module
from inferd.artefacts.manifest import manifest_of
from inferd.artefacts.policy import Policy
from inferd.artefacts.signature import sign
from inferd.artefacts.store import checked_copy, remove_unused, store_folder
from inferd.artefacts.trust import Trust
from inferd.errors import ModelLoadError

CONTENTS = {"config.json": b"{}", "sub/weights.bin": bytes(range(256)) * 100, "empty": b""}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", CONTENTS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def policy_of(model: Path, form: str = "tree") -> Policy:
    if form == "tree":
        return Policy(digest=manifest_of(model).tree_digest)
    if form == "root":
        return Policy(digest=manifest_of(model).digest)
    folder = model.parent
    bundle, _ = sign(model, private_pem(folder, key()), shard_size=4096 if form == "shards" else None)
    return Policy(bundle=bundle, trust=Trust(public_key=public_pem(folder, key())))


FORMS = ["tree", "root", "signature"]


@pytest.mark.parametrize("form", FORMS)
def test_the_copy_is_the_artefact_and_serves_again(model: Path, store: Path, form: str) -> None:
    policy = policy_of(model, form)
    first = checked_copy(model, policy, store)
    assert first.path.name == "model"
    assert first.path.is_relative_to(store)
    assert files_of(first.path) == sorted(CONTENTS)
    assert {path: (first.path / path).read_bytes() for path in CONTENTS} == CONTENTS
    inode = (first.path / "config.json").stat().st_ino
    second = checked_copy(model, policy, store)
    assert second == first
    assert (second.path / "config.json").stat().st_ino == inode  # nothing was written again
    assert [entry.name for entry in store.iterdir()] == [first.path.parent.name]


@pytest.mark.parametrize("form", [*FORMS, "shards"])
def test_a_single_file_keeps_its_name(model: Path, store: Path, form: str) -> None:
    file = model / "sub" / "weights.bin"
    found = checked_copy(file, policy_of(file, form), store)
    assert found.path.name == "weights.bin"
    assert found.path.read_bytes() == CONTENTS["sub/weights.bin"]
    assert checked_copy(file, policy_of(file, form), store).path == found.path


def test_shards_are_compared_with_the_copy(model: Path, store: Path) -> None:
    (model / "empty").unlink()
    policy = policy_of(model, "shards")
    assert checked_copy(model, policy, store).path.is_dir()
    (model / "sub" / "weights.bin").write_bytes(bytes(25_600))
    with pytest.raises(ModelLoadError, match=r"weights\.bin:0:4096 of .*/model "):
        checked_copy(model, policy, store)


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_verify_leaves_nothing_and_spoils_nothing(model: Path, store: Path, form: str) -> None:
    policy = policy_of(model, form)
    good = checked_copy(model, policy, store).path
    for change in ({"config.json": b"[]"}, {"added": b""}):
        write(model, change)
        with pytest.raises(ModelLoadError) as caught:
            checked_copy(model, policy, store)
        assert str(model) in caught.value.message
        assert [entry.name for entry in store.iterdir()] == [good.parent.name]
        (model / "added").unlink(missing_ok=True)
        write(model, CONTENTS)
    assert {path: (good / path).read_bytes() for path in CONTENTS} == CONTENTS


@pytest.mark.parametrize("form", FORMS)
def test_a_source_that_is_swapped_after_the_check_is_not_what_is_loaded(model: Path, store: Path, form: str) -> None:
    """By another file at its place, by other bytes in the same file, and by another folder."""
    policy = policy_of(model, form)
    loaded = checked_copy(model, policy, store).path
    with (model / "config.json").open("r+b") as file:
        file.write(b"evil")
    (model / "sub" / "weights.bin").unlink()
    (model / "sub" / "weights.bin").write_bytes(b"evil")
    model.rename(model.with_name("old"))
    write(model, {"config.json": b"evil", "evil.py": b"evil"})
    assert {path: (loaded / path).read_bytes() for path in CONTENTS} == CONTENTS


@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_source_that_is_swapped_during_the_check_is_refused_or_does_not_matter(
    model: Path, store: Path, form: str, when: int
) -> None:
    """Whatever a writer does between any two reads, what is loaded has the digest of the policy."""
    policy, calls = policy_of(model, form), 0

    def swap(phase: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            shutil.rmtree(model / "sub")
            write(model, {"sub/weights.bin": b"evil" * 6400, "config.json": b"[]"})

    before = manifest_of(model).tree_digest
    try:
        found = checked_copy(model, policy, store, progress=swap)
    except ModelLoadError:
        return
    assert manifest_of(found.path).tree_digest == before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("damage", ["change", "add", "remove", "link", "file"])
def test_a_damaged_copy_is_replaced(model: Path, store: Path, form: str, damage: str) -> None:
    policy = policy_of(model, form)
    copy = checked_copy(model, policy, store).path
    file = copy / "config.json"
    file.chmod(0o600)
    if damage == "change":
        file.write_bytes(b"[]")
    elif damage == "add":
        (copy / "__pycache__").mkdir()
        (copy / "__pycache__" / "x.pyc").write_bytes(b"x")
    elif damage == "remove":
        file.unlink()
    elif damage == "link":
        file.unlink()
        file.symlink_to("/etc/hostname")
    else:
        shutil.rmtree(copy)
        copy.write_bytes(b"x")
    again = checked_copy(model, policy, store).path
    assert again == copy
    assert files_of(again) == sorted(CONTENTS)
    assert (again / "config.json").read_bytes() == b"{}"
    assert len(list(store.iterdir())) == 1


def test_unsigned_files_are_not_copied(model: Path, store: Path) -> None:
    policy = policy_of(model, "signature")
    write(model, {"evil.py": b"evil", "sub/evil.py": b"evil"})
    with pytest.raises(ModelLoadError, match=r"holds evil\.py, which was not signed"):
        checked_copy(model, policy, store)
    lenient = Policy(bundle=policy.bundle, trust=policy.trust, ignore_unsigned=True)
    assert files_of(checked_copy(model, lenient, store).path) == sorted(CONTENTS)
    assert files_of(checked_copy(model, lenient, store).path) == sorted(CONTENTS)


def test_a_digest_and_a_signature_must_both_hold(model: Path, store: Path) -> None:
    signed = policy_of(model, "signature")
    both = Policy(digest=manifest_of(model).digest, bundle=signed.bundle, trust=signed.trust)
    found = checked_copy(model, both, store)
    assert found.evidence.startswith(f"digest {both.digest} and signature by key ")
    for digest in (f"sha256:{'0' * 64}", f"tree-sha256:{'0' * 64}"):
        wrong = Policy(digest=digest, bundle=signed.bundle, trust=signed.trust)
        with pytest.raises(ModelLoadError, match=f"but verify.digest is {digest}"):
            checked_copy(model, wrong, store)
    with pytest.raises(ModelLoadError, match="nothing can be verified"):
        checked_copy(model, Policy(), store)


def test_a_hubs_links_are_copied_as_files(model: Path, store: Path, tmp_path: Path) -> None:
    policy, blobs = policy_of(model), tmp_path / "blobs"
    blobs.mkdir()
    (model / "config.json").rename(blobs / "abc")
    (model / "config.json").symlink_to(os.path.relpath(blobs / "abc", model))
    with pytest.raises(ModelLoadError, match="symbolic link"):
        checked_copy(model, policy, store)
    for _ in range(2):
        copy = checked_copy(model, policy, store, links_into=blobs).path
        assert not (copy / "config.json").is_symlink()


def test_a_store_that_others_can_write_to_is_not_used(model: Path, store: Path) -> None:
    store.mkdir()
    store.chmod(0o770)
    with pytest.raises(ModelLoadError, match="others can write to it"):
        checked_copy(model, policy_of(model), store)
    store.chmod(0o700)
    assert checked_copy(model, policy_of(model), store)


def test_a_store_that_cannot_be_made_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="cannot be written"):
        checked_copy(model, policy_of(model), tmp_path / "file" / "store")


def test_the_store_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_folder() == tmp_path / "inferd" / "artefacts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_folder() == tmp_path / ".cache" / "inferd" / "artefacts"


def _copy_and_wait(model: Path, policy: Policy, store: Path, done: object, end: object) -> None:
    checked_copy(model, policy, store)
    done.set()  # type: ignore[attr-defined]
    end.wait(60)  # type: ignore[attr-defined]


def test_a_copy_that_a_process_uses_is_not_removed(model: Path, store: Path) -> None:
    context = multiprocessing.get_context("spawn")
    done, end = context.Event(), context.Event()
    user = context.Process(target=_copy_and_wait, args=(model, policy_of(model), store, done, end))
    user.start()
    try:
        assert done.wait(60)
        (store / ".part-0").mkdir()  # of a process that was killed
        assert [entry.name for entry in remove_unused(store, 0.0)] == [".part-0"]
        assert len(list(store.iterdir())) == 1
    finally:
        end.set()
        user.join(60)
    assert remove_unused(store, 3600.0) == []
    assert len(remove_unused(store, 0.0)) == 1
    assert list(store.iterdir()) == []


def test_a_new_copy_removes_those_that_nothing_has_used_for_a_week(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.mkdir(mode=0o700)
    for name, age in (("old", store_module.UNUSED_S + 60), ("young", 60.0)):
        (store / name).mkdir()
        used_at = (store / name).stat().st_mtime - age
        os.utime(store / name, (used_at, used_at))
    checked_copy(model, policy_of(model), store)
    assert sorted(entry.name for entry in store.iterdir() if len(entry.name) < 64) == ["young"]


def test_an_entry_that_another_process_removes_before_it_is_locked_is_made_again(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, removed = os.open, list[str]()

    def removing(path: str | Path, *args: int, **kwargs: int) -> int:
        if Path(path).parent == store and str(path) not in removed:
            removed.append(str(path))
            os.rmdir(path)
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", removing)
        copy = checked_copy(model, policy_of(model), store).path
    assert len(removed) == 2, "the part, and the place of the copy"
    assert (copy / "config.json").exists()


def _copy_once(model: Path, policy: Policy, store: Path) -> str:
    return str(checked_copy(model, policy, store).path)


def test_processes_that_copy_the_same_artefact_at_the_same_time_share_it(model: Path, store: Path) -> None:
    write(model, {"large.bin": os.urandom(3_000_000)})
    policy = policy_of(model)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = set(pool.starmap(_copy_once, [(model, policy, store)] * 6))
    assert len(found) == 1
    assert [entry.name for entry in store.iterdir()] == [Path(found.pop()).parent.name]


def test_a_name_that_repeats_below_another_folder_has_the_same_content(
    model: Path, store: Path, tmp_path: Path
) -> None:
    """Copies are named by content and by name, so two artefacts cannot meet in one place."""
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other" / "model", {"config.json": b"[]"})
    paths = {checked_copy(one, policy_of(one), store).path for one in (model, other)}
    assert len(paths) == 2
    digests = {hashlib.sha256((path / "config.json").read_bytes()).hexdigest() for path in paths}
    assert len(digests) == 2
