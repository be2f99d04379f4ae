"""Calls that are recorded for ``inferd replay``: the client's bytes are the same, and a record is enough to ask again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes import FakeRouter, running

from inferd.config import PayloadsConfig
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.payloads.store import PayloadStore

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
VOLATILE = re.compile(rb'"(id|request_id)":"[^"]*"|"created(_at)?":\d+')


def log_of(folder: Path, **settings: Any) -> PayloadLog:
    return PayloadLog(folder, PayloadsConfig(tenants=("*",), keep=("replay",), **settings), lambda: None)


def bytes_of(path: str, body: object, log: PayloadLog | None) -> tuple[int, bytes]:
    """The status and the bytes that a client gets, without what differs from call to call."""
    with running(FakeRouter("tiny"), payloads=log) as server:
        answer = server.http.post(server.url + path, json=body, headers={"x-request-id": "r"})
        return answer.status_code, VOLATILE.sub(b"", answer.content)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}),
    ],
)
def test_a_client_gets_the_same_bytes_with_and_without_the_recorder(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    log = log_of(tmp_path)
    recorded = bytes_of(path, body, log)
    log.close(30)
    assert recorded == bytes_of(path, body, None)
    (record,) = PayloadStore(tmp_path).records()
    assert VOLATILE.sub(b"", record["answer"]["whole"]["text"].encode()) == recorded[1]
    assert (record["path"], record["status"]) == (path, recorded[0])
