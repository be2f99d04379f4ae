"""Speculation changes nothing but the time: every output equals that of the twin that never guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import write_tiny_model
from tests.engine.deltas import stats_of
from tests.engine.speculation.speculating import Prophet, Recorded, always

from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.sampler import Drawn, SampleRow
from inferd.engine.scheduling.sequence import Sequence
from inferd.errors import ModelLoadError
from inferd.native.masks import RowMasks
from inferd.native.paged_attention import native_available
from inferd.types import Continuation, GenerateRequest, Output, SamplingParams, TokenPrompt

pytestmark = pytest.mark.skipif(
    not native_available(torch.float32, 8),
    reason="bit-equal rows need the native kernels; torch's products depend on the batch",
)
NONE = SpeculationConfig(method="none")


def build(
    folder: Path, speculation: SpeculationConfig, *, num_blocks: int = 256, seed: int | None = 1, **scheduler: Any
) -> Engine:
    return create_backend(
        "tiny",
        ModelConfig(
            source=str(folder),
            dtype="float32",
            device="cpu",
            threads=1,
            max_model_len=128,
            seed=seed,
            scheduler=SchedulerConfig(**scheduler),
            kv_cache=KVCacheConfig(block_size=4, num_blocks=num_blocks),
            speculation=speculation,
        ),
        lambda phase, done, total: None,
    )


@pytest.fixture(scope="module")
def twin(tiny_model: Path) -> Engine:
    return build(tiny_model, NONE)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer: a draft that is nearly always wrong."""
    return write_tiny_model(tmp_path_factory.mktemp("other-model"), seed=1)


def make(name: str, prompt: list[int], **sampling: Any) -> GenerateRequest:
    options = {"temperature": 0.0, "max_tokens": 24, "seed": 7, **sampling}
    stream = options.pop("stream", True)
    resumes = options.pop("resumes", None)
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=TokenPrompt(token_ids=prompt),
        sampling=SamplingParams(**options),
        explicit=tuple(options),
        stream=stream,
        resumes=resumes,
    )


def tell(outputs: list[Output]) -> dict[str, dict[int, tuple[object, ...]]]:
    """Everything that was said in each request's choices, however it was cut into deltas."""
    said: dict[str, dict[int, tuple[object, ...]]] = {}
    for output in outputs:
        for delta in output.deltas:
            text, ids, logprobs, *_ = said.setdefault(output.request_id, {}).get(delta.index, ("", (), (), None, None))
            said[output.request_id][delta.index] = (
                str(text) + delta.text,
                (*ids, *delta.token_ids),  # type: ignore[misc]
                (*logprobs, *(delta.logprobs or ())),  # type: ignore[misc]
                delta.finish_reason,
                delta.stop_reason,
            )
        if output.end is not None:
            usage = output.end.usage
            end = (output.end.outcome, output.end.failure, usage.prompt_tokens, usage.completion_tokens)
            said.setdefault(output.request_id, {})[-1] = end
    return said


def run(engine: Engine, *requests: GenerateRequest, now: float = 1.0) -> list[Output]:
    for request in requests:
        engine.add(engine.prepare(request), now)
    outputs: list[Output] = []
    while engine.due(now) is not None:
        outputs += engine.step(now)[0]
        engine.pool.check()
    assert_idle(engine)
    return outputs


def assert_idle(engine: Engine) -> None:
    assert engine.pool.num_used == 0
    speculation = engine._speculation
    if speculation is not None:
        assert not speculation._drafted
        assert not speculation._texts
        if speculation.draft is not None and not isinstance(speculation.draft, Prophet):
            speculation.draft.pool.check()
            assert speculation.draft.pool.num_used == 0
            assert not speculation.draft._mirrors


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.7, "top_k": 40, "min_p": 0.02},
    {"repetition_penalty": 1.4},
    {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.6, "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": (40, 80, 120, 160, 200), "temperature": 1.0},
    {"logit_bias": {30: 4.0, 31: 3.5, 32: 3.0}, "temperature": 0.8},
    {"bad_words": ("a", "e", "th", "xy"), "temperature": 0.6},
    {"allowed_token_ids": tuple(range(60, 90)), "temperature": 1.0, "logprobs": 0},
    {"stop": ("e", "q1", "Z"), "include_stop_str_in_output": True, "temperature": 1.1},
    {"n": 3, "temperature": 1.0, "logprobs": 1},
    {"n": 2, "best_of": 3, "temperature": 1.0},
    {"use_beam_search": True, "n": 2},
    {"prompt_logprobs": 1, "temperature": 0.5},
    {"max_tokens": 1},
    {"max_tokens": 2, "temperature": 1.0},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"ignore_eos": True, "logit_bias": {0: 6.0}},
    {"stream": False, "temperature": 0.8},
]


@pytest.mark.timeout(600)
@settings(max_examples=15)
@given(
    wanted=st.lists(
        st.tuples(st.lists(st.integers(3, 60), min_size=1, max_size=30), st.sampled_from(OPTIONS)),
        min_size=1,
        max_size=5,
    ),
    error_rate=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    most=st.integers(1, 9),
    chunk=st.integers(4, 40),
    num_seqs=st.integers(3, 6),
    num_blocks=st.integers(34, 80),
    caching=st.booleans(),
)
def test_no_output_differs_from_the_twin_that_never_guesses(
    tiny_model: Path,
    twin: Engine,
    wanted: list[tuple[list[int], dict[str, Any]]],
    error_rate: float,
    most: int,
    chunk: int,
    num_seqs: int,
    num_blocks: int,
    caching: bool,
) -> None:
    requests = [make(f"r{i}", prompt, **options) for i, (prompt, options) in enumerate(wanted)]
    expected: dict[str, dict[int, tuple[object, ...]]] = {}
    for request in requests:
        expected |= tell(run(twin, request))

    def answer_of(sequence: Sequence) -> list[int]:
        ids = expected[sequence.request_id].get(sequence.index, ("", ()))[1]
        assert isinstance(ids, tuple)
        return list(ids)

    engine = build(
        tiny_model,
        SpeculationConfig(max_tokens=most),
        num_blocks=num_blocks,
        max_num_batched_tokens=chunk,
        max_num_seqs=num_seqs,
        prefix_caching=caching,
    )
    always(engine, Prophet(answer_of, seed=len(wanted), error_rate=error_rate))
    for _ in range(2):  # the second time prompts are found in the prefix cache
        assert tell(run(engine, *requests)) == expected


@pytest.mark.parametrize("method", ["prompt_lookup", "draft", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_real_guesses_change_no_answer_in_a_crowd_that_is_preempted(
    tiny_model: Path, other_model: Path, twin: Engine, method: Any, temperature: float
) -> None:
    prompts = [[10 + i % 7 for i in range(start, start + 20)] for start in range(8)]
    requests = [
        make(f"r{i}", prompt, temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    expected = tell([output for request in requests for output in run(twin, request)])
    for draft in (tiny_model, other_model):
        engine = build(
            tiny_model, SpeculationConfig(method=method, draft=str(draft)), num_blocks=60, max_num_batched_tokens=48
        )
        always(engine)
        outputs, drafted, preempted = [], 0, 0
        for request in requests:
            engine.add(engine.prepare(request), 0.0)
        while engine.due(0.0) is not None:
            said, stats = engine.step(0.0)
            assert stats is not None
            outputs += said
            drafted += stats.drafted_tokens
            preempted += stats.num_preempted
            engine.pool.check()
        assert tell(outputs) == expected
        assert preempted, "the cache was meant to be too small"
        assert drafted
        assert_idle(engine)


def test_a_draft_that_is_the_model_itself_is_always_right_and_saves_its_steps(tiny_model: Path, twin: Engine) -> None:
    engine = build(tiny_model, SpeculationConfig(method="draft", draft=str(tiny_model), max_tokens=7))
    always(engine)
    request = make("r", [20, 30, 40], max_tokens=41, ignore_eos=True)
    engine.add(engine.prepare(request), 0.0)
    outputs, steps, drafted, accepted = [], 0, 0, 0
    while engine.due(0.0) is not None:
        said, stats = engine.step(0.0)
        assert stats is not None
        outputs += said
        steps += 1
        drafted += stats.drafted_tokens
        accepted += stats.accepted_tokens
    assert tell(outputs) == tell(run(twin, request))
    assert drafted == accepted == 35
    assert steps == 1 + 40 // 8, "the prompt, and then eight tokens in each step"


@pytest.mark.parametrize("error_rate", [0.0, 0.4, 1.0])
def test_of_each_draft_the_right_guesses_and_the_first_wrong_one_are_learned_from(
    tiny_model: Path, twin: Engine, error_rate: float
) -> None:
    request = make("r", [20, 30, 40], max_tokens=41, ignore_eos=True)
    answer = [token for output in run(twin, request) for delta in output.deltas for token in delta.token_ids]
    engine = build(tiny_model, SpeculationConfig(max_tokens=4))
    speculation = always(engine, Prophet(lambda sequence: answer, seed=5, error_rate=error_rate))
    tokens, drafts = Recorded(), Recorded()
    speculation._surenesses, speculation._any_guess = tokens, drafts[1.0]
    engine.add(engine.prepare(request), 0.0)
    accepted = whole = some = steps = 0
    while engine.due(0.0) is not None:
        _, stats = engine.step(0.0)
        assert stats is not None
        accepted += stats.accepted_tokens
        steps += stats.drafted_tokens > 0
        some += stats.accepted_tokens > 0
        whole += 0 < stats.accepted_tokens == stats.drafted_tokens
    assert tokens.outcomes.count(True) == accepted
    assert tokens.outcomes.count(False) == steps - whole
    assert (drafts.outcomes.count(True), len(drafts.outcomes)) == (some, steps)
    assert (accepted > 0, whole < steps) == (error_rate < 1, error_rate > 0)


def test_guesses_at_a_period_of_the_prompt_are_right(tiny_model: Path, twin: Engine) -> None:
    """A bias that makes one token follow itself: the text quotes itself from then on."""
    engine = build(tiny_model, SpeculationConfig(method="prompt_lookup", max_tokens=6))
    always(engine)
    request = make("r", [50, 51, 52], max_tokens=30, logit_bias={77: 100.0})
    engine.add(engine.prepare(request), 0.0)
    outputs, accepted = [], 0
    while engine.due(0.0) is not None:
        said, stats = engine.step(0.0)
        assert stats is not None
        outputs += said
        accepted += stats.accepted_tokens
    assert tell(outputs) == tell(run(twin, request))
    assert accepted >= 20


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.8, "min_p": 0.05}])
def test_what_is_drawn_after_guesses_has_the_samplers_distribution(
    tiny_model: Path, other_model: Path, sampling: dict[str, Any]
) -> None:
    """The third token over many seeds, against the exact probabilities: two guesses of a poor draft stand before it."""
    from scipy.stats import chisquare  # type: ignore[import-untyped]

    allowed = tuple(range(60, 66))
    engine = build(tiny_model, SpeculationConfig(method="draft", draft=str(other_model), max_tokens=4), max_num_seqs=64)
    always(engine)
    count = 1200
    requests = [
        make(f"r{i}", [20, 30, 40], seed=i, max_tokens=3, allowed_token_ids=allowed, **sampling) for i in range(count)
    ]
    said = tell(run(engine, *requests))
    seen: dict[tuple[int, ...], int] = {}
    for i in range(count):
        ids = said[f"r{i}"][0][1]
        assert isinstance(ids, tuple)
        seen[ids] = seen.get(ids, 0) + 1
    shares = exact(engine, [20, 30, 40], allowed, sampling)
    likely = {ids: p for ids, p in shares.items() if p * count >= 5}
    observed = [seen.get(ids, 0) for ids in likely]
    assert all(ids in shares for ids in seen), "what has no probability was drawn"
    rest = 1.0 - sum(likely.values())
    test = chisquare(
        [*observed, count - sum(observed)], [*(p * count for p in likely.values()), max(rest, 1e-9) * count]
    )
    assert test.pvalue > 1e-3, f"p = {test.pvalue}"


def exact(
    engine: Engine, prompt: list[int], allowed: tuple[int, ...], sampling: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of three tokens: products of the filtered and renormalised softmax."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for ids, before in shares.items():
            (output,) = [
                o
                for o in run(
                    engine,
                    make(
                        "exact",
                        [*prompt, *ids],
                        max_tokens=1,
                        allowed_token_ids=allowed,
                        logprobs=engine.info.vocab_size,
                    ),
                )
                if o.deltas
            ]
            assert output.deltas[0].logprobs is not None
            logprobs = {top.token_id: top.logprob for top in output.deltas[0].logprobs[0].top}
            weights = torch.tensor([logprobs[t] for t in allowed], dtype=torch.float64) / sampling["temperature"]
            chances = weights.softmax(0)
            chances = chances * (chances >= sampling.get("min_p", 0.0) * chances.max())
            chances /= chances.sum()
            order = chances.argsort(descending=True)
            sums = chances[order].cumsum(0)
            kept = order[: int((sums < sampling.get("top_p", 1.0) - 1e-12).sum()) + 1]
            for at in kept.tolist():
                longer[*ids, allowed[at]] = before * float(chances[at] / chances[kept].sum())
        shares = {ids: p for ids, p in longer.items() if p > 0}
    return shares


def test_guessed_tokens_that_were_wrong_never_enter_the_prefix_cache(tiny_model: Path, other_model: Path) -> None:
    """What is cached after an answer is what the twin caches, and it computes the same."""
    plain = build(tiny_model, NONE)
    engine = build(tiny_model, SpeculationConfig(method="draft", draft=str(other_model), max_tokens=6))
    always(engine)
    request = make("r", [20, 30, 40, 50, 60], max_tokens=30, ignore_eos=True, temperature=1.0)
    said = []
    for one in (plain, engine):
        ids = tell(run(one, request))["r"][0][1]
        assert isinstance(ids, tuple)
        said.append(ids)
        keys = set(one.pool._by_key)
        follow = run(one, make("f", [20, 30, 40, 50, 60, *ids], max_tokens=4, logprobs=3))
        (cached,) = [o.end.usage.cached_tokens for o in follow if o.end is not None]
        said.append((tuple(sorted(keys)), cached, tell(follow)["f"]))
    assert said[:2] == said[2:]


def test_a_cancelled_a_late_and_a_failing_request_leave_nothing_behind(tiny_model: Path, other_model: Path) -> None:
    engine = build(tiny_model, SpeculationConfig(draft=str(other_model)))
    always(engine)
    for i in range(4):
        engine.add(engine.prepare(make(f"r{i}", [20, 21, 20, 21, 20], ignore_eos=True, max_tokens=60)), 0.0)
    for _ in range(5):
        engine.step(0.0)
    engine.cancel("r1")
    ended = {o.request_id: o.end.outcome for o in engine.step(0.0)[0] if o.end}
    assert ended == {"r1": "cancelled"}
    failed = engine.abort_step(RuntimeError("broken"), 0.0)
    assert {o.request_id for o in failed} == {"r0", "r2", "r3"}
    assert_idle(engine)


def test_an_answer_is_continued_elsewhere_with_or_without_guesses(
    tiny_model: Path, other_model: Path, twin: Engine
) -> None:
    request = make("r", [20, 30, 40], temperature=1.0, max_tokens=30, ignore_eos=True)
    whole = tell(run(twin, request))["r"][0]
    ids = whole[1]
    assert isinstance(ids, tuple)
    engine = build(tiny_model, SpeculationConfig(draft=str(other_model)))
    always(engine)
    for said in (1, 11, 29):
        rest = make(
            "r",
            [20, 30, 40],
            temperature=1.0,
            max_tokens=30,
            ignore_eos=True,
            resumes=Continuation(token_ids=ids[:said], seed=7),
        )
        assert tell(run(engine, rest))["r"][0][1] == ids[said:]


def test_no_row_is_computed_behind_the_last_token_that_may_come(tiny_model: Path) -> None:
    engine = build(tiny_model, SpeculationConfig(max_tokens=5))
    always(engine)
    seen: list[SampleRow] = []
    draw = engine._sampler.draw

    def watched(logits: torch.Tensor, rows: list[SampleRow], unended: RowMasks | None = None) -> Drawn:
        seen.extend(rows)
        return draw(logits, rows, unended)

    engine._sampler.draw = watched  # type: ignore[method-assign]
    engine.add(engine.prepare(make("r", [50, 51, 52], max_tokens=12, logit_bias={77: 100.0})), 0.0)
    accepted = 0
    while engine.due(0.0) is not None:
        accepted += stats_of(engine, 0.0).accepted_tokens
    assert accepted > 5
    assert [len(row.output_ids) for row in seen] == list(range(12)), "every row once, and all of them used"


def test_a_draft_with_other_tokens_is_refused(tiny_model: Path, shared_tokenizers: Path) -> None:
    with pytest.raises(ModelLoadError, match="other tokens than"):
        build(tiny_model, SpeculationConfig(draft=str(shared_tokenizers)))


def test_a_draft_with_fewer_rows_than_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    smaller = write_tiny_model(tmp_path, num_more=-9)
    with pytest.raises(ModelLoadError, match="different tokens"):
        build(tiny_model, SpeculationConfig(draft=str(smaller)))


def test_a_prompt_with_ids_that_only_the_model_has_is_answered_without_its_draft(
    tiny_model: Path, tmp_path: Path
) -> None:
    wider = write_tiny_model(tmp_path, num_more=64)
    engine = build(wider, SpeculationConfig(method="draft", draft=str(tiny_model)))
    assert always(engine).draft is not None
    for prompt, is_guessed in (([5, 310, 7], False), ([5, 10, 7], True)):
        engine.add(engine.prepare(make("one", prompt)), 1.0)
        outputs, drafted = [], 0
        while engine.due(1.0) is not None:
            news, stats = engine.step(1.0)
            assert stats is not None
            outputs += news
            drafted += stats.drafted_tokens
        assert (drafted > 0) is is_guessed
        assert tell(outputs) == tell(run(build(wider, NONE), make("one", prompt)))


@pytest.fixture
def shared_tokenizers(tmp_path: Path, tiny_model: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    for file in tiny_model.iterdir():
        text = file.read_bytes()
        (folder / file.name).write_bytes(
            text.replace(b"<|user|>", b"<|somebody|>") if file.name == "tokenizer.json" else text
        )
    return folder


def test_as_many_rows_as_are_computed_may_be_other_rows(twin: Engine) -> None:
    """Two rows of one prompt, of which the last counts, and one of another, which counts for two choices."""
    requests = [make("r0", [3, 3]), make("r1", [3], n=2, temperature=1.0)]
    alone = tell(run(twin, requests[0])) | tell(run(twin, requests[1]))
    assert tell(run(twin, *requests)) == alone
