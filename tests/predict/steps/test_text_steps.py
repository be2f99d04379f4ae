"""Texts in one form, and as tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.predict.steps.pictures import tokenizer_file

from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.steps.operation import texts
from inferd.predict.steps.registry import operation


def normal(text: str, **options: object) -> str:
    made = operation("text.normalize", options).load()({"text": texts([text.encode()])})
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


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid UTF-8"):
        operation("text.normalize", {}).load()({"text": texts([b"\xff\xfe"])})


def test_tokens_are_padded_and_cut(tmp_path: Path) -> None:
    file = str(tokenizer_file(tmp_path))
    words = texts([b"good film", b"bad", b"good good good good good"])
    made = operation("tokenize", {"file": file, "max_tokens": 3}).load()({"text": words})
    assert made["input_ids"].tolist() == [[1, 3, 0], [2, 0, 0], [1, 1, 1]]
    assert made["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert made["token_type_ids"].shape == (3, 3)
    wide = operation("tokenize", {"file": file, "max_tokens": 3, "pad_to": 5}).load()({"text": words[:1]})
    assert wide["input_ids"].shape == (1, 5)
    empty = operation("tokenize", {"file": file}).load()({"text": texts([b""])})
    assert empty["input_ids"].shape == (1, 1)


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer\.json"):
        operation("tokenize", {"file": str(tmp_path / "tokenizer.json")}).load()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        operation("tokenize", {"file": str(tmp_path / "gone.json")}).load()
