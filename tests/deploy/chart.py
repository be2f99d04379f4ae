"""The chart rendered in Python: the part of Go's templates and of sprig that its files use, and nothing more.

What is not known here is an error, so a template cannot quietly become more than this. `test_helm.py` (a soak test)
compares with Helm itself.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "inferd"
RELEASE = {"Name": "inferd", "Namespace": "default", "Service": "Helm"}

Values = dict[str, Any]
Object = dict[str, Any]

_ACTION = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


def default_values() -> Values:
    return copy.deepcopy(_default_values())


@functools.cache
def _default_values() -> Values:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def merged(values: Values, other: Mapping[str, Any]) -> Values:
    """Values with others over them, as Helm merges: maps by key, everything else as a whole, null removes a key."""
    result = copy.deepcopy(values)
    for key, value in other.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def render(values: Values) -> list[Object]:
    """The objects of the chart."""
    return rendered(values)[0]


def rendered(values: Values) -> tuple[list[Object], set[tuple[str, ...]]]:
    """The objects of the chart, and the paths of the values that its templates read."""
    found: list[Object] = []
    template = Template(values)
    for file in sorted((CHART / "templates").glob("*.yaml")):
        found += [one for one in yaml.safe_load_all(template.text(file.read_text())) if one]
    return found, template.used


@functools.cache
def chart_file() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "Chart.yaml").read_text()))


def notes(values: Values) -> str:
    return Template(values).text((CHART / "templates" / "NOTES.txt").read_text())


class _Block(NamedTuple):
    """An action with what is between it and its end: if, with, range or define."""

    kind: str
    argument: str
    parts: list[Any]
    other: list[Any]


class Template:
    """Renders texts with the values of a release."""

    def __init__(self, values: Values) -> None:
        chart = chart_file()
        self._root = {
            "Values": values,
            "Release": RELEASE,
            "Chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
        }
        self._named: dict[str, list[Any]] = {}
        self.used: set[tuple[str, ...]] = set()
        """The paths of values that were read."""

        for file in (CHART / "templates").glob("*.tpl"):
            self.text(file.read_text())

    def text(self, source: str) -> str:
        return self._run(_parts_of(source), self._root)

    def _run(self, parts: list[Any], dot: Any) -> str:
        out = []
        for part in parts:
            if isinstance(part, str):
                out.append(part)
            elif not isinstance(part, _Block):
                out.append(_shown(self._pipeline(part[0], dot)))
            elif part.kind == "define":
                self._named[part.argument.strip('"')] = part.parts
            elif part.kind == "if":
                out.append(self._run(part.parts if self._pipeline(part.argument, dot) else part.other, dot))
            elif part.kind == "with":
                value = self._pipeline(part.argument, dot)
                out.append(self._run(part.parts, value) if value else self._run(part.other, dot))
        return "".join(out)

    # -- pipelines --------------------------------------------------------------------------

    def _pipeline(self, text: str, dot: Any) -> Any:
        tokens = _TOKEN.findall(text)
        value, rest = self._commands(tokens, dot)
        assert not rest, text
        return value

    def _commands(self, tokens: list[str], dot: Any) -> tuple[Any, list[str]]:
        value: Any = None
        is_first = True
        while True:
            arguments: list[Any] = []
            name = ""
            while tokens and tokens[0] not in ("|", ")"):
                token, tokens = tokens[0], tokens[1:]
                if token == "(":
                    inner, tokens = self._commands(tokens, dot)
                    assert tokens[0] == ")"
                    tokens = tokens[1:]
                    arguments.append(inner)
                elif not arguments and not name and token in _FUNCTIONS:
                    name = token
                else:
                    arguments.append(self._term(token, dot))
            if not is_first:
                arguments.append(value)
            if name == "include":
                value = self._run(self._named[arguments[0]], arguments[1])
            elif name:
                value = _FUNCTIONS[name](*arguments)
            else:
                (value,) = arguments
            is_first = False
            if not tokens or tokens[0] == ")":
                return value, tokens
            tokens = tokens[1:]

    def _term(self, token: str, dot: Any) -> Any:
        if token.startswith('"'):
            return token[1:-1]
        if token == ".":
            return dot
        if token.startswith("."):
            value = dot
            path = token[1:].split(".")
            if path[0] == "Values":
                self.used.add(tuple(path[1:]))
            for step in path:
                assert isinstance(value, Mapping), f"{token} of {value!r}"
                value = value.get(step)
            return value
        assert token.isdigit(), f"{token} is not known"
        return int(token)


@functools.cache
def _parts_of(source: str) -> list[Any]:
    parts, rest = _parsed(_tokens(source))
    assert not rest, "an end without a beginning"
    return parts


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Texts and actions, with the white space trimmed that the actions ask for."""
    at, is_trimmed = 0, False
    for match in _ACTION.finditer(source):
        text = source[at : match.start()] + ("" if match[2] else match[1])
        if is_trimmed:
            text = text.lstrip()
        if match[2]:
            text = text.rstrip()
        yield "text", text
        if not match[3].startswith("/*"):
            yield "action", match[3]
        at, is_trimmed = match.end(), bool(match[4])
    rest = source[at:]
    yield "text", rest.lstrip() if is_trimmed else rest


def _parsed(tokens: Iterator[tuple[str, str]]) -> tuple[list[Any], str]:
    """The parts until an end or an else, and which of them it was."""
    parts: list[Any] = []
    for kind, text in tokens:
        if kind == "text":
            parts.append(text)
            continue
        word, _, argument = text.partition(" ")
        if word in ("end", "else"):
            return parts, word
        if word in ("if", "with", "define"):
            inner, ended = _parsed(tokens)
            other: list[Any] = []
            if ended == "else":
                other, ended = _parsed(tokens)
            assert ended == "end", text
            parts.append(_Block(word, argument.strip(), inner, other))
        else:
            parts.append((text,))
    return parts, ""


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=False, width=10_000).removesuffix("\n").removesuffix("\n...")


_FUNCTIONS: dict[str, Any] = {
    "include": None,
    "add": lambda *numbers: sum(int(number) for number in numbers),
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "ceil": math.ceil,
    "default": lambda other, value=None: value or other,
    "eq": lambda one, other: one == other,
    "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.split("\n")),
    "not": lambda value: not value,
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "quote": lambda value: '"' + str(value) + '"',
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toYaml": _yaml,
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "trunc": lambda width, text: text[:width],
}
