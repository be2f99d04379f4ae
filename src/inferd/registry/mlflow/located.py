"""Which version a source names now, and where its artifacts are: the questions to MLflow's REST API.

Endpoints and fields: mlflow/protos/service.proto and model_registry.proto.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.registry.mlflow.listing import list_folder
from inferd.registry.mlflow.server import API, Server, refused
from inferd.registry.mlflow.uris import ModelUri

DIGEST_TAG: Final = "inferd.digest"
"""A tag of a version, or of a logged model, with the digest that its files must have (``inferd registry digest``)."""


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """A model of an MLflow server, as the server describes it."""

    name: str  # of the registered model, or the id of a logged model or a run
    version: str = ""  # its number; empty: it is no registered version
    origin: str = ""  # its source in MLflow's own terms
    digest: str = ""  # of DIGEST_TAG

    @property
    def shown(self) -> str:
        return f"{self.name} version {self.version}" if self.version else self.name

    @property
    def key(self) -> str:
        """Equal for equal files, as far as the registry says."""
        return f"{self.name}\n{self.version}\n{self.origin}\n{self.digest}"


class _Tag(msgspec.Struct):
    key: str
    value: str = ""


class _Version(msgspec.Struct):
    name: str
    version: str
    status: str = "READY"
    status_message: str = ""
    source: str = ""
    run_id: str = ""
    tags: list[_Tag] = []


class _LoggedInfo(msgspec.Struct):
    model_id: str
    artifact_uri: str
    name: str = ""
    status: str = "LOGGED_MODEL_READY"
    tags: list[_Tag] = []


class _Run(msgspec.Struct):
    artifact_uri: str = ""


class _Output(msgspec.Struct):
    model_id: str


def locate(server: Server, uri: ModelUri) -> Located:
    """What the server has for a source now: one request. Raises ModelLoadError."""
    match uri.kind:
        case "alias":
            found = server.get(f"{API}/registered-models/alias", name=uri.name, alias=uri.ref)
            return _ready(_read(server, found.get("model_version"), _Version))
        case "version":
            found = server.get(f"{API}/model-versions/get", name=uri.name, version=uri.ref)
            return _ready(_read(server, found.get("model_version"), _Version))
        case "latest":
            found = server.get(
                f"{API}/model-versions/search",
                filter=f"name='{uri.name}'",
                order_by="version_number DESC",
                max_results="1",
            )
            newest = _read(server, found.get("model_versions", []), list[_Version])
            if not newest:
                raise refused(f"The MLflow server {server.url} has no version of {uri.name!r}.", param="source")
            return _ready(newest[0])
        case "logged":
            info = _logged(server, uri.name)
            return Located(name=uri.name, origin=info.artifact_uri, digest=_digest(info.tags))
        case "run":
            return Located(name=uri.shown.partition(":")[2], origin=_of_run(server, uri))


def artifact_uri(server: Server, found: Located) -> str:
    """Where the artifacts of a model are. Raises ModelLoadError."""
    if not found.version:
        return found.origin
    answer = server.get(f"{API}/model-versions/get-download-uri", name=found.name, version=found.version)
    where = answer.get("artifact_uri")
    if not isinstance(where, str) or not where:
        raise refused(f"The MLflow server {server.url} does not say where {found.shown} is.", param="source")
    return where


def _logged(server: Server, model_id: str) -> _LoggedInfo:
    model = server.get(f"{API}/logged-models/{model_id}").get("model")
    info: _LoggedInfo = _read(server, model.get("info") if isinstance(model, dict) else None, _LoggedInfo)
    if info.status != "LOGGED_MODEL_READY":
        raise refused(f"The logged model {model_id} is {info.status}; wait until it is complete.", param="source")
    return info


def _of_run(server: Server, uri: ModelUri) -> str:
    """The artifacts of a run at a path; since MLflow 3 also the newest logged model of that name."""
    run = server.get(f"{API}/runs/get", run_id=uri.name).get("run")
    run = run if isinstance(run, dict) else {}
    info = _read(server, run.get("info"), _Run)
    outputs = run.get("outputs")
    ids = _read(server, outputs.get("model_outputs", []) if isinstance(outputs, dict) else [], list[_Output])
    logged = [_logged(server, one.model_id) for one in ids[:1000]]
    named = [one for one in logged if one.name == uri.ref]
    if named:
        return named[-1].artifact_uri
    below = f"{info.artifact_uri.rstrip('/')}/{uri.ref}"
    if info.artifact_uri.startswith("mlflow-artifacts:") and not list_folder(server, below):
        raise refused(f"The run {uri.name} has no artifact and no model called {uri.ref!r}.", param="source")
    return below


def _ready(version: _Version) -> Located:
    if version.status != "READY":
        why = f" ({version.status_message[:200]})" if version.status_message else ""
        raise refused(
            f"{version.name} version {version.version} is {version.status}{why}; wait until it is READY, or name "
            "another version.",
            param="source",
        )
    return Located(
        name=version.name,
        version=version.version,
        origin=f"{version.source} {version.run_id}".strip(),
        digest=_digest(version.tags),
    )


def _digest(tags: list[_Tag]) -> str:
    return next((tag.value for tag in tags if tag.key == DIGEST_TAG), "")


def _read(server: Server, found: Any, form: Any) -> Any:
    """An answer's value as a struct. Raises ModelLoadError where it has another form."""
    try:
        return msgspec.convert(found, form)
    except msgspec.ValidationError as error:
        raise refused(
            f"{server.url} does not answer as an MLflow server does ({error}); check mlflow.url.", param="mlflow.url"
        ) from None
