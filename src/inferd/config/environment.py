"""The settings among the environment variables, and variables that look like settings but are none."""

from __future__ import annotations

import re
from collections.abc import Mapping

from inferd.config.devices import DevicesConfig
from inferd.config.server import CacheConfig, JobsConfig, MetricsConfig, NodesConfig, ServerConfig, StateConfig
from inferd.config.tracing import TracingConfig
from inferd.config.tree import Text, branches
from inferd.errors import ConfigError

ENV_PREFIX = "INFERD_"
Origins = dict[tuple[str, ...], str]
"""The variable that each path was set by."""

# Variables that are read elsewhere, and those that Kubernetes sets for a service called inferd.
_NO_SETTINGS = re.compile(r"INFERD_(DEBUG|API_KEY|URL|NODE_TOKEN|(PORT|SERVICE_(HOST|PORT))(_.*)?)")


def settings_of(env: Mapping[str, str], names: Mapping[str, list[str]], origins: Origins) -> dict[str, object]:
    """The settings among environment variables, as a nested tree of texts. ``names`` are those of the
    sections that have names: models and tenants."""
    tree: dict[str, object] = {}
    for variable, value in sorted(env.items()):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest == variable or "__" not in rest:
            continue
        parts = rest.split("__")
        path = [part.lower() for part in parts]
        if path[0] in names and len(path) > 1:
            wanted = _plain(parts[1])
            path[1] = next((name for name in names[path[0]] if _plain(name) == wanted), path[1])
        origins[tuple(path)] = variable
        node = tree
        for depth, part in enumerate(path[:-1], start=1):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(
                    f"{variable} and {origins[tuple(path[:depth])]} contradict each other: "
                    f"one sets {part}, the other a field inside it."
                )
            node = child
        node[path[-1]] = Text(value)
    return tree


def stray_variables(env: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting and is none: INFERD_PORT, INFERD_SERVER_PORT."""
    settings = {
        _plain("_".join((*branch.path, leaf.name))): (*branch.path, leaf.name)
        for section, kind in (
            ("server", ServerConfig),
            ("state", StateConfig),
            ("cache", CacheConfig),
            ("devices", DevicesConfig),
            ("tracing", TracingConfig),
            ("metrics", MetricsConfig),
            ("jobs", JobsConfig),
            ("nodes", NodesConfig),
        )
        for branch in branches(kind, (section,))
        for leaf in branch.leaves
    }
    by_field = {path[-1]: path for path in reversed(settings.values())}
    found = []
    for variable, value in sorted(env.items()):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest == variable or "__" in rest:
            continue
        path = settings.get(_plain(rest)) or by_field.get(_plain(rest))
        # Of a service called inferd, Kubernetes makes INFERD_PORT=tcp://10.0.0.1:80.
        if _NO_SETTINGS.fullmatch(variable) and (path is None or "://" in value):
            continue
        hint = f"did you mean {ENV_PREFIX}{'__'.join(path).upper()}?" if path else "a setting has two underscores."
        found.append(f"{variable} is no setting and was ignored; {hint}")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
