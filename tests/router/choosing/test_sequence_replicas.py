"""The replica of a sequence is remembered from its first request to its last one, for one tenant, within a bound."""

from __future__ import annotations

from typing import Any, cast

from inferd.router.choosing.sequence_replicas import MAX_SEQUENCES, SequenceReplicas
from inferd.router.replicas.replica import Replica
from inferd.types import GenerateRequest, PredictRequest, TextPrompt

ONE, OTHER = cast(Replica, object()), cast(Replica, object())


def asked(sequence: str, tenant: str = "t", **fields: Any) -> PredictRequest:
    return PredictRequest(id="p", model="m", dialect="v2", body=b"", sequence=sequence, tenant=tenant, **fields)


def test_a_sequence_is_where_its_last_request_went_until_its_end() -> None:
    replicas = SequenceReplicas()
    assert replicas.replica_of(asked("a")) is None
    replicas.note(asked("a"), ONE)
    replicas.note(asked("b"), OTHER)
    assert [replicas.replica_of(asked(name)) for name in "abc"] == [ONE, OTHER, None]
    assert replicas.replica_of(asked("a", "another tenant")) is None
    replicas.note(asked("a"), OTHER)
    assert replicas.replica_of(asked("a")) is OTHER
    replicas.note(asked("a", sequence_end=True), OTHER)
    replicas.note(asked("never begun", sequence_end=True), OTHER)
    assert [replicas.replica_of(asked(name)) for name in ("a", "b", "never begun")] == [None, OTHER, None]


def test_requests_of_no_sequence_are_not_remembered() -> None:
    replicas = SequenceReplicas()
    for request in (asked(""), GenerateRequest(id="g", model="m", prompt=TextPrompt(text="x"))):
        replicas.note(request, ONE)
        assert replicas.replica_of(request) is None


def test_the_least_recently_used_sequences_are_forgotten() -> None:
    replicas = SequenceReplicas()
    for name in ("a", "b", *map(str, range(MAX_SEQUENCES - 2)), "a", "another"):
        replicas.note(asked(name), ONE)
    assert [name for name in ("a", "b", "0", "another") if replicas.replica_of(asked(name)) is not None] == [
        "a",
        "0",
        "another",
    ]
