"""``truncation: auto``: the oldest messages of a conversation that the model's context does not hold are left out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferd.eager import in_task
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.generation.items import JSON
from inferd.gateway.generation.writer import encode
from inferd.gateway.upstream import ModelStatus
from inferd.types import Chat


async def fitting(context: Context, call: Call, model: ModelStatus, chat: Chat, max_output_tokens: int | None) -> Chat:
    """The conversation, without so many of its oldest messages that the prompt leaves room for the answer. That is
    ``max_output_tokens``, at most half of the context; without it a quarter. Where the last messages alone are too
    long, they stay, and the worker refuses them. Raises what the router raises."""
    longest = model.info.max_model_len if model.info is not None else 0
    room = longest - min(longest // 4 if max_output_tokens is None else max_output_tokens, longest // 2)
    if not longest or len(encode(chat)) <= room:  # no token is shorter than a byte
        return chat
    await in_task()

    async def fits(messages: list[JSON]) -> bool:
        shorter = msgspec.structs.replace(chat, messages=messages)
        ids, _ = await context.router.tokenize(model.name, shorter, tenant=call.principal.tenant)
        return len(ids) <= room

    if await fits(chat.messages):
        return chat
    ways = shortened(chat.messages)
    if not ways:
        return chat
    low, high = 0, len(ways) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(_kept(chat.messages, ways[middle])):
            high = middle
        else:
            low = middle + 1
    return msgspec.structs.replace(chat, messages=_kept(chat.messages, ways[low]))


def shortened(messages: Sequence[JSON]) -> list[tuple[int, ...]]:
    """The ways to shorten a conversation, the longest rest first: each as the places of single messages that stay, and
    last the place from which on all stay. System text at the beginning stays. First whole turns of the user are left
    out, then the calls of the last turn with their results."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    system = tuple(range(first))
    turns = [i for i, message in enumerate(messages) if message["role"] == "user" and i > first]
    ways = [(*system, turn) for turn in turns]
    asked = turns[-1] if turns else first
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > asked + 1]
    return ways + [(*system, asked, answer) for answer in answers]


def _kept(messages: Sequence[JSON], way: tuple[int, ...]) -> list[JSON]:
    *single, start = way
    return [*(messages[i] for i in single), *messages[start:]]
