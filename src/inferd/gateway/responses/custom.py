"""The input of a custom tool's call, read from the arguments of the function that stands for the tool."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from inferd.gateway.generation.items import INPUT

_HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_CHARS: Final = re.compile(
    r'(?P<plain>[^"\\]+)|\\(?P<short>["\\/bfnrt])'
    r"|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})(?:\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})|(?=[^\\]|\\[^u]|\\u(?![dD][c-f"
    r"C-F])[0-9a-fA-F]{2}))|\\u(?P<unit>(?![dD][89abAB])[0-9a-fA-F]{4})"
)
_SHORT: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT: Final = "�"  # in place of half a surrogate pair, which is no character


class InputText:
    """Decodes the text piece by piece. The result does not depend on where the pieces end."""

    __slots__ = ("_is_over", "_is_text", "_rest")

    def __init__(self) -> None:
        self._rest = ""  # of the arguments, that is not decoded yet
        self._is_text = False  # the text has begun
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """The characters of the text that the next part of the arguments has."""
        if self._is_over:
            return ""
        self._rest += arguments
        if not self._is_text:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._is_text = True
            self._rest = self._rest[head.end() :]
        decoded: list[str] = []
        at = 0
        while (found := _CHARS.match(self._rest, at)) is not None:
            decoded.append(_character(found))
            at = found.end()
        self._is_over = self._rest.startswith('"', at)
        self._rest = self._rest[at:]
        return "".join(decoded)

    def end(self) -> str:
        """The rest of the text after the last part: all of it where the arguments do not begin with it."""
        if self._is_text:
            return ""
        try:
            decoded = msgspec.json.decode(self._rest)
        except msgspec.DecodeError:
            return ""  # the answer was cut off before the text
        text = decoded.get(INPUT) if isinstance(decoded, dict) else None
        return text if isinstance(text, str) else self._rest


def _character(found: re.Match[str]) -> str:
    plain, short, high, low, unit = found.group("plain", "short", "high", "low", "unit")
    if plain is not None:
        return plain
    if short is not None:
        return _SHORT.get(short, short)
    if high is not None:
        if low is None:
            return _REPLACEMENT
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    character = chr(int(unit, 16))
    return _REPLACEMENT if "\ud800" <= character <= "\udfff" else character
