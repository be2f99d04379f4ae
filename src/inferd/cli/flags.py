"""The command line's flags, derived from the Config structs: names, limits, defaults and help.

A setting that is added to a struct becomes a flag. Sections become prefixes (``kv_cache.memory_bytes`` is
``--kv-cache-memory``), except sections whose fields have unambiguous names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import getdoc
from typing import TYPE_CHECKING, Final, TypeVar

import click
import msgspec
from msgspec import inspect

from inferd.cli.help import COMMON
from inferd.config import ModelConfig, NodesConfig, ServerConfig
from inferd.config.tree import Leaf, Text, branches, parse
from inferd.config.units import NotAllowedError, number_text, size_text

_UNPREFIXED = ("scheduler",)
_UNITS = {"_bytes": "SIZE", "_s": "SECONDS"}

_ENTRY_FLAGS: Final = {"adapters": "--adapter"}
"""Flags that give one entry of a mapping, named by it."""

_FIELD_TERMS: Final = {
    ("parallel", "tensor"): "--tensor-parallel",
    ("parallel", "pipeline"): "--pipeline-parallel",
    ("parallel", "machines"): "--machines",
}
"""Flags that have the terms of the field."""

_WIDEST_VALUES: Final = 50  # characters of a flag's values beside its name; more of them are listed in its help

_COMMON_FLAGS: Final = (
    *("--port", "--host", "--auth", "--log-format"),
    *("--max-model-len", "--kv-cache-memory", "--dtype", "--quantization", "--device", "--threads", "--replicas"),
    *("--chat-template", "--allow-code", "--allow-pickle", "--options"),
)
"""Listed before all other flags."""

if TYPE_CHECKING:
    _ParamType = click.ParamType[object]
else:
    _ParamType = click.ParamType  # generic only since click 8.2

Decorated = TypeVar("Decorated", bound=Callable[..., object])


class Parsed(_ParamType):
    """A click type by a function, whose NotAllowedError says what was expected."""

    def __init__(self, name: str, metavar: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._metavar = metavar
        self._parse = parse

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self._metavar

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except NotAllowedError as wrong:
            self.fail(f"{value!r} is not {wrong}.", param, ctx)


class Setting(_ParamType):
    """A click type with the values and the error messages of the configuration."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.name = leaf.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        for suffix, metavar in _UNITS.items():
            if self.leaf.name.endswith(suffix):
                return metavar
        if isinstance(self.leaf.type, inspect.LiteralType):
            listed = "|".join(_values(self.leaf.type))
            return f"[{listed}]" if len(listed) <= _WIDEST_VALUES else "NAME"
        if isinstance(self.leaf.type, inspect.IntType):
            return "N"
        if isinstance(self.leaf.type, inspect.FloatType):
            return "NUMBER"
        if isinstance(self.leaf.type, inspect.DictType):
            return "NAME=VALUE"
        return "TEXT,.." if isinstance(self.leaf.type, inspect.VarTupleType) else "TEXT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str):
            return value
        if isinstance(self.leaf.type, inspect.DictType):
            return self._entry(value, param, ctx)
        try:
            return parse(self.leaf, Text(value))
        except NotAllowedError as wrong:
            self.fail(f"{value!r} is not {wrong}.", param, ctx)

    def _entry(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        """One entry of a mapping: a name, and a value in JSON (3, true, [0.1, 0.9]) or else a text."""
        name, is_entry, value = text.partition("=")
        if not is_entry or not name.strip():
            self.fail(f"{text!r} is not NAME=VALUE.", param, ctx)
        try:
            return name.strip(), msgspec.json.decode(value)
        except msgspec.DecodeError:
            return name.strip(), value


def _values(of: inspect.LiteralType) -> list[str]:
    return sorted(map(str, of.values), key=lambda value: (value != "auto", value))


def flag_name(leaf: Leaf) -> str:
    """``--kv-cache-memory`` for ``kv_cache.memory_bytes``."""
    if leaf.name in _ENTRY_FLAGS:
        return _ENTRY_FLAGS[leaf.name]
    if leaf.path in _FIELD_TERMS:
        return _FIELD_TERMS[leaf.path]
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


class SettingOption(click.Option):
    """A flag of a setting; ``section`` is where the help lists it."""

    section = COMMON
    place = 0


def option(leaf: Leaf, sections: Mapping[tuple[str, ...], str]) -> click.Option:
    """``sections``: the titles in the help, by the paths of the settings' sections."""
    name, parameter = flag_name(leaf), "__".join(leaf.path)
    if isinstance(leaf.type, inspect.BoolType):
        declared, kind, is_flag = f"{name}/--no-{name[2:]}", None, True
    else:
        declared, kind, is_flag = name, Setting(leaf), False
    shown = _default(leaf)
    text = _about(leaf).rstrip(".") + "."
    if isinstance(leaf.type, inspect.LiteralType) and len("|".join(_values(leaf.type))) > _WIDEST_VALUES:
        text += f" One of {', '.join(_values(leaf.type))}."
    text += f"  [default: {shown}]" if shown else ""
    is_mapping = isinstance(leaf.type, inspect.DictType)
    if is_mapping:
        text += "  Again for more."
    made = SettingOption(
        [declared, parameter], type=kind, is_flag=is_flag, multiple=is_mapping, default=None, help=text
    )
    if name in _COMMON_FLAGS:
        made.place = 1 + _COMMON_FLAGS.index(name)
    else:
        made.section = sections[leaf.path[:-1]]
    return made


def _sections(of: type[msgspec.Struct], word: str) -> dict[tuple[str, ...], str]:
    """The titles of a struct's sections: their paths, and the first sentence of what they say of themselves."""
    titles = {}
    for branch in branches(of):
        about = (getdoc(branch.type.cls) or "").partition("\n")[0].rstrip(".").partition(": ")
        summary = re.split(r", | \(", about[2] if about[0] == "One model" else about[0])[0]
        titles[branch.path] = f"{'.'.join(branch.path) or word} ({summary[:1].lower()}{summary[1:]})"
    return titles


def _about(leaf: Leaf) -> str:
    """The description of a setting, with flags in the place of the names of other settings."""
    beside = {other.name: other for other in (*MODEL_LEAVES, *SERVER_LEAVES)}
    named = {".".join(other.path): other for other in NODES_LEAVES}
    beside |= {other.name: other for other in (*MODEL_LEAVES, *SERVER_LEAVES) if other.path[:-1] == leaf.path[:-1]}

    def flagged(found: re.Match[str]) -> str:
        other = named.get(found["name"]) or beside.get(found["name"])
        is_named = found["mark"] or (other is not None and ("_" in other.name or "." in found["name"]))
        return flag_name(other) if other is not None and is_named else found[0]

    return re.sub(
        r"(?<![\w./-])(?P<mark>'?)(?P<name>(?:nodes\.)?[a-z]\w+)(?P=mark)(?![\w/-])", flagged, leaf.description
    )


def _default(leaf: Leaf) -> str:
    if isinstance(leaf.default, bool):
        return "yes" if leaf.default else "no"
    if isinstance(leaf.default, int) and leaf.is_size:
        return size_text(leaf.default)
    if isinstance(leaf.default, int | float):
        return number_text(leaf.default)
    return leaf.default if isinstance(leaf.default, str) else ""


SERVER_LEAVES = leaves(ServerConfig, skip=("memory_bytes", "reload"))
# Settings of several replicas or servers belong in the file, where they are seen together.
MODEL_LEAVES = leaves(
    ModelConfig,
    skip=(
        *("source", "remote", "remotes", "routing", "breaker", "retry", "cache", "load"),
        *("pipeline", "inputs", "outputs", "preprocess", "postprocess", "sequence"),
        *(
            "roles",
            "rollout",
            "drift",
            "scaling",
            "placement",
            "memory_fraction",
            "batching.buckets",
            "batching.preferred_sizes",
        ),
    ),
)


NODES_LEAVES = [replace(leaf, path=("nodes", *leaf.path)) for leaf in leaves(NodesConfig) if leaf.path == ("listen",)]
"""Other settings of nodes concern more than one server or model."""


def _flags(of: list[Leaf], sections: Mapping[tuple[str, ...], str]) -> Callable[[Decorated], Decorated]:
    def decorate(function: Decorated) -> Decorated:
        for leaf in reversed(of):
            made = option(leaf, sections)
            params: list[click.Option] = function.__dict__.setdefault("__click_params__", [])
            params.append(made)
        return function

    return decorate


def server_flags(function: Decorated) -> Decorated:
    """Add a flag for each field of ServerConfig that concerns a server of one model, and for where nodes join it."""
    of_nodes = {("nodes", *path): title for path, title in _sections(NodesConfig, "nodes").items()}
    function = _flags(NODES_LEAVES, of_nodes)(function)
    return _flags(SERVER_LEAVES, _sections(ServerConfig, "server"))(function)


def model_flags(function: Decorated) -> Decorated:
    """Add a flag for each field of ModelConfig that concerns one copy of a model."""
    return _flags(MODEL_LEAVES, _sections(ModelConfig, "model"))(function)


def given(of: list[Leaf], values: Mapping[str, object]) -> dict[str, object]:
    """The nested settings that flags set, without those left alone."""
    tree: dict[str, object] = {}
    for leaf in of:
        value = values.get("__".join(leaf.path))
        if isinstance(value, tuple) and isinstance(leaf.type, inspect.DictType):
            value = dict(value) or None
        if value is None:
            continue
        node = tree
        for part in leaf.path[:-1]:
            child = node.setdefault(part, {})
            assert isinstance(child, dict)
            node = child
        node[leaf.name] = value
    return tree


# -- messages ------------------------------------------------------------------------------------

_NAMES: Final = {
    **{".".join(leaf.path): leaf for leaf in MODEL_LEAVES},
    **{f"server.{'.'.join(leaf.path)}": leaf for leaf in SERVER_LEAVES},
    **{".".join(leaf.path): leaf for leaf in NODES_LEAVES},
}
_NAME: Final = "|".join(re.escape(name) for name in sorted(_NAMES, key=len, reverse=True))
_OF_A_MODEL: Final = r"models\.(?:\"[^\"]*\"|[^\s:\"]+?)"
# A setting of one word is taken for one only where the model stands before it: "seed" and "device" are words as well.
_NAMED: Final = re.compile(
    rf"(?<![\w.-])(?:(?P<prefix>{_OF_A_MODEL}\.)?(?P<name>{_NAME})(?!\w)(?P<entry>\.\w+)?(?P<value>: true\b(?: "
    r"\(--[\w-]+\))?|: [^\s'\"]+)?)"
)
_PLACE: Final = re.compile(rf"(?<![\w.-]){_OF_A_MODEL}(?:\.source)?: ")


def in_flags(sentence: str, *, is_alone: bool = False) -> str:
    """A message with flags in the place of the settings' names: for a model that was named on the command line, where
    there is no file to change. ``models.iris.kv_cache.memory_bytes`` is ``--kv-cache-memory``. ``is_alone``: there is
    one model, which need not be named."""

    def flagged(found: re.Match[str]) -> str:
        leaf, entry, value = _NAMES[found["name"]], found["entry"] or "", found["value"] or ""
        if not found["prefix"] and "_" not in found["name"] and "." not in found["name"] + entry:
            return found[0]
        flag = flag_name(leaf)
        if isinstance(leaf.type, inspect.DictType):
            return f"{flag} {entry[1:]}{value.replace(': ', '=', 1)}" if entry else flag + value
        if isinstance(leaf.type, inspect.BoolType) and value.startswith(": true"):
            return flag
        return flag + entry + value

    said = _NAMED.sub(flagged, sentence)
    return _PLACE.sub("", said) if is_alone else said
