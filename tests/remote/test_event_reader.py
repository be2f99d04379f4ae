"""A stream's bytes pass as they are, however the network cuts them; what they say is noted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.remote.fault_server import DONE, event, piece, told_usage

from inferd.remote.events import MAX_EVENT_BYTES, BadAnswer, EventReader, ReportedError, read_answer
from inferd.types import Usage

texts = st.text(max_size=6)
events = st.one_of(
    texts.map(lambda text: event(piece(text))),
    texts.map(lambda text: event(piece(text)).replace(b"\n", b"\r\n")),
    st.sampled_from(
        [
            b": keep-alive\n\n", b"event: x\ndata: {}\n\n", b"id: 1\r\ndata: {\"a\":1}\r\n\r\n",
            b"data:{}\n\n\n", b"\n\n",
            b'data: {"choices":\ndata: []}\n\n', event(piece("", "stop")),
            event({"choices": [{"index": 1, "text": "x"}]}),
        ]
    ),
)  # fmt: skip


def fed(data: bytes, cuts: list[int], *, drop_usage: bool) -> tuple[bytes, EventReader]:
    reader = EventReader(drop_usage=drop_usage)
    out, begin = b"", 0
    for cut in [*sorted(cuts), len(data)]:
        out += reader.feed(data[begin:cut])
        begin = cut
    return out, reader


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=5), st.data())
def test_however_a_stream_is_cut_the_same_bytes_go_on(made: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(made) + event(told_usage(3, 2)) + DONE
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=8))
    out, reader = fed(whole, cuts, drop_usage=False)
    assert out == whole
    assert reader.is_done
    assert reader.usage == Usage(3, 2)
    out, reader = fed(whole, cuts, drop_usage=True)
    assert out == b"".join(made) + DONE
    assert reader.usage == Usage(3, 2)


def test_every_single_split_of_a_stream_says_the_same() -> None:
    whole = event(piece("é")) + event(piece("", "stop")).replace(b"\n", b"\r\n") + event(told_usage(7, 9)) + DONE
    expected = whole.replace(event(told_usage(7, 9)), b"")
    for cut in range(len(whole) + 1):
        out, reader = fed(whole, [cut], drop_usage=True)
        assert out == expected, cut
        assert (reader.usage, reader.num_tokens, reader.is_done) == (Usage(7, 9), 1, True)


def test_a_usage_that_comes_with_a_choice_goes_on() -> None:
    last = event({**piece("x", "stop"), "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    out, reader = fed(last, [], drop_usage=True)
    assert (out, reader.usage) == (last, Usage(1, 1))


def test_text_that_looks_like_usage_or_the_end_is_only_text() -> None:
    whole = event(piece('"usage":{"prompt_tokens":1} [DONE] data: [DONE]'))
    out, reader = fed(whole, [], drop_usage=True)
    assert (out, reader.usage, reader.is_done) == (whole, None, False)


@pytest.mark.parametrize(
    "data",
    [
        b"<html>\n\n", b"data: {\n\n", b"data: nonsense\n\n", b"data: []\n\n", b"data: 5\n\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"data: " + b"[" * 100_000 + b"\n\n", b"data: \xff\xfe\n\n",
    ],
)  # fmt: skip
def test_what_is_no_event_never_goes_on(data: bytes) -> None:
    reader = EventReader(drop_usage=False)
    good = event(piece("a"))
    assert reader.feed(good + data) == good
    assert isinstance(reader.broken, BadAnswer)
    reader = EventReader(drop_usage=False)
    assert reader.feed(data) == b""
    assert isinstance(reader.broken, BadAnswer)


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    reader = EventReader(drop_usage=False)
    for _ in range(MAX_EVENT_BYTES // 2**20 + 2):
        assert reader.feed(b"x" * 2**20) == b""
        if reader.broken is not None:
            break
    assert "larger than" in str(reader.broken)


def test_an_error_in_a_stream_is_no_event_of_an_answer() -> None:
    reader = EventReader(drop_usage=False)
    assert reader.feed(event({"error": {"message": "out of memory", "code": 500}})) == b""
    assert isinstance(reader.broken, ReportedError)
    assert str(reader.broken) == "out of memory"


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        ('{"prompt_tokens": -5, "completion_tokens": 2}', Usage(0, 2)),
        ('{"prompt_tokens": 99999999999999999999, "completion_tokens": null}', Usage(2**40)),
        ('{"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}', Usage(4, 1, 4)),
        ('{"prompt_tokens": 4, "prompt_tokens_details": null}', Usage(4, 0, 0)),
    ],
)
def test_whatever_a_server_says_it_cost_counts_are_counts(said: str, usage: Usage) -> None:
    found = read_answer(f'{{"choices": [], "usage": {said}}}'.encode())
    assert found == usage
