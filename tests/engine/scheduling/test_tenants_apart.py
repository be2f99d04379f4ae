"""What one tenant's requests leave in the machine, no other tenant's requests can find."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.native.paged_attention import native_available
from inferd.types import Continuation, GenerateRequest, Output, SamplingParams, TextPrompt, TokenPrompt

SHARED_PROMPT = [3 + i % 200 for i in range(40)]


def load(folder: Path, *, num_blocks: int, max_num_seqs: int = 8, max_num_batched_tokens: int = 32) -> Engine:
    config = ModelConfig(
        source=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=128,
        kv_cache=KVCacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
    )
    return create_backend("tiny", config, lambda phase, done, total: None)


@pytest.fixture(scope="module")
def roomy(tiny_model: Path) -> Engine:
    return load(tiny_model, num_blocks=400)


def asked(name: str, tenant: str, prompt: list[int], **fields: object) -> GenerateRequest:
    options: dict[str, object] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    return GenerateRequest(
        id=name,
        model="tiny",
        tenant=tenant,
        prompt=TokenPrompt(token_ids=prompt),
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        explicit=tuple(options),
        **fields,  # type: ignore[arg-type]
    )


def blocks_of(engine: Engine) -> dict[str, set[int]]:
    """Blocks held by each running tenant."""
    held: dict[str, set[int]] = {}
    for sequence in engine._scheduler.running:
        held.setdefault(sequence.tenant, set()).update(sequence.blocks)
    return held


def cached_tokens(engine: Engine, request: GenerateRequest) -> int:
    engine.add(engine.prepare(request), 0.0)
    ends = []
    while engine.due(0.0) is not None:
        ends += [output.end for output in engine.step(0.0)[0] if output.end is not None]
    (end,) = ends
    return end.usage.cached_tokens


def test_a_cached_prefix_is_found_by_its_own_tenant_alone(roomy: Engine) -> None:
    assert cached_tokens(roomy, asked("1", "a", SHARED_PROMPT)) == 0
    assert cached_tokens(roomy, asked("2", "a", SHARED_PROMPT)) == 36
    assert cached_tokens(roomy, asked("3", "b", SHARED_PROMPT)) == 0
    assert cached_tokens(roomy, asked("4", "", SHARED_PROMPT)) == 0
    assert cached_tokens(roomy, asked("5", "a", SHARED_PROMPT, cache_salt="x")) == 0
    assert cached_tokens(roomy, asked("6", "b", SHARED_PROMPT)) == 36


def test_names_and_salts_cannot_be_made_to_mean_each_other(roomy: Engine) -> None:
    """("ab", "c") is not ("a", "bc"), nor any other way of cutting the same letters."""
    cuts = [("te", "nant"), ("ten", "ant"), ("tenant", ""), ("", "tenant"), ("2:te", "nant")]
    salts = {roomy.prepare(asked("s", tenant, SHARED_PROMPT, cache_salt=salt)).salt for tenant, salt in cuts}
    assert len(salts) == len(cuts)


def test_what_a_tenant_reuses_takes_no_block_of_anothers_share(tiny_model: Path) -> None:
    """The busy one asks for more than the cache holds, again and again. The other one's prompt takes a fifth of it."""
    engine = load(tiny_model, num_blocks=50)
    busy = [[3 + (number * 31 + i) % 200 for i in range(40)] for number in range(8)]
    assert cached_tokens(engine, asked("calm", "calm", SHARED_PROMPT)) == 0
    for number in range(40):
        cached_tokens(engine, asked(f"busy {number}", "busy", busy[number % len(busy)], weight=2.0))
    assert cached_tokens(engine, asked("again", "calm", SHARED_PROMPT)) == 36


def test_a_text_that_one_tenant_sent_is_tokenized_anew_for_another(roomy: Engine) -> None:
    """As a prompt, as a chat's bad word, and by a call of the tokenizer."""
    tokenizer = roomy._preparer.tokenizer

    def hits(tenant: str) -> int:
        before = tokenizer.cache_hits
        roomy.tokenize(TextPrompt(text="once upon a time"), tenant=tenant)
        request = asked("t", tenant, [], cache_salt="")
        sampling = SamplingParams(max_tokens=1, bad_words=("a secret word",))
        roomy.prepare(msgspec.structs.replace(request, prompt=TextPrompt(text="a secret"), sampling=sampling))
        return tokenizer.cache_hits - before

    assert hits("first") == 0
    assert hits("first") == 4, "two texts, and the bad word with and without a space"
    assert hits("second") == 0


def test_running_tenants_hold_no_block_together_and_one_tenant_does(roomy: Engine) -> None:
    for i, tenant in enumerate(("x", "y", "x")):
        roomy.add(roomy.prepare(asked(f"r{i}", tenant, SHARED_PROMPT)), 0.0)
        for _ in range(3):
            roomy.step(0.0)
    held = blocks_of(roomy)
    assert held["x"]
    assert held["y"]
    assert held["x"].isdisjoint(held["y"])
    first, _, third = roomy._scheduler.running
    assert set(first.blocks) & set(third.blocks), "the same tenant's requests share their prompt"
    while roomy.due(0.0) is not None:
        roomy.step(0.0)


@pytest.mark.skipif(
    not native_available(torch.float32, 8),
    reason="answers equal to the bit need the native kernels; torch's products depend on the batch",
)
def test_no_canary_of_a_tenant_comes_out_at_another_under_preemption_cancelling_and_continuation(
    tiny_model: Path, roomy: Engine
) -> None:
    """Each tenant's prompt is its own canary. Whatever happens around it, its answer is the one it gets alone, in
    an engine without other requests: an answer that read one foreign key or value would differ."""
    crowded = load(tiny_model, num_blocks=60, max_num_seqs=6)
    draw = random.Random(5)
    tenants = [f"tenant-{i}" for i in range(12)]
    prefix = SHARED_PROMPT[:8]
    canaries = {tenant: [*prefix, *(draw.randrange(3, 250) for _ in range(20))] for tenant in tenants}
    alone: dict[str, list[int]] = {}
    for tenant in tenants:
        roomy.add(roomy.prepare(asked(tenant, tenant, canaries[tenant])), 0.0)
        alone[tenant] = []
        while roomy.due(0.0) is not None:
            for output in roomy.step(0.0)[0]:
                alone[tenant] += [token for delta in output.deltas for token in delta.token_ids]
    assert len({tuple(answer) for answer in alone.values()}) > 6, "the canaries can be told apart"

    said: dict[str, list[int]] = {}
    owner: dict[str, str] = {}
    resumed = cancelled = preempted = checked = 0
    number = 0

    def submit(tenant: str, so_far: list[int] | None = None) -> None:
        nonlocal number
        number += 1
        name = f"{tenant}/{number}"
        owner[name], said[name] = tenant, list(so_far or ())
        resumes = None if so_far is None else Continuation(token_ids=tuple(so_far), seed=0)
        priority = draw.choice([-1, 0, 1])
        request = asked(name, tenant, canaries[tenant], resumes=resumes, priority=priority)
        crowded.add(crowded.prepare(request), 0.0)

    def take(outputs: list[Output]) -> None:
        nonlocal checked, preempted
        for output in outputs:
            said[output.request_id] += [token for delta in output.deltas for token in delta.token_ids]
            if output.end is None:
                continue
            preempted += output.end.num_preemptions
            answer, tenant = said.pop(output.request_id), owner.pop(output.request_id)
            if output.end.outcome == "done":
                checked += 1
                assert answer == alone[tenant], f"{tenant} got another answer than alone"

    for _ in range(400):
        if len(owner) < 20:
            submit(draw.choice(tenants))
        if draw.random() < 0.15 and owner:
            victim = draw.choice(sorted(owner))
            tenant, so_far = owner[victim], list(said[victim])
            crowded.cancel(victim)
            cancelled += 1
            if 0 < len(so_far) < 10 and draw.random() < 0.7:
                submit(tenant, so_far)
                resumed += 1
        take(crowded.step(0.0)[0])
        held = blocks_of(crowded)
        assert sum(map(len, held.values())) == len(set().union(*held.values())), "two tenants hold one block"
        crowded.pool.check()
    while crowded.due(0.0) is not None:
        take(crowded.step(0.0)[0])
    assert crowded.pool.num_used == 0
    assert min(resumed, cancelled, preempted, checked) >= 10, (resumed, cancelled, preempted, checked)
