"""What a text model makes of limits, prompts, options and of folders that are not in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.predict.encoder.test_encoder_families import ask, hidden_states, load, texts
from tests.predict.encoder.tiny_encoders import POSITIONS, VOCABULARY, write_encoder, write_modules

from inferd.config import BatchingConfig
from inferd.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from inferd.native import compiled
from inferd.predict.encoder.texts import Texts
from inferd.predict.runtime import Item
from inferd.predict.runtimes.encoder import EncoderRuntime

LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bert"), "BertModel")


def vector(runtime: EncoderRuntime, text: str, **parameters: object) -> Any:
    (result,) = ask(runtime, {"text": [text]}, **parameters)
    return result.outputs["embedding"][0]


def with_modules(bert: Path, folder: Path, **settings: Any) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(bert / name)
    write_modules(folder, **settings)
    return folder


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken"])
def test_the_folder_says_how_tokens_become_a_vector(bert: Path, tmp_path: Path, pooling: str) -> None:
    runtime = load(with_modules(bert, tmp_path, pooling=pooling, normalize=False))
    hidden = hidden_states(bert, "the cat sits")
    expected = {"cls": hidden[0], "mean": hidden.mean(0), "max": hidden.amax(0), "lasttoken": hidden[-1]}[pooling]
    np.testing.assert_allclose(vector(runtime, "the cat sits"), expected.numpy(), atol=1e-4)


def test_a_dense_layer_behind_the_pooling_is_computed(bert: Path, tmp_path: Path) -> None:
    folder = with_modules(bert, tmp_path, normalize=False)
    listed = json.loads((folder / "modules.json").read_text())
    listed.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "2_Dense").mkdir()
    settings = {"in_features": 32, "out_features": 5, "bias": True, "activation_function": "torch.nn.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(settings))
    weight, bias = torch.randn(5, 32), torch.randn(5)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    expected = torch.tanh(weight @ hidden_states(bert, "the cat").mean(0) + bias)
    np.testing.assert_allclose(vector(load(folder), "the cat"), expected.numpy(), atol=1e-4)


def test_vectors_have_length_one_unless_told_otherwise(bert: Path, tmp_path: Path) -> None:
    assert np.linalg.norm(vector(load(bert), "the cat")) == pytest.approx(1.0, abs=1e-6)
    runtime = load(with_modules(bert, tmp_path, normalize=False))
    assert np.linalg.norm(vector(runtime, "the cat")) > 1.5
    assert np.linalg.norm(vector(runtime, "the cat", normalize=True)) == pytest.approx(1.0, abs=1e-6)


def test_fewer_dimensions_are_the_first_ones_made_to_length_one(bert: Path) -> None:
    runtime = load(bert)
    whole, short = vector(runtime, "the cat"), vector(runtime, "the cat", dimensions=8)
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    for wrong in (0, 33):
        with pytest.raises(InvalidRequest, match=f"dimensions must be from 1 to 32 for this model, not {wrong}"):
            vector(runtime, "the cat", dimensions=wrong)


def test_a_text_beyond_the_limit_is_refused_with_its_number_and_the_limit(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"Text 1 of 2 has 54 tokens; this model reads at most {POSITIONS}"):
        ask(load(bert), {"text": ["a", LONG]})
    with pytest.raises(ContextLengthExceeded, match="reads at most 12"):
        ask(load(with_modules(bert, tmp_path, max_tokens=12)), {"text": [LONG]})


def test_truncation_keeps_the_special_tokens_and_the_side_that_was_asked_for(bert: Path) -> None:
    runtime = load(bert)
    letters = LONG.split()
    np.testing.assert_allclose(
        vector(runtime, LONG, truncate=True), vector(runtime, " ".join(letters[: POSITIONS - 2])), atol=1e-6
    )
    left = vector(runtime, LONG, truncate_prompt_tokens=10, truncation_side="left")
    np.testing.assert_allclose(left, vector(runtime, " ".join(letters[-8:])), atol=1e-6)
    whole = vector(runtime, "a b c", truncate_prompt_tokens=-1)
    np.testing.assert_array_equal(whole, vector(runtime, "a b c"))
    for wrong in (0, POSITIONS + 1):
        with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens must be -1 .* or from 1 to 40"):
            vector(runtime, "a", truncate_prompt_tokens=wrong)
    with pytest.raises(InvalidRequest, match="2 of them are special"):
        vector(runtime, LONG, truncate_prompt_tokens=2)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters were made tokens, call by call."""
    sizes: list[int] = []
    tokens = Texts._tokens

    def counted(self: Texts, texts: Any, offsets: bool) -> Any:
        sizes.append(sum(len(part) for text in texts for part in ([text] if isinstance(text, str) else text)))
        return tokens(self, texts, offsets)

    monkeypatch.setattr(Texts, "_tokens", counted)
    return sizes


def test_a_huge_text_is_not_read_to_its_end(bert: Path, read: list[int]) -> None:
    runtime = load(bert)
    words = "the cat sits outside " * 50_000
    with pytest.raises(
        ContextLengthExceeded, match=r"Text 1 of 2 has more than 40 tokens; this model reads at most 40"
    ):
        ask(runtime, {"text": ["a", words]})
    with pytest.raises(ContextLengthExceeded, match=r"The text has 1000000 characters; this model reads at most 40"):
        ask(runtime, {"text": ["x" * 1_000_000]})
    assert sum(read) < 100_000
    read.clear()
    kept = words.split()
    right = vector(runtime, words, truncate=True)
    np.testing.assert_allclose(right, vector(runtime, " ".join(kept[: POSITIONS - 2])), atol=1e-6)
    left = vector(runtime, words, truncate=True, truncation_side="left")
    np.testing.assert_allclose(left, vector(runtime, " ".join(kept[2 - POSITIONS :])), atol=1e-6)
    assert sum(read) < 100_000


def test_a_long_text_of_few_tokens_is_read_whole(bert: Path) -> None:
    runtime = load(bert)
    sparse = "the" + " " * 20_000 + "cat" + "x" * 3_000
    np.testing.assert_allclose(vector(runtime, sparse), vector(runtime, "the [UNK]"), atol=1e-6)


def test_a_huge_text_of_a_pair_is_cut_as_if_it_had_been_read_to_its_end(tmp_path: Path, read: list[int]) -> None:
    runtime = load(write_encoder(tmp_path, "BertForSequenceClassification", labels=1))
    words = "the cat sits outside " * 50_000

    def score(query: str, text: str) -> float:
        (result,) = ask(runtime, {"query": [query], "text": [text]}, truncate=True)
        return float(result.outputs["score"][0])

    kept = words.split()
    assert score("a b", words) == pytest.approx(score("a b", " ".join(kept[: POSITIONS - 3 - 2])), abs=1e-6)
    half = (POSITIONS - 3) // 2
    assert score(words, words) == pytest.approx(score(" ".join(kept[: half + 1]), " ".join(kept[:half])), abs=1e-6) or (
        score(words, words) == pytest.approx(score(" ".join(kept[:half]), " ".join(kept[: half + 1])), abs=1e-6)
    )
    assert sum(read) < 200_000


def test_of_a_pair_the_longer_text_is_cut_first(tmp_path: Path) -> None:
    runtime = load(write_encoder(tmp_path, "BertForSequenceClassification", labels=1))

    def score(query: str, text: str, **parameters: object) -> float:
        (result,) = ask(runtime, {"query": [query], "text": [text]}, **parameters)
        return float(result.outputs["score"][0])

    with pytest.raises(ContextLengthExceeded):
        score("a b", LONG)
    kept = " ".join(LONG.split()[: POSITIONS - 3 - 2])
    assert score("a b", LONG, truncate=True) == pytest.approx(score("a b", kept), abs=1e-6)
    even = score(LONG, LONG, truncate_prompt_tokens=13)
    assert even == pytest.approx(score("a b c d e", "a b c d e"), abs=1e-6)


def test_prompts_of_the_folder_go_before_the_text(bert: Path, tmp_path: Path) -> None:
    prompts = {"query": "the king ", "document": ""}
    runtime = load(with_modules(bert, tmp_path, prompts=prompts, default_prompt_name="query"))
    expected = vector(load(bert), "the king plays")
    np.testing.assert_allclose(vector(runtime, "plays"), expected, atol=1e-6)
    np.testing.assert_allclose(vector(runtime, "plays", prompt_name="query"), expected, atol=1e-6)
    np.testing.assert_allclose(vector(runtime, "king plays", prompt="the "), expected, atol=1e-6)
    with pytest.raises(InvalidRequest, match="no prompt named 'passage'; it has 'query'"):
        vector(runtime, "plays", prompt_name="passage")


def test_token_ids_are_read_as_they_are(bert: Path) -> None:
    runtime = load(bert)

    def of(*ids: int, **parameters: object) -> Any:
        made = np.empty(1, dtype=np.object_)
        made[0] = np.array(ids, "<i4").tobytes()
        item = Item(request_id="ids", inputs={"token_ids": made}, parameters=parameters)
        runtime.prepare(item)
        (result,) = runtime.predict([item])
        assert not isinstance(result, Exception)
        assert result.num_tokens == len(ids) or parameters
        return result.outputs["embedding"][0]

    known = ["[CLS]", "the", "cat", "[SEP]"]
    np.testing.assert_array_equal(of(*[VOCABULARY.index(word) for word in known]), vector(runtime, "the cat"))
    ids = [2, *range(8, 12), 3]
    np.testing.assert_array_equal(of(*ids, truncate_prompt_tokens=2), of(*ids[:2]))
    np.testing.assert_array_equal(of(*ids, truncate_prompt_tokens=4, truncation_side="left"), of(*ids[-4:]))
    np.testing.assert_array_equal(of(*ids, truncate_prompt_tokens=6, truncation_side="left"), of(*ids))
    of(0, len(VOCABULARY) - 1)
    for outside in (-1, len(VOCABULARY)):
        with pytest.raises(
            InvalidRequest, match=rf"input\[0\] holds the token id {outside};.* ids 0 to {len(VOCABULARY) - 1}"
        ):
            of(2, outside)
    with pytest.raises(InvalidRequest, match="token id 5000; this model has the ids 0 to"):
        of(2, 5000)
    with pytest.raises(InvalidRequest, match="empty list of token ids"):
        of()
    with pytest.raises(ContextLengthExceeded):
        of(*[9] * (POSITIONS + 1))


def test_tokens_are_what_a_request_takes_of_a_batch(bert: Path) -> None:
    item = Item(request_id="1", inputs={"text": texts(["the cat", "a"])}, rows=2)
    load(bert).prepare(item)
    assert item.size == 4 + 3


@pytest.mark.parametrize(("positions", "rows"), [(POSITIONS, 64), (512, 16), (4096, 8)])
def test_the_longer_texts_may_be_the_fewer_are_computed_in_one_go(tmp_path: Path, positions: int, rows: int) -> None:
    contract = load(write_encoder(tmp_path, "BertModel", max_position_embeddings=positions)).contract
    assert (contract.max_tokens, contract.typical_rows, contract.max_size) == (positions, rows, 512)


def test_the_tokens_computed_together_are_the_operators_to_choose(bert: Path) -> None:
    assert load(bert, batching=BatchingConfig(max_batch_tokens=99)).contract.max_size == 99


def test_a_text_that_is_no_utf8_is_refused(bert: Path) -> None:
    made = np.empty(1, dtype=np.object_)
    made[0] = b"\xff\xfe"
    with pytest.raises(InvalidRequest, match="no UTF-8"):
        load(bert).prepare(Item(request_id="1", inputs={"text": made}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "rerank"}, "BertModel with 2 labels cannot rerank; it was made to embed"),
        ({"max_model_len": 41}, "max_model_len is 41, but .* has positions for 40"),
        ({"options": {"polling": "cls"}}, "unknown field `polling`"),
        ({"dtype": "float16"}, "float16 is not computed on the CPU"),
        ({"dtype": "bfloat16", "options": {"quantize": "int8"}}, "for encoders on the CPU, beside dtype: float32"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_are_refused(bert: Path, settings: Any, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load(bert, **settings)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ('[{"path": "../elsewhere", "type": "a.Transformer"}]', "leads out of the model's folder"),
        ('[{"path": "", "type": "a.LSTM"}]', "a module of the type 'a.LSTM'"),
        ('{"path": ""}', "must be a list of modules"),
        ("[", "is not valid JSON"),
    ],
)
def test_modules_that_are_not_understood_are_refused(bert: Path, tmp_path: Path, modules: str, said: str) -> None:
    folder = with_modules(bert, tmp_path)
    (folder / "modules.json").write_text(modules)
    with pytest.raises(ModelLoadError, match=said):
        load(folder)


def test_weights_that_do_not_belong_to_the_configuration_are_refused(bert: Path, tmp_path: Path) -> None:
    folder = with_modules(bert, tmp_path)
    settings = json.loads((bert / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 2}))
    with pytest.raises(ModelLoadError, match=r"has 16 tensors that config\.json's architecture does not know"):
        load(folder)


def test_a_decoder_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "Qwen3Model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "is_causal": False}))
    with pytest.raises(ModelLoadError, match="is_causal is false"):
        load(folder)


def test_bfloat16_products_keep_the_direction(bert: Path) -> None:
    exact, fast = load(bert), load(bert, dtype="bfloat16")
    for text in ("the cat sits outside", "Paris", "dogs"):
        assert float(vector(exact, text) @ vector(fast, text)) > 0.999


@pytest.mark.parametrize("architecture", ["BertModel", "MPNetModel", "ModernBertModel"])
def test_products_of_bytes_keep_the_direction(tmp_path: Path, architecture: str) -> None:
    if not compiled.has_int8():
        pytest.skip("this processor has no products of bytes")
    folder = write_encoder(tmp_path, architecture)
    exact, fast = load(folder), load(folder, options={"quantize": "int8"})
    assert fast.contract.dtype == "int8"
    for text in ("the cat sits outside", "Paris", "dogs"):
        assert 0.97 < float(vector(exact, text) @ vector(fast, text)) < 0.999999


def test_where_there_are_no_products_of_bytes_that_is_said(bert: Path) -> None:
    with compiled.using_level("none"), pytest.raises(ModelLoadError, match="AVX-512 VNNI"):
        load(bert, options={"quantize": "int8"})
