"""References to versions as sources of models: from ``registry:churn@production`` to the files with their digest.

A reference to the registry names a stage, a number or an alias; without one it is the version in production. One to an
MLflow server is read by ``mlflow_references.py``. The configuration that is served has files as the source and their
digest in ``verify``, so that the loader compares what it loads with it. Nothing else knows references.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from inferd.config import Config, ModelConfig
from inferd.config.versioning import RegistryConfig, VerifyConfig
from inferd.config.versions import versions_of
from inferd.errors import InferdError, ModelLoadError, ModelNotFound, StateUnavailable
from inferd.lifecycle import registry
from inferd.lifecycle.mlflow_references import MlflowReferences, Showing
from inferd.lifecycle.registry import Version
from inferd.registry.source import Progress, silent
from inferd.state.database import Database, number
from inferd.state.folder import data_folder, make_folder
from inferd.state.open import open_database

PREFIX: Final = "registry:"

_log = logging.getLogger("inferd.lifecycle")


def _silently(title: str) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(silent)


class References:
    """The references of one server. Every method may block, and one thread at a time uses the database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._config: Config | None = None  # as it was read last, with references to the registry
        self._counter = -1  # of changes of the registry, when it was looked at last
        self._seen: Mapping[str, str] = {}  # digests, by reference
        self._mlflow = MlflowReferences()
        self._registered: dict[tuple[str, str], str] = {}  # NAME@NUMBER, by the entry and its digest
        self._rejected: dict[str, str] = {}  # NAME@NUMBER, by the entries that were left out

    def resolved(self, config: Config, showing: Showing = _silently) -> Config:
        """The configuration with files instead of references. ``showing`` shows the progress of downloads. Raises
        ModelLoadError with everything that cannot be served, and ConfigError or StateUnavailable where the database
        cannot be used."""
        problems: list[str] = []
        with self._lock:
            config = self._without_rejected(config)
            models = {
                **config.models,
                **self._of_registry(config, problems),
                **self._mlflow.resolved(config, problems, showing),
            }
        if problems:
            raise ModelLoadError(_listed(problems), param="source")
        return msgspec.structs.replace(config, models=models) if models != config.models else config

    def registered(self, config: Config) -> dict[str, str]:
        """The versions, as NAME@NUMBER, by the names of their entries in a configuration that ``resolved`` has made, and
        of those that it has left out."""
        found = dict(self._rejected)
        for entry, model in config.models.items():
            digest = None if model.verify is None else model.verify.digest
            if digest is not None and (entry, digest) in self._registered:
                found[entry] = self._registered[entry, digest]
        return found

    def have_changed(self) -> bool:
        """Whether a reference leads to other files than when this was called or ``resolved`` before. False while the
        database or the MLflow server does not answer."""
        with self._lock:
            return self._registry_has_changed() or self._mlflow.have_moved()

    def look_soon(self) -> None:
        """Ask the MLflow server at the next ``have_changed``. Does not block."""
        self._mlflow.look_soon()

    def _without_rejected(self, config: Config) -> Config:
        """The configuration without new versions of rollouts that were rejected before this server has loaded them. The
        rollouts stay, and go back. Raises ConfigError, StateUnavailable."""
        self._rejected = {}
        new = {
            entry: name
            for name, model in config.models.items()
            if model.rollout is not None
            and (entry := versions_of(config.models, name)[str(model.rollout.new)]) != name
            and config.models[entry].source.startswith(PREFIX)
            and entry not in {loaded for loaded, _ in self._registered}
        }
        if not new:
            return config
        models = dict(config.models)
        with contextlib.closing(_opened(config)) as database:
            for entry, name in new.items():
                version = _found(database, models[entry].source)
                if version is None or version.record.stage != "rejected":
                    continue
                del models[entry]
                self._rejected[entry] = f"{version.name}@{version.version}"
                _log.error(
                    "models.%s is not loaded: %s was rejected (%s). Version %s of %s serves everything; remove "
                    "models.%s and the rollout, or name another version.",
                    *(entry, self._rejected[entry], version.record.reason, models[name].version, name, entry),
                )
        return msgspec.structs.replace(config, models=models)

    def _of_registry(self, config: Config, problems: list[str]) -> dict[str, ModelConfig]:
        """The models that come from the registry, with their files."""
        names = [name for name, model in config.models.items() if model.source.startswith(PREFIX)]
        self._config = config if names else None
        if not names:
            return {}
        models, seen = {}, {}
        with contextlib.closing(_opened(config)) as database:
            self._counter = _counter(database)
            for name in names:
                model = config.models[name]
                try:
                    version = _version(database, model.source, config.registry)
                    models[name] = _loading(model, version)
                    self._registered[name, version.digest] = f"{version.name}@{version.version}"
                    seen[model.source] = version.digest
                except InferdError as error:
                    if isinstance(error, StateUnavailable):
                        raise
                    problems.append(f"models.{name}.source: {error.message}")
                    seen[model.source] = ""
        self._seen = seen
        return models

    def _registry_has_changed(self) -> bool:
        if self._config is None:
            return False
        try:
            with contextlib.closing(_opened(self._config)) as database:
                counter = _counter(database)
                if counter == self._counter:
                    return False
                found = {ref: self._digest(database, ref, self._config.registry) for ref in self._seen}
        except InferdError:
            return False
        self._counter = counter
        before, self._seen = self._seen, found
        return found != before

    def _digest(self, database: Database, ref: str, settings: RegistryConfig) -> str:
        """Empty where the reference leads to nothing that may be served. Raises StateUnavailable."""
        try:
            return _version(database, ref, settings).digest
        except StateUnavailable:
            raise
        except InferdError:
            return ""


def _opened(config: Config) -> Database:
    return open_database(config.state.url, make_folder(data_folder(config.state)))


def _counter(database: Database) -> int:
    with database.reading() as transaction:
        return number(transaction, "registry")


def _named(database: Database, source: str) -> Version:
    """The version that a source names. Raises ModelNotFound, StateUnavailable."""
    name, _, ref = source.removeprefix(PREFIX).partition("@")
    return registry.find(database, name, ref or "production")


def _found(database: Database, source: str) -> Version | None:
    try:
        return _named(database, source)
    except ModelNotFound:
        return None


def _version(database: Database, source: str, settings: RegistryConfig) -> Version:
    """Raises ModelNotFound, and ModelLoadError for a version that may not be served."""
    found = _named(database, source)
    word = f"{found.name}@{found.version}"
    if found.record.stage == "rejected":
        raise ModelLoadError(
            f"{word} was rejected ({found.record.reason}), and is never served; name another version.", param="source"
        )
    if settings.require_approval and not found.record.approver:
        raise ModelLoadError(
            f"{word} is {found.record.stage} and was not approved, which registry.require_approval asks for; "
            f"'inferd registry approve {word}' approves it when it is validated.",
            param="source",
        )
    return found


def _loading(model: ModelConfig, version: Version) -> ModelConfig:
    """The settings that load these files, and no others. Raises ModelLoadError."""
    verify = model.verify or VerifyConfig()
    if verify.digest not in (None, version.digest):
        raise ModelLoadError(
            f"{version.name}@{version.version} has the digest {version.digest}, but verify.digest says "
            f"{verify.digest}; leave verify.digest out, the registry has it.",
            param="verify.digest",
        )
    verified = msgspec.structs.replace(verify, mode="enforce", digest=version.digest)
    return msgspec.structs.replace(model, source=version.source, verify=verified)


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  - ".join([f"{len(problems)} models cannot be loaded:", *problems])
