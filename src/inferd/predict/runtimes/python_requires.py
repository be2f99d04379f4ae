"""Whether the packages that a Python class requires are installed, in the required versions. Imports none of them."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from inferd.errors import ModelLoadError

_REQUIREMENT: Final = re.compile(
    r"\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[\w,.\s-]*\])?\s*(?P<versions>(?:(?:===|[<>=!~]=|<|>)\s*[\w.*+!-]+\s*,?\s*)*)"
)
_CLAUSE: Final = re.compile(r"(===|[<>=!~]=|<|>)\s*([\w.*+!-]+)")


def declared_requirements(file: Path, cls: str) -> object:
    """The class's ``requires``, read from the text, because importing the file may fail without these packages. Empty
    when there is none, or when it cannot be read without running it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()  # the import will report the problem
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for part in node.body:
                if isinstance(part, ast.Assign) and any(ast.unparse(target) == "requires" for target in part.targets):
                    with contextlib.suppress(ValueError):
                        return ast.literal_eval(part.value)
    return ()


def check_requirements(name: str, requires: object) -> None:
    """``requires`` is a list of requirements as pip writes them, without markers and addresses. Raises ModelLoadError
    with the line that installs what is missing."""
    if isinstance(requires, str) or not isinstance(requires, Iterable):
        raise ModelLoadError(
            f"{name}.requires is {requires!r}; expected a list such as ['pillow>=10'].", param="source"
        )
    missing, problems = [], []
    for requirement in requires:
        found = _REQUIREMENT.fullmatch(requirement) if isinstance(requirement, str) else None
        if found is None:
            raise ModelLoadError(
                f"{name}.requires has {requirement!r}; expected a name and versions, such as 'pillow>=10'.",
                param="source",
            )
        try:
            version = metadata.version(found["name"])
        except metadata.PackageNotFoundError:
            missing.append(requirement)
            problems.append(f"{found['name']} is not installed")
            continue
        clauses = _CLAUSE.findall(found["versions"])
        if not all(_holds(version, operator, wanted) for operator, wanted in clauses):
            missing.append(requirement)
            problems.append(f"{found['name']} {version} is installed")
    if missing:
        line = " ".join(f"'{requirement}'" for requirement in missing)
        raise ModelLoadError(
            f"{name} requires {', '.join(missing)}, but {', '.join(problems)}. Install it: pip install {line}",
            param="source",
        )


def _holds(version: str, operator: str, wanted: str) -> bool:
    if operator == "===":
        return version == wanted
    if wanted.endswith(".*"):
        prefix = _release(wanted[:-2])
        is_within = _padded(_release(version), len(prefix))[: len(prefix)] == prefix
        return is_within == (operator == "==")
    has, wants = _release(version), _release(wanted)
    if operator == "~=":
        return _compare(has, wants) >= 0 and _padded(has, len(wants))[: len(wants) - 1] == wants[:-1]
    order = _compare(has, wants)
    return {
        "==": order == 0,
        "!=": order != 0,
        ">=": order >= 0,
        "<=": order <= 0,
        ">": order > 0,
        "<": order < 0,
    }[operator]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without alpha, beta and local parts."""
    found = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _padded(release: tuple[int, ...], size: int) -> tuple[int, ...]:
    return release + (0,) * (size - len(release))


def _compare(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    size = max(len(first), len(second))
    a, b = _padded(first, size), _padded(second, size)
    return (a > b) - (a < b)
