"""What decoding a body may cost: JSON of too many values is refused before objects are made of it."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.body import decode_cost, document
from inferd.gateway.body.decode import decode
from inferd.gateway.body.decode_cost import MAX_DECODE_COST, check_decode_cost
from inferd.gateway.body.embedded import MAX_TEXT_BYTES, EmbeddedJson
from inferd.gateway.body.faults import path_of_fault
from inferd.gateway.kserve import outline as outlines
from inferd.gateway.kserve.parameters import read_infer
from inferd.gateway.openai.relay_fields import text_decoder
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
        found = decode_cost.decode_cost(body, texts=False)
    assert least <= found <= cost_of(value) + body.count(b"\\") // 16 + len(body) // size + 1


@given(values)
def test_what_is_cheap_at_first_sight_is_cheap(value: object) -> None:
    """With limits as small as the values."""
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cost, "MAX_DECODE_COST", 1200)
        if decode_cost._is_cheap(body, texts=False):
            assert decode_cost.decode_cost(body, texts=False) <= 1200


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
    check_decode_cost(body, texts=True)
    assert decode(body, completion_decoder).prompt


def test_a_number_is_as_costly_where_two_pieces_meet() -> None:
    """Each stands across the end of a piece."""
    number = b"1e308,"
    body = b"[  " + number.join([b" " * (decode_cost.PIECE_BYTES - len(number))] * 41) + b"1]"
    assert body[decode_cost.PIECE_BYTES - 3 : decode_cost.PIECE_BYTES + 3] == number
    assert decode_cost.decode_cost(body, texts=False) >= 40 * 400


@pytest.mark.parametrize("number", ["1.5", "0.1234567890123", "-1e-05", "3E+22"])
def test_as_many_common_numbers_are_read_as_ever(number: str) -> None:
    check_decode_cost(f"[{','.join([number] * 250_000)}]".encode(), texts=True)


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
    assert document.is_certain(*document.shortened(body))
    assert not document.is_certain(*document.shortened(b'{"a":' + body + b',"b":0,"b":1}'))


def is_shortened(short: object, whole: object, size: int) -> bool:
    """Whether two values differ in texts of more than ``size`` bytes alone."""
    if isinstance(short, list) and isinstance(whole, list):
        return len(short) == len(whole) and all(map(is_shortened, short, whole, [size] * len(whole)))
    if isinstance(short, dict) and isinstance(whole, dict):
        return list(short) == list(whole) and is_shortened([*short.values()], [*whole.values()], size)
    if isinstance(short, str) and isinstance(whole, str):
        return short == whole or len(json.dumps(whole)) > size
    return short == whole


def keys_of(value: object) -> list[str]:
    """The keys of all objects in a value."""
    if isinstance(value, dict):
        return [*value, *(key for part in value.values() for key in keys_of(part))]
    return [key for part in value for key in keys_of(part)] if isinstance(value, list) else []


@given(values, st.text(min_size=1), st.integers(8, 40), st.integers(0, 40), st.booleans())
@example([{'000000000"': None}], "0", 8, 0, False)
def test_a_shortened_document_lacks_the_middle_of_long_texts_alone(
    value: object, text: str, size: int, shift: int, is_ascii: bool
) -> None:
    """Wherever a body is cut; texts of up to a piece's length stay as they are, as do keys."""
    whole = [" " * shift, text * (100 // len(text)), value, {"a": text, "b": text * 9}]
    body = json.dumps(whole, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cost, "PIECE_BYTES", size)
        if any(len(json.dumps(key, ensure_ascii=is_ascii).encode()) > size for key in keys_of(whole)):
            with contextlib.suppress(InvalidRequest):  # a key this long may be refused
                document.shortened(body)
            return
        shortened, num_keys = document.shortened(body)
    assert is_shortened(json.loads(shortened), whole, size)
    assert num_keys == document._num_keys(whole)


TEXT_UNIT = decode_cost.TEXT_BYTES_OF_A_UNIT


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600"])
def test_texts_count_by_their_bytes_where_objects_are_made_of_them(letter: str) -> None:
    text = letter * ((TEXT_UNIT * MAX_DECODE_COST - 4096) // len(letter.encode()))
    read = decode(f'{{"prompt":"{text}"}}'.encode(), completion_decoder)
    assert read.prompt == text
    body = f'{{"prompt":"{text}","user":"{letter * 4096}"}}'.encode()
    with pytest.raises(InvalidRequest, match=r"4\.00 MiB of text") as refused:
        decode(body, completion_decoder)
    assert refused.value.code == "too_many_values"
    assert bytes(decode(body, text_decoder, texts=False).prompt) == body[10 : body.index(b'","user') + 1]


@pytest.mark.parametrize("body", [b'{"prompt":"\xff"}', b'{"prompt":"a","user":"\xff"}', b'{"\xff":1,"prompt":"a"}'])
def test_a_text_that_is_not_utf8_is_refused_as_such_wherever_it_stands(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(body, completion_decoder)
    assert refused.value.code == "invalid_utf8"


LONG = b"x" * document._ENCODED_BYTES


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"a":"' + LONG + b'","a":1}', "duplicate_key"),
        (b'{"a":"' + LONG + b'","b":1e999}', "invalid_json"),
        (b'{"a":"' + LONG + b"\xff" + LONG + b'"}', "invalid_utf8"),
        (b'{"' + LONG + b'"  :1}', "invalid_json"),
        (b'{"' + LONG + b'":1,"' + LONG + b'":2}', "invalid_json"),
    ],
)
def test_defects_beside_and_within_long_texts_are_found(body: bytes, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        document.check_document(body)
    assert refused.value.code == code


def test_no_object_is_made_of_the_middle_of_a_long_text() -> None:
    """What the decoder gets is small, however long the texts are."""
    for letter in ("a", "\u00e9", "\U0001f600"):
        body = json.dumps({"a": letter * 1_000_000, "b": [letter * 100_000] * 2}, ensure_ascii=False).encode()
        shortened, num_keys = document.shortened(body)
        assert num_keys == 2
        assert len(shortened) < 10 * decode_cost.PIECE_BYTES


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
    check_decode_cost(json.dumps({"prompt": list(range(200_000))}).encode(), texts=True)


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", "b", 3]}, "stop[2]"),
        ({"logit_bias": {"1": 1, "2": "x", "3": 1}}, "logit_bias.2"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": 5}, {"role": "user"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 3}]}]},
            "messages[0].content[1].text",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": 3}}]},
            "tools[1].function.name",
        ),
    ],
)
def test_the_entry_that_is_wrong_is_named_and_not_those_beside_it(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(InvalidRequest) as refused:
        decode(json.dumps(body).encode(), chat_decoder)
    assert refused.value.param == param


class Part(msgspec.Struct):
    counts: dict[str, int] = {}
    others: list[int] = []


class Whole(msgspec.Struct):
    parts: str | list[Part] | None = None
    named: dict[str, Part] = {}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"parts": [{"counts": {"a": 1}}, {"counts": {"a": 1, "b": "x"}}, {}]}, ".parts[1].counts.b"),
        ({"parts": [{}, {}, {"counts": {"a": "x"}}]}, ".parts[2].counts.a"),
        ({"named": {"one": {"others": [1]}, "two": {"others": [1, 2, "x"]}}}, ".named.two.others[2]"),
        ({"parts": [{"counts": {"a": 1}}], "named": {"one": {"counts": {"b": None}}}}, ".named.one.counts.b"),
        ({"parts": [{"counts": {"a": 1}}]}, None),
    ],
)
def test_a_wrong_entry_of_an_object_in_a_list_is_named_with_its_number(value: Any, path: str | None) -> None:
    assert path_of_fault(value, Whole) == path
