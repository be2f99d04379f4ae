"""The prompts that a replica computes for others: each ends once, and ids of clients meet none of them."""

from __future__ import annotations

import asyncio

from inferd.router.replicas.prompts import Prompts
from inferd.types import End, Failure, GenerateRequest, Handed, Output, TextPrompt
from inferd.worker.messages import Cancel, Submit


def request(name: str) -> GenerateRequest:
    return GenerateRequest(id=name, model="tiny", prompt=TextPrompt(text="abc"))


async def started(*names: str, limit_s: float = 60.0) -> tuple[Prompts, list[Submit | Cancel], list[Handed]]:
    sent: list[Submit | Cancel] = []
    ended: list[Handed] = []
    prompts = Prompts(sent.append)
    for name in names:
        prompts.begin(request(name), "address", 10, limit_s, ended.append)
    return prompts, sent, ended


def own_id(message: Submit | Cancel) -> str:
    return message.request.id if isinstance(message, Submit) else message.request_id


def failed(name: str, message: str) -> Output:
    return Output.ended(name, End("failed", failure=Failure("model_failed", message)))


def test_a_prompt_ends_once_by_its_report_its_failure_or_the_end_of_its_replica() -> None:
    async def scenario() -> None:
        prompts, sent, ended = await started("a", "b", "c")
        assert (len(prompts), prompts.num_tokens) == (3, 30)
        prompts.handed(Handed(request_id="a", num_blocks=2))
        prompts.handed(Handed(request_id="a", num_blocks=2))
        assert prompts.without_ends([failed(own_id(sent[1]), "It broke.")]) == []
        prompts.handed(Handed(request_id="b"))
        prompts.lose("its replica is gone")
        prompts.lose("its replica is gone")
        assert [(one.request_id, one.failure) for one in ended] == [
            ("a", ""),
            ("b", "It broke"),
            ("c", "its replica is gone"),
        ]
        assert not len(prompts)

    asyncio.run(scenario())


def test_a_prompt_that_is_not_needed_is_cancelled_and_not_told() -> None:
    async def scenario() -> None:
        prompts, sent, ended = await started("a")
        prompts.cancel("a")
        prompts.cancel("a")
        prompts.handed(Handed(request_id="a"))
        assert [own_id(message) for message in sent] == [own_id(sent[0])] * 2
        assert isinstance(sent[1], Cancel)
        assert ended == []

    asyncio.run(scenario())


def test_a_prompt_that_takes_too_long_is_given_up() -> None:
    async def scenario() -> None:
        _, sent, ended = await started("a", limit_s=0.001)
        while not ended:
            await asyncio.sleep(0.001)
        assert ended[0].failure == "it took more than 0.001 s"
        assert isinstance(sent[-1], Cancel)

    asyncio.run(scenario())


def test_the_outputs_of_other_requests_pass_whatever_their_ids_are() -> None:
    async def scenario() -> None:
        prompts, sent, ended = await started("a")
        others = [failed(name, "no") for name in ("a", "a#prompt", "#", "")]
        done = Output.ended(own_id(sent[0]), End("done"))
        assert prompts.without_ends([done, *others]) == others
        assert ended == []

    asyncio.run(scenario())


def test_a_prompt_is_computed_without_an_answer() -> None:
    async def scenario() -> None:
        _, sent, _ = await started("a")
        (message,) = sent
        assert isinstance(message, Submit)
        part = message.request
        assert isinstance(part, GenerateRequest)
        assert part.sampling.max_tokens == 0
        assert (part.hands_over_to, part.hands_over_for) == ("address", "a")

    asyncio.run(scenario())
