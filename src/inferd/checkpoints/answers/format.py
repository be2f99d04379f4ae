"""The description of a notation: how an answer writes reasoning and tool calls.

White space at the edges of a text is what the checkpoint writes; the parser accepts any other white space there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["response template", "chat template", "table"]

WHITE_SPACE: Final = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""The characters that may stand before the beginning of reasoning: those that ``str.isspace`` knows. The grammar and
the parser of answers both use it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A fixed text of a call."""

    text: str

    @property
    def core(self) -> str:
        """The text without white space at its edges; a text of white space alone is its own core."""
        return self.text.strip() or self.text


@dataclass(frozen=True, slots=True)
class Name:
    """The place of the tool's name."""


@dataclass(frozen=True, slots=True)
class Id:
    """The place of an identifier of the call, which is read and dropped."""

    pattern: str = "[A-Za-z0-9_.:-]{1,64}"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The place of the arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The place of the arguments as a text per parameter, without quotes: ``<parameter=city>Paris</parameter>``."""

    before_key: str
    after_key: str
    after_value: str
    after_other_key: str = ""  # where the value is no string, if the notation tells strings apart
    separator: str = ""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The place of the arguments as keyword arguments of Python: ``city="Paris", days=3``."""

    separator: str = ", "


@dataclass(frozen=True, slots=True)
class Envelope:
    """The place of a JSON object that holds the name and the arguments, with its keys in the checkpoint's order."""

    keys: tuple[str, ...] = ("name", "arguments")
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_text: bool = False  # the arguments are JSON within a string


Part = Text | Name | Id | Arguments | Parameters | Keywords | Envelope


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are written: ``begin``, the calls with ``separator`` between them, ``end``."""

    call: tuple[Part, ...]
    begin: str = ""
    separator: str = ""
    end: str = ""
    is_list: bool = False  # the calls are the items of a JSON list
    content: str = ""  # what stands before text that is no call, where such text is marked too

    @property
    def trigger(self) -> str:
        """The text with which calls begin; empty: the answer's first character decides."""
        first = self.call[0]
        return self.begin.strip() or (first.text.strip() if isinstance(first, Text) else "")

    @property
    def has_section(self) -> bool:
        """Whether a text stands before the first call and not before each call."""
        return bool(self.begin.strip()) or self.is_list


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The texts around reasoning, with the white space that the checkpoint writes."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The notation of one checkpoint."""

    family: str
    source: Source
    reasoning: Reasoning | None = None
    calls: Calls | None = None
    is_channels: bool = False  # an answer is a sequence of messages with a channel and a recipient (gpt-oss)

    @property
    def markers(self) -> tuple[str, ...]:
        """Every fixed text of the notation."""
        found = list(CHANNEL_MARKERS) if self.is_channels else []
        if self.reasoning is not None:
            found += [self.reasoning.begin, self.reasoning.end]
        if self.calls is not None:
            found += [self.calls.begin, self.calls.separator, self.calls.end]
            for part in self.calls.call:
                match part:
                    case Text(text):
                        found.append(text)
                    case Parameters():
                        found += [part.before_key, part.after_key, part.after_other_key, part.after_value]
                    case _:
                        pass
        return tuple(text for text in found if text)


CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
