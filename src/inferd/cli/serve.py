"""``inferd serve``: makes a Config of the flags, serves it, and shows how to use the server."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec

from inferd.app.change import refuse_empty
from inferd.app.source import ConfigSource
from inferd.cli.board import Board
from inferd.cli.demo import CHAT, demo_models
from inferd.cli.flags import MODEL_LEAVES, NODES_LEAVES, SERVER_LEAVES, given, in_flags, model_flags, server_flags
from inferd.cli.help import Sectioned
from inferd.cli.ready import show_ready
from inferd.cli.terminal import ReportProgress, is_live, loading, speak_json, warn
from inferd.config import REMOTE_PREFIX, Config, ModelConfig, load_config, model_name, stray_variables
from inferd.config.rules import url_problem
from inferd.errors import ConfigError, InferdError, ModelLoadError
from inferd.observe.plain import is_plain
from inferd.registry.artifact import artifact_of
from inferd.registry.source import blaming, is_code, is_remote, resolve, silent

_MOST_ELSEWHERE: Final = 32
"""Models of a remote server up to which all are served without being named."""


_RELAYED: Final = frozenset(("generate", "embed", "rerank", "score"))
"""The tasks of a remote server."""


@click.command("serve", cls=Sectioned)
@click.argument("sources", metavar="[SOURCE]", nargs=-1)
@click.option(
    "--name", default=None, help="Name that clients use for the model.  [default: the folder's name, or the hub id]"
)
@click.option(
    "--insecure-no-auth",
    is_flag=True,
    help="Serve every client that reaches the address, without API keys: the same as --auth off.",
)
@server_flags
@model_flags
def command(sources: tuple[str, ...], name: str | None, insecure_no_auth: bool, **flags: object) -> int:
    """Serve a model, or everything in a config file.

    SOURCE is a folder, a model file (ONNX, .pt2, skops, XGBoost, LightGBM), a Python class (module:Class) or a Hugging
    Face Hub id (id@revision for a fixed version). registry:NAME@production is a version of 'inferd registry', by its
    stage, number or alias, and mlflow:models:/NAME@ALIAS one of an MLflow server. The default, 'demo', serves the
    bundled models: a chat model, to which --name and the flags apply, and classifiers of digits and intents.
    openai:https://host/v1 serves the models of a remote server: all that it lists, or the one that --name says. A .yaml
    file or a Triton model repository is read again when it changes.

    \b
    Examples:
      inferd serve
      inferd serve model.onnx
      inferd serve ./my-model --port 9000 --dtype bfloat16
      inferd serve Qwen/Qwen3-0.6B --max-model-len 8192 --kv-cache-memory 4GiB
      inferd serve inferd.yaml

    Then talk to it: inferd chat, or any OpenAI client with base URL http://127.0.0.1:8000/v1.
    """
    if len(sources) > 1:
        raise click.UsageError(
            f"SOURCE is one model, not {len(sources)} ({', '.join(sources)}); name several in a file, each below "
            "models: with its source, and serve that file."
        )
    source = sources[0] if sources else CHAT
    if insecure_no_auth:
        if flags.get("auth") not in (None, "off"):
            raise click.UsageError(f"--insecure-no-auth and --auth {flags['auth']} contradict each other; keep one.")
        flags["auth"] = "off"
    if _is_file(source) or _is_repository(source):
        return _follow(source, name, flags)
    try:
        config = serve_config(source, name, flags)
        _begin_log(config)
        if source == CHAT:
            models, left_out = demo_models()
            for sentence in left_out:
                warn(sentence)
            chat = next(iter(config.models))  # the model that the flags are for
            return run(config, known=models, words=lambda model, said: in_flags(said) if model == chat else said)
        return run(config, words=lambda model, said: in_flags(said, is_alone=True))
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(in_flags(error.message, is_alone=source != CHAT), param=error.param) from error


def _begin_log(config: Config) -> None:
    """Give all further messages the log's form, and warn of variables that only look like settings."""
    speak_json(not is_plain(config.server.log_format))
    for sentence in stray_variables(os.environ):
        warn(sentence)


def _follow(source: str, name: str | None, flags: dict[str, object]) -> int:
    """Serve a configuration file or a model repository, and follow its changes."""
    config = serve_config(source, name, flags)
    _begin_log(config)
    if _is_repository(source):
        from inferd.registry.triton import read_repository

        for sentence in read_repository(Path(source).expanduser()).warnings:
            warn(sentence)

    def again() -> Config:
        try:
            return serve_config(source, name, flags)
        except click.UsageError as error:  # the flags do not fit the file as it is now
            raise ConfigError(error.format_message()) from None

    return run(config, ConfigSource(Path(source).absolute(), again))


def serve_config(source: str, name: str | None, flags: dict[str, object]) -> Config:
    """The configuration for a source with its flags. Raises ConfigError or click.UsageError."""
    model = given(MODEL_LEAVES, flags)
    sections = {"server": given(SERVER_LEAVES, flags), **given(NODES_LEAVES, flags)}
    if _is_file(source):
        return _file_config(Path(source), name, sections, model)
    if _is_repository(source):
        return _repository_config(Path(source).expanduser(), name, sections, model)
    if source == CHAT:
        return _demo_config(name, sections, model)
    if name is None and source.startswith(REMOTE_PREFIX):
        models = {found: {"source": source, **model} for found in _models_elsewhere(source.removeprefix(REMOTE_PREFIX))}
        return load_config(None, os.environ, {**sections, "models": models})
    chosen = name if name is not None else model_name(source)
    if is_code(source):
        model.setdefault("allow_code", True)  # naming the class on the command line is the operator's permission
    overrides = {**sections, "models": {chosen: {"source": source, **model}}}
    return load_config(None, os.environ, overrides)


def _models_elsewhere(url: str) -> list[str]:
    """The names of a remote server's models, as it lists them. Raises click.UsageError when they are not known, or are
    too many to serve all."""
    from inferd.cli.running.control import find_server

    if problem := url_problem(url):
        raise click.UsageError(f"{REMOTE_PREFIX}{url}: {problem}")
    try:
        parts = urlsplit(url)
        host = parts._replace(path="", query="", fragment="").geturl()
        listed = find_server(None, None, host, None).get(f"{parts.path.rstrip('/')}/models", _Listed)
    except (InferdError, ValueError) as error:
        raise click.UsageError(
            f"{url} did not list its models: {getattr(error, 'message', error)} Name the model: "
            f"inferd serve {REMOTE_PREFIX}{url} --name NAME."
        ) from None
    names = [model.id for model in listed.data if model.tasks is None or not _RELAYED.isdisjoint(model.tasks)]
    if not 0 < len(names) <= _MOST_ELSEWHERE:
        some = f"{len(names)} models ({', '.join(names[:_MOST_ELSEWHERE])}, ...)" if names else "no model"
        raise click.UsageError(f"{url} lists {some}. Say with --name which of them is to be served.")
    return names


class _Model(msgspec.Struct, frozen=True):
    id: str
    tasks: tuple[str, ...] | None = None  # only inferd's model lists have this field


class _Listed(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...] = ()


def _demo_config(name: str | None, sections: dict[str, object], model: dict[str, object]) -> Config:
    """The bundled models; the flags are for the one that chats, and so is the name."""
    models, _ = demo_models()
    chosen = CHAT if name is None else name
    if chosen in models and chosen != CHAT:
        raise click.UsageError(f"--name {chosen} is the name of another bundled model; choose one for the chat model.")
    chat = merged(models.pop(CHAT), model)
    return load_config(None, os.environ, {**sections, "models": {chosen: chat, **models}})


def _is_file(source: str) -> bool:
    return Path(source).suffix in (".yaml", ".yml")


def _is_repository(source: str) -> bool:
    folder = Path(source).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return False
    from inferd.registry.triton import is_repository  # imported here, so that files and checkpoints start faster

    return is_repository(folder)


def _repository_config(folder: Path, name: str | None, sections: dict[str, object], model: dict[str, object]) -> Config:
    """A Triton model repository's models, with the flags for each of them; with a name that one alone."""
    from inferd.registry.triton import read_repository

    models = read_repository(folder).models
    if name is not None and name not in models:
        raise click.UsageError(f"{folder} holds {', '.join(models) or 'no model'}; --name names none of them.")
    chosen = models if name is None else {name: models[name]}
    flagged = {key: merged(tree, model) for key, tree in chosen.items()}
    return load_config(None, os.environ, {**sections, "models": flagged})


def merged(tree: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """The settings, overridden by other settings."""
    found = dict(tree)
    for key, value in over.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


def _file_config(path: Path, name: str | None, sections: dict[str, object], model: dict[str, object]) -> Config:
    config = load_config(path, os.environ, sections)
    if name is None and not model:
        return config
    names = list(config.models)
    if name is None and len(names) == 1:
        name = names[0]
    if name not in config.models:
        raise click.UsageError(
            f"{path} serves {', '.join(names) or 'no model'}; say with --name which of them the flags are for."
        )
    return load_config(path, os.environ, {**sections, "models": {name: model}})


def run(
    config: Config,
    source: ConfigSource | None = None,
    known: Collection[str] = (),
    words: Callable[[str, str], str] | None = None,
) -> int:
    """Serve until a signal ends the server; the exit code. ``source`` is followed while serving, ``known`` as in
    ``ready_to_load``. ``words`` edits messages about a model, whose name it takes first, before they are shown."""
    from inferd.lifecycle.sources import References

    references = References()
    config = ready_to_load(references.resolved(config, loading), loading, known)
    from inferd.app import root  # after the flags were checked, so that an error in them is reported at once

    if source is not None:
        read = source.read
        source = msgspec.structs.replace(
            source,
            read=lambda: checked(ready_to_load(references.resolved(read()), _silently)),
            has_changed=references.have_changed,
            look_soon=references.look_soon,
        )
    edited = root.unchanged if words is None else words
    board = Board(config.models)
    with contextlib.ExitStack() as showing:
        showing.enter_context(board.shown())

        def ready(found: root.Ready) -> None:
            showing.close()
            show_ready(
                found.address,
                config,
                {
                    name: msgspec.structs.replace(info, not_batched=edited(name, info.not_batched))
                    for name, info in found.models.items()
                },
                needs_key=found.needs_key,
                grpc_address=found.grpc_address,
                failed={name: edited(name, why) for name, why in found.failed.items()},
                away=found.away,
                waiting={name: edited(name, why) for name, why in found.waiting.items()},
            )

        log = board if is_live() else None
        options = root.ServeOptions(
            *(source, ready, board.handle),
            log=log,
            words=edited,
            registered=references.registered,
        )
        return root.run(config, options)


def ready_to_load(
    config: Config, showing: Callable[[str], AbstractContextManager[ReportProgress]], known: Collection[str] = ()
) -> Config:
    """The configuration with every hub id replaced by the folder it was downloaded to. ``known``: models that come with
    inferd, whose steps need no check.

    Raises ConfigError where there is nothing to serve, and ModelLoadError that names every source
    which is not there: a missing folder is told before anything starts.
    """
    refuse_empty(config)
    models, missing = {}, []
    for name, model in config.models.items():
        try:
            if not model.is_remote and is_remote(model.source):
                with showing(model.source) as tell:
                    model = msgspec.structs.replace(model, source=str(resolve(model.source, tell)))
            model = _with_adapters(_with_draft(model, showing), showing)
            if not model.is_remote:
                _recognised(model, is_alone=len(config.models) == 1)
            if model.has_steps and name not in known:
                from inferd.predict.pipelines.wiring import (
                    check_steps,  # needs numpy, which other models leave out here
                )

                check_steps(name, model)
        except ModelLoadError as error:
            missing.append(error if len(config.models) == 1 else ModelLoadError(f"models.{name}: {error.message}"))
        models[name] = model
    if len(missing) == 1:
        raise missing[0]
    if missing:
        lines = [f"{len(missing)} models cannot be found:", *(error.message for error in missing)]
        raise ModelLoadError("\n  - ".join(lines))
    return msgspec.structs.replace(config, models=models)


def _with_draft(model: ModelConfig, showing: Callable[[str], AbstractContextManager[ReportProgress]]) -> ModelConfig:
    """The model with the folder of its draft model, downloaded first when it is a hub id that will be used."""
    settings = model.speculation
    if model.is_remote or settings.draft is None or settings.method not in ("auto", "draft"):
        return model
    with blaming("speculation.draft"):
        if not is_remote(settings.draft):
            resolve(settings.draft)
            return model
        with showing(settings.draft) as tell:
            draft = msgspec.structs.replace(settings, draft=str(resolve(settings.draft, tell)))
    return msgspec.structs.replace(model, speculation=draft)


def _with_adapters(model: ModelConfig, showing: Callable[[str], AbstractContextManager[ReportProgress]]) -> ModelConfig:
    """The model with the folders of its adapters, downloaded first where they are hub ids."""
    found: dict[str, str] = {}
    for name, source in model.adapters.items():
        with blaming(f"adapters.{name}"):
            if is_remote(source):
                with showing(source) as tell:
                    source = str(resolve(source, tell))
            else:
                resolve(source)
        found[name] = source
    return msgspec.structs.replace(model, adapters=found) if found else model


def _recognised(model: ModelConfig, *, is_alone: bool) -> None:
    """Raises ModelLoadError for a source that is not there or must not be opened. A file or folder that exists and is
    invalid is refused later by its worker, so that other models can be served."""
    try:
        artifact_of(model)
    except ModelLoadError as error:
        is_there = Path(model.source).expanduser().exists()
        if is_alone or not is_there or error.param != "source":
            raise


def checked(config: Config) -> Config:
    """The configuration, after every checkpoint was checked: a bad one is reported before it replaces a model.

    Raises ModelLoadError with all problems. Free memory is not checked, because only the running server knows it.
    """
    from inferd.planning.memory import adapter_problems, plan_model

    problems = []
    for name, model in config.models.items():
        try:
            plan_model(name, model, free_bytes=sys.maxsize)
        except ModelLoadError as error:
            problems.append(f"models.{name}: {error.message}")
        problems += [f"models.{name}.adapters.{sentence}" for sentence in adapter_problems(model)]
    if len(problems) == 1:
        raise ModelLoadError(problems[0])
    if problems:
        raise ModelLoadError("\n  - ".join([f"{len(problems)} models cannot be loaded:", *problems]))
    return config


def _silently(title: str) -> AbstractContextManager[ReportProgress]:
    """A running server shows no progress of a download."""
    return contextlib.nullcontext(silent)
