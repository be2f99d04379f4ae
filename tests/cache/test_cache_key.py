"""Equal requests share a key, and nothing else does."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.cache.key import TENANT_BYTES, cache_key, canonical, tenant_digest

PATH = "/chat/completions"
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.text(min_size=1, max_size=6), values, max_size=5)


class Asked(msgspec.Struct, kw_only=True):
    model: str
    temperature: float = 1.0
    stop: list[str] = []
    stream: bool = False


def key(body: bytes | msgspec.Struct, **other: object) -> bytes:
    named: dict[str, str] = {"tenant": "a", "model": "m", "fingerprint": "f", "path": PATH}
    named |= {name: str(value) for name, value in other.items()}
    return cache_key(named["tenant"], named["model"], named["fingerprint"], named["path"], body)


@given(bodies, st.randoms(use_true_random=False))
def test_neither_the_order_of_fields_nor_spaces_nor_nulls_matter(body, random) -> None:  # type: ignore[no-untyped-def]
    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            names = list(value)
            random.shuffle(names)
            return {name: shuffled(value[name]) for name in names}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    again = shuffled(body)
    assert isinstance(again, dict)
    again |= {"not asked for": None}
    assert key(json.dumps(body).encode()) == key(json.dumps(again, indent=1).encode())


@given(bodies, bodies)
def test_different_requests_have_different_keys(one, other) -> None:  # type: ignore[no-untyped-def]
    means = [canonical(json.dumps(body).encode()) for body in (one, other)]
    assert (means[0] == means[1]) == (key(json.dumps(one).encode()) == key(json.dumps(other).encode()))
    left_out = ("stream", "stream_options", "timeout", "priority", "request_id")
    meant = [{k: v for k, v in body.items() if v is not None and k not in left_out} for body in (one, other)]
    same = json.dumps(meant[0], sort_keys=True) == json.dumps(meant[1], sort_keys=True)  # 1 and True are not the same
    assert same == (means[0] == means[1])


def test_defaults_of_a_decoded_request_do_not_matter() -> None:
    decode = msgspec.json.Decoder(Asked).decode
    assert key(decode(b'{"model": "m"}')) == key(decode(b'{"stop": [], "temperature": 1, "model": "m"}'))
    assert key(decode(b'{"model": "m"}')) != key(decode(b'{"model": "m", "temperature": 0}'))


def test_how_an_answer_travels_is_not_what_it_says() -> None:
    plain, streamed = b'{"a": 1}', b'{"stream": true, "stream_options": {}, "timeout": 3, "request_id": "r", "a": 1}'
    assert canonical(plain) == canonical(streamed)
    forms = {cache_key("a", "m", "f", PATH, plain, stream=stream) for stream in (True, False)}
    assert len(forms) == 2  # but the bytes that are kept differ


@pytest.mark.parametrize("field", ["tenant", "model", "fingerprint", "path"])
def test_everything_that_decides_the_answer_is_part_of_the_key(field: str) -> None:
    assert key(b"{}") != key(b"{}", **{field: "another"})


def test_parts_do_not_run_into_each_other() -> None:
    assert cache_key("t", "ab", "c", PATH, b"{}") != cache_key("t", "a", "bc", PATH, b"{}")


def test_a_key_begins_with_its_tenant_and_shows_no_word_of_the_request() -> None:
    made = key(b'{"messages": "a secret"}', tenant="team")
    assert made[:TENANT_BYTES] == tenant_digest("team")
    assert len(made) == 48
    assert b"secret" not in made
    assert b"team" not in made


def test_a_body_that_is_no_object_has_no_key() -> None:
    with pytest.raises(msgspec.DecodeError):
        key(b"[1]")
