"""Models of an MLflow server as sources: resolved to files, and looked at again for aliases that have moved.

A version that was served once is held while the server does not answer, so neither a reload nor the server's absence
changes what is served. A start without the server takes the copy that was verified last (``last_copies.py``). Every method may block; ``References`` calls them one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import msgspec

from inferd import clock
from inferd.config import Config, ModelConfig
from inferd.config.versioning import MlflowConfig
from inferd.errors import ModelLoadError
from inferd.lifecycle.last_copies import recall, remember
from inferd.registry.mlflow.fetching import TEMPORARY, fetch
from inferd.registry.mlflow.located import Located, locate
from inferd.registry.mlflow.server import AWAY, server_of
from inferd.registry.mlflow.uris import PREFIX, read_uri
from inferd.registry.source import Progress

Showing = Callable[[str], AbstractContextManager[Progress]]
"""Shows the progress of what has this title."""

_log = logging.getLogger("inferd.lifecycle")


class _Held(msgspec.Struct, frozen=True):
    """What a source led to, for a model with certain settings."""

    key: str  # of the version
    model: ModelConfig  # as the configuration has it
    made: ModelConfig  # as it is loaded


class MlflowReferences:
    """The models of one server whose sources begin with ``mlflow:``."""

    def __init__(self) -> None:
        self._settings = MlflowConfig()
        self._held: dict[str, _Held] = {}  # by the model's name
        self._seen: dict[str, str] = {}  # keys of versions, by sources that may move; empty: none
        self._looked_at = 0.0
        self._is_due = False  # a webhook says that something has changed
        self._is_away = False

    def resolved(self, config: Config, problems: list[str], showing: Showing) -> Mapping[str, ModelConfig]:
        """The models that come from an MLflow server, with their files. ``problems`` gets a sentence for each model
        that cannot be served."""
        self._settings = config.mlflow
        self._is_due = False
        self._looked_at = clock.now()
        names = [name for name, model in config.models.items() if model.source.startswith(PREFIX)]
        held, self._held, self._seen = self._held, {}, {}
        found = {}
        for name in names:
            model = config.models[name]
            before = held.get(name)
            try:
                made = self._one(model, before, showing)
            except ModelLoadError as error:
                if before is not None:
                    self._held[name] = before  # it may be served on
                problems.append(f"models.{name}.source: {error.message}")
                continue
            found[name] = made.made
            self._held[name] = made
        return found

    def have_moved(self) -> bool:
        """Whether a source leads to another version than when it was resolved. Asks the server when it is time to, or
        when a webhook came. False while the server does not answer."""
        if not self._seen or not (self._is_due or clock.now() - self._looked_at >= self._settings.poll_s):
            return False
        self._is_due = False
        self._looked_at = clock.now()
        try:
            found = {source: self._key(source) for source in self._seen}
        except ModelLoadError as error:
            self._told_away(error.message)
            return False
        self._told_back()
        return found != self._seen

    def look_soon(self) -> None:
        """Ask the server at the next look, whenever the last one was."""
        self._is_due = True

    def _key(self, source: str) -> str:
        """The key of the version that a source leads to now; empty where the server refuses it. Raises ModelLoadError
        while the server does not answer."""
        try:
            return locate(server_of(self._settings), read_uri(source)).key
        except ModelLoadError as error:
            if error.code == AWAY:
                raise
            return ""

    def _one(self, model: ModelConfig, before: _Held | None, showing: Showing) -> _Held:
        """What one source leads to. Raises ModelLoadError."""
        uri = read_uri(model.source)
        server = server_of(self._settings)
        located: Located | None = None
        try:
            located = locate(server, uri)
            if before is not None and before.model == model and before.key == located.key:
                made = before
            else:
                with showing(model.source) as tell:
                    made = _Held(located.key, model, fetch(server, located, model, self._settings, tell))
                _log.info("%s is %s, %s", uri.shown, located.shown, _digest(made.made))
                remember(server.url, model, made.made, located.key, located.shown)
        except ModelLoadError as error:
            is_temporary = error.code in TEMPORARY
            if uri.may_move:
                # What was refused is looked at again when it moves; what did not come is, at the next look.
                refused = "" if located is None else located.key
                known = "" if before is None else before.key
                self._seen[model.source] = known if is_temporary else refused
            if is_temporary and before is not None and before.model == model:
                _log.warning("%s stays as it is served: %s", uri.shown, error.message)
                return before
            last = recall(server.url, model) if is_temporary and before is None else None
            if last is not None:
                _log.warning("%s is %s, the copy that was verified last: %s", uri.shown, last.shown, error.message)
                if uri.may_move:
                    self._seen[model.source] = last.key
                return _Held(last.key, model, last.loading(model))
            raise
        if uri.may_move:
            self._seen[model.source] = made.key
        return made

    def _told_away(self, sentence: str) -> None:
        if not self._is_away:
            _log.warning("aliases of MLflow are not followed for now; what is served goes on: %s", sentence)
        self._is_away = True

    def _told_back(self) -> None:
        if self._is_away:
            _log.info("the MLflow server answers again; its aliases are followed")
        self._is_away = False


def _digest(model: ModelConfig) -> str:
    return "" if model.verify is None or model.verify.digest is None else model.verify.digest
