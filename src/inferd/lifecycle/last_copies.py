"""What each source of an MLflow server led to last, in the user's cache folder: so that a server which starts while the
MLflow server is away serves the verified copy of before.

A copy counts for settings that ask for the same of the files. It is in the store of artefacts, and the worker compares
it with its digest when it loads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from inferd.artefacts.store import store_folder
from inferd.config import ModelConfig, VerifyConfig
from inferd.errors import ModelLoadError

_log = logging.getLogger("inferd.lifecycle")


class LastCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was downloaded and verified."""

    key: str  # of the version
    shown: str
    place: str  # in the store
    digest: str
    options: dict[str, Any]  # of a model, that its MLmodel says
    asked: str  # digest of what the settings ask of the files

    def loading(self, model: ModelConfig) -> ModelConfig:
        """The model's settings with these files."""
        verify = VerifyConfig(mode="enforce", digest=self.digest)
        return msgspec.structs.replace(
            model, source=self.place, verify=verify, options={**self.options, **model.options}
        )


def remember(url: str, model: ModelConfig, made: ModelConfig, key: str, shown: str) -> None:
    """Record what a model's source led to. A folder that cannot be written to is told, and nothing else."""
    digest = "" if made.verify is None or made.verify.digest is None else made.verify.digest
    copy = LastCopy(key=key, shown=shown, place=made.source, digest=digest, options=made.options, asked=_asked(model))
    try:
        path = _path(url, model.source)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.encode(copy))
        os.replace(part, path)
    except OSError as error:
        _log.warning(
            "%s is not kept for a start without the MLflow server: %s cannot be written (%s)",
            *(shown, store_folder().parent, error.strerror),
        )


def recall(url: str, model: ModelConfig) -> LastCopy | None:
    """The last copy for a model's source, where the settings ask for the same of it and it is still there."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError, ModelLoadError):
        found = msgspec.json.decode(_path(url, model.source).read_bytes(), type=LastCopy)
        if found.asked == _asked(model) and Path(found.place).exists():
            return found
    return None


def _asked(model: ModelConfig) -> str:
    asked = (model.verify, model.allow_pickle, model.allow_code)
    return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()


def _path(url: str, source: str) -> Path:
    """Raises ModelLoadError where the user has no cache folder."""
    name = hashlib.sha256(f"{url}\0{source}".encode()).hexdigest()[:32]
    return store_folder().parent / "mlflow" / "last" / f"{name}.json"
