"""What decoding a body may cost: JSON of too many values is refused before objects are made of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.body import decode_cost, document
from inferd.gateway.body.decode import decode
from inferd.gateway.body.decode_cost import MAX_DECODE_COST, check_decode_cost
from inferd.gateway.body.embedded import MAX_TEXT_BYTES, EmbeddedJson
from inferd.gateway.kserve import outline as outlines
from inferd.gateway.kserve.parameters import read_infer
from inferd.gateway.openai.wire import chat_decoder, completion_decoder

texts = st.text(st.sampled_from('a,:[]{}"\\\n\u00e91e300')) | st.text()
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e308, 5e-324, 10**40])
values: Any = st.recursive(
    st.none() | numbers | texts, lambda of: st.lists(of) | st.dictionaries(texts, of), max_leaves=20
)


def cost_of(value: object) -> int:
    """A string one, an element beyond the first one, a container and a key four more; and what numbers cost."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 4 + max(0, len(value) - 1) + sum(cost_of(one) for one in value)
    if isinstance(value, dict):
        own = 4 + max(0, len(value) - 1) + 5 * len(value)
        return own + sum(cost_of(one) for one in value.values())
    if isinstance(value, int | float):
        mantissa, _, exponent = json.dumps(value).lstrip("-").partition("e")
        return (len(mantissa) // 3 if len(mantissa) >= 16 else 0) + (400 if len(exponent.lstrip("+-")) >= 3 else 0)
    return 0


@given(values, st.integers(1, 40), st.booleans())
def test_strings_have_no_cost_but_their_own_wherever_a_body_is_cut(value: object, size: int, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    least = cost_of(value) + len(re.findall(rb"\\.", body)) // 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cost, "PIECE_BYTES", size)
        found = decode_cost.decode_cost(body)
    assert least <= found <= cost_of(value) + body.count(b"\\") // 16 + len(body) // size + 1


@given(values)
def test_what_is_cheap_at_first_sight_is_cheap(value: object) -> None:
    """With limits as small as the values."""
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cost, "MAX_DECODE_COST", 1200)
        if decode_cost._is_cheap(body):
            assert decode_cost.decode_cost(body) <= 1200


HEAVY = {
    "numbers": b'{"prompt":[' + b"1," * MAX_DECODE_COST + b"1]}",
    "empty texts": b'{"prompt":[' + b'"",' * MAX_DECODE_COST + b'""]}',
    "empty lists": b'{"documents":[' + b"[]," * MAX_DECODE_COST + b"[]]}",
    "keys": b'{"documents":{' + b'"":1,' * MAX_DECODE_COST + b'"":1}}',
    "messages": b'{"messages":[' + b'{"role":"user"},' * MAX_DECODE_COST + b"1]}",
    "quotes": b'"' * (4 * MAX_DECODE_COST),
    "numbers near the largest": b'{"prompt":[' + b"1e308," * (MAX_DECODE_COST // 200) + b"1]}",
    "numbers near nothing": b'{"prompt":[' + b"4.9E-324," * (MAX_DECODE_COST // 200) + b"1]}",
    "such numbers without an exponent": b'{"prompt":['
    + (b"0." + b"0" * 320 + b"5,") * (MAX_DECODE_COST // 100)
    + b"1]}",
    "long numbers": b'{"prompt":[' + (b"7" * 300 + b",") * (MAX_DECODE_COST // 100) + b"1]}",
    "numbers between two others": b'{"prompt":[' + b"9007199254740993.0," * (MAX_DECODE_COST // 6) + b"1]}",
    "escapes": b'{"prompt":"' + rb"\n" * (17 * MAX_DECODE_COST) + b'"}',
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


def test_a_number_is_as_costly_where_two_pieces_meet() -> None:
    """Each stands across the end of a piece."""
    number = b"1e308,"
    body = b"[  " + number.join([b" " * (decode_cost.PIECE_BYTES - len(number))] * 41) + b"1]"
    assert body[decode_cost.PIECE_BYTES - 3 : decode_cost.PIECE_BYTES + 3] == number
    assert decode_cost.decode_cost(body) >= 40 * 400


@pytest.mark.parametrize("number", ["1.5", "0.1234567890123", "-1e-05", "3E+22"])
def test_as_many_common_numbers_are_read_as_ever(number: str) -> None:
    check_decode_cost(f"[{','.join([number] * 250_000)}]".encode())


def test_parameters_of_a_prediction_are_counted_before_they_are_decoded_and_its_tensors_are_not() -> None:
    """The tensors are stepped over here."""
    numbers = ",".join(["1e308"] * (MAX_DECODE_COST // 400))
    body = '{"inputs":[{"data":[%s]}],"parameters":{"priority":1,"other":%s}}'
    assert read_infer((body % (numbers, 1)).encode()).priority is not None
    keys = ",".join(f'"{number}":1e308' for number in range(MAX_DECODE_COST // 400))
    with pytest.raises(InvalidRequest) as refused:
        read_infer(f'{{"parameters":{{{keys}}}}}'.encode())
    assert refused.value.code == "too_many_values"


def test_json_in_the_texts_of_a_request_is_counted_as_one_body() -> None:
    embedded = EmbeddedJson()
    half = f"[{','.join(['1'] * (MAX_DECODE_COST // 2))}]"
    assert len(embedded.value(half)) == MAX_DECODE_COST // 2
    with pytest.raises(InvalidRequest) as refused:
        embedded.arguments(half)
    assert refused.value.code == "too_many_values"


def test_json_in_the_texts_of_a_request_has_a_size() -> None:
    embedded = EmbeddedJson()
    text = json.dumps({"text": "x" * (MAX_TEXT_BYTES // 2 - 100)})
    embedded.arguments(text)
    embedded.arguments(text)
    with pytest.raises(InvalidRequest, match="MiB"):
        embedded.arguments(text)
    with pytest.raises(InvalidRequest, match="MiB"):
        EmbeddedJson().value("\u00e9" * MAX_TEXT_BYTES)


def test_many_small_texts_of_json_are_counted_together() -> None:
    embedded = EmbeddedJson()
    for _ in range(MAX_DECODE_COST // 800):
        assert embedded.arguments('{"x":1e308}') == {"x": 1e308}
    with pytest.raises(InvalidRequest, match="arguments of calls"):
        any(embedded.arguments('{"x":1e308}') == "" for _ in range(MAX_DECODE_COST // 200))


@given(values, st.sampled_from((None, 1)), st.booleans())
def test_of_a_large_document_keys_are_counted(value: object, indent: int | None, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "_ENCODED_BYTES", -1)
        assert document.is_certain(body)
        assert not document.is_certain(b'{"a":' + body + b',"b":0,"b":1}')


@pytest.mark.parametrize("levels", [document.MAX_DEPTH, document.MAX_DEPTH + 1])
@pytest.mark.parametrize("size", [0, document._ENCODED_BYTES])
def test_a_document_of_too_many_levels_is_refused_whatever_its_size(levels: int, size: int) -> None:
    body = b"[" * levels + b'"' + b"x" * size + b'"' + b"]" * levels
    if levels <= document.MAX_DEPTH:
        document.check_document(body)
    else:
        with pytest.raises(InvalidRequest, match="levels of lists and objects"):
            document.check_document(body)


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
