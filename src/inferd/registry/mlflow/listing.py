"""The files of a model on an MLflow server: what there is, of which size, and where each is read.

Artifacts come through the server (``mlflow-artifacts:``, MLflow's default), or are files in a folder that the operator
has allowed. Other stores are refused by name: their credentials belong to MLflow's server.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from inferd.artefacts.tree import MAX_DEPTH, MAX_FILES, checked_name, folded
from inferd.errors import ModelLoadError
from inferd.registry.mlflow.server import Server, refused

_LIST: Final = "/api/2.0/mlflow-artifacts/artifacts"


class Listed(msgspec.Struct, frozen=True):
    """A file of a model."""

    path: str  # relative to the model, with /
    size: int  # bytes, as the server announces


class _Entry(msgspec.Struct):
    path: str
    is_dir: bool = False
    file_size: int | None = None


def proxied_root(server: Server, uri: str) -> str | None:
    """The path of artifacts that come through this server; None: they are elsewhere."""
    parts = urlsplit(uri)
    if parts.scheme != "mlflow-artifacts":
        return None
    if parts.netloc and parts.netloc != urlsplit(server.url).netloc:
        raise refused(
            f"The artifacts are at {uri[:200]}, on another server than {server.url}; credentials are sent to "
            "mlflow.url alone.",
            param="source",
        )
    return "/".join(part for part in unquote(parts.path).split("/") if part)


def local_folder(uri: str, roots: Sequence[str]) -> Path | None:
    """The folder of artifacts that are files; None: they are no files. Raises ModelLoadError for one outside the
    allowed folders."""
    parts = urlsplit(uri)
    if parts.scheme not in ("file", "") or parts.netloc not in ("", "localhost"):
        return None
    path = Path(unquote(parts.path))
    real = path.resolve()
    if not any(real.is_relative_to(Path(root).expanduser().resolve()) for root in roots):
        raise refused(
            f"The artifacts are files in {path}, which is in none of mlflow.artifact_roots; allow the folder if it is "
            "on this machine, or start mlflow server with --serve-artifacts.",
            param="source",
        )
    if not real.is_dir():
        raise refused(f"The artifacts should be in the folder {path}, which is not on this machine.", param="source")
    return real


def refuse_store(uri: str) -> ModelLoadError:
    """The error for artifacts in a store that only MLflow's server can read."""
    return refused(
        f"The artifacts are at {urlsplit(uri).scheme or 'an unknown place'}:, which inferd does not read; start mlflow "
        "server with --serve-artifacts and --artifacts-destination, so that they come through the server.",
        param="source",
    )


def list_files(server: Server, uri: str) -> list[Listed]:
    """All files of a model that come through the server, by path. Raises ModelLoadError, also for names
    that mean different files in different places."""
    found: list[Listed] = []
    folders = [""]
    while folders:
        folder = folders.pop()
        if folder.count("/") >= MAX_DEPTH:
            raise refused(f"{uri} is more than {MAX_DEPTH} folders deep.", param="source")
        seen: set[str] = set()
        for entry in list_folder(server, uri, folder):
            name = checked_name(entry.path)
            if "/" in name or folded(name) in seen:
                raise refused(
                    f"The server lists the file {name!r} twice, or outside its folder {folder or uri!r}; the model is "
                    "refused.",
                    param="source",
                )
            seen.add(folded(name))
            path = f"{folder}/{name}" if folder else name
            if entry.is_dir:
                folders.append(path)
            elif entry.file_size is None or entry.file_size < 0:
                raise refused(f"The server does not say how long {path} is.", param="source")
            else:
                found.append(Listed(path, entry.file_size))
            if len(found) + len(folders) > MAX_FILES:
                raise refused(f"{uri} holds more than {MAX_FILES} files; name the folder of one model.", param="source")
    return sorted(found, key=lambda file: file.path)


def list_folder(server: Server, uri: str, below: str = "") -> list[_Entry]:
    """The entries of one folder, none where there is no such folder. Raises ModelLoadError."""
    root = proxied_root(server, uri)
    if root is None:
        raise refuse_store(uri)
    answer = server.get(_LIST, path=f"{root}/{below}" if below else root)
    try:
        return msgspec.convert(answer.get("files", []), list[_Entry])
    except msgspec.ValidationError as error:
        raise refused(f"{server.url} lists artifacts in another form ({error}).", param="mlflow.url") from None
