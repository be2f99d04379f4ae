"""Versions of a model: a folder's numbered subfolders, each as an entry of the configuration.

A model whose folder holds 1/, 2/, ... becomes one entry per version that its policy names. The newest keeps the model's
name; the others are called ``name@1``. So a version is a model like any other: it is loaded, limited, measured and
reloaded by itself. Looks at folders' names alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from inferd.errors import ConfigError

if TYPE_CHECKING:
    from inferd.config import Config, ModelConfig, VersionsConfig

VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")
_ENTRY: Final = re.compile(r"(?P<name>.+)@(?P<version>[1-9][0-9]{0,17})", re.DOTALL)


def entry_of(name: str, version: str) -> str:
    """What an older version's entry is called."""
    return f"{name}@{version}"


def base_of(entry: str) -> str:
    """The model an entry is a version of, by its name."""
    match = _ENTRY.fullmatch(entry)
    return entry if match is None else match["name"]


def versions_of(models: Mapping[str, ModelConfig], name: str) -> dict[str, str]:
    """The served versions of a model and their entries, the oldest first; empty: there is no such model."""
    if name not in models:
        return {}
    found = {models[name].version: name}
    for entry, config in models.items():
        match = _ENTRY.fullmatch(entry)
        if match is not None and match["name"] == name and config.version == match["version"]:
            found[config.version] = entry
    return {version: found[version] for version in sorted(found, key=int)}


def expand_versions(config: Config) -> Config:
    """The configuration with an entry for each version of each model. Raises ConfigError, with every problem."""
    models: dict[str, ModelConfig] = {}
    problems: list[str] = []
    for name, model in config.models.items():
        found = _folders(model.source)
        if not found:
            models[name] = model
            continue
        try:
            chosen = _chosen(model.versions, sorted(found))
        except ConfigError as error:
            problems.append(f"models.{name}.versions: {error.message}")
            continue
        for number in chosen:
            entry = name if number == chosen[-1] else entry_of(name, str(number))
            if entry in models or (entry != name and entry in config.models):
                problems.append(f"models.{entry}: the name is that of a version of {name}; rename one of them.")
            models[entry] = msgspec.structs.replace(model, source=str(found[number]), version=str(number))
    if problems:
        raise ConfigError("\n".join(problems), param="models")
    return msgspec.structs.replace(config, models=models)


def _folders(source: str) -> dict[int, Path]:
    """The numbered subfolders of a model's folder that hold something; none where it is a model itself."""
    folder = Path(source).expanduser()
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return {}
    if any(entry.name == "config.json" or entry.name.startswith("model.") for entry in entries):
        return {}
    return {
        int(entry.name): entry
        for entry in entries
        if VERSION.fullmatch(entry.name) and entry.is_dir() and any(entry.iterdir())
    }


def _chosen(policy: VersionsConfig, numbers: list[int]) -> list[int]:
    """The versions to serve, in order."""
    match policy.policy:
        case "all":
            return numbers
        case "latest":
            return numbers[-policy.count :]
    if not policy.only:
        raise ConfigError("the policy 'specific' needs 'only': the numbers of the versions to serve.")
    missing = sorted(set(policy.only) - set(numbers))
    if missing:
        raise ConfigError(
            f"there is no version {', '.join(map(str, missing))}; the folder has {', '.join(map(str, numbers))}."
        )
    return sorted(set(policy.only))
