"""``inferd check``: all problems of a configuration, and the memory that serving it needs."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click
import msgspec

from inferd.app.change import refuse_empty
from inferd.cli.demo import CHAT
from inferd.cli.flags import in_flags
from inferd.cli.ready import tensor_lines
from inferd.cli.serve import serve_config
from inferd.cli.terminal import console, fail, warn
from inferd.config import Config, ModelConfig, RemoteConfig, stray_variables
from inferd.config.rules import runs_here
from inferd.config.units import bytes_text
from inferd.config.versions import rollout_warnings
from inferd.errors import ConfigError, InferdError, ModelLoadError
from inferd.lifecycle.export import files_problem, is_document, problems_of, read_document
from inferd.machine.gpus import may_compute_on_gpu, num_visible_gpus
from inferd.observe.devices.nvml import gpu_bytes
from inferd.registry.source import defines_class, find, is_code, is_reference, is_remote
from inferd.registry.triton import is_repository, read_repository
from inferd.registry.verified import verified_models, verify_source
from inferd.tenancy.door import is_loopback

if TYPE_CHECKING:
    from inferd.planning.memory import MemoryEstimate, Plan
    from inferd.planning.placing import Placed

NOT_CHECKED: Final = 3
"""Exit code: no problem was found, but not everything could be checked."""

_CONFIGURATIONS: Final = (".yaml", ".yml")
_NOT_DOWNLOADED: Final = "is not downloaded yet, so its files and the memory it takes are unknown"
_NOT_LOOKED_UP: Final = (
    "is looked up in the registry when it is served, so its files and the memory it takes are unknown"
)
_NOT_DEFINED: Final = (
    "is Python code, which check does not run, and no text that it finds defines the class; whether the class is there "
    "is known when it is loaded"
)
_NOT_CLEAR: Final = "http to another host: the API key and every request travel unencrypted; use https."


class RemoteReport(msgspec.Struct, frozen=True, kw_only=True):
    """One remote server of a model. ``answers``: None when it was not probed."""

    model: str
    url: str
    fallback: bool
    answers: bool | None = None
    detail: str = ""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``--json``. Sizes are in bytes. ``ok``: there is no problem, and everything could be checked."""

    ok: bool
    file: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    address: str = ""
    access: str = ""
    plan: Plan | None = None
    remotes: tuple[RemoteReport, ...] = ()
    unchecked: tuple[str, ...] = ()  # a sentence for each thing that could not be checked
    answer_formats: dict[str, str] = {}  # model -> its notation of tool calls and reasoning, as far as it has one
    divided: dict[str, tuple[str, ...]] = {}  # model -> why it is on several machines or GPUs, though no layout is set


@click.command("check")
@click.argument("file")
@click.option("--probe", is_flag=True, help="Ask the remote servers whether they answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings for programs.")
@click.option(
    "--allow-code",
    is_flag=True,
    help="Check a model or a model repository with the code that comes with it, as serve does.",
)
@click.option("--allow-pickle", is_flag=True, help="Check models whose files are pickles, as serve does.")
def command(file: str, probe: bool, as_json: bool, allow_code: bool, allow_pickle: bool) -> int:
    """Show all problems of FILE (or a model, or a Triton model repository), and the memory that serving it needs.

    FILE may also be a version that 'inferd registry export' has written. Its digests, reports and files are compared.

    Loads nothing and changes nothing. The plan is the engine's own arithmetic: weights, KV cache,
    headroom and how many requests fit at the same time. Of predictive models it shows their inputs,
    outputs and how many rows are computed together, as their files say.

    \b
    Examples:
      inferd check inferd.yaml
      inferd check inferd.yaml --probe
      inferd check model.onnx
      inferd check Qwen/Qwen3-0.6B
      inferd check ./model_repository --allow-code
      inferd check inferd.yaml --json | jq .plan.startup_bytes

    Exit code 0 when FILE can be served here, 1 when it has a problem. Exit code 3 when no problem was found but not
    everything could be checked: a model of the hub that is not downloaded yet, a Python class that is not found.

    The MLflow server is asked whether a model of it is there and can be served, by its list of files and its MLmodel.
    """
    allowed = {
        name: True for name, is_given in (("allow_code", allow_code), ("allow_pickle", allow_pickle)) if is_given
    }
    if allowed and Path(file).suffix in _CONFIGURATIONS:
        raise click.UsageError(f"{file} is a configuration file; set allow_code and allow_pickle for its models there.")
    report = examine(file, probe=probe, allowed=allowed)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        show(report)
    return 0 if report.ok else 1 if report.problems else NOT_CHECKED


def examine(file: str, *, probe: bool, allowed: Mapping[str, bool] = {}) -> CheckReport:
    """The findings about a source of ``inferd serve``. Never raises: problems are among the findings. ``allowed``:
    settings for models without a configuration."""
    if is_document(Path(file)):
        return _document(file)
    report = _examined(file, probe=probe, allowed=allowed)
    if Path(file).suffix in _CONFIGURATIONS or is_repository(Path(file).expanduser()):
        return report
    return _in_flags(report, is_alone=file != CHAT)


def _document(file: str) -> CheckReport:
    """The findings about a version that 'inferd registry export' has written, and its files where they are here."""
    try:
        document = read_document(Path(file))
        problems = problems_of(document)
        place = Path(document.source).expanduser()
        if not place.exists():
            unchecked = (f"{document.source} (the files of {document.name}@{document.version}) is not on this machine",)
            return CheckReport(ok=False, file=file, problems=tuple(problems), unchecked=unchecked)
        problem = files_problem(document, place)
    except InferdError as error:
        return CheckReport(ok=False, file=file, problems=_lines(error))
    problems += [problem] if problem else []
    return CheckReport(ok=not problems, file=file, problems=tuple(problems))


def _in_flags(report: CheckReport, *, is_alone: bool) -> CheckReport:
    """The findings about a model that was named on the command line, where there is no file to change."""
    problems = tuple(in_flags(problem, is_alone=is_alone) for problem in report.problems)
    plan = report.plan
    if plan is not None and is_alone:
        models = tuple(msgspec.structs.replace(one, not_batched=in_flags(one.not_batched)) for one in plan.models)
        wrong = tuple(in_flags(problem, is_alone=True) for problem in plan.problems)
        plan = msgspec.structs.replace(plan, models=models, problems=wrong)
    return msgspec.structs.replace(report, problems=problems, plan=plan)


def _examined(file: str, *, probe: bool, allowed: Mapping[str, bool]) -> CheckReport:
    from inferd.planning.memory import plan_config  # a long import, which the list of commands does not need
    from inferd.planning.spreading import spread

    warnings = stray_variables(os.environ)
    try:
        config = _read(file, warnings, allowed)
    except ConfigError as error:
        return CheckReport(ok=False, file=file, problems=_lines(error), warnings=tuple(warnings))
    warnings += rollout_warnings(config.models)
    problems = _verification(config, warnings)
    plan, divided = None, dict[str, tuple[str, ...]]()
    try:
        refuse_empty(config)
        found = spread(config, gpus=gpu_bytes())
        plan, divided = plan_config(found.config), dict(found.reasons)
        problems += plan.problems
    except InferdError as error:
        problems += _lines(error)
    problems += _gpus(config)
    problems += _adapters(config)
    problems += _steps(config)
    problems += _certificate(config)
    problems += _references(config)
    judged = _of_mlflow(config, warnings, problems)
    formats = _answer_formats(plan, config, warnings, problems)
    remotes = tuple(
        _remote(name, upstream, probe=probe) for name, model in config.models.items() for upstream in model.upstreams
    )
    problems += [f"models.{one.model}: {one.url} {one.detail}" for one in remotes if one.answers is False]
    unchecked = [
        f"{source} ({name}) {judged.get(name, reason)}"
        for name, model in config.models.items()
        for source, reason in _unread(model)
    ]
    warnings += [
        f"models.{name}: {upstream.url} is {_NOT_CLEAR}"
        for name, model in config.models.items()
        for upstream in model.upstreams
        if _is_in_the_clear(upstream)
    ]
    return CheckReport(
        ok=not problems and not unchecked,
        file=file,
        problems=tuple(problems),
        warnings=tuple(warnings),
        address=f"{config.server.host}:{config.server.port}",
        access=access(config),
        plan=plan,
        remotes=remotes,
        unchecked=tuple(unchecked),
        answer_formats=formats,
        divided=divided,
    )


def _verification(config: Config, warnings: list[str]) -> list[str]:
    """The problems of files that are to be verified; those of a model that is loaded all the same are warnings."""
    problems: list[str] = []
    for name, model in config.models.items():
        for place, part in verified_models(name, model):
            settings = part.verify
            if settings is None or (is_remote(part.source) and find(part.source) is None):
                continue  # what is not downloaded is told below
            if settings.digest is not None and settings.digest.startswith("sha256:") and settings.signature is None:
                warnings.append(
                    f"models.{place}.verify.digest: it does not cover the names of files; pin the tree-sha256: that "
                    "inferd registry digest prints."
                )
            try:
                verify_source(part)
            except InferdError as error:
                lines = [f"models.{place}.verify: {line}" for line in _lines(error)]
                if settings.mode == "enforce":
                    problems += lines
                else:
                    warnings += lines
    return problems


def _answer_formats(plan: Plan | None, config: Config, warnings: list[str], problems: list[str]) -> dict[str, str]:
    """How each generating model writes tool calls and reasoning. A notation that is not parsed back is a warning."""
    from inferd.checkpoints.answers.notation import told_of

    formats: dict[str, str] = {}
    for model in plan.models if plan is not None else ():
        settings = config.models.get(model.name)
        if model.kind != "generate" or settings is None:
            continue
        override = None if settings.chat_template is None else Path(settings.chat_template)
        try:
            told, defect = told_of(Path(model.folder), override)
        except InferdError as error:
            problems += _lines(error)
            continue
        if told:
            formats[model.name] = told
        if defect:
            warnings.append(f"models.{model.name}: a call that its chat template renders is not parsed back: {defect}.")
    return formats


def _read(source: str, warnings: list[str], allowed: Mapping[str, bool]) -> Config:
    """The configuration that serve would make of the source. Raises ConfigError."""
    folder = Path(source).expanduser()
    if folder.suffix not in _CONFIGURATIONS and is_repository(folder):
        warnings += read_repository(folder).warnings
    try:
        return serve_config(source, None, dict(allowed))
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from None


def _unread(model: ModelConfig) -> list[tuple[str, str]]:
    """The sources of a model that cannot be checked before it is served, and why: hub ids that are not downloaded yet,
    references to a registry, and Python classes whose definition is not found."""
    draft = model.speculation.draft if model.speculation.method in ("auto", "draft") else None
    steps = [msgspec.convert(section, ModelConfig) for section in model.pipeline.models.values()]
    sources = [*([] if model.is_remote or model.is_pipeline else [model.source]), *([draft] if draft else [])]
    sources += model.adapters.values()
    found = []
    for source in sources:
        if is_code(source) and not defines_class(source):
            found.append((source, _NOT_DEFINED))
        elif is_reference(source):
            found.append((source, _NOT_LOOKED_UP))
        elif is_remote(source) and find(source) is None:
            found.append((source, _NOT_DOWNLOADED))
    return [*found, *(pair for step in steps for pair in _unread(step))]


def _of_mlflow(config: Config, warnings: list[str], problems: list[str]) -> dict[str, str]:
    """What an MLflow server says of the models that come from one: a clause by model, for those that can be served."""
    from inferd.lifecycle.last_copies import recall
    from inferd.registry.mlflow.fetching import judge
    from inferd.registry.mlflow.located import locate
    from inferd.registry.mlflow.server import AWAY, server_of
    from inferd.registry.mlflow.uris import PREFIX, read_uri

    found = {}
    for name, model in config.models.items():
        if not model.source.startswith(PREFIX):
            continue
        try:
            uri, server = read_uri(model.source), server_of(config.mlflow)
            try:
                located = locate(server, uri)
                size = bytes_text(judge(server, located, model, config.mlflow))
                found[name] = f"is {located.shown}, {size}, and can be served; the memory it takes is unknown"
            except ModelLoadError as error:
                last = recall(server.url, model) if error.code == AWAY else None
                if last is None:
                    raise
                warnings.append(
                    f"models.{name}.source: {error.message} A start now would serve {last.shown}, the copy that was "
                    "verified last."
                )
                found[name] = f"would be {last.shown} at a start without the MLflow server"
        except ModelLoadError as error:
            problems += [f"models.{name}.{error.param or 'source'}: {line}" for line in _lines(error)]
    return found


def _gpus(config: Config) -> list[str]:
    """The problems of ranks that have too few GPUs here. Where nodes can join, a machine is sought when they start."""
    from inferd.engine.model.share import check_devices

    found: list[str] = []
    for name, model in config.models.items():
        if runs_here(model, config) and may_compute_on_gpu(model.device):
            try:
                check_devices(model, num_visible_gpus(), model.num_local)
            except ModelLoadError as error:
                found += [f"models.{name}: {line}" for line in _lines(error)]
    return found


def _adapters(config: Config) -> list[str]:
    """The problems of adapters' files. The plan has those of the models themselves."""
    from inferd.planning.memory import adapter_problems

    found: list[str] = []
    for name, model in config.models.items():
        with contextlib.suppress(InferdError):
            found += [f"models.{name}.adapters.{sentence}" for sentence in adapter_problems(model)]
    return found


def _steps(config: Config) -> list[str]:
    """The problems of pipelines' operations."""
    found = []
    for name, model in config.models.items():
        if model.has_steps:
            from inferd.predict.pipelines.wiring import check_steps

            try:
                check_steps(name, model, with_files=False)  # the plan has checked them
            except InferdError as error:
                found += [f"models.{name}: {line}" for line in _lines(error)]
    return found


def _references(config: Config) -> tuple[str, ...]:
    """Files of references and golden sets that are none."""
    from inferd.drift.reference import read_references
    from inferd.rollout.golden import read_golden_sets

    problems: list[str] = []
    for read in (read_references, read_golden_sets):
        try:
            read(config)
        except ConfigError as error:
            problems += error.message.splitlines()
    return tuple(problems)


def _certificate(config: Config) -> list[str]:
    from inferd.http.tls import certificate_of  # most servers have none

    try:
        certificate_of(config.server.tls)
    except ConfigError as error:
        return [f"{error.param}: {error.message}"]
    return []


def _lines(error: InferdError) -> tuple[str, ...]:
    head, *rest = error.message.split("\n  - ")
    return tuple(rest) if rest else (head,)


def access(config: Config) -> str:
    """A sentence about which clients may use a server of this configuration."""
    server = config.server
    reach = "this machine alone" if is_loopback(server.host) else "any client that reaches it"
    match server.auth:
        case "off":
            return f"no API keys: {reach} may use it"
        case "required":
            return f"API keys for every client; {reach} may connect"
        case _ if is_loopback(server.host):
            return "this machine alone may connect; API keys are needed as soon as one exists"
        case _:
            return "API keys for every client; it does not start before one exists (inferd keys create --tenant NAME)"


def _is_in_the_clear(remote: RemoteConfig) -> bool:
    has_key = remote.api_key_env is not None or remote.api_key_file is not None
    return has_key and remote.url.startswith("http://") and not is_loopback(urlsplit(remote.url).hostname or "")


def _remote(model: str, remote: RemoteConfig, *, probe: bool) -> RemoteReport:
    answers, detail = _probe(remote) if probe else (None, "")
    return RemoteReport(model=model, url=remote.url, fallback=remote.fallback, answers=answers, detail=detail)


def _probe(remote: RemoteConfig) -> tuple[bool, str]:
    """Whether the server answers and accepts the key: the request lists its models, which is free."""
    parts = urlsplit(remote.url)
    host, path = parts.hostname or "", f"{parts.path.rstrip('/')}/models"
    headers = {"accept": "application/json"}
    try:
        key = _key(remote)
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            trust = ssl.create_default_context(cafile=remote.ca_file)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=remote.connect_timeout_s, context=trust)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=remote.connect_timeout_s)
        try:
            connection.request("GET", path, headers=headers)
            status = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return False, f"does not answer: {getattr(error, 'strerror', None) or error or type(error).__name__}"
    if status in (401, 403):
        return False, f"refuses the API key (status {status})"
    if status >= 500:
        return False, f"is not well (status {status})"
    return True, "answers" if status < 400 else f"answers (and has no list of models: status {status})"


def _key(remote: RemoteConfig) -> str:
    if remote.api_key_file is not None:
        return Path(remote.api_key_file).expanduser().read_text(encoding="utf-8").strip()
    return os.environ.get(remote.api_key_env, "").strip() if remote.api_key_env is not None else ""


# -- on the terminal ----------------------------------------------------------------------------------


def show(report: CheckReport) -> None:
    """The plan on stdout, the problems on stderr."""
    for sentence in report.warnings:
        warn(sentence)
    out = console()
    plan = report.plan
    if plan is not None and plan.models:
        _show_plan(plan.models, report.divided)
        _show_contracts([model for model in plan.models if model.kind == "predict"])
        demanded = (
            "" if plan.all_bytes == plan.startup_bytes else f", {bytes_text(plan.all_bytes)} with those on demand"
        )
        out.print(
            f"At the start {bytes_text(plan.startup_bytes)}{demanded}; there are {bytes_text(plan.budget_bytes)}.",
            markup=False,
        )
    for remote in report.remotes:
        place = f"{remote.model} at {remote.url}" + (" (fallback)" if remote.fallback else "")
        out.print(f"Remote: {place}{': ' + remote.detail if remote.detail else ''}.", markup=False)
    for name, told in report.answer_formats.items():
        out.print(f"Tool calls and reasoning of {name}: {told}.", markup=False)
    if report.address:
        out.print(f"Listens on {report.address}: {report.access}.", markup=False)
    if report.ok:
        unasked = sum(remote.answers is None for remote in report.remotes)
        beside = f" but for {unasked} remote server{'s' * (unasked != 1)}, not asked (--probe asks)" if unasked else ""
        click.secho(f"{report.file} is good{beside}.", fg="green")
    elif not report.problems:
        click.secho(f"{report.file} is not checked in full, though nothing wrong was found:", fg="yellow")
        for sentence in report.unchecked:
            click.echo(f"  - {sentence}.")
    elif len(report.problems) == 1:
        fail(report.problems[0])
    else:
        fail(f"{len(report.problems)} problems in {report.file}:\n  - " + "\n  - ".join(report.problems))


def _show_plan(models: Sequence[MemoryEstimate], divided: Mapping[str, Sequence[str]] = {}) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("model", overflow="fold", min_width=8)
    for heading in ("weights", "KV cache", "process", "copies", "together"):
        table.add_column(heading, justify="right", overflow="fold", min_width=max(map(len, heading.split())))
    table.add_column("at once", overflow="fold")
    for model in models:
        lengths = {model.max_model_len: model.max_concurrency, model.typical_len: model.typical_concurrency}
        table.add_row(
            Text(model.name),
            bytes_text(model.weights_bytes),
            bytes_text(model.kv_bytes) if model.kind == "generate" else "-",
            bytes_text(model.headroom_bytes),
            str(model.replicas),
            bytes_text(model.total_bytes * model.replicas),
            "\n".join(f"{count * model.num_answering} x {length:,}" for length, count in lengths.items())
            if model.kind == "generate"
            else _rows_text(model),
        )
    out = console()
    out.print(table)
    for model in models:
        if model.roles:
            out.print(f"{model.name} has replicas with roles: {model.roles}.", markup=False)
        if model.layout:
            out.print(f"{model.name} is divided among {model.layout}; the figures are of all ranks.", markup=False)
            for line in gpu_lines(model, divided.get(model.name, ())):
                out.print(line, markup=False)
        if model.parallel.machines > 1:
            for line in spread_lines(model, divided.get(model.name, ())):
                out.print(line, markup=False)
        if model.placed is not None:
            for line in placed_lines(model.name, model.placed):
                out.print(line, markup=False)
        if model.checkpoint:
            out.print(f"{model.name} is a quantised checkpoint: {model.checkpoint}.", markup=False)
        if model.rope_factors:
            out.print(f"{model.name}: {model.rope_factors}.", markup=False)


def gpu_lines(model: MemoryEstimate, reasons: Sequence[str]) -> list[str]:
    """Why the ranks of a model are on several GPUs of this machine, where that was chosen."""
    if model.parallel.machines > 1 or not reasons:
        return []
    chosen = f"{model.name} has a GPU for each rank; parallel is not set, so the fewest GPUs were chosen."
    return [chosen, *(f"  {sentence}" for sentence in reasons)]


def spread_lines(model: MemoryEstimate, reasons: Sequence[str]) -> list[str]:
    """Where the ranks of a model on several machines will be, what each machine must have, and why they are not on
    fewer where that was chosen."""
    parallel = model.parallel
    own = "rank 0" if parallel.per_machine == 1 else f"ranks 0 to {parallel.per_machine - 1}"
    others = (
        f"rank {parallel.count - 1}"
        if parallel.count - parallel.per_machine == 1
        else (f"ranks {parallel.per_machine} to {parallel.count - 1}")
    )
    nodes = (
        "a node that joins"
        if parallel.machines == 2
        else f"{parallel.machines - 1} nodes that join, {parallel.per_machine} on each"
    )
    each = bytes_text(max(model.machines_bytes))
    chosen = "; parallel is not set, so the fewest machines like this one were chosen" if reasons else ""
    return [
        f"{model.name} has {own} on this machine and {others} on {nodes}; each machine needs at most {each}{chosen}.",
        *(f"  {sentence}" for sentence in reasons),
    ]


def placed_lines(name: str, placed: Placed) -> list[str]:
    """Where the ranks of a model are, and why it takes no fewer devices."""
    rank = placed.fullest
    numbers = sorted({one.device for one in placed.ranks})
    where = f"device {numbers[0]}" if len(numbers) == 1 else f"devices {', '.join(map(str, numbers))}"
    used = f"{bytes_text(rank.total_bytes)} of {bytes_text(rank.room_bytes)}"
    return [
        f"{name} is on {where}; the fullest rank takes {used}: "
        f"weights {bytes_text(rank.weights_bytes)}, KV cache {bytes_text(rank.kv_bytes)}, process "
        f"{bytes_text(rank.process_bytes)}.",
        *(f"  {sentence}" for sentence in placed.not_fewer),
    ]


def _rows_text(model: MemoryEstimate) -> str:
    from inferd.registry.signature import ANY_ROWS

    match model.max_batch_size:
        case None:
            return "known when loaded"
        case 0 | 1:
            return "1 request"
        case rows:
            return "any number" if rows >= ANY_ROWS else f"{rows} rows"


def _show_contracts(models: Sequence[MemoryEstimate]) -> None:
    """What models that make predictions take and give, as far as their files say so before they are loaded."""
    out = console()
    for model in models:
        missing = [noun for noun, specs in (("inputs", model.inputs), ("outputs", model.outputs)) if not specs]
        unknown = f": {' and '.join(missing)} are known when it is loaded" if missing else ""
        out.print(f"{model.name}  {model.platform}{unknown}", markup=False)
        for line in tensor_lines(model.inputs, model.outputs):
            out.print(line, markup=False, soft_wrap=True)
        if model.not_batched:
            out.print(f"  one request at a time: {model.not_batched}", markup=False, soft_wrap=True)
        if model.named_rows:
            reason = f"{model.named_rows}, and nothing refutes it; a trial at load has the last word"
            out.print(f"  requests together: {reason}", markup=False, soft_wrap=True)
    if models:
        out.print()
