"""The stages of a request for a model, in order: the idempotency store, the response cache, the quota, the queue.

A dialect describes its request (``Work``); the stages are the same for all dialects. A stage returns an answer, or
None. After None the next stage gets the request.
"""

from __future__ import annotations

from typing import Final, Protocol

from inferd import clock
from inferd.eager import in_task
from inferd.gateway.admission import reserve
from inferd.gateway.caching import CacheInputs, cached_answer
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.idempotency import asks_for_repetition, repeated
from inferd.gateway.terms import Cost

COLD_START: Final = b"x-keda-http-cold-start"
"""``true`` where a request waits for a model that is loaded for it, ``false`` where such a model was there: the header
of KEDA's HTTP add-on."""


class Work(Protocol):
    """A request that was decoded and checked."""

    @property
    def model_name(self) -> str: ...
    def identity(self) -> bytes:
        """The bytes that are equal for repetitions of a request with one Idempotency-Key."""
        ...

    def inputs(self, context: Context) -> CacheInputs | None:
        """The inputs of the cache key; None: the answer must not be cached."""
        ...

    def prepare(self, context: Context, call: Call) -> Cost:
        """Make the request that is submitted; returns its cost. Raises InvalidRequest."""
        ...

    async def submit(self, context: Context, call: Call) -> Answer:
        """Submit the request. Raises what the router raises."""
        ...


async def answer_of(context: Context, call: Call, work: Work) -> Answer:
    """The answer to a request: stored, cached or computed. Raises InferdError for a failure before the first byte."""
    call.received_at = clock.now()
    model = work.model_name
    answer: Answer | None = None
    if asks_for_repetition(context, call):
        await in_task()
        answer = await repeated(context, call, work.identity(), model)
    if answer is None and context.cache is not None and context.caching_of(model).enabled:
        await in_task()
        inputs = work.inputs(context)
        answer = None if inputs is None else await cached_answer(context, call, inputs, model)
    if answer is None:
        cost = work.prepare(context, call)
        reserve(context, call, model, prompt_tokens=cost.max_prompt, max_tokens=cost.max_answer)
        call.model = model
        call.submitted_at = clock.now()
        if model in context.on_demand_models:
            call.common_headers += ((COLD_START, b"true" if _is_away(context, model) else b"false"),)
        answer = await work.submit(context, call)
    return answer


def _is_away(context: Context, model: str) -> bool:
    status = context.router.model(model)
    return status is not None and status.state in ("unloaded", "loading")
