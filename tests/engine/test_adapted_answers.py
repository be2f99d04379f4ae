"""Adapters in the engine: answers, neighbours in a batch, the prefix cache, replacement, and what is refused."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.adapters import merged, write_adapter
from tests.engine.deltas import stats_of
from tests.engine.speculation.speculating import always, run_guessing
from tests.engine.test_engine import PROMPTS, Answer, make_request, run

from inferd.answer_form import AnswerForm, Regex
from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.errors import ModelNotFound, WorkerDied
from inferd.native.paged_attention import native_available
from inferd.types import Continuation, GenerateRequest

RANKS = {"a": 8, "b": 24, "c": 128}
PATTERN = "[a-h]{6}"
PROMPT = "The quick brown fox jumps over the lazy dog"


def load(base: Path, adapters: dict[str, Path], **fields: Any) -> Engine:
    config = ModelConfig(
        source=str(base),
        device="cpu",
        threads=1,
        max_model_len=128,
        kv_cache=KVCacheConfig(block_size=4, num_blocks=fields.pop("num_blocks", 256)),
        adapters={name: str(folder) for name, folder in adapters.items()},
        **{"dtype": "float32", "speculation": SpeculationConfig(method="none"), **fields},
    )
    return create_backend("tiny", config, lambda phase, done, total: None)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, tiny_model, seed=rank, rank=rank) for name, rank in RANKS.items()}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, folders: dict[str, Path]) -> Iterator[Engine]:
    engine = load(tiny_model, folders)
    yield engine
    engine.close()


def request(name: str, prompt: str | list[int], adapter: str = "", **options: Any) -> GenerateRequest:
    return msgspec.structs.replace(make_request(name, prompt, **options), adapter=adapter)


def tokens(engine: Engine, adapter: str = "", prompt: str = PROMPT, **options: Any) -> list[int]:
    return run(engine, request("one", prompt, adapter, ignore_eos=True, **options))[0].tokens()


def constrained(name: str, adapter: str = "", **options: Any) -> GenerateRequest:
    form = AnswerForm(constraint=Regex(pattern=PATTERN, at="regex"))
    return msgspec.structs.replace(request(name, PROMPT, adapter, **options), form=form)


def logprobs(answer: Answer) -> list[float]:
    return [each.logprob for delta in answer.deltas for each in delta.logprobs or ()]


def test_an_adapter_answers_as_the_base_with_it_merged(
    engine: Engine, tiny_model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    answers = {name: tokens(engine, name) for name in ("", *folders)}
    assert len(set(map(tuple, answers.values()))) == 4, "each answers differently"
    for name, folder in folders.items():
        whole = load(merged(tiny_model, folder, tmp_path / name), {})
        assert tokens(whole) == answers[name]
        whole.close()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from(PROMPTS), st.integers(1, 7)),
        min_size=2,
        max_size=9,
    )
)
def test_a_row_has_the_bits_that_it_has_alone(engine: Engine, wanted: list[tuple[str, str, int]]) -> None:
    if not native_available(torch.float32, 8):
        pytest.skip("the plain path of torch does not promise it")
    requests = [
        request(str(i), prompt, adapter, max_tokens=count, logprobs=1, ignore_eos=True)
        for i, (adapter, prompt, count) in enumerate(wanted)
    ]
    together = run(engine, *requests)
    for each, found in zip(requests, together, strict=True):
        engine.pool.clear_cache()
        (alone,) = run(engine, each)
        assert (alone.tokens(), logprobs(alone)) == (found.tokens(), logprobs(found))


def test_a_step_tells_which_adapters_its_sequences_use(engine: Engine) -> None:
    one, two = sorted(engine.info.adapters)[:2]
    for name, adapter in (("a", two), ("b", one), ("c", one), ("d", "")):
        engine.add(engine.prepare(request(name, PROMPT, adapter)), 0.0)
    used = stats_of(engine, 0.0).adapters
    loaded = sum(state.failure is None for state in engine.info.adapters.values())
    assert (used.num_loaded, used.running, used.waiting) == (loaded, (one, two), ())
    for name in "abcd":
        engine.cancel(name)
    while engine.due(0.0) is not None:
        used = stats_of(engine, 0.0).adapters
    assert (used.running, used.waiting) == ((), ())


def test_the_prefix_cache_of_one_adapter_is_not_read_by_another(engine: Engine) -> None:
    engine.pool.clear_cache()

    def cached(adapter: str) -> int:
        (answer,) = run(engine, request("one", PROMPT, adapter))
        assert answer.end is not None
        return answer.end.usage.cached_tokens

    assert [cached(name) for name in ("a", "b", "")] == [0, 0, 0]
    assert [cached(name) > 0 for name in ("a", "b", "")] == [True, True, True]


def test_other_files_under_the_same_name_meet_no_old_cache_and_running_requests_keep_theirs(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "x", tiny_model, seed=1)
    engine = load(tiny_model, {"x": folder})
    before = tokens(engine, "x")
    first = engine.info.adapters["x"].identity
    engine.add(engine.prepare(request("running", PROMPT, "x", ignore_eos=True)), 1.0)
    engine.step(1.0)
    held = weakref.ref(engine.prepare(request("held", PROMPT, "x")).adapter)
    write_adapter(folder, tiny_model, seed=2)
    (state,) = engine.set_adapters({"x": str(folder)}).values()
    assert state.failure is None
    assert state.identity != first
    answer = Answer()
    while engine.due(1.0) is not None:
        for output in engine.step(1.0)[0]:
            answer.take(output)
    assert answer.tokens() == before[-len(answer.tokens()) :]
    assert tokens(engine, "x") == tokens(load(tiny_model, {"x": folder}), "x") != before
    resumed = msgspec.structs.replace(
        request("again", PROMPT, "x"), adapter_identity=first, resumes=Continuation(token_ids=(5,), seed=0)
    )
    with pytest.raises(WorkerDied, match="was replaced"):
        engine.prepare(resumed)
    assert engine.set_adapters({}) == {}
    with pytest.raises(ModelNotFound, match="'x' is not loaded"):
        engine.prepare(request("gone", PROMPT, "x"))
    gc.collect()
    assert held() is None, "the memory of an adapter goes with the last request that uses it"


def test_files_that_fail_leave_what_was_loaded(tiny_model: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", tiny_model, seed=1)
    engine = load(tiny_model, {"x": folder, "bad": tmp_path / "nothing"})
    assert "There is no file or folder" in _failure(engine.info.adapters["bad"])
    before = tokens(engine, "x")
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    states = engine.set_adapters({"x": str(folder), "a": str(folders["a"])})
    assert "its header claims" in _failure(states["x"])
    assert states["x"].identity
    assert states["a"].failure is None
    assert tokens(engine, "x") == before


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
        {"speculation": SpeculationConfig(method="prompt_lookup")},
        {"kv_cache": KVCacheConfig(block_size=4, num_blocks=64, dtype="int8")},
        {"scheduler": SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)},
        {"num_blocks": 34},
    ],
    ids=["int8", "int4", "prompt-lookup", "int8-cache", "chunks", "preemption"],
)
def test_adapters_work_with(fields: dict[str, Any], tiny_model: Path, folders: dict[str, Path]) -> None:
    """The same answers in a crowd as alone; the other adapters' and the base's differ."""
    kv_cache = fields.pop("kv_cache", None) if "kv_cache" in fields else None
    engine = load(tiny_model, folders, **dict(fields))
    if kv_cache is not None:
        engine.close()
        engine = create_backend(
            "tiny",
            ModelConfig(
                source=str(tiny_model),
                device="cpu",
                dtype="float32",
                threads=1,
                max_model_len=128,
                kv_cache=kv_cache,
                adapters={name: str(folder) for name, folder in folders.items()},
            ),
            lambda phase, done, total: None,
        )
    names = ["", "a", "b", "c"]
    requests = [
        request(f"{name}{i}", prompt * 2, name, max_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS[:2])
        for name in names
    ]
    together = [answer.tokens() for answer in run(engine, *requests)]
    engine.pool.clear_cache()
    assert together == [run(engine, each)[0].tokens() for each in requests]
    assert len({tuple(each) for each in together[:4]}) == 4
    engine.close()


def test_a_schema_binds_the_answer_of_an_adapter(
    engine: Engine, tiny_model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    whole = load(merged(tiny_model, folders["b"], tmp_path / "whole"), {})
    texts: dict[str, str] = {}
    for name in ("", "a", "b"):
        (answer,) = run(engine, constrained("x", name))
        texts[name] = answer.text()
        assert re.fullmatch(PATTERN, texts[name])
    (expected,) = run(whole, constrained("x"))
    assert texts["b"] == expected.text()
    assert len(set(texts.values())) == 3, "the adapters choose among what the form allows"
    whole.close()


@pytest.mark.parametrize("with_form", [False, True])
def test_a_stream_of_an_adapter_is_continued_at_every_token(engine: Engine, with_form: bool) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": not with_form}

    def make(name: str) -> GenerateRequest:
        return constrained(name, "b", **options) if with_form else request(name, PROMPT, "b", **options)

    (whole,) = run(engine, make("whole"))
    ids, identity = whole.tokens(), engine.info.adapters["b"].identity
    assert ids
    for cut in range(len(ids) + 1):
        rest = msgspec.structs.replace(
            make("rest"),
            adapter_identity=identity,
            resumes=Continuation(token_ids=tuple(ids[:cut]), seed=5),
        )
        assert run(engine, rest)[0].tokens() == ids[cut:]


def test_a_draft_model_changes_no_answer_of_an_adapter(
    engine: Engine, tiny_model: Path, folders: dict[str, Path]
) -> None:
    """The draft model is the base itself, so that it is right for the base and errs for the adapters."""
    drafted = load(tiny_model, folders, speculation=SpeculationConfig(method="draft", draft=str(tiny_model)))
    always(drafted)
    requests = [
        request(f"{name}{heat}", PROMPT, name, max_tokens=24, ignore_eos=True, temperature=heat, seed=4)
        for name in ("", "a", "b")
        for heat in (0.0, 1.0)
    ]
    assert run_guessing(drafted, requests) == [run(engine, each)[0].tokens() for each in requests]
    drafted.close()


def test_choices_and_beams_use_the_adapter(
    engine: Engine, tiny_model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    whole = load(merged(tiny_model, folders["b"], tmp_path / "whole"), {})
    cases: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"n": 2, "use_beam_search": True, "temperature": 0.0},
    ]
    for options in cases:
        (found,) = run(engine, request("x", PROMPT, "b", **options))
        (expected,) = run(whole, request("x", PROMPT, **options))
        assert [found.tokens(i) for i in range(2)] == [expected.tokens(i) for i in range(2)]
    whole.close()


def test_the_plan_counts_adapters_and_their_limit_holds(tiny_model: Path, folders: dict[str, Path]) -> None:
    plain, some = load(tiny_model, {}), load(tiny_model, {"c": folders["c"]})
    needed = some.info.adapters["c"].num_bytes
    assert some.info.memory.weights_bytes - plain.info.memory.weights_bytes == needed
    limited = load(tiny_model, {"a": folders["a"]}, adapter_memory_bytes=needed)
    assert limited.info.memory.weights_bytes - plain.info.memory.weights_bytes == needed
    states = limited.set_adapters({"a": str(folders["a"]), "c": str(folders["c"])})
    assert "raise adapter_memory_bytes" in _failure(states["c"])


def _failure(state: Any) -> str:
    assert state.failure is not None
    return str(state.failure.message)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora is True: DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: whole modules"),
        ({"bias": "all"}, "bias is 'all': biases are not added"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA': only LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa_niter_4"}, "it changes the base's weights"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"r": 0}, "r is 0: a rank must be"),
        ({"r": 16}, r"has the shape \[8, [0-9]+\], but adapter_config.json gives it the rank 16"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"target_modules": ["q_proj"]}, "which target_modules in adapter_config.json does not name"),
        ({"exclude_modules": ["0.self_attn.v_proj"]}, r"has matrices of \S+\.0\.self_attn\.v_proj, which"),
        ({"target_modules": "(q_proj"}, "no regular expression"),
        ({"target_modules": "([a-z_.0-9]+)+!"}, "matching it could take for ever"),
        ({"rank_pattern": {".*" * 12 + "!": 8}}, "rank_pattern is .*: matching it could take for ever"),
        ({"target_modules": None}, "target_modules is None"),
        ({"rank_pattern": {"q_proj": 4}}, "gives it the rank 4"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w7"]},
            "'w7'",
        ),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused_by_name(
    config: dict[str, Any], said: str, engine: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(folders["a"], tmp_path / "x")
    path = tmp_path / "x" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    states = engine.set_adapters({name: str(folder) for name, folder in folders.items()} | {"x": str(tmp_path / "x")})
    assert re.search(said, _failure(states["x"])), _failure(states["x"])


def test_files_that_do_not_fit_are_refused_by_name(
    engine: Engine, tiny_model: Path, folders: dict[str, Path], tmp_path: Path, families: Any
) -> None:
    families.write_checkpoint("qwen3", tmp_path / "other")
    good = {name: str(folder) for name, folder in folders.items()}

    def said(change: Any) -> str:
        folder = write_adapter(tmp_path / change.__name__, tiny_model, rank=8)
        folder = change(folder) or folder
        return _failure(engine.set_adapters(good | {"x": str(folder)})["x"])

    def tensors(folder: Path, change: Any) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    def other_base(folder: Path) -> Path:
        return write_adapter(tmp_path / "foreign", tmp_path / "other", rank=8)

    def pickled(folder: Path) -> None:
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    def empty(folder: Path) -> None:
        tensors(folder, lambda found: {})

    def one_side(folder: Path) -> None:
        tensors(folder, lambda found: {k: v for k, v in found.items() if "0.self_attn.q_proj.lora_B" not in k})

    def head(folder: Path) -> None:
        tensors(folder, lambda found: found | {"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 32)})

    def not_finite(folder: Path) -> None:
        tensors(folder, lambda found: {k: v * float("inf") for k, v in found.items()})

    def unknown(folder: Path) -> None:
        tensors(folder, lambda found: found | {"some.tensor": torch.zeros(1)})

    def no_config(folder: Path) -> None:
        (folder / "adapter_config.json").unlink()

    def huge_header(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])

    def cut_off(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])

    def other_shape(folder: Path) -> None:
        """The header gives a matrix more rows than its bytes hold."""
        file = folder / "adapter_model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        name = next(name for name in header if "lora_A" in name)
        header[name]["shape"][0] += 1
        changed = json.dumps(header).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])

    for lying in (huge_header, cut_off, other_shape):
        assert "adapter_model.safetensors" in said(lying)
    assert "trained on another base model" in said(other_base)
    assert "a pickle, which can run code and is never loaded" in said(pickled)
    assert "has no tensors" in said(empty)
    assert "both lora_A and lora_B are needed" in said(one_side)
    assert "the output layer cannot be adapted" in said(head)
    assert "not finite" in said(not_finite)
    assert "'some.tensor', which is not a matrix" in said(unknown)
    assert "so it is not an adapter" in said(no_config)
    assert tokens(engine, "a"), "the others go on"


@pytest.mark.parametrize("target_modules", ["all-linear", r".*\.self_attn\.(q|v)_proj", ["self_attn.q_proj", "v_proj"]])
def test_modules_are_named_as_peft_reads_them(target_modules: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "x",
        tiny_model,
        targets=("q_proj", "v_proj"),
        target_modules=target_modules,
        rank_pattern={"layers.1.self_attn.q_proj": 5},
        alpha_pattern={"v_proj": 3},
        exclude_modules=["k_proj", "layers.9.self_attn.q_proj"],  # no other module than these
    )
    engine = load(tiny_model, {"x": folder})
    whole = load(merged(tiny_model, folder, tmp_path / "whole"), {})
    assert engine.info.adapters["x"].failure is None
    assert tokens(engine, "x") == tokens(whole)
