"""The watermark of an answer, against that of transformers, and what it leaves alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.speculation.speculating import always, run_guessing
from tests.engine.test_engine import make_request, run
from transformers import WatermarkDetector, WatermarkingConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, WatermarkLogitsProcessor

from inferd.answer_form import AnswerForm, Regex
from inferd.cli.main import main
from inferd.config import KVCacheConfig, ModelConfig, SpeculationConfig, WatermarkConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.sampler import Sampler, SampleRow
from inferd.engine.watermark import Watermark, load_watermark
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.types import Continuation, GenerateRequest, PromptReport, SamplingParams

KEY, VOCAB = 15485863, 50
PROMPT = "The quick brown fox jumps over the lazy dog"


def load(base: Path, key_file: Path, apply: Any = "always", **fields: Any) -> Engine:
    config = ModelConfig(
        source=str(base),
        device="cpu",
        threads=1,
        dtype="float32",
        max_model_len=256,
        kv_cache=KVCacheConfig(block_size=4, num_blocks=512),
        watermark=WatermarkConfig(key_file=str(key_file), apply=apply, bias=6.0),
        **{"speculation": SpeculationConfig(method="none"), **fields},
    )
    return create_backend("tiny", config, lambda phase, done, total: None)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text(f"{KEY}\n")
    return path


@pytest.fixture(scope="module")
def engine(tiny_model: Path, key_file: Path) -> Iterator[Engine]:
    engine = load(tiny_model, key_file)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def asked(tiny_model: Path, key_file: Path) -> Iterator[Engine]:
    engine = load(tiny_model, key_file, "requested")
    yield engine
    engine.close()


def ask(name: str = "one", **options: Any) -> GenerateRequest:
    return make_request(name, PROMPT, **{"max_tokens": 60, "ignore_eos": True, **options})


def detector(engine: Engine) -> Any:
    config: Any = SimpleNamespace(vocab_size=engine.info.vocab_size, bos_token_id=-1, is_encoder_decoder=False)
    settings = WatermarkingConfig(greenlist_ratio=0.25, bias=6.0, hashing_key=KEY, seeding_scheme="lefthash")
    return WatermarkDetector(config, "cpu", settings, ignore_repeated_ngrams=True)


@settings(max_examples=30, deadline=None)
@given(
    previous=st.integers(0, VOCAB - 1),
    key=st.integers(1, 2**40),
    ratio=st.sampled_from([0.1, 0.25, 0.5]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    padding=st.integers(0, 7),
)
def test_the_logits_are_those_of_transformers(
    previous: int, key: int, ratio: float, temperature: float, padding: int
) -> None:
    """``padding``: ids that config.json counts and the tokenizer does not have."""
    vocab_size = VOCAB + padding
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(previous))
    processor = WatermarkLogitsProcessor(vocab_size, "cpu", ratio, 2.0, key, "lefthash", 1)
    ids = torch.tensor([[3, previous]])
    warped = TemperatureLogitsWarper(temperature)(ids, logits) if temperature else logits
    expected = processor(ids, warped)[0, :VOCAB]
    found = logits[0, :VOCAB].clone()
    Watermark(key, vocab_size, ratio, 2.0).add(found, previous, temperature)
    torch.testing.assert_close(found / (temperature or 1.0), expected)
    chosen = SampleRow(
        SamplingParams(temperature=0.0), [1, previous], [], 0, 0, watermark=Watermark(key, vocab_size, ratio, 2.0)
    )
    if not temperature:
        (sampled,) = Sampler(VOCAB).draw(logits.clone(), [chosen]).results
        assert sampled.token_id == expected.argmax()  # type: ignore[union-attr]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=60))
def test_the_score_is_that_of_transformers(ids: list[int]) -> None:
    config: Any = SimpleNamespace(vocab_size=VOCAB, bos_token_id=-1, is_encoder_decoder=False)
    oracle: Any = WatermarkDetector(
        config, "cpu", WatermarkingConfig(hashing_key=KEY, seeding_scheme="lefthash"), ignore_repeated_ngrams=True
    )
    expected = oracle(torch.tensor([ids]), return_dict=True)
    found = Watermark(KEY, VOCAB, 0.25, 2.0).score(ids)
    assert (found.num_scored, found.num_green) == (expected.num_tokens_scored[0], expected.num_green_tokens[0])
    assert found.z == pytest.approx(expected.z_score[0])
    assert found.p_value == pytest.approx(expected.p_value[0], rel=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transformers_detects_an_answer_and_not_one_without(engine: Engine, asked: Engine, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 150}
    (marked,), (plain,) = run(engine, ask(**options)), run(asked, ask(**options))
    find = detector(engine)
    assert find(torch.tensor([marked.tokens()]), z_threshold=4.0)[0]
    assert not find(torch.tensor([plain.tokens()]), z_threshold=4.0)[0]
    (wanted,) = run(asked, ask(**options, watermark=True))
    assert wanted.tokens() == marked.tokens()


def test_an_answer_reports_its_watermark(engine: Engine, asked: Engine) -> None:
    def reported(one: Engine, request: GenerateRequest) -> str:
        one.add(one.prepare(request), 1.0)
        reports: list[PromptReport] = []
        while one.due(1.0) is not None:
            reports += [output.prompt for output in one.step(1.0)[0] if output.prompt is not None]
        (report,) = reports
        return report.watermark

    assert reported(engine, ask()) == "kgw"
    assert reported(asked, ask()) == ""
    assert reported(asked, ask(watermark=True)) == "kgw"


def test_the_answer_is_the_same_in_a_crowd_when_guessed_and_when_continued(
    engine: Engine, tiny_model: Path, key_file: Path
) -> None:
    requests = [ask(f"{heat}{seed}", temperature=heat, seed=seed) for heat in (0.0, 1.0) for seed in range(2)]
    expected = [run(engine, each)[0].tokens() for each in requests]
    assert [answer.tokens() for answer in run(engine, *requests)] == expected
    drafted = load(tiny_model, key_file, speculation=SpeculationConfig(method="draft", draft=str(tiny_model)))
    always(drafted)
    assert run_guessing(drafted, requests) == expected
    drafted.close()
    for cut in (0, 1, 7, 59):
        rest = msgspec.structs.replace(
            requests[2], resumes=Continuation(token_ids=tuple(expected[2][:cut]), seed=requests[2].sampling.seed or 0)
        )
        assert run(engine, rest)[0].tokens() == expected[2][cut:]


def test_a_form_binds_before_the_watermark(engine: Engine, asked: Engine) -> None:
    pattern = "[a-h]{8}"
    form = AnswerForm(constraint=Regex(pattern=pattern, at="regex"))
    texts = [run(one, msgspec.structs.replace(ask(ignore_eos=False), form=form))[0].text() for one in (engine, asked)]
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert texts[0] != texts[1]


def test_what_cannot_be_marked_is_refused(engine: Engine, asked: Engine, tiny_model: Path) -> None:
    beams = ask(n=2, use_beam_search=True, temperature=0.0)
    with pytest.raises(InvalidRequest, match="Leave use_beam_search out"):
        engine.prepare(beams)
    assert asked.prepare(beams).watermark is None
    unmarked = create_backend(
        "tiny",
        ModelConfig(source=str(tiny_model), device="cpu", threads=1, kv_cache=KVCacheConfig(num_blocks=64)),
        lambda phase, done, total: None,
    )
    assert unmarked.info.fingerprint != asked.info.fingerprint
    with pytest.raises(InvalidRequest, match="This model has no watermark"):
        unmarked.prepare(ask(watermark=True))
    unmarked.close()


@pytest.mark.parametrize("said", ["", "0", "-1", "passphrase", "9223372036854775808", "1" * 5000, "1 2"])
def test_a_key_that_is_none_is_refused_and_not_shown(said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(said)
    with pytest.raises(ModelLoadError, match="one whole number") as refused:
        load_watermark(WatermarkConfig(key_file=str(path)), VOCAB)
    assert len(said) < 3 or said not in refused.value.message
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_watermark(WatermarkConfig(key_file=str(tmp_path / "nothing")), VOCAB)


def test_the_command_tells_marked_texts_from_others(
    engine: Engine, asked: Engine, tiny_model: Path, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "inferd.yaml"
    chat = {"source": str(tiny_model), "watermark": {"key_file": str(key_file), "bias": 6.0}}
    config.write_text(json.dumps({"models": {"chat": chat, "other": {"source": str(tiny_model)}}}))
    for one, is_marked in ((engine, True), (asked, False)):
        text = tmp_path / "answer.txt"
        text.write_text(run(one, ask(temperature=1.0, seed=3, max_tokens=150))[0].text())
        assert main(["watermark", str(text), "--config", str(config), "--json"]) == (0 if is_marked else 1)
        found = json.loads(capsys.readouterr().out)
        assert found["watermarked"] is is_marked
        assert (found["z"] > 4) is is_marked
    assert main(["watermark", str(text), "--config", str(config)]) == 1
    assert "No watermark was found" in capsys.readouterr().out
    assert main(["watermark", str(text), "--config", str(config), "--name", "other"]) == 1
    assert "'other' has no watermark" in capsys.readouterr().err
    text.write_text("")
    assert main(["watermark", str(text), "--config", str(config)]) == 1
    assert "at least 2 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        (("chat", "other"), "has 2 models with a watermark: chat, other; choose one with --name."),
        ((), "has 0 models with a watermark; set watermark.key_file of one."),
    ],
)
def test_the_command_asks_which_model_where_not_just_one_has_a_watermark(
    marked: tuple[str, ...], said: str, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text = tmp_path / "inferd.yaml", tmp_path / "answer.txt"
    text.write_text("some text")
    plain = {"source": "demo"}
    with_key = plain | {"watermark": {"key_file": str(key_file)}}
    models = {name: with_key if name in marked else plain for name in ("chat", "other")}
    config.write_text(json.dumps({"models": models}))
    assert main(["watermark", str(text), "--config", str(config)]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
