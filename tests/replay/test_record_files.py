"""Files of records: what can be asked again, why others cannot, and files that are damaged."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from inferd.errors import InvalidRequest
from inferd.observe.payloads import content, whole
from inferd.replay import records
from inferd.replay.records import REASONS, read


def kept(data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    try:
        return {"bytes": len(data), "whole": {"text": data.decode(), "sha256": digest}}
    except UnicodeDecodeError:
        return {"bytes": len(data), "whole": {"base64": base64.b64encode(data).decode(), "sha256": digest}}


def record(request: Any = b"{}", answer: Any = b"{}", **changes: Any) -> dict[str, Any]:
    return {
        "schema": 2,
        "request_id": "r",
        "route": "/v1/chat/completions",
        "path": "/v1/chat/completions",
        "headers": {},
        "model": "m",
        "version": "1",
        "fingerprint": "fp_1",
        "status": 200,
        "stream": False,
        "duration_s": 0.5,
        "first_s": None,
        "usage": [3, 2],
        "request": request if isinstance(request, dict) else kept(request),
        "answer": answer if isinstance(answer, dict) else kept(answer),
        **changes,
    }


def written(folder: Path, *lines: Any, end: str = "\n") -> Path:
    file = folder / "asked.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + end)
    return file


def test_bodies_come_back_byte_for_byte(tmp_path: Path) -> None:
    body = bytes(range(256))
    (found,) = read(written(tmp_path, record(body, "é".encode())), {})
    assert (found.body, found.answer, found.usage, found.fingerprint) == (body, "é".encode(), (3, 2), "fp_1")


def test_records_that_cannot_be_asked_again_are_counted_by_their_reason(tmp_path: Path) -> None:
    old = {name: value for name, value in record().items() if name != "schema"}
    bare = record(request={"bytes": 2})
    lines = [record(not_replayable=reason) for reason in ("redacted", "redacted", "opaque", "of the future")]
    skipped: dict[str, int] = {}
    assert len(list(read(written(tmp_path, old, bare, *lines, record()), skipped))) == 1
    assert skipped == {"schema": 1, "no_bodies": 1, "redacted": 2, "opaque": 1, "not_answered": 1}
    assert set(skipped) <= set(REASONS)


def test_the_reader_knows_the_writers_schema_and_its_reasons() -> None:
    assert records.SCHEMA == content.SCHEMA
    source = Path(whole.__file__).read_text()
    said = {text.split('"')[1] for text in source.split("_Refused(")[1:] if text.startswith('"')}
    assert len(said) > 4
    assert said <= set(REASONS)


@pytest.mark.parametrize(
    ("lines", "end", "said"),
    [
        ([record(), '{"schema": 2, "route": "/v1/ch'], "", "line 2 .* was cut off, so export it again"),
        ([record(), "not json"], "\n", "line 2 .* not valid JSON"),
        ([{"prompt": "a dataset"}], "\n", "line 1 .* is no record; 'inferd payloads export'"),
        ([record(schema=3)], "\n", "line 1 .* has schema 3, and this version of inferd reads records up to 2"),
        ([record(usage="none")], "\n", "line 1 .* is damaged"),
        ([record(path=None)], "\n", "line 1 .* is damaged"),
        ([record(answer={"whole": {"text": "x", "sha256": "00"}})], "\n", "line 1 .* does not have the digest"),
        ([record(answer={"whole": {"base64": "?", "sha256": "00"}})], "\n", "line 1 .* is damaged"),
        ([record(answer={"whole": {}})], "\n", "line 1 .* is damaged"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, lines: list[Any], end: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        list(read(written(tmp_path, *lines, end=end), {}))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        list(read(tmp_path / "none", {}))
