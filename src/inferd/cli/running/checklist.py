"""``inferd checklist``: the ten stages from a model's files to production, as far as a machine can check them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

import click
import msgspec

from inferd.cli.running.control import Server, server_options
from inferd.config import Config, ModelConfig, load_config
from inferd.errors import InferdError
from inferd.gateway.control import ServerReport
from inferd.registry.source import REFERENCES
from inferd.tenancy.keys import KeyInfo

T = TypeVar("T")

Result = Literal["pass", "missing", "advised", "not checkable"]
"""``missing`` is required in production, ``advised`` is missing and not required."""

STAGES: Final = (
    "artefact",
    "runtime",
    "hardware",
    "configuration",
    "API",
    "observability",
    "load",
    "security",
    "rollout",
    "failure modes",
)
_MARKS: Final[dict[Result, str]] = {"pass": "ok", "missing": "MISSING", "advised": "advised", "not checkable": "?"}
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the checklist."""

    stage: str
    what: str
    result: Result
    remedy: str = ""  # empty where it passes
    page: str = ""  # of the documentation


class Checklist(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``ok``: nothing that is required is missing."""

    ok: bool
    server: str
    items: list[Item]


class _ModelName(msgspec.Struct, frozen=True):
    id: str = ""


class _ModelNames(msgspec.Struct, frozen=True):
    data: list[_ModelName] = []


class _KeyList(msgspec.Struct, frozen=True):
    data: list[KeyInfo] = []


class Seen(NamedTuple):
    """What a running server and its configuration file say. None: it could not be read."""

    status: ServerReport
    ready: bool
    models: frozenset[str] | None  # of /v1/models
    metrics: str | None  # of /metrics
    keys: tuple[KeyInfo, ...] | None
    config: Config | None
    config_problem: str  # why there is no ``config``


@click.command("checklist")
@click.option("--json", "as_json", is_flag=True, help="Print the findings for programs.")
@server_options
def command(server: Server, as_json: bool) -> int:
    """Check a running server against the ten stages of a deployment, and name the remedy of what is missing.

    It reads the server and its configuration file, and changes nothing.

    \b
    Examples:
      inferd checklist
      inferd checklist --url https://gpu.example.com:8000 --key sk-inf-... --json

    Exit code 0 if nothing that is required is missing, 1 otherwise.
    """
    found = items(read(server))
    report = Checklist(ok=all(item.result != "missing" for item in found), server=server.name, items=found)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _show(report)
    return 0 if report.ok else 1


def _show(report: Checklist) -> None:
    stage = ""
    for item in report.items:
        if item.stage != stage:
            stage = item.stage
            click.echo(f"{STAGES.index(stage) + 1:>2}. {stage}")
        click.echo(f"    {_MARKS[item.result]:<8} {item.what}")
        if item.remedy:
            click.echo(f"             {item.remedy}" + (f" ({item.page})" if item.page else ""))
    counts = {result: sum(item.result == result for item in report.items) for result in _MARKS}
    click.echo(
        f"{counts['pass']} pass, {counts['missing']} missing, {counts['advised']} advised, "
        f"{counts['not checkable']} for people to check"
    )


def read(server: Server) -> Seen:
    """Ask the server. Raises InferdError where it does not answer."""
    status = server.get("/admin/status", ServerReport)
    names = _tried(lambda: server.get("/v1/models", _ModelNames))
    keys = _tried(lambda: server.get("/admin/keys", _KeyList))
    config, problem = _config(status)
    return Seen(
        status=status,
        ready=_tried(lambda: server.get("/health/ready", msgspec.Raw)) is not None,
        models=None if names is None else frozenset(one.id for one in names.data),
        metrics=_tried(lambda: _text(server)),
        keys=None if keys is None else tuple(keys.data),
        config=config,
        config_problem=problem,
    )


def _text(server: Server) -> str:
    return b"".join(server.lines("/metrics", 10.0)).decode()


def _tried(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except InferdError:
        return None


def _config(status: ServerReport) -> tuple[Config | None, str]:
    path = status.config_path
    if path is None:
        return None, "the server was started without a configuration file"
    if not Path(path).is_file():
        return None, f"its configuration file {path} is not on this machine"
    try:
        return load_config(Path(path), os.environ, {}), ""
    except InferdError as error:
        return None, error.message


def items(seen: Seen) -> list[Item]:
    """The checklist, in the order of the stages."""
    parts = (
        _artefact,
        _runtime,
        _hardware,
        _configuration,
        _api,
        _observability,
        _load,
        _security,
        _rollout,
        _failures,
    )
    return [
        msgspec.structs.replace(item, stage=stage, remedy="" if item.result == "pass" else item.remedy)
        for stage, part in zip(STAGES, parts, strict=True)
        for item in part(seen)
    ]


def _item(what: str, is_good: bool | None, remedy: str, page: str, *, is_required: bool = True) -> Item:
    """``is_good`` None: it cannot be seen from here."""
    result: Result = "missing" if is_required else "advised"
    if is_good is None:
        result = "not checkable"
    elif is_good:
        result = "pass"
    return Item(stage="", what=what, result=result, remedy=remedy, page=page)


def _of_config(
    seen: Seen, what: str, is_good: Callable[[Config], bool], remedy: str, page: str, *, is_required: bool = True
) -> Item:
    """An item that the configuration decides; without one it is for people."""
    if seen.config is None:
        return _item(what, None, f"Not seen, as {seen.config_problem}. {remedy}", page)
    return _item(what, is_good(seen.config), remedy, page, is_required=is_required)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _is_verified(model: ModelConfig) -> bool:
    """Whether other files than those that were meant are refused. A reference leads to files with a digest."""
    if model.is_remote or model.source.startswith(REFERENCES):
        return True
    return model.verify is not None and model.verify.mode == "enforce"


def _artefact(seen: Seen) -> Iterator[Item]:
    local = [model for model in seen.status.models if any(one.kind == "local" for one in model.replicas)]
    unknown = [
        model.name for model in local if any(one.state == "ready" and not one.artifact for one in model.replicas)
    ]
    several = [model.name for model in local if len({one.artifact for one in model.replicas if one.artifact}) > 1]
    yield _item(
        "the content of every model's files is known by a digest" + (f": not of {_listed(unknown)}" if unknown else ""),
        not unknown,
        "Load the model again: inferd models load NAME.",
        "docs/models.md",
    )
    yield _item(
        "all replicas of a model serve the same files" + (f": not of {_listed(several)}" if several else ""),
        not several,
        "Load the model again: inferd models load NAME.",
        "docs/models.md",
    )

    def is_pinned(config: Config) -> bool:
        return all(
            model.is_remote or model.is_pipeline or "@" in model.source or Path(model.source).expanduser().exists()
            or model.source.startswith(("demo", *REFERENCES)) for model in config.models.values()
        )  # fmt: skip

    yield _of_config(
        seen,
        "sources are files here, or name a revision",
        is_pinned,
        "Name a revision of a model of the hub: source: name/model@REVISION.",
        "docs/models.md",
    )
    yield _of_config(
        seen,
        "files are verified before they are loaded",
        lambda config: all(map(_is_verified, config.models.values())),
        "Set models.NAME.verify: a pinned digest, or a signature of a trusted key.",
        "docs/artefacts.md",
        is_required=False,
    )
    yield _of_config(
        seen,
        "no model may run code or open pickles of its files",
        lambda config: not any(model.allow_code or model.allow_pickle for model in config.models.values()),
        "Convert the model to a format without code (ONNX, skops), and leave allow_code and allow_pickle out.",
        "docs/security.md",
        is_required=False,
    )


def _runtime(seen: Seen) -> Iterator[Item]:
    bad = [model.name for model in seen.status.models if model.state not in ("ready", "unloaded")]
    yield _item(
        "every model is ready" + (f": not {_listed(bad)}" if bad else ""),
        not bad,
        "inferd status names the reason; inferd check FILE finds it before a start.",
        "docs/operations.md",
    )
    restarts = [model.name for model in seen.status.models if any(one.restarts > 2 for one in model.replicas)]
    yield _item(
        "no worker dies again and again" + (f": those of {_listed(restarts)} do" if restarts else ""),
        not restarts,
        "Find the cause of the deaths in the log of the replica.",
        "docs/runbooks/InferdReplicaRestarting.md",
    )
    single = [model.name for model in seen.status.models if model.not_batched]
    yield _item(
        "requests are computed in batches" + (f": not those of {_listed(single)}" if single else ""),
        not single,
        "inferd status says why; a batch dimension of the model, or because: declared, allows it.",
        "docs/batching.md",
        is_required=False,
    )


def _hardware(seen: Seen) -> Iterator[Item]:
    budget = seen.status.memory_budget_bytes
    yield _item(
        "models have a budget of memory",
        budget is not None,
        "Set server.memory_bytes, so that a model that does not fit is refused at the start.",
        "docs/operations.md",
        is_required=False,
    )
    yield _item(
        "models take less than their budget",
        None if budget is None else seen.status.memory_bytes <= budget,
        "Compare inferd status with the memory of the machine." if budget is None else "Raise server.memory_bytes.",
        "docs/operations.md",
    )
    yield _item(
        "devices are read",
        seen.status.energy is not None,
        "Set devices.enabled, so that throttled and broken devices are told.",
        "docs/devices.md",
        is_required=False,
    )


def _configuration(seen: Seen) -> Iterator[Item]:
    yield _item(
        "the server has a configuration file",
        seen.status.config_path is not None,
        "Write one with inferd config show > inferd.yaml, and start inferd serve inferd.yaml.",
        "docs/configuration.md",
    )
    reload = seen.status.last_reload
    yield _item(
        "the server serves what the file says",
        reload is None or reload.is_whole,
        "inferd status names what was refused; correct it, and run inferd reload.",
        "docs/runbooks/InferdReloadRefused.md",
    )
    yield _item(
        "the file has no problem",
        None if seen.config is None and not _is_here(seen) else seen.config is not None,
        "inferd check FILE names each." if _is_here(seen) else f"Not seen, as {seen.config_problem}.",
        "docs/operations.md",
    )


def _is_here(seen: Seen) -> bool:
    path = seen.status.config_path
    return path is not None and Path(path).is_file()


def _api(seen: Seen) -> Iterator[Item]:
    yield _item(
        "the server says that it is ready",
        seen.ready,
        "GET /health names the models that are not ready.",
        "docs/operations.md",
    )
    names = {model.name for model in seen.status.models}
    gone = sorted(names - seen.models) if seen.models is not None else []
    yield _item(
        "clients see every model" + (f": not {_listed(gone)}" if gone else ""),
        None if seen.models is None else not gone,
        "Give the key of the checklist access to all models." if gone else "Ask with a key that may read /v1/models.",
        "docs/openai-api.md",
    )


def _observability(seen: Seen) -> Iterator[Item]:
    yield _item(
        "metrics can be read",
        None if seen.metrics is None else "inferd_build_info" in seen.metrics,
        "Let Prometheus read /metrics with a key of the scope metrics, or set server.public_metrics.",
        "docs/metrics.md",
    )

    def has_objectives(config: Config) -> bool:
        return all(
            any(value is not None for value in (one.availability, one.ttft_ms, one.tpot_ms, one.total_ms))
            for one in (model.objectives for model in config.models.values())
        )

    yield _of_config(
        seen,
        "every model has an objective",
        has_objectives,
        "Set models.NAME.objectives: {availability: 0.999, total_ms: 500}.",
        "docs/operations.md",
    )
    yield _item(
        "Prometheus has the alerts of this configuration",
        None,
        "inferd alerts FILE > inferd.rules.yml, and name that file in rule_files of Prometheus.",
        "docs/runbooks/index.md",
    )
    yield _of_config(
        seen,
        "requests are in the log",
        lambda config: config.server.access_log and config.server.log_level in ("debug", "info"),
        "Set server.access_log: true and server.log_level: info.",
        "docs/logs.md",
    )
    yield _of_config(
        seen,
        "traces are sent to a collector",
        lambda config: config.tracing.endpoint is not None,
        "Set tracing.endpoint.",
        "docs/traces.md",
        is_required=False,
    )
    yield _of_config(
        seen,
        "drift is watched",
        lambda config: all(model.drift.enabled for model in config.models.values()),
        "Set models.NAME.drift.enabled.",
        "docs/drift.md",
        is_required=False,
    )


def _load(seen: Seen) -> Iterator[Item]:
    yield _item(
        "a load test has shown what the server bears",
        None,
        "inferd bench --model NAME, with the load of a busy hour; compare with the objectives.",
        "docs/performance.md",
    )


def _security(seen: Seen) -> Iterator[Item]:
    keys = None if seen.keys is None else [key for key in seen.keys if key.state == "active"]
    yield _item(
        "there are keys, so that no request is without one",
        None if keys is None else bool(keys),
        "inferd keys create --tenant NAME." if keys is not None else "Ask with a key of the scope admin.",
        "docs/keys-and-limits.md",
    )
    endless = [] if keys is None else [key.id for key in keys if key.expires_at is None]
    yield _item(
        "keys expire" + (f": not {_listed(endless)}" if endless else ""),
        None if keys is None else not endless,
        "inferd keys rotate ID, or create keys with --expires.",
        "docs/keys-and-limits.md",
        is_required=False,
    )
    yield _of_config(
        seen,
        "clients on other machines use TLS",
        lambda config: config.server.tls.certificate is not None or config.server.host in _LOOPBACK,
        "Set server.tls.certificate, or listen on 127.0.0.1 behind a proxy with TLS.",
        "docs/security.md",
    )

    def has_limits(config: Config) -> bool:
        limited = {name for name, tenant in config.tenants.items() if tenant.rpm or tenant.tpm or tenant.max_in_flight}
        return all(key.tenant in limited or key.rpm or key.tpm or key.max_in_flight for key in keys or ())

    yield _of_config(
        seen,
        "every tenant has a limit",
        has_limits,
        "Set tenants.NAME.rpm, tpm or max_in_flight, so that one client cannot take the whole server.",
        "docs/keys-and-limits.md",
    )


def _rollout(seen: Seen) -> Iterator[Item]:
    single = [model.name for model in seen.status.models if len(model.replicas) < 2 and model.load == "startup"]
    yield _item(
        "every model has two replicas or more" + (f": not {_listed(single)}" if single else ""),
        not single,
        "Set models.NAME.replicas: 2, so that a worker that dies takes no model away.",
        "docs/operations.md",
    )
    yield _of_config(
        seen,
        "a new version can come by a rollout",
        lambda config: any(model.rollout is not None for model in config.models.values()),
        "Put versions into folders 1/, 2/, and write models.NAME.rollout.",
        "docs/rollouts.md",
        is_required=False,
    )


def _failures(seen: Seen) -> Iterator[Item]:
    metrics = seen.metrics
    yield _item(
        "the database of keys and limits answers",
        None if metrics is None else "inferd_state_available 1" in metrics,
        "See the runbook." if metrics is not None else "Ask with a key that may read /metrics.",
        "docs/runbooks/InferdStateUnavailable.md",
    )
    yield _item(
        "the server drains before it ends",
        None if seen.config is None else seen.config.server.grace_s > 0,
        "Set server.grace_s to the longest answer that clients may lose otherwise.",
        "docs/operations.md",
    )
    yield _item(
        "failures were rehearsed",
        None,
        "Kill a worker (inferd status names its pid) and the server under load, and watch clients and alerts.",
        "docs/failure-modes.md",
    )
