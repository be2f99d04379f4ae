"""The prompts that one replica computes for other replicas of its model, which then compute the answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from inferd.types import GenerateRequest, Handed, Output
from inferd.worker.messages import Cancel, Submit

Ended = Callable[[Handed], None]
"""Called once for each prompt, when it was handed over or cannot be."""


class _Prompt:
    __slots__ = ("ended", "num_tokens", "timer")

    def __init__(self, ended: Ended, num_tokens: int, timer: asyncio.TimerHandle) -> None:
        self.ended = ended
        self.num_tokens = num_tokens
        self.timer = timer


class Prompts:
    """``send`` sends a message to the replica's worker."""

    __slots__ = ("_by_request", "_send", "_suffix")

    def __init__(self, send: Callable[[Submit | Cancel], None]) -> None:
        self._send = send
        self._by_request: dict[str, _Prompt] = {}
        self._suffix = f"#{secrets.token_hex(8)}"  # of ids in the worker; clients choose ids, and must not hit one

    def __len__(self) -> int:
        return len(self._by_request)

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of all of them."""
        return sum(prompt.num_tokens for prompt in self._by_request.values())

    def begin(self, request: GenerateRequest, address: str, num_tokens: int, limit_s: float, ended: Ended) -> None:
        """Compute the prompt of a request and hand it over to the worker at ``address``. ``num_tokens``: estimated.
        ``limit_s``: seconds after which it is given up. ``ended`` is never called before this call returns."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit_s, self._give_up, request.id, limit_s)
        self._by_request[request.id] = _Prompt(ended, num_tokens, timer)
        self._send(Submit(prompt_of(request, address, request.id + self._suffix)))

    def cancel(self, request_id: str) -> None:
        """The request does not need its prompt here any more; ``ended`` is not called."""
        if self._pop(request_id) is not None:
            self._send(Cancel(request_id + self._suffix))

    def handed(self, handed: Handed) -> None:
        """The worker reported what became of a hand-over."""
        prompt = self._pop(handed.request_id)
        if prompt is not None:
            prompt.ended(handed)

    def without_ends(self, outputs: list[Output]) -> list[Output]:
        """The outputs of requests that are answered here. The ends of failed prompts are taken out and noted."""
        own = []
        for output in outputs:
            if not output.request_id.endswith(self._suffix):
                own.append(output)
            elif output.end is not None and output.end.outcome != "done":
                failure = output.end.failure
                why = output.end.outcome if failure is None else failure.message.rstrip(".")
                self.handed(Handed(request_id=output.request_id.removesuffix(self._suffix), failure=why))
        return own

    def lose(self, why: str) -> None:
        """The worker ended, or the replica is removed."""
        for request_id in tuple(self._by_request):
            self.handed(Handed(request_id=request_id, failure=why))

    def _give_up(self, request_id: str, limit_s: float) -> None:
        self._send(Cancel(request_id + self._suffix))
        self.handed(Handed(request_id=request_id, failure=f"it took more than {limit_s:.3g} s"))

    def _pop(self, request_id: str) -> _Prompt | None:
        prompt = self._by_request.pop(request_id, None)
        if prompt is not None:
            prompt.timer.cancel()
        return prompt


def prompt_of(request: GenerateRequest, address: str, own_id: str) -> GenerateRequest:
    """The part of a request that computes its prompt and nothing else."""
    sampling = msgspec.structs.replace(
        request.sampling, max_tokens=0, min_tokens=0, n=1, best_of=None, use_beam_search=False, logprobs=None
    )
    return msgspec.structs.replace(
        request,
        id=own_id,
        sampling=sampling,
        stream=False,
        form=None,
        return_prompt_ids=False,
        hands_over_to=address,
        hands_over_for=request.id,
    )


def has_prompt_alone(request: object) -> bool:
    """Whether the prompt of a request can be computed apart from its answer."""
    return (
        isinstance(request, GenerateRequest)
        and not request.answer_sets
        and not request.is_copy
        and request.resumes is None
        and request.sampling.prompt_logprobs is None
        and request.sampling.max_tokens != 0
    )
