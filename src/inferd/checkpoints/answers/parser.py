"""The incremental parser of an answer: text, reasoning and calls from the text that a model generates.

The parser takes one character after another, so what it has returned after a text does not depend on how the text was
cut. Arguments are returned as they are generated. Text that is no well-formed call stays text: a call has begun when
its name is known and its arguments begin, and until then its text is held back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Mapping
from functools import cache
from itertools import groupby
from string import hexdigits
from typing import Any, Final, NamedTuple

import msgspec

from inferd.checkpoints.answers.format import (
    WHITE_SPACE,
    AnswerFormat,
    Arguments,
    Calls,
    Envelope,
    Id,
    Keywords,
    Name,
    Parameters,
    Part,
    Reasoning,
    Text,
)
from inferd.checkpoints.answers.values import escaped, is_text, value_json
from inferd.types import CallDelta, joined_calls

Steps = Generator[None, str, Any]
"""A part of the parser: it receives one character at a time, and the empty string at the end of the answer."""

_MAX_HELD: Final = 2048  # characters of a call before its name is known and its arguments begin
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/\-]{1,128}")
_OPENING: Final = frozenset("{[")
_CLOSING: Final = frozenset("}]")
_SCALAR: Final = frozenset("+-.0123456789Eaeflnrstu")
_BETWEEN: Final = _SCALAR | frozenset(" \t\n\r:,")
_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]+')
_ANY: Final = re.compile(r".+", re.DOTALL)
_NO_TAG: Final = re.compile(r"[^<]+")
_IN_CALLS: Final = {"call": "calls", "arguments": "calls"}
_QUOTES: Final = frozenset("\"'")
_PYTHON_ESCAPES: Final = {
    **{"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_MESSAGE_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER: Final = 256
_HEADER_START: Final = re.compile(r"\s*(<|to=|assistant|commentary|analysis|final|[a-z]{0,10}\Z)", re.DOTALL)
_RECIPIENT: Final = re.compile(r"to=functions\.([A-Za-z0-9_.\-]{1,128})")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")


class Parts(NamedTuple):
    """A part of an answer that became certain: text, reasoning or calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class _Sink:
    """Takes the text of one kind, and keeps its place among that of the others."""

    __slots__ = ("_found", "_kind", "is_muted")

    def __init__(self, kind: str, found: list[tuple[str, str]]) -> None:
        self.is_muted = False  # what comes is dropped
        self._kind = kind
        self._found = found

    def append(self, text: str) -> None:
        if text and not self.is_muted:
            self._found.append((self._kind, text))


class _NotACall(Exception):
    """The text held back is no call."""


class _CallOver(Exception):
    """A call that has begun goes on otherwise than its notation says; it ends here, or its end was read."""

    def __init__(self, *, has_ended: bool = False) -> None:
        self.has_ended = has_ended


class AnswerParser:
    """Parses one answer.

    ``tools``: the tools that may be called, each with the JSON Schema of its arguments; None: calls stay text. With
    ``only_one``, calls after the first are dropped. ``in_reasoning``: the prompt has opened the reasoning.
    """

    def __init__(
        self,
        notation: AnswerFormat,
        *,
        tools: Mapping[str, Any] | None = None,
        only_one: bool = False,
        splits_reasoning: bool = True,
        in_reasoning: bool = False,
    ) -> None:
        self.is_reasoning = False
        self.num_calls = 0
        self._tools = tools or {}
        self._only_one = only_one
        self._calls_format = notation.calls if tools is not None else None
        self._reasoning_format = notation.reasoning if splits_reasoning else None
        self._is_channels = notation.is_channels
        self._splits_reasoning = splits_reasoning
        self._parses_calls = tools is not None
        self._input = ""  # characters that were received and are not parsed
        self._at = 0
        self._held: str | None = None  # the text of what may be a call
        self._space = ""  # white space that is shown if more text follows
        self._drops_space = False
        # Characters that the current part passes on unchanged, and where they go.
        self._plain: re.Pattern[str] | None = None
        self._found: list[tuple[str, str]] = []  # kind and text, in their order; "call" has the name of a call
        self._text = _Sink("text", self._found)
        self._reasoning = _Sink("reasoning", self._found)
        self._arguments = _Sink("arguments", self._found)
        self._sink: _Sink | list[str] = self._text
        self._num_returned = 0  # calls
        self._steps = self._answer(in_reasoning)
        next(self._steps)

    def feed(self, text: str) -> list[Parts]:
        """Add generated text; returns what became certain with it, in its order."""
        self._input = self._input[self._at :] + text
        self._at = 0
        self._run()
        return self._take()

    def finish(self) -> list[Parts]:
        """What was held back, at the end of the answer."""
        while True:
            self._run()
            try:
                self._steps.send("")
            except StopIteration:
                return self._take()

    def _run(self) -> None:
        while self._at < len(self._input):
            if self._plain is not None:
                plain = self._plain.match(self._input, self._at)
                if plain is not None:
                    self._sink.append(plain[0])
                    self._at = plain.end()
                    continue
            character = self._input[self._at]
            self._at += 1
            if self._held is not None:
                self._held += character
                if len(self._held) > _MAX_HELD:
                    self._steps.throw(_NotACall)
                    continue
            self._steps.send(character)

    def _unread(self, text: str) -> None:
        """Give back the last characters that were received."""
        if self._held is not None and text:
            self._held = self._held[: -len(text)]
        self._input = text + self._input[self._at :]
        self._at = 0

    def _take(self) -> list[Parts]:
        parts: list[Parts] = []
        for kind, group in groupby(self._found, lambda found: _IN_CALLS.get(found[0], found[0])):
            if kind == "calls":
                parts.append(Parts(calls=joined_calls([self._call_part(*found) for found in group])))
            else:
                text = "".join(text for _, text in group)
                parts.append(Parts(text) if kind == "text" else Parts(reasoning=text))
        self._found.clear()
        return parts

    def _call_part(self, kind: str, text: str) -> CallDelta:
        if kind == "call":
            self._num_returned += 1
            return CallDelta(self._num_returned - 1, text)
        return CallDelta(self._num_returned - 1, None, text)

    # -- the answer -------------------------------------------------------------------------

    def _answer(self, in_reasoning: bool) -> Steps:
        reasoning, calls = self._reasoning_format, self._calls_format
        if self._is_channels:
            yield from self._messages()
            return
        if reasoning is not None and (in_reasoning or (yield from self._opens(reasoning.begin.strip()))):
            yield from self._reason(reasoning)
        if calls is None:
            yield from self._rest()
        elif calls.trigger:
            yield from self._content(calls)
        else:
            yield from self._bare(calls)

    def _opens(self, begin: str) -> Steps:
        """Whether the answer begins with a text. White space before it is dropped."""
        read = ""
        while True:
            character = yield
            read += character
            begun = read.lstrip(WHITE_SPACE)
            if begun == begin:
                return True
            if not character or not begin.startswith(begun):
                self._unread(read)
                return False

    def _reason(self, reasoning: Reasoning) -> Steps:
        self.is_reasoning = self._drops_space = True
        end = reasoning.end.strip()
        has_ended = yield from self._until(end, self._reasoning)
        self._space = ""
        self._drops_space = False
        if not has_ended:
            return
        self.is_reasoning = False
        for expected in reasoning.end[reasoning.end.index(end) + len(end) :]:
            character = yield
            if character != expected:
                self._unread(character)
                return

    def _content(self, calls: Calls) -> Steps:
        trigger = calls.trigger or calls.separator.strip()
        while (yield from self._until(trigger, self._text)):
            self._held = trigger
            try:
                yield from self._section(calls)
            except _NotACall:
                held, self._held = self._held or "", None  # empty: the answer ended behind a separator of calls
                self._say(held[:1], self._text)
                self._unread(held[1:])
        self._end_text()

    def _bare(self, calls: Calls) -> Steps:
        """Calls without a text before them: only the answer's beginning can be one."""
        character = yield
        while character.isspace():
            self._space += character
            character = yield
        self._held = character
        self._unread(character)
        try:
            yield from self._section(calls)
        except _NotACall:
            held, self._held = self._held or "", None
            if calls.content and held.startswith(calls.content):
                held = held[len(calls.content) :]
            if calls.separator.strip() and not calls.is_list:
                self._unread(held)
            else:
                self._say(held, self._text)
        if calls.separator.strip() and not calls.is_list:
            yield from self._content(calls)
        else:
            yield from self._rest()

    def _rest(self) -> Steps:
        """Text to the end of the answer."""
        if self._drops_space:
            character = yield from self._next()
            self._unread(character)
        self._text.append(self._space)
        self._space = ""
        self._plain, self._sink = _ANY, self._text
        while (yield):
            pass

    def _until(self, trigger: str, sink: _Sink | list[str]) -> Steps:
        """Text up to ``trigger``; False: the answer ended before it."""
        begun = ""  # of the trigger
        while True:
            if not (begun or self._space or self._drops_space):
                self._plain, self._sink = _plain_until(trigger[0]), sink
            character = yield
            self._plain = None
            if not character:
                if begun:
                    self._say(begun, sink)
                return False
            begun += character
            while begun and not trigger.startswith(begun):
                if begun[0].isspace():
                    if not self._drops_space:
                        self._space += begun[0]
                else:
                    self._say(begun[0], sink)
                begun = begun[1:]
            if begun == trigger:
                return True

    def _say(self, text: str, sink: _Sink | list[str]) -> None:
        if text:
            sink.append(self._space + text)
            self._space = ""
            self._drops_space = False

    def _end_text(self) -> None:
        self._text.append(self._space)
        self._space = ""

    # -- channels ---------------------------------------------------------------------------

    def _messages(self) -> Steps:
        """An answer of messages: ``<|channel|>analysis<|message|>...<|end|><|start|>assistant...``."""
        while True:
            header = ""
            while not header.endswith("<|message|>"):
                character = yield
                header += character
                if not character or len(header) > _MAX_HEADER or not _HEADER_START.match(header):
                    self._text.append(header)  # no header: the model has left its notation
                    yield from self._rest()
                    return
            recipient = _RECIPIENT.search(header)
            channel = header.partition("<|channel|>")[2]
            if recipient is not None and self._parses_calls:
                self._begin_call(recipient[1])
                sink = self._arguments
            elif channel.startswith("analysis") and self._splits_reasoning:
                self.is_reasoning = True
                sink = self._reasoning
            else:
                sink = self._text
            has_ended = yield from self._body_until_end(sink)
            self.is_reasoning = False
            if not has_ended:
                return

    def _body_until_end(self, sink: _Sink | list[str]) -> Steps:
        """The body of a message, up to a token that ends it; False: the answer ended before that."""
        begun = ""
        while True:
            self._plain, self._sink = (None if begun else _NO_TAG), sink
            character = yield
            self._plain = None
            if not character:
                sink.append(begun)
                return False
            begun += character
            if begun in _MESSAGE_ENDS:
                return True
            while begun and not any(end.startswith(begun) for end in _MESSAGE_ENDS):
                sink.append(begun[0])
                begun = begun[1:]

    # -- calls ------------------------------------------------------------------------------

    def _section(self, calls: Calls) -> Steps:
        """The calls after the trigger. Raises _NotACall, with their text in ``_held``."""
        is_first = True
        ends = [calls.end.strip()] if calls.end.strip() else []
        if calls.is_list:
            if (yield from self._next()) != "[":
                raise _NotACall
            ends = ["]"]
        begins = self._first_texts(calls.call, 0)
        while True:
            try:
                yield from self._call(calls, skips_first=is_first and not calls.begin.strip())
            except _CallOver as over:
                if not over.has_ended:
                    return
            finally:
                self._plain = None
            is_first = False
            if not calls.has_section:
                return
            separators = [calls.separator.strip()] if calls.separator.strip() else []
            found = yield from self._one_of([*separators, *begins, *ends])
            if found is None:
                return
            if found in ends:
                break
            if found in begins:
                self._unread(found)
            self._held = ""
        if calls.is_list and calls.end.strip():
            yield from self._one_of([calls.end.strip()])

    def _call(self, calls: Calls, *, skips_first: bool) -> Steps:
        """One call. Raises _NotACall before it has begun, and _CallOver after that."""
        for at, part in enumerate(calls.call):
            match part:
                case Text():
                    if not (skips_first and at == 0):
                        yield from self._literal(part.core)
                case Name():
                    following = self._first_texts(calls.call, at + 1)
                    name = yield from self._word(following)
                    if not isinstance(calls.call[at + 1], Arguments | Parameters):
                        yield from self._named(name, calls, at + 1)
                        return
                    yield from self._body(name, calls, at + 1)
                    return
                case Id():
                    yield from self._word(self._first_texts(calls.call, at + 1))
                case Envelope():
                    yield from self._envelope(part, calls)
                case _:
                    raise AssertionError(f"the arguments precede the name in {calls}")

    def _named(self, name: str, calls: Calls, at: int) -> Steps:
        """The parts between a name and the arguments, then the rest of the call."""
        for index in range(at, len(calls.call)):
            part = calls.call[index]
            match part:
                case Text():
                    yield from self._literal(part.core)
                case Id():
                    yield from self._word(self._first_texts(calls.call, index + 1))
                case _:
                    yield from self._body(name, calls, index)
                    return

    def _body(self, name: str, calls: Calls, at: int) -> Steps:
        """The arguments of a call, and what follows them."""
        part = calls.call[at]
        if isinstance(part, Parameters):
            yield from self._parameters(name, part, self._first_texts(calls.call, at + 1))
        elif isinstance(part, Keywords):
            yield from self._keywords(name)
        else:
            character = yield from self._next()
            if character != "{":
                raise _NotACall
            self._begin_call(name)
            yield from self._stream(character, calls)
        for after in calls.call[at + 1 :]:
            if isinstance(after, Text):
                yield from self._literal(after.core)

    def _begin_call(self, name: str) -> None:
        """A call has begun. Raises _NotACall where nothing but the tool's name tells a call from other text."""
        calls = self._calls_format
        if calls is not None and not calls.trigger and name not in self._tools:
            raise _NotACall
        self._held = None
        self._space = ""
        self._drops_space = True
        self._arguments.is_muted = self._only_one and self.num_calls > 0
        if not self._arguments.is_muted:
            self._found.append(("call", name))
            self.num_calls += 1

    def _stream(self, character: str, calls: Calls) -> Steps:
        """Arguments as JSON that begins with ``character``, as they are generated."""
        if (yield from self._json(character, self._arguments)):
            return
        # No JSON follows. The text up to the end of the call is what the model wrote as arguments.
        last = calls.call[-1]
        end = last.core if isinstance(last, Text) else calls.end.strip() or calls.trigger
        self._drops_space = False
        if not end:
            self._plain, self._sink = _ANY, self._arguments
            while (yield):
                pass
            raise _CallOver
        has_ended = yield from self._until(end, self._arguments)
        self._space = ""
        self._drops_space = True
        if has_ended and end == calls.trigger:
            self._unread(end)
        raise _CallOver(has_ended=isinstance(last, Text))

    def _envelope(self, part: Envelope, calls: Calls) -> Steps:
        if (yield from self._next()) != "{":
            raise _NotACall
        name: str | None = None
        arguments: str | None = None  # written before the name
        has_begun = False
        while (character := (yield from self._next())) != "}":
            if character == ",":
                continue
            key = yield from self._json_string(character)
            yield from self._literal(":")
            character = yield from self._next()
            if key == part.name_key and name is None:
                name = yield from self._json_string(character)
                if not name:
                    raise _NotACall
                if arguments is not None:
                    self._begin_call(name)
                    self._arguments.append(arguments)
                    has_begun = True
            elif (key == part.arguments_key or key in _ARGUMENT_KEYS) and not has_begun and arguments is None:
                if character == "{" and name is not None:
                    self._begin_call(name)
                    has_begun = True
                    yield from self._stream(character, calls)
                else:
                    arguments = yield from self._whole_arguments(character)
                    if name is not None:
                        self._begin_call(name)
                        self._arguments.append(arguments)
                        has_begun = True
            elif not (yield from self._json(character, [])):
                self._fail("")
        if name is None:
            self._fail("")
        elif not has_begun:
            self._begin_call(name)
            self._arguments.append("{}")

    def _whole_arguments(self, character: str) -> Steps:
        """Arguments that are held back: an object before the name, null, or an object written as a string."""
        written: list[str] = []
        if not (yield from self._json(character, written)):
            raise _NotACall
        try:
            value = msgspec.json.decode("".join(written))
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise _NotACall from None
        if value is None:
            return "{}"
        if isinstance(value, str):
            return value
        if not isinstance(value, dict):
            raise _NotACall
        return "".join(written)

    def _parameters(self, name: str, part: Parameters, ends: list[str]) -> Steps:
        """A text per parameter, as the members of a JSON object."""
        schema = self._tools.get(name)
        first = Text(part.before_key).core
        has_begun = False
        num_read = 0
        while True:
            separators = [part.separator.strip()] if num_read and part.separator.strip() else []
            found = yield from self._one_of([*separators, first, *ends], at_end=not ends and num_read >= 0)
            if not has_begun:
                if found is None:
                    raise _NotACall
                self._begin_call(name)
                has_begun = True
            if found is None or found in ends:
                if found:
                    self._unread(found)
                break
            if found in separators:
                yield from self._literal(first)
            key, is_string = yield from self._key(part)
            if key is None:
                break
            self._arguments.append(("{" if num_read == 0 else ", ") + msgspec.json.encode(key).decode() + ": ")
            num_read += 1
            if not (yield from self._value(key, schema, part, is_string)):
                return
        self._arguments.append("}" if num_read else "{}")

    def _key(self, part: Parameters) -> Steps:
        """A parameter's name, and whether the notation says that its value is a string."""
        strings, others = Text(part.after_key).core, Text(part.after_other_key).core
        read = ""
        while len(read) < 256:
            character = yield
            if not character:
                return None, None
            read += character
            if read.endswith(strings):
                return read[: -len(strings)].strip(), True if others else None
            if others and read.endswith(others):
                return read[: -len(others)].strip(), False
        self._unread(read)
        return None, None

    def _value(self, key: str, schema: Any, part: Parameters, is_string: bool | None) -> Steps:
        """A parameter's value; False: the answer ended within it."""
        before = part.after_key[len(part.after_key.rstrip()) :]
        after = part.after_value[: -len(part.after_value.lstrip())] if part.after_value.strip() else ""
        end = Text(part.after_value).core
        as_text = is_text(schema, key) if is_string is None else is_string
        for expected in before:
            character = yield
            if character != expected:
                self._unread(character)
                break
        if as_text:
            self._arguments.append('"')
        read = ""  # of a string: not shown yet; of other values: all
        while True:
            character = yield
            if not character:
                return False
            read += character
            if read.endswith(end):
                break
            if as_text:
                shown, read = _certain(read, after + end)
                self._arguments.append(escaped(shown))
        value = read[: -len(end)].removesuffix(after)
        if as_text:
            self._arguments.append(escaped(value) + '"')
        else:
            self._arguments.append(value_json(value, schema, key))
        return True

    def _keywords(self, name: str) -> Steps:
        """Keyword arguments as the members of a JSON object, up to the parenthesis behind them, which is left."""
        schema = self._tools.get(name)
        num_read = 0
        while True:
            character = yield from self._next()
            if num_read and character == ",":
                character = yield from self._next()
            key = ""
            while character == "_" or character.isalnum():
                key += character
                character = yield
            if character.isspace():
                character = yield from self._next()
            is_named = character == "=" and key.isidentifier()
            if num_read == 0:
                if not is_named and (key or character != ")"):
                    raise _NotACall
                self._begin_call(name)
            if not is_named:
                self._unread(character)
                break
            self._arguments.append(("{" if num_read == 0 else ", ") + msgspec.json.encode(key).decode() + ": ")
            num_read += 1
            if not (yield from self._keyword_value(key, schema)):
                return
        self._arguments.append("}" if num_read else "{}")

    def _keyword_value(self, key: str, schema: Any) -> Steps:
        """A literal of Python or JSON, up to the comma or the parenthesis behind it; False: the answer ended in it."""
        character = yield from self._next()
        if character and character in _QUOTES:
            if not (yield from self._python_string(character)):
                return False
            character = yield from self._next()
            while character and character not in ",)":
                character = yield
            self._unread(character)
            return bool(character)
        read, depth, quote = "", 0, ""
        while character and (depth or quote or character not in ",)"):
            read += character
            if quote:
                if character == "\\":
                    read += yield
                elif character == quote:
                    quote = ""
            elif character in _QUOTES:
                quote = character
            else:
                depth += (character in "([{") - (character in ")]}")
            character = yield
        self._unread(character)
        if character:
            self._arguments.append(value_json(read.strip(), schema, key))
        return bool(character)

    def _python_string(self, quote: str) -> Steps:
        """A string of Python after its first quotation mark, as JSON; False: the answer ended in it."""
        self._arguments.append('"')
        while True:
            character = yield
            if character == quote:
                self._arguments.append('"')
                return True
            if character == "\\":
                character = yield
                width = _HEX_DIGITS.get(character)
                if width is not None:
                    digits = ""
                    while len(digits) < width and (digit := (yield)) and digit in hexdigits:
                        digits += digit
                    if len(digits) < width:
                        self._unread(digit)
                        self._arguments.append("\\\\" + character + digits)
                    elif width == 8:
                        self._arguments.append(escaped(chr(min(int(digits, 16), sys.maxunicode))))
                    else:
                        self._arguments.append("\\u" + digits.rjust(4, "0"))
                    continue
                if character and character not in _PYTHON_ESCAPES:
                    self._arguments.append("\\\\")
                character = _PYTHON_ESCAPES.get(character, character)
            elif not character:
                return False
            self._arguments.append(escaped(character))

    # -- texts ------------------------------------------------------------------------------

    def _first_texts(self, parts: tuple[Part, ...], at: int) -> list[str]:
        """The texts with which the parts from ``at`` on may begin."""
        if at == len(parts):
            return []
        match parts[at]:
            case Text() as text:
                return [text.core]
            case Parameters() as parameters:
                return [Text(parameters.before_key).core, *self._first_texts(parts, at + 1)]
            case Arguments() | Envelope():
                return ["{"]
            case _:
                return []

    def _next(self) -> Steps:
        """The next character that is no white space."""
        while (character := (yield)).isspace():
            pass
        return character

    def _literal(self, text: str) -> Steps:
        """A fixed text, after any white space."""
        read = ""
        character = (yield) if text.isspace() else (yield from self._next())
        while True:
            if not character and self._held is None:
                return  # the answer ends within a call that has begun
            read += character
            if read == text:
                return
            if not character or not text.startswith(read):
                self._fail(read)
            character = yield

    def _one_of(self, texts: list[str], *, at_end: bool = False) -> Steps:
        """One of some fixed texts, after any white space; None: something else follows, or nothing."""
        read = yield from self._next()
        while read not in texts:
            if not any(text.startswith(read) for text in texts):
                self._unread(read)
                return None
            character = yield
            if not character:
                return None
            read += character
        return read

    def _word(self, ends: list[str]) -> Steps:
        """A name or an identifier, up to one of some texts, which is left."""
        read = ""
        while True:
            character = yield
            if not character or len(read) > 256:
                raise _NotACall
            read += character
            end = next((end for end in ends if read.endswith(end)), None)
            if end is not None:
                self._unread(end)
                word = read[: -len(end)].strip()
                if not _NAME.fullmatch(word):
                    raise _NotACall
                return word

    def _fail(self, read: str) -> None:
        if self._held is not None:
            raise _NotACall
        self._unread(read)
        raise _CallOver

    # -- JSON -------------------------------------------------------------------------------

    def _json_string(self, character: str) -> Steps:
        """The text of a JSON string that begins with ``character``."""
        written: list[str] = []
        if character != '"' or not (yield from self._json(character, written)):
            self._fail(character if character != '"' else "")
        try:
            return msgspec.json.decode("".join(written), type=str)
        except (msgspec.DecodeError, ValueError):
            return self._fail("")

    def _json(self, character: str, sink: _Sink | list[str]) -> Steps:
        """A JSON value that begins with ``character``; False: its text cannot be JSON, or the answer ended."""
        depth = 0
        while True:
            if character == '"':
                sink.append(character)
                if not (yield from self._in_string(sink)):
                    return False
                if depth == 0:
                    return True
            elif character in _OPENING:
                depth += 1
                sink.append(character)
            elif character in _CLOSING and depth:
                depth -= 1
                sink.append(character)
                if depth == 0:
                    return True
            elif depth == 0 and character in _SCALAR:
                while character in _SCALAR:
                    sink.append(character)
                    character = yield
                self._unread(character)
                return True
            elif depth and character in _BETWEEN:
                sink.append(character)
            else:
                self._unread(character)
                return False
            character = yield

    def _in_string(self, sink: _Sink | list[str]) -> Steps:
        """A JSON string after its first quotation mark, to its last."""
        is_escaped = False
        while True:
            if self._held is None and not is_escaped:
                self._plain, self._sink = _IN_STRING, sink
            character = yield
            self._plain = None
            if not character or character < " ":
                self._unread(character)
                return False
            sink.append(character)
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == '"':
                return True


@cache
def _plain_until(character: str) -> re.Pattern[str]:
    """Text that contains neither white space nor ``character``."""
    return re.compile(rf"[^\s{re.escape(character)}]+")


def _certain(text: str, end: str) -> tuple[str, str]:
    """The part of ``text`` that cannot belong to ``end``, and the rest. White space before an end may be missing."""
    for at in range(max(0, len(text) - len(end)), len(text)):
        tail = text[at:]
        if end.startswith(tail) or end.lstrip().startswith(tail):
            return text[:at], tail
    return text, ""
