"""Versions of a model: a folder's numbered subfolders, each as an entry of the configuration.

A model whose folder holds 1/, 2/, ... becomes one entry per version that its policy names. The newest version, or the
stable one of a rollout, keeps the model's name; the others are called ``name@1``. So a version is a model like any
other: it is loaded, limited, measured and reloaded by itself. An alias is another name for a version, and weights
divide the requests for the model's own name among its versions. Only the names of folders are read.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from inferd.config.config import Config
from inferd.config.model import ModelConfig
from inferd.config.versioning import VersionsConfig
from inferd.errors import ConfigError

VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")
MAX_OFF: Final = 0.05
"""Percent by which rounded weights, such as three thirds, may miss 100."""

_REGISTRY: Final = "registry:"
_ALIAS: Final = re.compile(r"[A-Za-z][\w.-]{0,63}")
_ENTRY: Final = re.compile(r"(?P<name>.+)@(?P<version>[1-9][0-9]{0,17})", re.DOTALL)


def entry_of(name: str, version: str) -> str:
    """The name of another version's entry."""
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


def entry_named(models: Mapping[str, ModelConfig], name: str) -> str | None:
    """The entry of ``model@alias`` or ``model@3``; None: the name is neither, or is an entry's own."""
    base, at, word = name.rpartition("@")
    if not at or name in models or base not in models:
        return None
    version = models[base].versions.aliases.get(word, word)
    return versions_of(models, base).get(str(version))


def names_of_entries(models: Mapping[str, ModelConfig]) -> dict[str, list[str]]:
    """All names of each entry: its own, and those for which ``entry_named`` finds it."""
    versions = {name: {config.version: name} for name, config in models.items()}
    for entry, config in models.items():
        match = _ENTRY.fullmatch(entry)
        if match is not None and match["name"] in versions and config.version == match["version"]:
            versions[match["name"]][config.version] = entry
    found = {entry: [entry] for entry in models}
    for base, entries in versions.items():
        words = {version: version for version in entries}
        words |= {alias: str(number) for alias, number in models[base].versions.aliases.items()}
        for word, version in words.items():
            name = f"{base}@{word}"
            if name not in models and version in entries:
                found[entries[version]].append(name)
    return found


class Draw(NamedTuple):
    """The version that a unit got."""

    entry: str
    digest: bytes = b""  # of the unit, by which it was drawn
    was_free: bool = False  # every version with a share could have been drawn


def draw(
    models: Mapping[str, ModelConfig], name: str, unit: str, is_able: Callable[[str], bool] = lambda entry: True
) -> Draw:
    """The entry that serves a request for the model ``name``, by its versions' weights; its own without weights, and
    where no version that is there has one.

    Equal ``unit``s (a session, a user) get equal versions. The versions divide an interval in order of age, so that a
    change of weights moves as few units as possible. ``is_able`` leaves out versions that cannot serve at all.
    """
    config = models.get(name)
    if config is None or not config.versions.weights:
        return Draw(name)
    there = [
        (entry, weight)
        for version, entry in versions_of(models, name).items()
        if (weight := config.versions.weights.get(version, 0.0)) > 0
    ]
    if not there:
        return Draw(name)
    shares = [share for share in there if is_able(share[0])] or there
    digest = hashlib.blake2b(f"{name}\0{unit}".encode(errors="surrogatepass"), digest_size=8).digest()
    point = int.from_bytes(digest, "big") / 2**64 * sum(weight for _, weight in shares)
    was_free = len(shares) == len(there)
    for entry, weight in shares:
        point -= weight
        if point < 0:
            return Draw(entry, digest, was_free)
    return Draw(shares[-1][0], digest, was_free)


def expand_versions(config: Config) -> Config:
    """The configuration with an entry for each version of each model. Raises ConfigError, with every problem."""
    models: dict[str, ModelConfig] = {}
    problems: list[str] = []
    folders: dict[str, dict[int, Path]] = {}
    for name, model in config.models.items():
        found = folders[name] = _folders(model.source)
        if not found:
            models[name] = model
            continue
        try:
            chosen = _chosen(model, sorted(found))
        except ConfigError as error:
            problems.append(f"models.{name}.versions: {error.message}")
            continue
        # The version that is stable keeps the name, so that a new one replaces nothing.
        first = chosen[-1] if model.rollout is None or model.rollout.stable not in chosen else model.rollout.stable
        for number in chosen:
            entry = name if number == first else entry_of(name, str(number))
            if entry in models or (entry != name and entry in config.models):
                problems.append(f"models.{entry}: the name is that of a version of {name}; rename one of them.")
            rollout = model.rollout if entry == name else None
            models[entry] = msgspec.structs.replace(
                model, source=str(found[number]), version=str(number), rollout=rollout
            )
    for name, model in config.models.items():
        problems += _version_problems(models, name, model.versions)
        problems += _rollout_problems(models, name, sorted(folders[name]))
    if problems:
        raise ConfigError("\n".join(problems), param="models")
    return msgspec.structs.replace(config, models=models)


def _version_problems(models: Mapping[str, ModelConfig], name: str, versions: VersionsConfig) -> list[str]:
    """The problems of aliases and weights, given the versions that are served."""
    served = versions_of(models, name)
    there = ", ".join(served) or "none"
    said = []
    for alias, number in versions.aliases.items():
        if not _ALIAS.fullmatch(alias):
            said.append(
                f"models.{name}.versions.aliases: {alias!r} is no name for a version; begin it with a letter and go on "
                "with letters, digits, '_', '-' and '.': stable."
            )
        if str(number) not in served:
            said.append(f"models.{name}.versions.aliases.{alias}: version {number} is not served; served are: {there}.")
        if f"{name}@{alias}" in models:
            said.append(
                f"models.{name}.versions.aliases.{alias}: there is a model {name}@{alias} already; choose another name."
            )
    said += [
        f"models.{name}.versions.weights: version {number} is not served; served are: {there}. Name it in 'only', or "
        "serve more by 'policy'."
        for number in versions.weights
        if number not in served
    ]
    if versions.weights and not sum(versions.weights.values()):
        said.append(f"models.{name}.versions.weights: all of them are 0, so no version would serve; give one a share.")
    elif versions.weights and not math.isclose(total := sum(versions.weights.values()), 100.0, abs_tol=MAX_OFF):
        said.append(
            f"models.{name}.versions.weights: they are percent and add up to {total:g}; change them so that they add "
            "up to 100."
        )
    if versions.weights and any(models[entry].is_remote for entry in served.values()):
        said.append(f"models.{name}.versions.weights: they are for versions that run here, and one is a remote server.")
    return said


def rollout_warnings(models: Mapping[str, ModelConfig]) -> list[str]:
    """What makes a rollout riskier than it need be."""
    return [
        f"models.{name}.replicas: each of the two versions of its rollout has one replica, so a worker that dies "
        "leaves its version without one until it is loaded again; set replicas to 2 or more."
        for name, model in models.items()
        if model.rollout is not None and model.replicas < 2
    ]


def _rollout_problems(models: Mapping[str, ModelConfig], name: str, numbers: list[int]) -> list[str]:
    """The problems of a model's rollout, given the versions that are served. ``numbers``: those of the model's folder;
    none: it is no folder of versions."""
    rollout = models[name].rollout if name in models else None
    if rollout is None:
        return []
    base = base_of(name)
    if base != name and versions_of(models, base).get(models[name].version) == name:
        return [f"models.{name}.rollout: this is a version of {base}; write the one rollout below models.{base}."]
    served = versions_of(models, name)
    there = ", ".join(served)
    said = [
        f"models.{name}.rollout.{field}: there is no version {number}; the folder has "
        f"{', '.join(map(str, numbers))}. Name one of these, or put the folder {number} there."
        if numbers and number not in numbers
        else f"models.{name}.rollout.{field}: version {number} is not served; served are: {there}. Name it in "
        "versions.only, or serve more by versions.policy."
        for field, number in (("stable", rollout.stable), ("new", rollout.new))
        if str(number) not in served
    ]
    said += [
        f"models.{entry}.source: {models[entry].source} may lead to another version while the rollout goes on; write "
        f"the number: {models[entry].source.partition('@')[0]}@3."
        for version, entry in served.items()
        if version in (str(rollout.stable), str(rollout.new)) and _is_moving(models[entry].source)
    ]
    said += [
        f"models.{name}.rollout: it is for versions that run here, and {entry} is a remote server; leave it out."
        for version, entry in served.items()
        if models[entry].is_remote and version in (str(rollout.stable), str(rollout.new))
    ]
    return said


def _is_moving(source: str) -> bool:
    """Whether a source is a reference to the registry that names no number."""
    return source.startswith(_REGISTRY) and VERSION.fullmatch(source.rpartition("@")[2]) is None


def _folders(source: str) -> dict[int, Path]:
    """The numbered subfolders of a model's folder that are not empty; none when the folder is a model itself."""
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


def _chosen(model: ModelConfig, numbers: list[int]) -> list[int]:
    """The versions to serve, in order."""
    policy, rollout = model.versions, model.rollout
    match policy.policy:
        case "all":
            return numbers
        case "latest" if rollout is not None:
            return [number for number in numbers if number in (rollout.stable, rollout.new)] or numbers[-1:]
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
