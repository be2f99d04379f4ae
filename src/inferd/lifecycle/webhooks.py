"""Signed messages of an MLflow server that something in its registry has changed.

A message that is accepted makes the server look at the registry at once. Nothing of its content is used, so the worst
that a leaked secret allows is a look. The form is that of Standard Webhooks: ``v1,`` and the base64 of HMAC-SHA256 over
``{delivery id}.{timestamp}.{body}`` (mlflow/webhooks/delivery.py; https://www.standardwebhooks.com).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from inferd.config.versioning import MlflowConfig
from inferd.errors import InvalidRequest, ModelLoadError, Unauthenticated
from inferd.events import Emit, WebhookCame, WebhookResult
from inferd.registry.mlflow.server import secret_of

MAX_AGE_S: Final = 300.0
"""A message is refused that was signed so long ago, or so far in the future."""

MAX_BODY_BYTES: Final = 256 * 1024
_MAX_KNOWN: Final = 10_000  # ids that are remembered at a time
_RESULTS: Final[Mapping[str, WebhookResult]] = {
    "webhook_signature": "forged",
    "webhook_age": "old",
    "webhook_replayed": "replayed",
    "no_webhook_secret": "unset",
}


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it arrived."""

    id: str
    timestamp: str  # seconds since the epoch
    signatures: str  # of this message, separated by spaces
    body: bytes


class Webhooks:
    """The messages to one server. ``look_soon`` looks at the registry; None: the server follows no configuration file.
    ``now``: seconds since the epoch. ``emit`` is called in the event loop."""

    def __init__(
        self,
        settings: Callable[[], MlflowConfig],
        look_soon: Callable[[], None] | None,
        now: Callable[[], float],
        emit: Emit,
    ) -> None:
        self._emit = emit
        self._settings = settings
        self._look_soon = look_soon
        self._now = now
        self._known: dict[str, float] = {}  # accepted ids and their times, the oldest first
        self._lock = threading.Lock()

    async def receive(self, delivery: Delivery) -> None:
        """Check a message, and tell what became of it. Raises Unauthenticated as ``check_delivery``."""
        try:
            await asyncio.to_thread(self.check_delivery, delivery)
        except Unauthenticated as error:
            result = _RESULTS[error.code or ""]
            self._emit(WebhookCame(result=result, delivery=delivery.id if result in ("old", "replayed") else ""))
            raise
        self._emit(WebhookCame(result="accepted", delivery=delivery.id))

    def check_delivery(self, delivery: Delivery) -> None:
        """Check a message with the secret of the settings, which may be in a file: this may block. Raises
        Unauthenticated for one that is forged, too old, or was accepted before."""
        settings = self._settings()
        try:
            secret = secret_of(
                os.environ, settings.webhook_secret_env, settings.webhook_secret_file, "mlflow.webhook_secret"
            )
        except ModelLoadError:
            raise Unauthenticated(
                "This server takes no webhook: mlflow.webhook_secret_env and webhook_secret_file name no secret.",
                code="no_webhook_secret",
            ) from None
        self.check(secret, delivery)

    def look_soon(self) -> None:
        """Look at the registry because of a message. Raises InvalidRequest where nothing is followed."""
        if self._look_soon is None:
            raise InvalidRequest(
                "This server was started without a configuration file, or with server.reload off, so it follows no "
                "alias; start it with inferd serve FILE.yaml.",
                code="no_config_file",
            )
        self._look_soon()

    def check(self, secret: str, delivery: Delivery) -> None:
        """Raises Unauthenticated unless the message has a signature with this secret, is recent and is new."""
        signed = f"{delivery.id}.{delivery.timestamp}.".encode() + delivery.body
        expected = base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest())
        given = [one.removeprefix("v1,").encode() for one in delivery.signatures.split() if one.startswith("v1,")]
        if not any(hmac.compare_digest(one, expected) for one in given):
            raise Unauthenticated(
                "The webhook's signature (X-MLflow-Signature) is missing or not made with this server's secret.",
                code="webhook_signature",
            )
        # From here on the message is the server's own, perhaps sent again by another.
        now = self._now()
        is_number = delivery.timestamp.isascii() and delivery.timestamp.isdecimal()
        if not is_number or abs(now - int(delivery.timestamp[:15])) > MAX_AGE_S:
            raise Unauthenticated(
                f"The webhook was signed more than {MAX_AGE_S:g} s ago or in the future; compare the clocks.",
                code="webhook_age",
            )
        with self._lock:
            self._forget(now)
            if delivery.id in self._known or not delivery.id:
                raise Unauthenticated(
                    "The webhook was delivered before (X-MLflow-Delivery-Id).", code="webhook_replayed"
                )
            self._known[delivery.id] = now

    def _forget(self, now: float) -> None:
        """Ids of messages that are refused by their age, and the oldest of too many."""
        for known, at in list(self._known.items()):
            if now - at <= 2 * MAX_AGE_S and len(self._known) < _MAX_KNOWN:
                break
            del self._known[known]
