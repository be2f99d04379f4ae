"""POST /api/embed, and /api/embeddings of older clients. The worker reads the texts, and writes the answer."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.gateway.body.decode import decode_body, json_body, within_decode_cost
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.ollama.names import found_by
from inferd.gateway.predictions import predict
from inferd.gateway.route import Endpoint
from inferd.gateway.terms import PredictFields
from inferd.gateway.versions import model_for


class _Named(msgspec.Struct, frozen=True):
    """The field of a body that the gateway uses."""

    model: str | None = None


_decoder: Final = msgspec.json.Decoder(_Named)


def _endpoint(dialect: str) -> Endpoint:
    async def endpoint(context: Context, call: Call, rest: str) -> Answer:
        raw = await within_decode_cost(await json_body(call, context.max_body_bytes, context.body_timeout_s))
        name = (await decode_body(raw, _decoder)).model
        model = found_by(lambda name: model_for(context, call, name), name)
        fields = PredictFields(dialect=dialect, body=raw, tokens=len(raw))
        return await predict(context, call, model, fields, "embed")

    return endpoint


embed = _endpoint("ollama.embed")
embeddings = _endpoint("ollama.embeddings")
