"""Tool calls in a model's text, in the Hermes form ``<tool_call>{"name", "arguments"}</tool_call>``.

The parser is incremental. A whole answer is parsed by the same parser, fed once, so streamed and whole answers agree.
Text that is not a well-formed call is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class ParsedCall(NamedTuple):
    """A tool call of a model."""

    name: str
    arguments: str  # a JSON object, compact


class ToolCallParser:
    """Splits generated text into plain text and tool calls.

    White space next to a call is dropped, so an answer of calls alone has no content. White space and the beginning of
    a tag are held back until more text shows whether a call follows. With ``only_one`` (``parallel_tool_calls: false``)
    calls after the first are dropped.
    """

    __slots__ = ("_after_call", "_buffer", "_in_call", "_only_one", "_space", "num_calls")

    def __init__(self, *, only_one: bool = False) -> None:
        self._buffer = ""
        self._space = ""  # white space before an open tag, returned if the call is not well-formed
        self._in_call = False
        self._after_call = False
        self._only_one = only_one
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Add ``text``; returns the plain text and the complete calls that are certain now."""
        self._buffer += text
        shown: list[str] = []
        calls: list[ParsedCall] = []
        while self._advance(shown, calls):
            pass
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[ParsedCall]]:
        """The remaining plain text and calls at the end of the text. A call without a closing tag counts if its JSON is
        complete."""
        shown: list[str] = []
        calls: list[ParsedCall] = []
        if self._in_call:
            self._end_call(self._buffer, "", shown, calls)
        else:
            rest = self._buffer.lstrip() if self._after_call else self._buffer
            shown.append(rest)
        self._buffer = ""
        return "".join(shown), calls

    def _advance(self, shown: list[str], calls: list[ParsedCall]) -> bool:
        """Parse to the next tag; False: more text is needed."""
        if self._in_call:
            body, tag, rest = self._buffer.partition(CLOSE)
            if not tag:
                return False
            self._buffer = rest
            self._end_call(body, CLOSE, shown, calls)
            return True
        if self._after_call:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
        before, tag, rest = self._buffer.partition(OPEN)
        if tag:
            text = before.rstrip()
            self._space = before[len(text) :]
            self._buffer = rest
            self._in_call = True
            self._show(text, shown)
            return True
        certain = len(before) - _undecided(before)
        self._buffer = before[certain:]
        self._show(before[:certain], shown)
        return False

    def _show(self, text: str, shown: list[str]) -> None:
        if text:
            shown.append(text)
            self._after_call = False

    def _end_call(self, body: str, close: str, shown: list[str], calls: list[ParsedCall]) -> None:
        self._in_call = False
        call = parse_call(body)
        if call is None:
            self._show(("" if self._after_call else self._space) + OPEN + body + close, shown)
        else:
            self._after_call = True
            if not (self._only_one and self.num_calls):
                self.num_calls += 1
                calls.append(call)
        self._space = ""


def _undecided(text: str) -> int:
    """Length of the tail that may belong to a following call: white space, then part of a tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            break
    else:
        length = 0
    head = text[: len(text) - length]
    return len(text) - len(head.rstrip())


class _CallJSON(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, msgspec.Raw] | str | None = None
    parameters: dict[str, msgspec.Raw] | None = None  # what some models write instead


_decoder = msgspec.json.Decoder(_CallJSON)


def parse_call(body: str) -> ParsedCall | None:
    """The call inside a pair of tags. None: it is not a JSON object with a name."""
    try:
        call = _decoder.decode(body.encode("utf-8"))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not call.name:
        return None
    if isinstance(call.arguments, str):
        return ParsedCall(call.name, call.arguments)
    arguments = call.arguments if call.arguments is not None else call.parameters
    return ParsedCall(call.name, msgspec.json.encode(arguments or {}).decode("utf-8"))


def parse_all(pieces: Iterable[str], *, only_one: bool = False) -> tuple[str, list[ParsedCall]]:
    """The text and the calls of a complete answer."""
    parser = ToolCallParser(only_one=only_one)
    texts: list[str] = []
    calls: list[ParsedCall] = []
    for piece in pieces:
        text, found = parser.feed(piece)
        texts.append(text)
        calls += found
    text, found = parser.finish()
    return "".join([*texts, text]), calls + found
