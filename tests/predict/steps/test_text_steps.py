"""Texts in one form, and as tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.steps.pictures import tokenizer_file

from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.contract import object_array
from inferd.predict.long_text import Part, deciding_part
from inferd.predict.steps.registry import operation
from inferd.predict.steps.text import NormalizeText


def normal(text: str, **options: object) -> str:
    made = operation("text.normalize", options).load()({"text": object_array([text.encode()])})
    found = made["text"][0]
    assert isinstance(found, bytes)
    return found.decode()


def test_texts_take_one_form() -> None:
    assert normal("  a \n\t b\u00a0c ") == "a b c"
    assert normal("  a  ", blanks="keep") == "  a  "
    assert normal("e\u0301") == "\u00e9"
    assert normal("\ufb01x\u2460", unicode="NFKC") == "fix1"
    assert normal("\u00c5ngstr\u00f6m \u00c9t\u00e9", strip_accents=True, lower=True) == "angstrom ete"
    assert normal("abcdef", max_chars=3) == "abc"


@given(
    st.text(alphabet="aB e\u0301\u00e9\ufdfa\u03a3\n\u00a0\u1100\u1161\u11a8", max_size=3000),
    st.integers(1, 60),
    st.sampled_from(["NFC", "NFKC", "NFD", "none"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_text_is_cut_as_if_all_of_it_had_been_brought_into_form(
    text: str, most: int, form: str, is_plain: bool
) -> None:
    options = {"unicode": form, "lower": True, "strip_accents": is_plain}
    assert normal(text, max_chars=most, **options) == normal(text, **options)[:most]


def test_a_text_is_cut_at_the_default_length_unless_max_chars_says_otherwise() -> None:
    assert len(normal("x" * 1_000_000)) == 65_536
    assert len(normal("x" * 1_000_000, max_chars=100_000)) == 100_000


def test_no_more_of_a_text_is_worked_on_than_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[int] = []
    form = NormalizeText._normal

    def counted(self: NormalizeText, text: str) -> str:
        worked.append(len(text))
        return form(self, text)

    monkeypatch.setattr(NormalizeText, "_normal", counted)
    assert normal("\ufdfa" * 1_000_000, unicode="NFKC", max_chars=2000).startswith("\u0635\u0644\u0649")
    assert sum(worked) < 10_000


def test_no_more_of_a_text_becomes_tokens_than_is_kept(tmp_path: Path) -> None:
    made = operation("tokenize", {"file": str(tokenizer_file(tmp_path)), "max_tokens": 3}).load()
    long = b"good bad " * 100_000
    read: list[str] = []

    def noted(text: str, limit: int, count: Callable[[str], int]) -> Part:
        part = deciding_part(text, limit, count)
        read.append(part.text)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inferd.predict.steps.text.deciding_part", noted)
        found = operation("tokenize", {"file": str(tokenizer_file(tmp_path)), "max_tokens": 3}).load()(
            {"text": object_array([long])}
        )
    assert found["input_ids"].tolist() == made({"text": object_array([long[:90]])})["input_ids"].tolist() == [[1, 2, 1]]
    assert len(read[0]) < 10_000


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid UTF-8"):
        operation("text.normalize", {}).load()({"text": object_array([b"\xff\xfe"])})


def test_tokens_are_padded_and_cut(tmp_path: Path) -> None:
    file = str(tokenizer_file(tmp_path))
    words = object_array([b"good film", b"bad", b"good good good good good"])
    made = operation("tokenize", {"file": file, "max_tokens": 3}).load()({"text": words})
    assert made["input_ids"].tolist() == [[1, 3, 0], [2, 0, 0], [1, 1, 1]]
    assert made["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert made["token_type_ids"].shape == (3, 3)
    wide = operation("tokenize", {"file": file, "max_tokens": 3, "pad_to": 5}).load()({"text": words[:1]})
    assert wide["input_ids"].shape == (1, 5)
    empty = operation("tokenize", {"file": file}).load()({"text": object_array([b""])})
    assert empty["input_ids"].shape == (1, 1)


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer\.json"):
        operation("tokenize", {"file": str(tmp_path / "tokenizer.json")}).load()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        operation("tokenize", {"file": str(tmp_path / "gone.json")}).load()
