"""The command line's flags, derived from the Config structs: names, limits, defaults and help.

A setting added to a struct is a flag the same day. Names: sections become prefixes (``kv_cache.
memory_bytes`` is ``--kv-cache-memory``), except those whose fields speak for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec
from msgspec import inspect

from inferd.config import ModelConfig, ServerConfig
from inferd.config.tree import Leaf, Text, branches, parse
from inferd.config.units import NotAllowedError, size_text

_UNPREFIXED = ("scheduler",)
_UNITS = {"_bytes": "SIZE", "_s": "SECONDS"}

if TYPE_CHECKING:
    _ParamType = click.ParamType[object]
else:
    _ParamType = click.ParamType  # generic only since click 8.2

Decorated = TypeVar("Decorated", bound=Callable[..., object])


class Setting(_ParamType):
    """A click type that takes what the config takes, and says the same when it is wrong."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.name = leaf.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        for suffix, metavar in _UNITS.items():
            if self.leaf.name.endswith(suffix):
                return metavar
        if isinstance(self.leaf.type, inspect.LiteralType):
            return "[" + "|".join(sorted(map(str, self.leaf.type.values), key=lambda v: (v != "auto", v))) + "]"
        if isinstance(self.leaf.type, inspect.IntType):
            return "N"
        return "TEXT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse(self.leaf, Text(value))
        except NotAllowedError as wrong:
            self.fail(f"{value!r} is not {wrong}.", param, ctx)


def flag_name(leaf: Leaf) -> str:
    """``--kv-cache-memory`` for ``kv_cache.memory_bytes``."""
    words = [*(part for part in leaf.path[:-1] if part not in _UNPREFIXED), leaf.name]
    for suffix in _UNITS:
        words[-1] = words[-1].removesuffix(suffix)
    return "--" + "-".join(words).replace("_", "-")


def leaves(section: type[msgspec.Struct], skip: Iterable[str] = ()) -> list[Leaf]:
    """The settings of a section, without those skipped by path or by their section's name."""
    skipped = set(skip)
    return [
        leaf
        for branch in branches(section)
        for leaf in branch.leaves
        if ".".join(leaf.path) not in skipped and leaf.path[0] not in skipped
    ]


def option(leaf: Leaf) -> click.Option:
    name, parameter = flag_name(leaf), "__".join(leaf.path)
    if isinstance(leaf.type, inspect.BoolType):
        declared, kind, is_flag = f"{name}/--no-{name[2:]}", None, True
    else:
        declared, kind, is_flag = name, Setting(leaf), False
    shown = _default(leaf)
    text = leaf.description.rstrip(".") + "." + (f"  [default: {shown}]" if shown else "")
    return click.Option([declared, parameter], type=kind, is_flag=is_flag, default=None, help=text)


def _default(leaf: Leaf) -> str:
    if isinstance(leaf.default, bool):
        return "yes" if leaf.default else "no"
    if isinstance(leaf.default, int) and leaf.is_size:
        return size_text(leaf.default)
    if isinstance(leaf.default, int | float):
        return f"{leaf.default:g}"
    return leaf.default if isinstance(leaf.default, str) else ""


SERVER_LEAVES = leaves(ServerConfig, skip=("memory_bytes", "reload"))
# What concerns several replicas or servers is for the file, where it can be seen as a whole.
MODEL_LEAVES = leaves(
    ModelConfig,
    skip=(
        *("source", "remote", "remotes", "routing", "breaker", "retry", "cache", "load"),
        *("options", "pipeline", "inputs", "outputs", "preprocess", "postprocess", "sequence"),
        *("memory_fraction", "batching.buckets", "batching.preferred_sizes"),
    ),
)


def _flags(of: list[Leaf]) -> Callable[[Decorated], Decorated]:
    def decorate(function: Decorated) -> Decorated:
        for leaf in reversed(of):
            made = option(leaf)
            params: list[click.Option] = function.__dict__.setdefault("__click_params__", [])
            params.append(made)
        return function

    return decorate


def server_flags(function: Decorated) -> Decorated:
    """Add a flag for each field of ServerConfig that concerns a server of one model."""
    return _flags(SERVER_LEAVES)(function)


def model_flags(function: Decorated) -> Decorated:
    """Add a flag for each field of ModelConfig that concerns one copy of a model."""
    return _flags(MODEL_LEAVES)(function)


def given(of: list[Leaf], values: Mapping[str, object]) -> dict[str, object]:
    """The nested settings that flags set, without those left alone."""
    tree: dict[str, object] = {}
    for leaf in of:
        value = values.get("__".join(leaf.path))
        if value is None:
            continue
        node = tree
        for part in leaf.path[:-1]:
            child = node.setdefault(part, {})
            assert isinstance(child, dict)
            node = child
        node[leaf.name] = value
    return tree
