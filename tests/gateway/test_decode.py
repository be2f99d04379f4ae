"""What decoding a body may cost: JSON of too many values is refused before objects are made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.body import decode_cost
from inferd.gateway.body.decode import decode
from inferd.gateway.body.decode_cost import MAX_DECODE_COST, check_decode_cost
from inferd.gateway.kserve import outline as outlines
from inferd.gateway.openai.wire import chat_decoder, completion_decoder

texts = st.text(st.sampled_from('a,:[]{}"\\\n\u00e9')) | st.text()
values: Any = st.recursive(
    st.none() | st.integers() | texts, lambda of: st.lists(of) | st.dictionaries(texts, of), max_leaves=20
)


def weight_of(value: object) -> int:
    """A string one, an element beyond the first one, a container and a key four more."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 4 + max(0, len(value) - 1) + sum(weight_of(one) for one in value)
    if isinstance(value, dict):
        own = 4 + max(0, len(value) - 1) + 5 * len(value)
        return own + sum(weight_of(one) for one in value.values())
    return 0


@given(values, st.integers(1, 40))
def test_strings_have_no_weight_but_their_own_wherever_a_body_is_cut(value: object, size: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cost, "PIECE_BYTES", size)
        found = decode_cost._weight(body)
    assert weight_of(value) <= found <= weight_of(value) + len(body) // size + 1


HEAVY = {
    "numbers": b'{"prompt":[' + b"1," * MAX_DECODE_COST + b"1]}",
    "empty texts": b'{"prompt":[' + b'"",' * MAX_DECODE_COST + b'""]}',
    "empty lists": b'{"documents":[' + b"[]," * MAX_DECODE_COST + b"[]]}",
    "keys": b'{"documents":{' + b'"":1,' * MAX_DECODE_COST + b'"":1}}',
    "messages": b'{"messages":[' + b'{"role":"user"},' * MAX_DECODE_COST + b"1]}",
    "quotes": b'"' * (4 * MAX_DECODE_COST),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(name: str) -> None:
    with pytest.raises(InvalidRequest) as of_chat:
        decode(HEAVY[name], chat_decoder)
    with pytest.raises(InvalidRequest) as of_completion:
        decode(HEAVY[name], completion_decoder)
    assert of_chat.value.code == of_completion.value.code == "too_many_values"


@pytest.mark.parametrize("text", ["so, it is: a [text]. ", '{"a": [1, 2]}\n', "\\,\\\\,"])
def test_a_large_text_is_no_large_number_of_values(text: str) -> None:
    body = json.dumps({"prompt": text * (4 * MAX_DECODE_COST // len(text))}).encode()
    check_decode_cost(body)
    assert decode(body, completion_decoder).prompt


def test_as_many_tokens_as_a_long_context_has_are_read() -> None:
    check_decode_cost(json.dumps({"prompt": list(range(200_000))}).encode())


def pruned(value: object, levels: int) -> object:
    """The value without what is nested deeper."""
    if isinstance(value, list):
        return [pruned(one, levels - 1) for one in value] if levels > 0 else []
    if isinstance(value, dict):
        return {key: pruned(one, levels - 1) for key, one in value.items()} if levels > 0 else {}
    return value


@given(values, st.integers(0, 4), st.integers(1, 40), st.sampled_from((None, 1)))
def test_an_outline_lacks_what_is_nested_deeper_wherever_a_body_is_cut(
    value: object, levels: int, size: int, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=False, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cost, "PIECE_BYTES", size)
        found = outlines.outline(body, levels)
    assert json.loads(found) == pruned(value, levels)


def test_a_body_of_many_small_inputs_has_an_outline_and_one_of_nothing_else_is_refused() -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [[0.5, 1.5]]}
    body = json.dumps({"inputs": [tensor] * 10_000, "parameters": {"priority": 1}}).encode()
    assert json.loads(outlines.outline(body, 2)) == {"inputs": [{}] * 10_000, "parameters": {"priority": 1}}
    with pytest.raises(InvalidRequest) as refused:
        outlines.outline(b'{"inputs":[' + b"[]," * 1_000_000 + b"[]]}", 2)
    assert refused.value.code == "too_many_values"


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.integers(1, 8))
def test_a_word_is_found_wherever_a_body_is_cut(body: str, word: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlines, "_SEARCHED_BYTES", size)
        found = outlines.contains(body.encode(), word.encode())
    assert found == (word in body)
