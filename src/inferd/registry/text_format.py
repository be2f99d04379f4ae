"""Protobuf's text format, as people write it into config.pbtxt, read into structs.

The library protobuf parses; its messages are described after the structs, so that these say once what fields there are.
The library is optional and its import takes long, so it is imported with the first text that is read.
"""

from __future__ import annotations

import functools
import re
import typing
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from inferd.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto
    from google.protobuf.message import Message
    from google.protobuf.text_format import ParseError

MAX_BYTES: Final = 1 << 20

S = TypeVar("S", bound=msgspec.Struct)


class TextFormatError(ValueError):
    """What is wrong, with its line and its field."""


def parse(text: str, kind: type[S], unknown: list[str]) -> S:
    """The text as a struct, whose tuples are repeated fields, whose dicts are maps and whose literals are enums. Fields
    that the struct has not are left out and named in ``unknown``. Raises TextFormatError, and ConfigError where the
    library is not installed."""
    if len(text) > MAX_BYTES:
        raise TextFormatError(f"it has {len(text)} characters; expected at most {MAX_BYTES}")
    try:
        from google.protobuf import json_format, text_format
    except ImportError:
        raise ConfigError(
            "Reading a config.pbtxt needs the package protobuf, which is not installed: pip install 'inferd[triton]'.",
            param="models",
        ) from None
    message = _message_class(kind)()
    fields = _Fields(text, message)
    try:
        text_format.Parse("\n".join(fields.known_lines), message)
    except text_format.ParseError as error:
        raise TextFormatError(fields.told(error)) from None
    unknown += fields.unknown
    found = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return msgspec.convert(found, kind, strict=False, str_keys=True)


# -- which fields there are ----------------------------------------------------------------------

_ENDS: Final = {"{": "}", "<": ">", "[": "]"}


class _Field(NamedTuple):
    path: str
    message: Any  # its type's descriptor; None for a scalar
    is_known: bool


class _Fields:
    """The fields of a text. Unknown ones are removed before the library reads the text. The library's own option to
    ignore unknown fields does not name them, and refuses a list of them without a colon (``model_warmup [ {} ]``)."""

    def __init__(self, text: str, message: Message) -> None:
        """Raises TextFormatError where a bracket of an unknown field does not end."""
        from google.protobuf.text_format import Tokenizer

        lines = text.split("\n")
        signs = [list(line) for line in lines]
        self._pool = message.DESCRIPTOR.file.pool
        self._names: list[tuple[tuple[int, int], str]] = []  # line and column, from 1, and path
        names: dict[str, None] = {}
        field = _Field("", message.DESCRIPTOR, True)
        begun = [(field, "")]  # by a bracket, and the one that ends it
        is_value = False  # whether a word is a value: behind a colon
        tokens: Any = Tokenizer(lines)
        while not tokens.AtEnd():
            token = tokens.token
            tokens.NextToken()
            line, column = _place(tokens.ParseErrorPreviousToken(""))
            within, end = begun[-1]
            if token in _ENDS:
                begun.append((field, _ENDS[token]))
            elif token == end:
                field, _ = begun.pop()
            elif end != "]" and within.message is not None and not is_value and re.match(r"\w", token):
                found = within.message.fields_by_name.get(token)
                path = f"{within.path}.{token}".lstrip(".")
                field = _Field(path, found.message_type if found is not None else None, found is not None)
                self._names.append(((line, column), path))
                if found is None:
                    names[path] = None
            if not field.is_known:
                signs[line - 1][column - 1 : column - 1 + len(token)] = " " * len(token)
            is_value = token == ":"
        if not begun[-1][0].is_known:
            raise TextFormatError(f"{field.path} does not end; expected {begun[-1][1]!r}")
        self.unknown = tuple(names)
        self.known_lines = ["".join(line) for line in signs]
        """The text with blanks in the place of unknown fields."""

    def told(self, error: ParseError) -> str:
        """The library's sentence, with the field that it is about."""
        line, column = _place(error)
        said = str(error).removeprefix(f"{line}:{column} : ")
        said = said.removeprefix(f"'{self.known_lines[line - 1]}': ").removeprefix("'': ").rstrip(".")
        enum = re.match(r'Enum type "([\w.]+)"', said)
        if enum is not None:
            said += f"; expected one of {', '.join(self._pool.FindEnumTypeByName(enum[1]).values_by_name)}"
        paths = [path for place, path in self._names if place <= (line, column)]
        return ": ".join([f"line {line}", *paths[-1:], said])


def _place(error: ParseError) -> tuple[int, int]:
    line, column = error.GetLine(), error.GetColumn()
    assert line is not None
    assert column is not None
    return line, column


# -- messages after structs ----------------------------------------------------------------------


@functools.cache
def _message_class(kind: type[msgspec.Struct]) -> type[Message]:
    """The protobuf message with the struct's fields. It has the syntax proto2, which records the fields that are
    set."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="structs.proto", syntax="proto2")
    pending: list[type[msgspec.Struct]] = [kind]
    for one in pending:
        message = file.message_type.add(name=one.__name__)
        for name, hint in typing.get_type_hints(one).items():
            pending += [other for other in _add_field(message, name, hint) if other not in pending]
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(kind.__name__))


_SCALARS: Final = {bool: "TYPE_BOOL", int: "TYPE_INT64", float: "TYPE_DOUBLE", str: "TYPE_STRING"}


def _add_field(message: DescriptorProto, name: str, hint: Any) -> list[type[msgspec.Struct]]:
    """Returns the structs that the field's type names."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    field = message.field.add(name=name, number=len(message.field) + 1)
    field.label = field.LABEL_REPEATED if origin in (tuple, dict) else field.LABEL_OPTIONAL
    if origin is dict:
        entry = message.nested_type.add(name=_camel_case(name) + "Entry")
        entry.options.map_entry = True
        field.type, field.type_name = field.TYPE_MESSAGE, f".{message.name}.{entry.name}"
        return [*_add_field(entry, "key", arguments[0]), *_add_field(entry, "value", arguments[1])]
    if origin is Literal:
        enum = message.enum_type.add(name=_camel_case(name))
        for number, word in enumerate(arguments):
            enum.value.add(name=word, number=number)
        field.type, field.type_name = field.TYPE_ENUM, f".{message.name}.{enum.name}"
        return []
    bare = arguments[0] if arguments else hint  # of a tuple, or beside None
    if bare in _SCALARS:
        field.type = getattr(field, _SCALARS[bare])
        return []
    field.type, field.type_name = field.TYPE_MESSAGE, f".{bare.__name__}"
    return [bare]


def _camel_case(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
