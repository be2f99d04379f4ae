"""Lines of inputs: how they are read, what is wrong with them, and what is written of their answers."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.jobs.batch import Place, Tokens
from inferd.jobs.lines import Lines
from inferd.jobs.results import Answer, answered, refused, request_id, tokens_of
from inferd.jobs.survey import Fault, Question, Reading, refuse_binary, survey

PATH = "/v1/completions"
MOST = 1000


def line(name: object = "a", url: str = PATH, body: object = None, **more: object) -> bytes:
    return json.dumps({"custom_id": name, "url": url, "body": body or {"model": "m"}, **more}).encode()


def read(content: bytes, place: Place = Place(), most: int = MOST) -> list[bytes | None]:
    lines = Lines(io.BytesIO(content), place, most)
    return [found.data for found in iter(lines.read, None)]


@given(st.lists(st.binary(max_size=20).filter(lambda text: not {10, 13} & set(text) and text[:3] != b"\xef\xbb\xbf")),
       st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.data())  # fmt: skip
def test_lines_are_those_between_the_ends_from_any_place(
    texts: list[bytes], end: bytes, is_ended: bool, data: st.DataObject
) -> None:
    content = end.join(texts) + (end if is_ended and texts else b"")
    lines = Lines(io.BytesIO(content), Place(), 30)
    found = list(iter(lines.read, None))
    expected = content.split(b"\n")
    expected = expected[:-1] if not expected[-1] else expected
    assert [one.data for one in found] == [text.rstrip(b"\r") for text in expected]
    if found:
        at = data.draw(st.sampled_from(found))
        assert at.end.offset - at.begin.offset >= len(at.data or b"")
        assert read(content, at.end, 30) == [one.data for one in found[at.number :]]


def test_a_mark_of_the_byte_order_is_left_out_at_the_beginning_alone() -> None:
    mark = b"\xef\xbb\xbf"
    assert read(mark + b"one\r\n" + mark + b"two") == [b"one", mark + b"two"]


class LongLine(io.RawIOBase):
    """A file with one line of ``size`` bytes between two requests, which exists nowhere as a whole."""

    def __init__(self, size: int) -> None:
        self._parts: list[bytes | int] = [line("first") + b"\n", size, b"\n" + line("last") + b"\n"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def readinto(self, buffer: Any) -> int:
        while self._parts and not self._parts[0]:
            self._parts.pop(0)
        if not self._parts:
            return 0
        part = self._parts[0]
        if isinstance(part, int):
            count = min(part, len(buffer))
            buffer[:count] = b"x" * count
            self._parts[0] = part - count
        else:
            count = min(len(part), len(buffer))
            buffer[:count] = part[:count]
            self._parts[0] = part[count:]
        return count


def test_a_line_of_a_hundred_megabytes_is_an_error_and_never_in_memory() -> None:
    tracemalloc.start()
    try:
        found = survey(io.BufferedReader(LongLine(100 << 20)), PATH, 1 << 20, 10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(one.code, one.line) for one in found.problems] == [("line_too_long", 2)]
    assert (found.total, found.refusal) == (3, None)
    assert peak < 8 << 20


def test_a_line_that_is_too_long_is_passed_over() -> None:
    content = b"x" * 1000 + b"\n" + b"y" * 300_000 + b"\n" + b"z\n"
    assert read(content) == [b"x" * 1000, None, b"z"]
    found = survey(io.BytesIO(line() + b"\n" + b"y" * 300_000), PATH, MOST, 10)
    assert (found.total, found.problems[0].code, found.problems[0].line) == (2, "line_too_long", 2)
    assert "server.max_body_bytes" in found.problems[0].message


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"\xff{}", "invalid_json", None),
        (b"[" * 900, "invalid_line", None),
        (b"7", "invalid_line", None),
        (b'{"url": "/v1/completions", "body": {}}', "invalid_line", "custom_id"),
        (line(7), "invalid_line", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (line(body=[1]), "invalid_body", "body"),
        (line(body={"model": "m", "stream": True}), "unsupported_value", "body.stream"),
        (line(body={"model": "m", "background": True}), "unsupported_value", "body.background"),
        (line(body={"model": "other"}), "mismatched_model", "body.model"),
        (line(body={"prompt": "a"}), "mismatched_model", "body.model"),
        (line("first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_by_its_number_and_field(content: bytes, code: str, param: str) -> None:
    whole = line("first") + b"\n\n" + content + b"\n" + line("last")
    found = survey(io.BytesIO(whole), PATH, MOST, 10)
    assert (found.total, found.model, found.refusal) == (3, "m", None)
    (problem,) = found.problems
    assert (problem.code, problem.line, problem.param) == (code, 3, param)
    assert problem.message.startswith("Line 3: ")
    reading = Reading(PATH, MOST, found.model, found.repeated)
    kinds = [type(reading.read(one)) for one in iter(Lines(io.BytesIO(whole), Place(), MOST).read, None) if one.data]
    assert kinds == [Question, Fault, Question], "the others go on"


def test_a_line_that_is_refused_keeps_its_id_where_it_has_one() -> None:
    reading = Reading(PATH, MOST)
    (found,) = [reading.read(one) for one in iter(Lines(io.BytesIO(b'{"custom_id": "a"}'), Place(), MOST).read, None)]
    assert isinstance(found, Fault)
    assert found.custom_id == "a"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n\r\n", "empty_file"),
        (b"not json\n{}\n", "no_requests"),
        (b"\n".join([line(str(number)) for number in range(11)]), "too_many_lines"),
    ],
)
def test_a_file_without_requests_is_refused(content: bytes, code: str) -> None:
    found = survey(io.BytesIO(content), PATH, MOST, 10)
    assert found.refusal is not None
    assert found.refusal.code == code


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_the_first_line_of_each_id_is_the_one_that_is_asked(names: list[str]) -> None:
    content = b"\n".join(map(line, names))
    found = survey(io.BytesIO(content), PATH, MOST, 100)
    assert found.repeated == {at for at, name in enumerate(names, 1) if name in names[: at - 1]}
    assert found == survey(io.BytesIO(content), PATH, MOST, 100)


@pytest.mark.parametrize("begin", [b"\x1f\x8b\x08", b"PK\x03\x04", b"\xff\xfe{\x00", b"{\x00", b"PAR1"])
def test_what_is_no_text_is_refused(begin: bytes) -> None:
    assert refuse_binary(begin) is not None
    assert refuse_binary(b"\xef\xbb\xbf" + line()) is None


@pytest.mark.parametrize(
    ("body", "shown"), [(b'{"a": 1}', {"a": 1}), (b'{"a":\n 1}', {"a": 1}), (b"\x00\xfftensor", "\x00\ufffdtensor")]
)
def test_an_answer_is_one_line_of_json(body: bytes, shown: Any) -> None:
    name = request_id("batch_1", 3)
    written = answered(name, "a", Answer(200, body))
    assert written.count(b"\n") == 1
    assert json.loads(written) == {
        "id": name,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": name, "body": shown},
        "error": None,
    }


def test_a_refused_line_is_one_line_of_json_too() -> None:
    (found,) = [Reading(PATH, MOST).read(one) for one in iter(Lines(io.BytesIO(b"{"), Place(), MOST).read, None)]
    assert isinstance(found, Fault)
    written = json.loads(refused("batch_req_1", None, found.problem))
    assert written["response"] is None
    assert written["error"]["line"] == 1


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b"{}", Tokens()),
        (b"no json", Tokens()),
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}}',
         Tokens(3, 1, 2, 0)),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 2}}}',
         Tokens(3, 0, 2, 2)),
        (b'{"usage": {"input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 2}}', Tokens(8, 5, 2, 0)),
    ],
)  # fmt: skip
def test_tokens_are_those_that_an_answer_reports(body: bytes, tokens: Tokens) -> None:
    assert tokens_of(body) == tokens
