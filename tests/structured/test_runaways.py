"""An answer under the masks cannot go on for ever with white space, digits or levels, whatever the model prefers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferd.answer_form import JsonSchema
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.structured.compiled import Compiler
from inferd.structured.vocabulary import Vocabulary

EOS = 0


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> Iterator[Compiler]:
    tokenizer = Tokenizer.load(tiny_model)
    made = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((EOS,))))
    yield made
    made.close()


def preferring(compiler: Compiler, schema: Any, wishes: str, begin: str = "", most: int = 400) -> str:
    """The text of a model that takes the first allowed of these characters, and any other where none is allowed. It
    ends where nothing that it wishes for may follow."""
    guide = compiler.compile(JsonSchema(schema=schema, at="s")).guide()
    characters = {compiler.vocabulary.token_bytes(i): i for i in range(3, 259)}
    text = ""
    while len(text) < most and not guide.matcher.is_stopped():
        row = np.frombuffer(guide.matcher.compute_bitmask(), dtype=np.int32).copy()
        guide.narrow(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        wanted = begin[len(text)] if len(text) < len(begin) else wishes
        token = next((characters[c.encode()] for c in wanted if bits[characters[c.encode()]]), None)
        if token is None:
            break
        text += chr(compiler.vocabulary.token_bytes(token)[0])
        guide.push(token)
    assert guide.failure() is None
    return text


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "array"}, {"type": "array", "minItems": 3}])
def test_white_space_ends(compiler: Compiler, schema: Any) -> None:
    for begin in ("[", "{", '{"a"', "[1", '{"a":'):
        if (schema.get("type"), begin[0]) in (("object", "["), ("array", "{")):
            continue
        for wishes in (" ", "\n", "\t\r", " \n"):
            text = preferring(compiler, schema, wishes, begin)
            assert text.startswith(begin)
            assert len(text) - len(begin) == 8, "eight characters, and then none of them may follow"


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": "integer"}, {"minimum": 0.5, "type": "number"}])
@pytest.mark.parametrize("digit", "09")
def test_digits_end(compiler: Compiler, schema: Any, digit: str) -> None:
    for begin in ("1", "-1", "1.", "-0."):
        if ("." in begin and schema.get("type") == "integer") or (begin[0] == "-" and "minimum" in schema):
            continue
        text = preferring(compiler, schema, digit, begin)
        assert text.startswith(begin)
        assert 8 <= len(re.sub(r"\D", "", text)) <= 19


def test_levels_of_a_value_that_the_schema_says_nothing_about_end(compiler: Compiler) -> None:
    assert preferring(compiler, {"type": "array"}, "[", "[") == "[" * 13  # the list, and twelve levels in it
    assert preferring(compiler, {}, "[", "[") == "[" * 13


@pytest.mark.parametrize(
    "schema",
    [{"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}, "additionalProperties": False}],
)
def test_an_object_without_properties_ends(compiler: Compiler, schema: Any) -> None:
    text = preferring(compiler, schema, "}", "{")
    assert json.loads(text) == {}
    guide = compiler.compile(JsonSchema(schema={**schema, "additionalProperties": False}, at="s")).guide()
    assert not any(guide.push(compiler.vocabulary.tokens.tokenize_str(c)[0]) for c in "{")
    assert guide.num_possible(compiler.vocabulary.tokens.tokenize_str('"')) == 0
