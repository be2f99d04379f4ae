"""The glossary is held to the code: its words are used, and its retired words are gone."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
CODE = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path != GLOSSARY)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words_of(text: str) -> str:
    """The words of prose and of names, in lower case, with one blank around each: ``KeptWeights`` has two."""
    return f" {' '.join(word.lower() for word in _WORD.findall(text))} "


@functools.cache
def words_of_file(path: Path) -> str:
    """The words of a file and of its name."""
    return words_of(path.read_text("utf-8") + " " + path.stem)


def rows_of(text: str) -> list[tuple[str, str]]:
    """The rows of the tables of two columns, without their headings."""
    found = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return [row for row in found if row[0] not in ("---", "Word", "Retired")]


_BEFORE, _, _AFTER = GLOSSARY.read_text("utf-8").partition("## Retired words")
TERMS = rows_of(_BEFORE)
RETIRED = [word for word, _ in rows_of(_AFTER)]


def test_the_glossary_has_terms_and_retired_words() -> None:
    assert len(TERMS) > 40
    assert len(RETIRED) > 4
    assert sorted(set(RETIRED)) == RETIRED


def test_a_term_is_explained_once_and_in_one_sentence() -> None:
    names = [name for name, _ in TERMS]
    assert len(set(names)) == len(names)
    assert [name for name, meaning in TERMS if not re.match(r"[A-Z]", meaning)] == []
    assert [name for name, meaning in TERMS if re.findall(r"\.(?=\s|$)", meaning) != ["."]] == []


def test_terms_are_in_the_order_of_the_alphabet() -> None:
    for section in _BEFORE.split("\n## ")[1:]:
        names = [name.lower() for name, _ in rows_of(section)]
        assert names == sorted(names)


def test_every_term_is_used() -> None:
    used = "".join(words_of(path.read_text("utf-8")) for path in (*CODE, *PAGES))
    assert [name for name, _ in TERMS if f" {name.lower()} " not in used and f" {name.lower()}s " not in used] == []


@pytest.mark.parametrize("retired", RETIRED)
def test_a_retired_word_does_not_come_back(retired: str) -> None:
    found = [str(path.relative_to(ROOT)) for path in (*CODE, *PAGES) if f" {retired} " in words_of_file(path)]
    assert found == []


@pytest.mark.parametrize(
    "text", ["KeptWeights", "kept_weights", "the kept\nweights", "_kept_weights()", "KEPT_WEIGHTS"]
)
def test_a_retired_word_is_found_in_names_and_in_prose(text: str) -> None:
    assert " kept weights " in words_of(text)


@pytest.mark.parametrize("text", ["unkept weights", "kept a weight", "keptweights"])
def test_a_retired_word_is_not_found_in_other_words(text: str) -> None:
    assert " kept weights " not in words_of(text)
