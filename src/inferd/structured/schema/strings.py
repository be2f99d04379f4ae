"""Texts: lengths, patterns, formats and finite sets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from inferd.structured.schema import formats, patterns
from inferd.structured.schema.formulas import Atom, Emptiness, Formula, Lost, any_of

UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # what has no escape but \\u, see the compiled grammars
LONGEST_EXCLUDED = 200  # characters of a text that is excluded, because its pattern nests as deep


@dataclass(frozen=True, slots=True)
class Texts:
    least: int = 0  # characters
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None  # only these
    excluded: frozenset[str] = frozenset()

    def has(self, text: str) -> bool:
        return (
            self.least <= len(text)
            and (self.most is None or len(text) <= self.most)
            and text not in self.excluded
            and all(patterns.matches(pattern, text) for pattern in self.patterns)
            and all(formats.matches(name, text) for name in self.formats)
        )

    def settled(self) -> Texts | None:
        if self.values is not None:
            kept = tuple(text for text in self.values if self.has(text))
            return Texts(values=kept) if kept else None
        if self.most is not None and self.least > self.most:
            return None
        if self.most == 0:
            return Texts(values=("",)) if self.has("") else None
        return self

    def all_patterns(self) -> list[str]:
        """The patterns that say all but the lengths."""
        found = [*map(patterns.for_masks, self.patterns), *map(formats.pattern, self.formats)]
        return [*found, patterns.for_masks(patterns.of_others(self.excluded))] if self.excluded else found

    def emitted(self) -> list[dict[str, Any]] | Lost:
        if self.values is not None:
            written = [text for text in self.values if not UNWRITTEN.search(text)]
            return [{"enum": written}] if written else Lost("control characters are never written", "other texts")
        if any(len(text) > LONGEST_EXCLUDED for text in self.excluded):
            return Lost(f"a text of over {LONGEST_EXCLUDED} characters is excluded", "shorter texts below 'not'")
        schema: dict[str, Any] = {"type": "string"}
        if self.least:
            schema["minLength"] = self.least
        if self.most is not None:
            schema["maxLength"] = self.most
        found = self.all_patterns()
        if found:
            schema["pattern"] = found[0]
        if found[1:]:
            schema["allOf"] = [{"type": "string", "pattern": pattern} for pattern in found[1:]]
        return [schema]


@dataclass(frozen=True, slots=True)
class Length(Atom):
    least: int = 0
    most: int | None = None

    def negated(self) -> Formula:
        above = self.most is not None and Length(self.most + 1)
        return any_of(self.least > 0 and Length(0, self.least - 1), above)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | None:
        most = texts.most if self.most is None else self.most if texts.most is None else min(self.most, texts.most)
        return replace(texts, least=max(texts.least, self.least), most=most).settled()


@dataclass(frozen=True, slots=True)
class Pattern(Atom):
    pattern: str

    def negated(self) -> Formula:
        return NotPattern(self.pattern)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | None:
        if self.pattern in texts.patterns:
            return texts
        listed = patterns.texts_of(self.pattern)
        if listed is not None:
            return TextIn(listed).narrow(texts, is_empty)
        return replace(texts, patterns=(*texts.patterns, self.pattern)).settled()


@dataclass(frozen=True, slots=True)
class NotPattern(Atom):
    pattern: str

    def negated(self) -> Formula:
        return Pattern(self.pattern)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | Lost | None:
        if texts.values is not None:
            kept = tuple(text for text in texts.values if not patterns.matches(self.pattern, text))
            return replace(texts, values=kept).settled()
        if self.pattern in texts.patterns:
            return None
        if (other := patterns.of_unlike(self.pattern)) is not None:
            return Pattern(other).narrow(texts, is_empty)
        return Lost(f"no mask enforces that a text does not match {self.pattern!r}", "a pattern of the other texts")


@dataclass(frozen=True, slots=True)
class Format(Atom):
    name: str

    def negated(self) -> Formula:
        return NotFormat(self.name)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | None:
        if self.name in texts.formats:
            return texts
        return replace(texts, formats=(*texts.formats, self.name)).settled()


@dataclass(frozen=True, slots=True)
class NotFormat(Atom):
    name: str

    def negated(self) -> Formula:
        return Format(self.name)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | Lost | None:
        if texts.values is not None:
            kept = tuple(text for text in texts.values if not formats.matches(self.name, text))
            return replace(texts, values=kept).settled()
        if self.name in texts.formats:
            return None
        return Lost(f"no mask enforces that a text is not a {self.name}", "a pattern of the other texts")


@dataclass(frozen=True, slots=True)
class TextIn(Atom):
    values: tuple[str, ...]

    def negated(self) -> Formula:
        return TextNotIn(self.values)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | None:
        known = set(self.values)
        kept = self.values if texts.values is None else tuple(text for text in texts.values if text in known)
        return replace(texts, values=kept).settled()


@dataclass(frozen=True, slots=True)
class TextNotIn(Atom):
    values: tuple[str, ...]

    def negated(self) -> Formula:
        return TextIn(self.values)

    def narrow(self, texts: Texts, is_empty: Emptiness) -> Texts | None:
        return replace(texts, excluded=texts.excluded | set(self.values)).settled()
