"""The configuration from a file < the environment < flags. The only reader of all three."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from inferd.config.config import Config
from inferd.config.devices import DevicesConfig
from inferd.config.environment import Origins, settings_of
from inferd.config.model import ModelConfig
from inferd.config.payloads import PayloadsConfig
from inferd.config.pipeline_rules import with_models
from inferd.config.rules import problems_between
from inferd.config.server import (
    CacheConfig,
    JobsConfig,
    MetricsConfig,
    NodesConfig,
    ServerConfig,
    StateConfig,
    TenantConfig,
)
from inferd.config.tracing import TracingConfig
from inferd.config.tree import Problem, check, dotted, long_form
from inferd.config.versioning import MlflowConfig, RegistryConfig
from inferd.config.versions import expand_versions
from inferd.config.yaml_file import read_yaml
from inferd.errors import ConfigError

_Tree = dict[str, object]


def load_config(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> Config:
    """The configuration from a YAML file < the environment < flags.

    ``env`` is the whole environment: ``INFERD_SERVER__PORT=9000`` sets ``server.port``,
    ``INFERD_MODELS__CHAT__DTYPE=bfloat16`` the ``dtype`` of the model ``chat`` (case and punctuation of
    names do not matter) and ``INFERD_MODELS__CHAT__REMOTES__0__URL`` the ``url`` of its first remote.
    Names without a double underscore are not settings (``stray_variables`` finds those that look like settings).
    ``overrides`` is a nested mapping in the shape of the tree. Sizes may be written as '4GiB'.

    Raises one ConfigError that lists every problem with its path, its value and what is allowed.
    """
    file = read_yaml(path) if path is not None else {}
    origins: Origins = {}
    tree: _Tree = {}
    for source in (file, settings_of(env, _names(file, overrides), origins), overrides):
        long = long_form(Config, source)
        assert isinstance(long, dict)
        _merge(tree, long)
    checked, problems = check(Config, tree)
    problems += _beyond_types(checked, env)
    where = str(path) if path is not None else None
    if problems:
        raise ConfigError(_sentence(problems, origins, tree, where), param=dotted(problems[0].path))
    try:
        config = msgspec.convert(checked, Config)
    except msgspec.ValidationError as error:  # a type that ``check`` leaves to msgspec
        raise ConfigError(f"The configuration {f'in {where} ' if where else ''}is not valid: {error}.") from None
    return with_models(expand_versions(_shared_out(config)))


def _shared_out(config: Config) -> Config:
    """Fractions of the server's memory as bytes."""
    whole = config.server.memory_bytes
    if whole is None or all(model.memory_fraction is None for model in config.models.values()):
        return config
    models = {
        name: model
        if model.memory_fraction is None
        else msgspec.structs.replace(model, memory_bytes=int(whole * model.memory_fraction))
        for name, model in config.models.items()
    }
    return msgspec.structs.replace(config, models=models)


def single_model_config(
    source: str,
    *,
    name: str | None = None,
    model: Mapping[str, object] | None = None,
    server: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of a server with one model: ``inferd serve SOURCE``. Raises ConfigError."""
    chosen = name if name is not None else model_name(source)
    overrides = {"models": {chosen: {"source": source, **(model or {})}}, "server": dict(server or {})}
    return load_config(None, env or {}, overrides)


def model_name(source: str) -> str:
    """The name of a model that was given by its source alone: the stem of a file, the name of a folder or a class, or
    the hub id, or the name in a registry."""
    path = Path(source).expanduser()
    if path.is_file():
        return path.stem.removesuffix(".pkl").removesuffix(".joblib") or "model"  # classifier.pkl.onnx: classifier
    if source.startswith("registry:"):
        return source.removeprefix("registry:").partition("@")[0]
    if source.startswith("mlflow:"):  # the name of the registered model, or the end of a run's path
        name = source.rstrip("/").partition(":/")[2].rpartition("@")[0] or source.partition(":/")[2].strip("/")
        return name.rpartition("/")[2] if ":runs:/" in source else name.partition("/")[0]
    if re.fullmatch(r"(\w+\.)*\w+:\w+|.+\.py:\w+", source):
        return source.rpartition(":")[2]
    if path.is_dir() or source.startswith((".", "/", "~")):
        return path.resolve().name or "model"
    return source.partition("@")[0]


def _names(*trees: Mapping[str, object]) -> dict[str, list[str]]:
    """The names of models and tenants, which the operator chooses."""
    found: dict[str, list[str]] = {"models": [], "tenants": []}
    for tree in trees:
        for section, names in found.items():
            below = tree.get(section)
            names += [str(name) for name in below] if isinstance(below, Mapping) else []
    return found


def _merge(into: _Tree, over: Mapping[str, object]) -> None:
    """Lay ``over`` upon ``into``: sections are merged, also numbered ones upon a list; values replaced."""
    for key, value in over.items():
        below = into.get(key)
        if isinstance(value, Mapping) and isinstance(below, list) and all(str(place).isdecimal() for place in value):
            below = into[key] = {str(place): section for place, section in enumerate(below)}
        if isinstance(value, Mapping) and (isinstance(below, dict) or below is None):
            child: _Tree = below if isinstance(below, dict) else {}
            _merge(child, value)
            into[key] = child
        else:
            into[key] = value


def _beyond_types(tree: object, env: Mapping[str, str]) -> Iterator[Problem]:
    """What the structs cannot say."""
    if not isinstance(tree, dict):
        return
    for section, noun in (("models", "model"), ("tenants", "tenant")):
        names = tree.get(section)
        for name in names if isinstance(names, dict) else ():
            if not name or name != name.strip() or not name.isprintable():
                yield Problem((section, name), f"{name!r} is not a {noun} name: it is empty, or has blanks around it.")
    yield from problems_between(_sound(tree), env)


def _sound(tree: _Tree) -> Config:
    """The part of a checked tree that has the right types; defaults stand in for the rest."""
    found: dict[str, object] = {}
    for name, kind in (
        ("server", ServerConfig),
        ("nodes", NodesConfig),
        ("state", StateConfig),
        ("cache", CacheConfig),
        ("devices", DevicesConfig),
        ("tracing", TracingConfig),
        ("metrics", MetricsConfig),
        ("payloads", PayloadsConfig),
        ("registry", RegistryConfig),
        ("jobs", JobsConfig),
        ("mlflow", MlflowConfig),
    ):
        with contextlib.suppress(msgspec.ValidationError):
            found[name] = msgspec.convert(tree.get(name, {}), kind)
    for name, named in (("tenants", TenantConfig), ("models", ModelConfig)):
        below, whole = tree.get(name), {}
        for key, section in below.items() if isinstance(below, dict) else ():
            with contextlib.suppress(msgspec.ValidationError):
                whole[str(key)] = msgspec.convert(section, named)
        found[name] = whole
    return msgspec.structs.replace(Config(), **found)


def _origin(path: tuple[str, ...], origins: Origins, tree: _Tree) -> str | None:
    """The variable that set what is wrong at a path: the value, or all that its section has. An absent field is wrong
    because its section is there."""
    if path in origins:
        return origins[path]
    node: object = tree
    for depth, part in enumerate(path):
        if not isinstance(node, dict) or part not in node:
            path = path[:depth]
            break
        node = node[part]
    leaves = [(*path, *below) for below in _leaves(node)]
    return origins[leaves[0]] if path and leaves and all(leaf in origins for leaf in leaves) else None


def _leaves(node: object) -> Iterator[tuple[str, ...]]:
    """The paths of the values below a node of the tree."""
    if not isinstance(node, dict):
        yield ()
        return
    for key, value in node.items():
        for below in _leaves(value):
            yield (str(key), *below)


def _sentence(problems: list[Problem], origins: Origins, tree: _Tree, where: str | None) -> str:
    lines = []
    for problem in problems:
        origin = _origin(tuple(map(str, problem.path)), origins, tree)
        lines.append(f"{dotted(problem.path)}{f' (from {origin})' if origin else ''}: {problem.sentence}")
    if len(lines) == 1:
        return lines[0]
    head = f"{len(lines)} problems in the configuration{f' ({where})' if where else ''}:"
    return "\n  - ".join([head, *lines])
