"""Signed messages of an MLflow server: which are accepted, and that no change of one is."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config.versioning import MlflowConfig
from inferd.errors import InvalidRequest, Unauthenticated
from inferd.events import Event, WebhookCame, ignore
from inferd.lifecycle.webhooks import MAX_AGE_S, Delivery, Webhooks

SECRET = "whsec-7"
NOW = 1_795_544_617
# Made by mlflow.webhooks.delivery._generate_hmac_signature of mlflow-skinny 3.17.2, for SECRET, "d-1" and NOW.
BODY = (
    b'{"entity": "model_version_alias", "action": "created", "timestamp": "2026-11-24T18:23:37+00:00", '
    b'"data": {"name": "adding", "alias": "champion", "version": "2"}}'
)
RECORDED = "v1,Ote3npG7c1YjnFUBd20FpOvYwgNCQgPhSgVq0AUSib8="


def signed(body: bytes = BODY, *, name: str = "d-1", at: int = NOW, secret: str = SECRET) -> Delivery:
    text = f"{name}.{at}.".encode() + body
    signature = base64.b64encode(hmac.new(secret.encode(), text, hashlib.sha256).digest()).decode()
    return Delivery(id=name, timestamp=str(at), signatures=f"v1,{signature}", body=body)


def webhooks(now: list[float] | None = None, **settings: Any) -> tuple[Webhooks, list[str]]:
    looks: list[str] = []
    clock = now or [float(NOW)]
    return Webhooks(lambda: MlflowConfig(**settings), lambda: looks.append("look"), lambda: clock[0], ignore), looks


def refused(found: Webhooks, delivery: Delivery, secret: str = SECRET) -> str | None:
    with pytest.raises(Unauthenticated) as error:
        found.check(secret, delivery)
    return error.value.code


def test_a_message_as_mlflow_signs_it_is_accepted_once() -> None:
    found, _ = webhooks()
    assert signed().signatures == RECORDED
    found.check(SECRET, signed())
    assert refused(found, signed()) == "webhook_replayed"
    found.check(SECRET, signed(name="d-2"))
    rotated = msgspec.structs.replace(signed(name="d-3"), signatures="v1,AAAA " + signed(name="d-3").signatures)
    found.check(SECRET, rotated)


@given(
    place=st.sampled_from(["id", "timestamp", "signatures", "body"]),
    at=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
def test_no_changed_bit_is_accepted(place: str, at: int, bit: int) -> None:
    delivery = signed()
    value = getattr(delivery, place)
    data = bytearray(value if isinstance(value, bytes) else value.encode())
    data[at % len(data)] ^= 1 << bit
    changed = bytes(data) if isinstance(value, bytes) else data.decode("latin-1")
    found, _ = webhooks()
    code = refused(found, msgspec.structs.replace(delivery, **{place: changed}))
    assert code == "webhook_signature"
    found.check(SECRET, delivery)  # a forged message does not use up an id


@given(age=st.integers(-10_000, 10_000))
def test_only_recent_messages_are_accepted(age: int) -> None:
    found, _ = webhooks()
    delivery = signed(at=NOW - age)
    if abs(age) <= MAX_AGE_S:
        return found.check(SECRET, delivery)
    assert refused(found, delivery) == "webhook_age"
    return None


def test_a_repetition_is_never_accepted_while_its_age_would_be() -> None:
    now = [float(NOW)]
    found, _ = webhooks(now)
    found.check(SECRET, signed(at=int(NOW + MAX_AGE_S)))
    for step in range(0, int(4 * MAX_AGE_S), 50):
        now[0] = NOW + step
        found.check(SECRET, signed(name=f"other-{step}", at=NOW + step))
        assert refused(found, signed(at=int(NOW + MAX_AGE_S))) in ("webhook_replayed", "webhook_age")


@pytest.mark.parametrize("timestamp", ["", "-1", "1e9", "٣", "9" * 400, "nan"])
def test_a_timestamp_that_is_no_number_is_refused(timestamp: str) -> None:
    text = f"d-1.{timestamp}.".encode() + BODY
    signature = base64.b64encode(hmac.new(SECRET.encode(), text, hashlib.sha256).digest()).decode()
    found, _ = webhooks()
    delivery = Delivery(id="d-1", timestamp=timestamp, signatures=f"v1,{signature}", body=BODY)
    assert refused(found, delivery) == "webhook_age"


def test_the_secret_is_read_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    found, looks = webhooks(webhook_secret_file=str(file))
    found.check_delivery(signed())
    found.look_soon()
    assert looks == ["look"]
    file.write_text("another")
    with pytest.raises(Unauthenticated, match="not made with this server's secret"):
        found.check_delivery(signed(name="d-2"))
    monkeypatch.setenv("A_SECRET", SECRET)
    found, _ = webhooks(webhook_secret_env="A_SECRET")
    found.check_delivery(signed())
    found, _ = webhooks()
    with pytest.raises(Unauthenticated, match="takes no webhook"):
        found.check_delivery(signed())


def test_a_server_that_follows_nothing_says_so() -> None:
    with pytest.raises(InvalidRequest, match="follows no alias"):
        Webhooks(MlflowConfig, None, lambda: 0.0, ignore).look_soon()


def test_each_message_is_told_with_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    clock = [float(NOW)]
    settings = MlflowConfig(webhook_secret_env="HOOK")
    found = Webhooks(lambda: settings, None, lambda: clock[0], told.append)

    def receive(delivery: Delivery) -> None:
        with contextlib.suppress(Unauthenticated):
            asyncio.run(found.receive(delivery))

    receive(signed())
    monkeypatch.setenv("HOOK", SECRET)
    receive(signed())
    receive(signed())
    receive(signed(name="d-2", secret="another"))
    clock[0] += 3600.0
    receive(signed(name="d-3"))
    assert told == [
        WebhookCame(result="unset"),
        WebhookCame(result="accepted", delivery="d-1"),
        WebhookCame(result="replayed", delivery="d-1"),
        WebhookCame(result="forged"),
        WebhookCame(result="old", delivery="d-3"),
    ]
