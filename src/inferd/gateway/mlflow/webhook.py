"""POST /admin/mlflow/webhook: an MLflow server says that its registry has changed. The signature is the credential."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.body.decode import decode_body
from inferd.gateway.call import Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.errors import printable
from inferd.gateway.generation.writer import encode
from inferd.lifecycle.webhooks import MAX_BODY_BYTES, Delivery


class WebhookEvent(msgspec.Struct, frozen=True):
    """The body of MLflow's webhooks. Only the names of the event are read."""

    entity: str = ""  # model_version_alias, model_version, registered_model, ...
    action: str = ""  # created, deleted, set
    timestamp: str = ""
    data: Any = None


class WebhookAccepted(msgspec.Struct, frozen=True):
    """The registry is looked at now."""

    event: str


_decoder: Final = msgspec.json.Decoder(WebhookEvent)


async def accept_webhook(context: Context, call: Call, rest: str) -> Response:
    """Raises Unauthenticated for a message that is forged, old or repeated, and InvalidRequest."""
    require_json(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    delivery = Delivery(
        id=_text(call, b"x-mlflow-delivery-id"),
        timestamp=_text(call, b"x-mlflow-timestamp"),
        signatures=_text(call, b"x-mlflow-signature"),
        body=body,
    )
    webhooks = control_of(context).webhooks
    await webhooks.receive(delivery)
    event = await decode_body(body, _decoder)
    webhooks.look_soon()
    return Response(202, encode(WebhookAccepted(f"{printable(event.entity)}.{printable(event.action)}")))


def _text(call: Call, name: bytes) -> str:
    """A header's value; empty where it is missing or given twice."""
    return (call.header(name) or b"").decode("latin-1")[:1024] if call.head.count(name) == 1 else ""
