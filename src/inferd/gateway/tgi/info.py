"""GET /info, where a model that writes texts is asked."""

from __future__ import annotations

from inferd import __version__
from inferd.errors import Unavailable
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.gateway.tgi.form import MAX_STOP
from inferd.gateway.tgi.generate import written_by
from inferd.gateway.tgi.wire import TgiInfo


async def info(context: Context, call: Call, rest: str) -> Answer:
    """The only model that writes texts. Raises InvalidRequest, ModelNotFound, Unavailable."""
    model = written_by(context, call, None)
    known = model.info
    if known is None:
        raise Unavailable("The model is still loading; try again.")
    told = TgiInfo(
        model_id=model.name,
        model_dtype=known.dtype,
        max_concurrent_requests=known.max_num_seqs * max(1, model.replicas_ready),
        max_stop_sequences=MAX_STOP,
        max_input_tokens=max(0, known.max_model_len - 1),
        max_total_tokens=known.max_model_len,
        version=__version__,
    )
    return Response(200, encode(told))
