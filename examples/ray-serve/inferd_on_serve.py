"""A Ray Serve deployment that stands in front of inferd: every path, every byte, streams as they come.

    inferd serve demo --port 8100
    pip install 'ray[serve]' httpx
    INFERD_URL=http://127.0.0.1:8100 serve run inferd_on_serve:app

Clients of OpenAI's API then use http://127.0.0.1:8000/v1, Serve's proxy. The deployment holds no model: it needs no
GPU, and one copy carries many requests. A client that leaves closes the connection to inferd, so its work ends too.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import httpx
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

URL = os.environ.get("INFERD_URL", "http://127.0.0.1:8100")

# Of one connection, so they are not for the next one (RFC 9110, section 7.6.1).
HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
class Inferd:
    """Relays requests to the server at ``url``. inferd limits and queues them, so nothing is limited here."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10.0, read=None), limits=limits)

    async def __call__(self, request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP]
        path = httpx.URL(path=request.url.path, query=request.url.query.encode())
        upstream = self.client.build_request(request.method, path, headers=headers, content=await request.body())
        try:
            answer = await self.client.send(upstream, stream=True)
        except httpx.TransportError as error:
            problem = {"message": f"inferd does not answer: {error}", "type": "upstream_error", "code": None}
            return JSONResponse({"error": problem}, status_code=502)
        kept = {name: value for name, value in answer.headers.items() if name not in HOP}
        return StreamingResponse(chunks(answer), answer.status_code, kept, background=BackgroundTask(answer.aclose))


async def chunks(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The bytes of an answer as they come, still encoded. Closed early, it closes the connection to inferd."""
    try:
        async for data in answer.aiter_raw():
            yield data
    finally:
        await answer.aclose()


app = Inferd.bind(URL)
