"""Walking a tree of msgspec structs: what each field allows, and every problem of a document.

Knows struct types, paths and messages. Does not know files, the environment, flags or which tree it walks. msgspec's
own decoder stops at the first problem; the operator needs all of them at once.
"""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import msgspec
from msgspec import inspect

from inferd.config.patterns import IN_WORDS
from inferd.config.units import NotAllowedError, Scale, is_size, number_text, scale_of

Path = tuple[str | int, ...]
"""Names of fields and sections, and places in lists counted from 0."""

_SHORT = reprlib.Repr()  # a few bytes of YAML can stand for gigabytes of lists
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


class Text(str):
    """A value from the environment or a flag: text that stands for a number, a truth or nothing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a document: its place, and a sentence with the value and what is allowed."""

    path: Path
    sentence: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: a field that holds a value, not a section.

    In the path ``*`` stands for any name, ``[]`` for any place in a list.
    """

    path: tuple[str, ...]
    type: inspect.Type
    optional: bool
    required: bool
    default: object
    description: str

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def is_size(self) -> bool:
        return is_size(self.name)

    @property
    def allowed(self) -> str:
        return _allowed(self.type, scale_of(self.name))


@dataclass(frozen=True, slots=True)
class Branch:
    """A section: its path, its struct type and the fields directly in it."""

    path: tuple[str, ...]
    type: inspect.StructType
    leaves: tuple[Leaf, ...]


def dotted(path: Path) -> str:
    """A path in the form ``models.chat.remotes[1].url``. Ambiguous names are quoted, and control characters of
    terminals are escaped."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part == "[]":
            text += part
        else:
            shown = part if part.isprintable() else part.encode("unicode_escape").decode("ascii")
            text += ("." if text else "") + (part if re.fullmatch(r"[\w*-]+", part) else f'"{shown}"')
    return text


@functools.cache
def _type_of(cls: type[msgspec.Struct]) -> inspect.Type:
    """The type with all below it, which takes msgspec some ten milliseconds for the whole configuration."""
    return inspect.type_info(cls)


def branches(cls: type[msgspec.Struct], path: tuple[str, ...] = ()) -> Iterator[Branch]:
    """Every section of a tree, outermost first, in the order of the fields."""
    yield from _branches(_struct(_type_of(cls)), path)


def _branches(node: inspect.StructType, path: tuple[str, ...]) -> Iterator[Branch]:
    leaves: list[Leaf] = []
    inner: list[tuple[inspect.StructType, tuple[str, ...]]] = []
    for field in node.fields:
        here = (*path, field.name)
        bare, description, optional = _unwrap(field.type)
        if isinstance(bare, inspect.StructType):
            inner.append((bare, here))
        elif isinstance(bare, inspect.DictType) and isinstance(_unwrap(bare.value_type)[0], inspect.StructType):
            inner.append((_struct(_unwrap(bare.value_type)[0]), (*here, "*")))
        elif (item := _item_type(bare)) is not None and isinstance(_unwrap(item)[0], inspect.StructType):
            inner.append((_struct(_unwrap(item)[0]), (*here, "[]")))
        else:
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            leaves.append(Leaf(here, bare, optional, field.required, default, description))
    yield Branch(path, node, tuple(leaves))
    for child, child_path in inner:
        yield from _branches(child, child_path)


def check(cls: type[msgspec.Struct], document: object) -> tuple[object, list[Problem]]:
    """The document with texts and sizes turned into values, and everything that is wrong with it."""
    problems: list[Problem] = []
    value = _check(_type_of(cls), long_form(cls, document), (), problems)
    return value, problems


def long_form(cls: type[msgspec.Struct], document: object) -> object:
    """The document with a section in place of each text that is short for one, so that documents can be merged."""
    return _long_form(_type_of(cls), document)


def _long_form(node: inspect.Type, value: object) -> object:
    bare = _unwrap(node)[0]
    if isinstance(bare, inspect.StructType):
        short: str = getattr(bare.cls, "short", "")
        if short and isinstance(value, str):
            return {short: value}
        types = {field.encode_name: field.type for field in bare.fields}
        if _is_mapping(value):
            return {key: _long_form(types[key], item) if key in types else item for key, item in value.items()}
    elif isinstance(bare, inspect.DictType) and _is_mapping(value):
        return {key: _long_form(bare.value_type, item) for key, item in value.items()}
    elif (item_type := _item_type(bare)) is not None and isinstance(value, list):
        return [_long_form(item_type, item) for item in value]
    return value


def parse(leaf: Leaf, value: object) -> object:
    """The value of a leaf that was given as ``value``. Raises NotAllowedError with what is allowed."""
    if leaf.optional and _is_nothing(value):
        return None
    problems: list[Problem] = []
    found = _check_bare(leaf.type, value, (leaf.name,), problems)
    if problems:
        raise NotAllowedError(leaf.allowed)
    return found


def _allowed(node: inspect.Type, scale: Scale | None = None) -> str:
    if isinstance(node, inspect.LiteralType):
        values = sorted((str(value) for value in node.values), key=lambda value: (value != "auto", value))
        return "one of " + ", ".join(values)
    if isinstance(node, inspect.BoolType):
        return "true or false"
    if isinstance(node, inspect.IntType | inspect.FloatType):
        noun = "an integer" if isinstance(node, inspect.IntType) else "a number"
        if scale is not None:
            noun = scale.noun
        return noun + _range(node)
    if isinstance(node, inspect.StrType):
        return IN_WORDS.get(node.pattern, f"text that matches {node.pattern}") if node.pattern else "text"
    if _item_type(node) is not None:
        return "a list"
    if isinstance(node, inspect.StructType | inspect.DictType):
        return "a section with fields of its own"
    return "a different value"


def _range(node: inspect.IntType | inspect.FloatType) -> str:
    if node.ge is not None and node.le is not None:
        return f" from {number_text(node.ge)} to {number_text(node.le)}"
    bounds = (("at least", node.ge), ("above", node.gt), ("at most", node.le), ("below", node.lt))
    said = [f"{word} {number_text(bound)}" for word, bound in bounds if bound is not None]
    return ", " + " and ".join(said) if said else ""


def _check(node: inspect.Type, value: object, path: Path, problems: list[Problem]) -> object:
    bare, _, optional = _unwrap(node)
    if optional and _is_nothing(value):
        return None
    if isinstance(bare, inspect.StructType):
        return _check_struct(bare, value, path, problems)
    return _check_bare(bare, value, path, problems)


def _check_bare(node: inspect.Type, value: object, path: Path, problems: list[Problem]) -> object:
    """The value, when it is neither a section nor unset."""
    if isinstance(node, inspect.DictType):
        if not _is_mapping(value):
            of = "its own section" if isinstance(_unwrap(node.value_type)[0], inspect.StructType) else "a value"
            problems.append(_bad(path, value, f"names, each with {of}"))
            return value
        if isinstance(node.key_type, inspect.LiteralType):
            names = [str(name) for name in node.key_type.values]
            problems += [_unknown(path, str(key), names) for key in value if key not in names]
        return {str(key): _check(node.value_type, item, (*path, str(key)), problems) for key, item in value.items()}
    item_type = _item_type(node)
    if item_type is not None:
        return _check_list(item_type, value, path, problems)
    try:
        return _leaf(node, value, scale_of(path[-1]) if path else None)
    except NotAllowedError as wrong:
        close = _closest(str(value), [str(v) for v in node.values]) if isinstance(node, inspect.LiteralType) else None
        problems.append(_bad(path, value, str(wrong), close))
        return value


def _check_list(item: inspect.Type, value: object, path: Path, problems: list[Problem]) -> object:
    """A list, or entries numbered from 0: the environment can write no list of sections."""
    is_section = isinstance(_unwrap(item)[0], inspect.StructType)
    if isinstance(value, Text) and not is_section:
        value = [Text(part.strip()) for part in value.split(",") if part.strip()]
    elif _is_mapping(value) and value and all(str(key).isdecimal() for key in value):
        numbered = {int(str(key)): section for key, section in value.items()}
        if sorted(numbered) != list(range(len(numbered))):
            said = ", ".join(map(str, sorted(numbered)))
            problems.append(Problem(path, f"its entries are numbered {said}; number them from 0 without gaps."))
            return value
        value = [numbered[index] for index in range(len(numbered))]
    if not isinstance(value, list | tuple):
        wanted = "a list of sections, each beginning with '- '" if is_section else "a list"
        problems.append(_bad(path, value, wanted))
        return value
    return [_check(item, entry, (*path, index), problems) for index, entry in enumerate(value)]


def _check_struct(node: inspect.StructType, value: object, path: Path, problems: list[Problem]) -> object:
    names = [field.encode_name for field in node.fields]
    if value is None:
        value = {}  # a section whose fields are all commented out
    if not _is_mapping(value):
        problems.append(_bad(path, value, "a section with the fields " + ", ".join(names)))
        return value
    found: dict[str, object] = {}
    for key in value:
        if key not in names:
            problems.append(_unknown(path, str(key), names))
    for field in node.fields:
        here = (*path, field.encode_name)
        if field.encode_name in value:
            found[field.encode_name] = _check(field.type, value[field.encode_name], here, problems)
        elif field.required:
            description = _unwrap(field.type)[1]
            problems.append(Problem(here, f"missing; give {description[:1].lower() + description[1:] or 'a value.'}"))
    return found


def _leaf(node: inspect.Type, value: object, scale: Scale | None) -> object:
    bare, _, optional = _unwrap(node)
    if optional and _is_nothing(value):
        return None
    if scale is not None and isinstance(value, str) and isinstance(bare, inspect.IntType):
        try:
            value = scale.read(value)
        except NotAllowedError as wrong:
            raise NotAllowedError(str(wrong) + _range(bare)) from None
    elif isinstance(value, Text):
        value = _untext(bare, value)
    refusal = NotAllowedError(_allowed(bare, scale))
    if isinstance(bare, inspect.LiteralType):
        if not any(value == choice and type(value) is type(choice) for choice in bare.values):
            raise refusal
    elif isinstance(bare, inspect.BoolType):
        if not isinstance(value, bool):
            raise refusal
    elif isinstance(bare, inspect.IntType):
        if not isinstance(value, int) or isinstance(value, bool) or not _in_range(bare, value):
            raise refusal
    elif isinstance(bare, inspect.FloatType):
        if not isinstance(value, int | float) or isinstance(value, bool) or not _in_range(bare, value):
            raise refusal
        try:
            return float(value)
        except OverflowError:  # an integer of hundreds of digits
            raise refusal from None
    elif isinstance(bare, inspect.StrType) and (
        not isinstance(value, str) or (bare.pattern and not re.search(bare.pattern, value))
    ):
        raise refusal
    # Anything richer is msgspec's to check when the tree is built.
    return value


def _untext(node: inspect.Type, text: str) -> object:
    plain = text.strip()
    if isinstance(node, inspect.AnyType):  # an option: JSON (3, true, [0.1, 0.9]) or else a text
        try:
            return msgspec.json.decode(plain)
        except msgspec.DecodeError:
            return str(text)
    if isinstance(node, inspect.BoolType):
        truths = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        return truths.get(plain.lower(), str(text))
    number: type[int] | type[float] | None = None
    if isinstance(node, inspect.IntType) or (isinstance(node, inspect.LiteralType) and _all_ints(node)):
        number = int
    elif isinstance(node, inspect.FloatType):
        number = float
    if number is not None:
        try:
            return number(plain)
        except ValueError:
            return str(text)
    return str(text)


def _item_type(node: inspect.Type) -> inspect.Type | None:
    """What a list holds; None where the type is no list."""
    if isinstance(node, inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType):
        return node.item_type
    return None


def _all_ints(node: inspect.LiteralType) -> bool:
    return all(isinstance(value, int) for value in node.values)


def _in_range(node: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (
        value == value  # not NaN
        and (node.ge is None or value >= node.ge)
        and (node.gt is None or value > node.gt)
        and (node.le is None or value <= node.le)
        and (node.lt is None or value < node.lt)
    )


def _unwrap(node: inspect.Type) -> tuple[inspect.Type, str, bool]:
    """The type under its metadata and its ``| None``; its description; whether None is allowed."""
    description, optional = "", False
    while True:
        if isinstance(node, inspect.Metadata):
            description = description or str((node.extra_json_schema or {}).get("description", ""))
            node = node.type
        elif isinstance(node, inspect.UnionType):
            others = tuple(kind for kind in node.types if not isinstance(kind, inspect.NoneType))
            optional = optional or len(others) < len(node.types)
            if len(others) != 1:
                return inspect.UnionType(others), description, optional
            node = others[0]
        else:
            return node, description, optional


def _struct(node: inspect.Type) -> inspect.StructType:
    assert isinstance(node, inspect.StructType)
    return node


def _is_mapping(value: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(value, Mapping)


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, Text) and value.strip().lower() in ("", "none", "null"))


def _bad(path: Path, value: object, wanted: str, close: str | None = None) -> Problem:
    shown = repr(str(value)) if isinstance(value, str) else "nothing" if value is None else _SHORT.repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    ending = f"; did you mean {close}?" if close else "."
    return Problem(path, f"{shown} is not {wanted}{ending}")


def _unknown(path: Path, key: str, names: list[str]) -> Problem:
    close = _closest(key, names)
    ending = f"did you mean {close}?" if close else "allowed: " + ", ".join(names) + "."
    return Problem((*path, key), f"no such field; {ending}")


def _closest(word: str, choices: list[str]) -> str | None:
    found = difflib.get_close_matches(word.lower(), choices, cutoff=0.6)
    if found:
        return found[0]
    # 'bf16' for 'bfloat16', 'max_seqs' for 'max_num_seqs': the letters in order.
    for choice in sorted(choices, key=len):
        letters = iter(choice)
        if len(word) > 2 and all(letter in letters for letter in word.lower()):
            return choice
    return None
