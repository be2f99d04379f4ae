"""The sources that name a model of an MLflow server.

=================================  ==========================================
``mlflow:models:/churn@champion``  the version that an alias names
``mlflow:models:/churn/3``         a version by its number
``mlflow:models:/churn/latest``    the version with the highest number
``mlflow:models:/m-1f0e...``       a logged model (MLflow 3)
``mlflow:runs:/RUN/path``          an artifact of a run
=================================  ==========================================

The syntax is that of MLflow's own URIs (mlflow/store/artifact/utils/models.py). Asks no server.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from inferd.errors import ModelLoadError

PREFIX: Final = "mlflow:"
MAX_NAME: Final = 256

Kind = Literal["alias", "version", "latest", "logged", "run"]

_LOGGED: Final = re.compile(r"m-[0-9a-f]{32}")
_RUN: Final = re.compile(r"[0-9a-f]{32}")
_ALIAS: Final = re.compile(r"[\w-]{1,255}", re.ASCII)
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")
_FORMS: Final = (
    "mlflow:models:/NAME@ALIAS, mlflow:models:/NAME/3, mlflow:models:/NAME/latest, mlflow:models:/m-ID or "
    "mlflow:runs:/RUN/PATH"
)


class ModelUri(msgspec.Struct, frozen=True):
    """A model of an MLflow server."""

    kind: Kind
    name: str  # of the registered model; the id of a logged model or of a run
    ref: str = ""  # the alias, the number, or the path below the run

    @property
    def may_move(self) -> bool:
        """Whether it may lead to another version tomorrow."""
        return self.kind in ("alias", "latest")

    @property
    def shown(self) -> str:
        """The source as the configuration has it."""
        match self.kind:
            case "alias":
                return f"{PREFIX}models:/{self.name}@{self.ref}"
            case "run":
                return f"{PREFIX}runs:/{self.name}/{self.ref}"
            case "logged":
                return f"{PREFIX}models:/{self.name}"
            case _:
                return f"{PREFIX}models:/{self.name}/{self.ref}"


def read_uri(source: str) -> ModelUri:
    """The model that a source names. Raises ModelLoadError for another form."""
    scheme, found, path = source.removeprefix(PREFIX).partition(":/")
    path = path.strip("/")
    if found and path.isprintable():
        if scheme == "runs":
            run, _, below = path.partition("/")
            if _RUN.fullmatch(run) and below and all(part not in ("", ".", "..") for part in below.split("/")):
                return ModelUri("run", run, below)
        elif scheme == "models":
            name, slash, ref = path.partition("/")
            if not slash and _LOGGED.fullmatch(path):
                return ModelUri("logged", path)
            if slash and _is_name(name) and _NUMBER.fullmatch(ref):
                return ModelUri("version", name, ref)
            if slash and _is_name(name) and ref == "latest":
                return ModelUri("latest", name, ref)
            name, at, alias = path.rpartition("@")
            if at and not slash and _is_name(name) and _ALIAS.fullmatch(alias):
                return ModelUri("alias", name, alias)
    raise ModelLoadError(f"{source[:300]!r} names no model of an MLflow server; write {_FORMS}.", param="source")


def _is_name(name: str) -> bool:
    """MLflow's names have no slash, colon or quote."""
    return 0 < len(name) <= MAX_NAME and not any(letter in "/:@'\"%`" for letter in name)
