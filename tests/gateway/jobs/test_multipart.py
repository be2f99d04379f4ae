"""Forms are read the same however their bytes arrive."""

from __future__ import annotations

import itertools

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.jobs.multipart import Begin, Data, End, Event, Form, boundary_of

names = st.text(st.characters(min_codepoint=32, max_codepoint=1000, exclude_characters="\\"), min_size=1, max_size=9)


def joined(events: list[Event]) -> list[Event]:
    """The events, with the bytes of each part in one."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Data) and found and isinstance(found[-1], Data):
            found[-1] = Data(found[-1].data + event.data)
        else:
            found.append(event)
    return found


def read(boundary: bytes, body: bytes, cuts: list[int]) -> list[Event]:
    form = Form(boundary)
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    events = [event for a, b in itertools.pairwise(places) for event in form.feed(body[a:b])]
    assert form.is_complete
    return joined(events)


def form_of(fields: dict[str, str], name: str, content: bytes) -> tuple[bytes, bytes]:
    """A form as httpx sends it: its boundary and its body."""
    request = httpx.Request("POST", "http://x/", data=fields, files={"file": (name, content)})
    return boundary_of(request.headers["content-type"].encode()), request.read()


@given(st.dictionaries(names, st.text(max_size=9), max_size=3), names, st.binary(max_size=60), st.lists(st.integers(0)))
def test_a_clients_form_is_read_whatever_the_pieces(
    fields: dict[str, str], name: str, content: bytes, cuts: list[int]
) -> None:
    boundary, body = form_of(fields, name, content)
    expected: list[Event] = []
    for key, value in fields.items():
        expected += [Begin(key, None), *([Data(value.encode())] if value else []), End()]
    expected += [Begin("file", name), *([Data(content)] if content else []), End()]
    assert read(boundary, body, cuts) == expected


@given(st.lists(st.sampled_from([b"\r\n--b", b"\r", b"\n", b"--", b"b", b"x"]), max_size=12), st.lists(st.integers(0)))
def test_bytes_that_are_like_a_boundary_are_content(pieces: list[bytes], cuts: list[int]) -> None:
    content = b"".join(pieces).replace(b"\r\n--bb", b"")
    if b"\r\n--bb" in content:
        return
    body = b'--bb\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--bb--\r\n' % content
    (_, *data, _) = read(b"bb", body, cuts)
    assert b"".join(one.data for one in data if isinstance(one, Data)) == content


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\nContent-Disposition: form-data\r\n\r\n",
        b"--b\r\n\r\n\r\n",
        b"--bx\r\n",
        b"--b\r\n" + b"x" * 9000,
        b"--b" + b" " * 9000,
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 33,
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid multipart"):
        Form(b"b").feed(body)


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        b"application/json",
        b"multipart/form-data",
        b"multipart/mixed; boundary=b",
        b"multipart/form-data; boundary=",
    ],
)
def test_a_content_type_without_a_boundary_is_refused(content_type: bytes | None) -> None:
    with pytest.raises(InvalidRequest, match="multipart/form-data"):
        boundary_of(content_type)


def test_a_body_without_its_last_boundary_is_not_complete() -> None:
    boundary, body = form_of({}, "a", b"content")
    form = Form(boundary)
    form.feed(body[: body.rindex(b"--")])
    assert not form.is_complete
