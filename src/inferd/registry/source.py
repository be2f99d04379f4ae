"""Where a model's files are: from the setting ``source`` to a file or folder that can be loaded.

Knows the bundled models, files, folders and the name of the hub. Does not know the contents of the files:
``registry/artifact.py`` recognises them, and the loader checks them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import symtable
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit

from inferd import models
from inferd.errors import ModelLoadError

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total); for the phase 'download' both are bytes."""

_BUNDLED = (*models.NAMES, *models.CLASSIFIERS)
_CODE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*|.+\.py:[A-Za-z_]\w*", re.DOTALL)
_HUBS: Final = ("huggingface.co", "hf.co", "www.huggingface.co")
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")

REFERENCES: Final = ("registry:", "mlflow:")
"""How sources begin that a registry of versions leads to files (``lifecycle/sources.py``)."""

MODEL_SUFFIXES: Final = (
    ".onnx",
    ".ort",
    ".pt2",
    ".pt",
    ".pth",
    ".jit",
    ".skops",
    ".pkl",
    ".pickle",
    ".joblib",
    ".ubj",
    ".lgb",
)
"""Of files that are models."""

REFUSED_SUFFIXES: Final = (".h5", ".keras", ".tflite", ".gguf", ".cbm", ".mar", ".plan", ".engine", ".mlmodel")
"""Of files that are models of formats that are known and not served."""

SHARED_SUFFIXES: Final = (".json", ".txt", ".model")
"""Of files that may be models, and may be something else: labels.txt."""

_PATH_SUFFIXES: Final = frozenset(
    (
        *MODEL_SUFFIXES,
        *REFUSED_SUFFIXES,
        *SHARED_SUFFIXES,
        ".safetensors",
        ".bin",
        ".npz",
        ".npy",
        ".pb",
        ".py",
        ".yaml",
        ".yml",
    )
)


def silent(phase: str, done: int, total: int) -> None:
    """A progress function that shows nothing."""


def is_code(source: str) -> bool:
    """Whether the source names a Python class: ``module:Class`` or ``path/file.py:Class``."""
    return bool(_CODE.fullmatch(source)) and not is_reference(source) and not Path(source).expanduser().exists()


def is_reference(source: str) -> bool:
    """Whether the source names a version in a registry."""
    return source.startswith(REFERENCES)


def check_code(source: str) -> None:
    """Raises ModelLoadError where the file of ``path/file.py:Class`` is not there. Nothing is imported."""
    place = source.rpartition(":")[0]
    path = Path(place).expanduser()
    if place.endswith(".py") and not path.is_file():
        raise ModelLoadError(f"There is no file {place}; {_path_advice(place, path)}", param="source")


def defines_class(source: str) -> bool:
    """Whether the text of the file of ``module:Class`` or ``path/file.py:Class`` binds the class's name at its top
    level. Nothing is imported, so a name that code makes in another way is not seen."""
    place, _, name = source.rpartition(":")
    file = Path(place).expanduser() if place.endswith(".py") else _module_file(place)
    if file is None:
        return False
    try:
        table = symtable.symtable(file.read_bytes().decode("utf-8"), str(file), "exec")
        bound = table.lookup(name)
    except (OSError, SyntaxError, ValueError, KeyError):
        return False
    return bound.is_assigned() or bound.is_imported()


def _module_file(module: str) -> Path | None:
    """The file of a module's text, in the working folder or installed; None where there is none."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for at in range(1, module.count(".") + 2):
        if places is None:
            return None
        spec = PathFinder.find_spec(".".join(module.split(".")[:at]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def is_path(source: str) -> bool:
    """Whether the source is a path in the file system, which need not exist, and not a hub id of the same spelling. A
    path exists, is written like one, ends like a model's file, or is in a folder that exists. A revision (``@main``)
    makes it a hub id.
    """
    path = Path(source).expanduser()
    if path.exists() or source.startswith((".", "/", "~")):
        return True
    if _is_revised(source):
        return False
    return path.suffix.lower() in _PATH_SUFFIXES or (path.parent != Path() and path.parent.is_dir())


def _is_revised(source: str) -> bool:
    hub_id = _HUB_ID.fullmatch(source)
    return hub_id is not None and hub_id["revision"] is not None


def is_bundled(source: str) -> bool:
    return source in _BUNDLED


def resolve(source: str, progress: Progress = silent) -> Path:
    """The file or folder that is the model, downloaded first when ``source`` is a hub id.

    ``source`` is 'demo', a file, a folder, or ``organisation/name[@revision]``. A path (``is_path``) wins over
    a hub id of the same spelling. Raises ModelLoadError that names what is missing and the remedy.
    """
    if source in _BUNDLED:
        return models.path(source)
    if is_reference(source):
        raise ModelLoadError(
            f"{source} names a version in a registry, which only a model of the configuration may; name a file "
            "or folder here.",
            param="source",
        )
    if source.startswith(("http://", "https://")):
        raise ModelLoadError(
            f"{source} is a URL, from which no model is loaded; {_url_advice(source)}.", param="source"
        )
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if is_path(source) and not is_code(source):
        raise ModelLoadError(f"There is no file or folder {source}; {_path_advice(source, path)}", param="source")
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is not None:
        from inferd.registry.hub import download

        return download(hub_id["repo"], hub_id["revision"], progress)
    close = difflib.get_close_matches(source, _BUNDLED, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ModelLoadError(
        f"{source!r} is no model source: there is no such file or folder, it is not a bundled model "
        f"({', '.join(_BUNDLED)}) and not a hub id such as Qwen/Qwen3-0.6B.{hint}",
        param="source",
    )


def _url_advice(url: str) -> str:
    """What to write in place of a URL: the id of a page of the Hub, a server's address, or the path of a file."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "check its spelling"
    if parts.hostname in _HUBS:
        hub_id = "/".join(parts.path.split("/")[1:3])
        return f"write {hub_id} for the model" if _HUB_ID.fullmatch(hub_id) else "write organisation/name of a model"
    if PurePosixPath(parts.path).suffix.lower() in MODEL_SUFFIXES:
        return "download the file, and write its path"
    return f"openai:{url} names a server there"


def _path_advice(source: str, path: Path) -> str:
    """The remedy for a path that does not exist."""
    around = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, around, n=1)
    if close:
        return f"did you mean {source.removesuffix(path.name)}{close[0]}?"
    if _HUB_ID.fullmatch(source) and path.parent.is_dir():
        return f"check the path. (The folder {path.parent} is here; the hub's model of that name is {source}@main.)"
    return "check the path."


@contextmanager
def blaming(setting: str) -> Iterator[None]:
    """A ModelLoadError raised in the block names ``setting``, the setting that this source comes from."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{setting}: {error.message}", param=setting) from error


def find(source: str) -> Path | None:
    """Like ``resolve`` without asking elsewhere: None for a hub id that is not here yet, and for a reference to a
    registry. Raises ModelLoadError."""
    if is_reference(source):
        return None
    if not is_remote(source):
        return resolve(source)
    from inferd.registry.hub import cached

    hub_id = _HUB_ID.fullmatch(source)
    assert hub_id is not None
    return cached(hub_id["repo"], hub_id["revision"])


def fetch_config(source: str, into: Path) -> Path:
    """The folder ``into`` with the config.json of a hub id, and nothing else of the model. Raises ModelLoadError."""
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None:
        raise ModelLoadError(f"{source!r} is not a hub id such as Qwen/Qwen3-0.6B.", param="source")
    from inferd.registry.hub import download

    return download(hub_id["repo"], hub_id["revision"], silent, ("config.json",), into)


def is_remote(source: str) -> bool:
    """Whether resolving the source asks a hub or a registry."""
    return is_reference(source) or (source not in _BUNDLED and bool(_HUB_ID.fullmatch(source)) and not is_path(source))


def check_folder(folder: Path) -> Path:
    """The folder itself when it has what every checkpoint has. Raises ModelLoadError."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"{folder} has no config.json, so it is not a Hugging Face checkpoint; "
            "give the folder that holds config.json, tokenizer.json and *.safetensors.",
            param="source",
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(name for name in _shards(index) if not (folder / name).is_file())
        if missing:
            raise ModelLoadError(
                f"{folder} lacks {len(missing)} of the weight files that {index.name} lists: {', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}; download the model again.",
                param="source",
            )
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise ModelLoadError(
            f"{folder} has weights only as {pickled[0]}, a pickle, which inferd never opens because it can run code; "
            "convert it to safetensors."
            if pickled
            else f"{folder} has no *.safetensors file; download the model's weights into it.",
            param="source",
        )
    return folder


def _shards(index: Path) -> set[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelLoadError(
            f"{index} is not a weight index ({error!r}); download the file again.", param="source"
        ) from None
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index} names a file outside its folder: {outside[0]!r}.", param="source")
    return names
