"""Getting the files of a model from an MLflow server into the store of artefacts, verified and once.

A version is downloaded below the user's cache folder, several files at a time. Each is hashed while it is read, and a
download that was interrupted goes on where it stopped. What was read is compared with the sizes that the server
announces, with the digest of the settings or of the version's tag, with the signature that the settings ask for, and
with what the same version was before: a version whose files have changed is refused. The files that are served are then
moved into the store under the digest of their content (``artefacts/store.py``), and the worker verifies that digest
again whenever it loads them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from inferd.artefacts.copying import copy_file, unwritable
from inferd.artefacts.download import INTERRUPTED, Wanted, download
from inferd.artefacts.manifest import HashedFile, Manifest, Progress, is_digest, silent
from inferd.artefacts.policy import Policy, expect
from inferd.artefacts.statement import signed_paths
from inferd.artefacts.store import adopt, store_folder
from inferd.artefacts.tree import FoundFile, find_files, not_verified
from inferd.config import ModelConfig, VerifyConfig
from inferd.config.units import bytes_text
from inferd.config.versioning import MlflowConfig
from inferd.errors import ModelLoadError
from inferd.registry.artifact import artifact_of
from inferd.registry.mlflow import mlmodel
from inferd.registry.mlflow.listing import Listed, list_files, local_folder, proxied_root, refuse_store
from inferd.registry.mlflow.located import DIGEST_TAG, Located, artifact_uri
from inferd.registry.mlflow.mlmodel import MLModel, Served, choose, read_mlmodel
from inferd.registry.mlflow.server import AWAY, Server
from inferd.registry.mlflow.signature import check_against, declared_inputs, script_inputs
from inferd.registry.signature import read_signature
from inferd.registry.verified import policy_of

_log = logging.getLogger("inferd.registry")

TEMPORARY: Final = frozenset({AWAY, INTERRUPTED})
"""Codes of errors after which the same version may come at the next try."""

ATTEMPTS = 5  # in sequence that bring no byte of a file
_THREADS: Final = 4  # files that are read at the same time
_RECORD: Final = "record.json"


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a version was when its files were read first."""

    files: tuple[HashedFile, ...]
    mlmodel: str

    @property
    def manifest(self) -> Manifest:
        return Manifest("model", self.files)

    @property
    def listed(self) -> list[Listed]:
        return [Listed(file.path, file.size) for file in self.files]


def fetch(
    server: Server, found: Located, model: ModelConfig, settings: MlflowConfig, progress: Progress = silent
) -> ModelConfig:
    """Settings that load a version: the served files, their digest, and what its MLmodel says. Raises
    ModelLoadError that names what is wrong and the remedy."""
    if found.digest and not is_digest(found.digest):
        raise _no_digest(found)
    uri = artifact_uri(server, found)
    folder = _folder(server, uri)
    try:
        with _locked(folder):
            version = _Version(server, found, uri, folder, settings, progress)
            record, served, described = version.served(model)
            place, digest = version.place(record, served)
    except ModelLoadError as error:
        if error.code not in TEMPORARY:  # what was refused must not be taken for a part of the next try
            shutil.rmtree(folder / "files", ignore_errors=True)
        raise
    except OSError as error:
        raise unwritable(folder, error) from None
    return _settings(model, place, digest, described, found)


def judge(server: Server, found: Located, model: ModelConfig, settings: MlflowConfig) -> int:
    """The bytes of a version that can be served, as far as its list of files and its MLmodel tell. Nothing is kept.
    Raises ModelLoadError that names what is wrong and the remedy."""
    if found.digest and not is_digest(found.digest):
        raise _no_digest(found)
    with tempfile.TemporaryDirectory(prefix="inferd-check-") as folder:
        return _Version(server, found, artifact_uri(server, found), Path(folder), settings, silent).judged(model)


def _no_digest(found: Located) -> ModelLoadError:
    return ModelLoadError(
        f"The tag {DIGEST_TAG} of {found.shown} is no digest; 'inferd registry digest' prints one.", param="source"
    )


class _Version:
    """One version of a model on its way into the store."""

    def __init__(
        self, server: Server, found: Located, uri: str, folder: Path, settings: MlflowConfig, progress: Progress
    ) -> None:
        self._server = server
        self._found = found
        self._uri = uri
        self._folder = folder
        self._files = folder / "files"
        self._progress = progress
        self._root = proxied_root(server, uri)
        self._is_here = False  # whether the files were read by this object
        self._local: dict[str, FoundFile] = {}
        if self._root is None:
            local = local_folder(uri, settings.artifact_roots)
            if local is None:
                raise refuse_store(uri)
            self._local = {file.path: file for file in find_files(local)}

    def judged(self, model: ModelConfig) -> int:
        """The bytes of all files. Raises ModelLoadError where the list or the MLmodel say that it cannot be served."""
        listed = self._listed()
        described = read_mlmodel(self._mlmodel(listed), self._found.shown)
        declared_inputs(described.signature, self._found.shown)
        choose(described, [file.path for file in listed], self._found.shown, allow_pickle=model.allow_pickle)
        return sum(file.size for file in listed)

    def served(self, model: ModelConfig) -> tuple[_Record, Served, MLModel]:
        """The version's record, and what is served of it. Everything that can be refused is refused before the large
        files are read."""
        listed = self._listed()
        paths = [file.path for file in listed]
        before = self._read_record()
        if before is not None and before.listed != listed:
            raise self._changed("its list of files")
        text = before.mlmodel.encode() if before is not None else self._mlmodel(listed)
        described = read_mlmodel(text, self._found.shown)
        declared_inputs(described.signature, self._found.shown)
        served = choose(described, paths, self._found.shown, allow_pickle=model.allow_pickle)
        if before is None:
            before = _Record(files=self._read_all(listed), mlmodel=text.decode())
            self._check(before.manifest, served, model)
            self._write_record(before)
        else:
            self._check(before.manifest, served, model)
        return before, served, described

    def place(self, record: _Record, served: Served) -> tuple[Path, str]:
        """Where the served files are in the store, which gets them now if they are not there, and their digest."""
        by_path = {file.path: file for file in record.files}
        files = tuple(
            sorted(
                (HashedFile(name, by_path[path].size, by_path[path].sha256) for path, name in served.files.items()),
                key=lambda file: file.path,
            )
        )
        manifest = Manifest("model" if served.is_folder else files[0].path, files)

        def bring() -> dict[str, Path]:
            if not self._is_here:
                self._read_again(record)
            return {name: self._files / path for path, name in served.files.items()}

        try:
            place = adopt(manifest, bring, store_folder(), is_folder=served.is_folder, progress=self._progress)
            return place, manifest.tree_digest
        finally:
            shutil.rmtree(self._files, ignore_errors=True)

    def _listed(self) -> list[Listed]:
        if self._root is None:
            return [Listed(file.path, file.size) for file in self._local.values()]
        listed = list_files(self._server, self._uri)
        if not listed:
            raise not_verified(
                f"The MLflow server {self._server.url} lists no file of {self._found.shown} at {self._uri}; log the "
                "model again.",
                param="source",
            )
        return listed

    def _mlmodel(self, listed: Sequence[Listed]) -> bytes:
        """The MLmodel, which is read before the other files."""
        file = next((one for one in listed if one.path == mlmodel.FILE), None)
        if file is None or file.size > mlmodel.MAX_BYTES:
            raise ModelLoadError(
                f"{self._found.shown} has no file MLmodel of at most {bytes_text(mlmodel.MAX_BYTES)}, so it is no "
                "model that MLflow has logged; name the folder of the model.",
                param="source",
            )
        self._read(file, silent)
        return (self._files / file.path).read_bytes()

    def _write_record(self, record: _Record) -> None:
        path = self._folder / _RECORD
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(record))
        os.replace(part, path)

    def _read_again(self, record: _Record) -> None:
        """The files of a version that is known and not in the store any more."""
        hashed = self._read_all(record.listed)
        if hashed != record.files:
            changed = next(now.path for now, then in zip(hashed, record.files, strict=True) if now != then)
            shutil.rmtree(self._files, ignore_errors=True)
            raise self._changed(changed)

    def _read_all(self, listed: Sequence[Listed]) -> tuple[HashedFile, ...]:
        total = sum(file.size for file in listed)
        free = shutil.disk_usage(self._folder).free
        if total > free:
            raise not_verified(
                f"{self._found.shown} has {bytes_text(total)}, and {bytes_text(free)} are free in {self._folder}; make "
                "room, or set XDG_CACHE_HOME to a folder on another disk.",
                param="source",
            )
        count = _Count(total, self._progress)
        largest_first = sorted(listed, key=lambda file: -file.size)
        pool = ThreadPoolExecutor(_THREADS)
        try:
            found = pool.map(lambda file: self._read(file, count.of(file.path)), largest_first)
            hashed = tuple(sorted(found, key=lambda file: file.path))
            self._is_here = True
            return hashed
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, file: Listed, progress: Progress) -> HashedFile:
        target = self._files / file.path
        if self._root is None:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            hashed = copy_file(self._local[file.path], target, lambda size: None)
        else:
            url = self._server.file_url(self._root, file.path)
            wanted = Wanted(url=url, headers=self._server.headers, size=file.size)
            hashed = download(wanted, target, progress=progress, timeout_s=self._server.timeout_s, attempts=ATTEMPTS)
        return HashedFile(file.path, hashed.size, hashed.sha256)

    def _check(self, manifest: Manifest, served: Served, model: ModelConfig) -> None:
        """Raises ModelLoadError where the version is not what the settings or its tag ask for."""
        wanted = self._found.digest
        if wanted and not manifest.has_digest(wanted):
            raise not_verified(
                f"{self._found.shown} has the digest {manifest.tree_digest}, but its tag {DIGEST_TAG} says {wanted}; "
                "its files are not those that were logged.",
                param="source",
            )
        settings = model.verify
        if settings is None or settings.mode == "off" or (settings.digest is None and settings.signature is None):
            return
        try:
            self._check_policy(manifest, served, model, settings)
        except ModelLoadError as error:
            if settings.mode == "enforce":
                raise
            _log.warning("%s is loaded although it does not verify: %s", self._found.shown, error.message)

    def _check_policy(self, manifest: Manifest, served: Served, model: ModelConfig, settings: VerifyConfig) -> None:
        policy = Policy(digest=settings.digest)
        if settings.signature is not None:
            if not self._is_here:  # the signature is one of the version's files
                self._read_all([Listed(file.path, file.size) for file in manifest.files])
            policy = policy_of(settings, self._files, msgspec.structs.replace(model, source=str(self._files)))
        expected = expect(policy, self._files)
        covered = tuple(file for file in manifest.files if file.path not in expected.ignored)
        expected.check(self._files, Manifest("model", covered), self._found.shown)
        if expected.signed is not None:
            unsigned = sorted(set(served.files) - signed_paths(expected.signed.statement))
            if unsigned:
                raise not_verified(
                    f"{unsigned[0]} of {self._found.shown} is not signed, so it is not served.", param="verify"
                )

    def _read_record(self) -> _Record | None:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode((self._folder / _RECORD).read_bytes(), type=_Record)
        return None

    def _changed(self, what: str) -> ModelLoadError:
        return not_verified(
            f"{self._found.shown} is not what it was: {what} has changed on {self._server.url} since the version was "
            "read first, and a version must not change. Register the new files as a new version. If the change is "
            f"meant, remove {self._folder / _RECORD}.",
            param="source",
        )


class _Count:
    """The bytes of several downloads as one sum. ``total``: in bytes."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, path: str) -> Progress:
        def told(phase: str, done: int, total: int) -> None:
            with self._lock:
                self._done[path] = done
                self._progress("download", min(sum(self._done.values()), self._total), self._total)

        return told


def _settings(model: ModelConfig, place: Path, digest: str, described: MLModel, found: Located) -> ModelConfig:
    """The model's settings with the files in the store. Raises ModelLoadError where files and signature contradict
    each other."""
    made = msgspec.structs.replace(model, source=str(place), verify=VerifyConfig(mode="enforce", digest=digest))
    declared = declared_inputs(described.signature, found.shown)
    artifact = artifact_of(made)
    if artifact.platform == "pytorch_torchscript":
        inputs = script_inputs(declared)
        if inputs and "inputs" not in model.options:
            made = msgspec.structs.replace(made, options={**model.options, "inputs": inputs})
    signature = read_signature(artifact)
    if signature is not None:
        check_against(declared, signature, found.shown)
    return made


def _folder(server: Server, uri: str) -> Path:
    """Where a version is downloaded to, and its record."""
    name = hashlib.sha256(f"{server.url}\0{uri}".encode()).hexdigest()[:32]
    return store_folder().parent / "mlflow" / name


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time reads a version; the others wait. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
