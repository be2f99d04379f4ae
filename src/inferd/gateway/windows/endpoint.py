"""GET /v2/models/{model}/stream: windows of a client's samples over a WebSocket, each answered as soon as it is full.

Errors before the WebSocket is accepted are HTTP answers. Later errors are messages (``windows/stream.py``).
"""

from __future__ import annotations

from inferd.errors import Unavailable
from inferd.gateway.call import Call, Switched
from inferd.gateway.context import Context
from inferd.gateway.errors import UpgradeRequired
from inferd.gateway.kserve import rest as v2
from inferd.gateway.kserve.served import draw_served_version
from inferd.gateway.predictions import check_task
from inferd.gateway.windows.options import options_of, plan_of
from inferd.http.exchange import ClientLeft


async def stream(context: Context, call: Call, rest: str) -> Switched:
    """Accept a WebSocket and start its stream of windows. Raises UpgradeRequired, ModelNotFound, InvalidRequest,
    Unavailable and ClientLeft."""
    if call.offer is None:
        raise UpgradeRequired(
            "This is a WebSocket: connect to it with ws:// or wss:// and a WebSocket client, over HTTP/1.1."
        )
    served = draw_served_version(context, call, v2.served_of(context, call, rest))
    info = served.status.info
    if context.router.draining:
        raise Unavailable("The server is shutting down; connect to another one.")
    if info is None:
        raise Unavailable(
            f"The model {served.name!r} is {served.status.state}, and what it takes is not known before it has been "
            "ready; connect again then.",
            param="model",
        )
    check_task(served.status, v2.task_of(served))
    options = options_of(call.offer.query)
    plan = None
    if options.window is not None:  # without it the first message must have the options
        plan = plan_of(served.name, info, options, context.max_body_bytes)
    # Imported here, so that a server without WebSockets does not load their library.
    from inferd.gateway.windows.stream import WindowStream
    from inferd.http.websocket import WebSocket

    socket = WebSocket(call.path, call.headers)
    window_stream = WindowStream(context, call, served, info, options, plan, socket)
    try:
        request_id = (b"x-request-id", call.request_id.encode("ascii"))
        socket.accept(call.offer, (request_id, *call.common_headers), window_stream.serve())
    except BrokenPipeError:
        raise ClientLeft from None
    return Switched()
