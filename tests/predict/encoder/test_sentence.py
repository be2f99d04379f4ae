"""A folder of sentence-transformers is read as its files say, and what they cannot mean is refused by its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd.errors import ModelLoadError
from inferd.predict.encoder.sentence import check_dense, read_sentence


def write_modules(folder: Path, *more: dict[str, object]) -> None:
    """A checkpoint in the folder itself, and a pooling without a file."""
    own = [{"path": "", "type": "a.models.Transformer"}, {"path": "1_Pooling", "type": "a.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps([*own, *more]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_mode": "max"}, ("max",)),
        ({"pooling_mode": ["mean", "cls"]}, ("cls", "mean")),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, ("lasttoken",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_cls_token": False}, ("weightedmean",)),
        ({"pooling_mode": "medium"}, "pooling_mode names 'medium'; supported are cls, max, mean"),
        ({"pooling_mode": ["mean", 7]}, "pooling_mode names 7; supported are cls"),
        ({"pooling_mode": []}, "enables no mode of pooling"),
        ({"pooling_mode_mean_tokens": "true"}, "enables no mode of pooling"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt is false"),
    ],
)
def test_the_modes_of_pooling_are_named_or_flags(
    tmp_path: Path, settings: dict[str, object], expected: tuple[str, ...] | str
) -> None:
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if isinstance(expected, tuple):
        assert read_sentence(tmp_path).pooling == expected
        return
    with pytest.raises(ModelLoadError, match=expected):
        read_sentence(tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (True, "tanh")),
        ({"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}, (False, "identity")),
        ({"activation_function": "torch.nn.ReLU"}, "activation_function is 'relu'; supported are Identity and Tanh"),
        ({"in_features": 0}, "must be positive integers"),
        ({"out_features": 2**31}, "must be positive integers"),
        ({"in_features": 3.0}, "must be positive integers"),
    ],
)
def test_a_dense_layer_is_described_by_its_file(
    tmp_path: Path, settings: dict[str, object], expected: tuple[bool, str] | str
) -> None:
    write_modules(tmp_path, {"path": "2_Dense", "type": "a.b.Dense"})
    (tmp_path / "2_Dense").mkdir()
    sizes = {"in_features": 1, "out_features": 2**31 - 1}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**sizes, **settings}))
    if isinstance(expected, tuple):
        (dense,) = read_sentence(tmp_path).dense
        assert (dense.bias, dense.activation) == expected
        assert (dense.in_features, dense.out_features) == (1, 2**31 - 1)
        assert check_dense([dense, dense], 1) == f"2_Dense takes 1 features, but gets {2**31 - 1}"
        assert check_dense([dense], 1) is None
        return
    with pytest.raises(ModelLoadError, match=expected):
        read_sentence(tmp_path)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"prompts": {"query": "q: ", "none": ""}, "default_prompt_name": "query"}, ({"query": "q: "}, "query")),
        ({"prompts": {"query": "q: ", "none": ""}, "default_prompt_name": "none"}, ({"query": "q: "}, None)),
        ({"prompts": None}, ({}, None)),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "other"}, "default_prompt_name is 'other', which"),
        ({"prompts": {"query": 1}}, "prompts must be an object of texts"),
        ({"prompts": ["query"]}, "prompts must be an object of texts"),
    ],
)
def test_prompts_are_texts_by_their_names(
    tmp_path: Path, told: dict[str, object], expected: tuple[dict[str, str], str | None] | str
) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(told))
    if isinstance(expected, tuple):
        found = read_sentence(tmp_path)
        assert (found.prompts, found.default_prompt) == expected
        assert (found.pooling, found.normalize, found.folder) == (None, None, tmp_path), "no modules, nothing said"
        return
    with pytest.raises(ModelLoadError, match=expected):
        read_sentence(tmp_path)


@pytest.mark.parametrize(("given", "limit"), [(12, 12), (0, None), (-1, None), ("12", None), (None, None)])
def test_a_limit_of_tokens_is_a_number_above_zero(tmp_path: Path, given: object, limit: int | None) -> None:
    settings = {"max_seq_length": given, "do_lower_case": given == 12}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    found = read_sentence(tmp_path)
    assert (found.max_tokens, found.lower_case) == (limit, given == 12)


def test_modules_say_where_the_checkpoint_is_and_whether_vectors_have_length_one(tmp_path: Path) -> None:
    write_modules(tmp_path, {"path": "9", "type": "a.Dropout"})
    found = read_sentence(tmp_path)
    assert (found.folder, found.pooling, found.normalize, found.dense) == (tmp_path, ("cls",), False, ())
    listed = [{"path": "0_Transformer", "type": "a.Transformer"}, {"type": "a.Normalize"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    found = read_sentence(tmp_path)
    assert (found.folder, found.pooling, found.normalize) == (tmp_path / "0_Transformer", None, True)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ('[{"path": "/a", "type": "a.Transformer"}]', "the path '/a' leads out of the model's folder"),
        ('[{"path": "b\\\\..", "type": "a.Transformer"}]', "leads out of the model's folder"),
        ('[{"path": "a/../../b", "type": "a.Transformer"}]', "leads out of the model's folder"),
        ('["a.Transformer"]', "every module must be an object with a type"),
        ('[{"path": "", "type": 7}]', "every module must be an object with a type"),
    ],
)
def test_modules_that_lead_elsewhere_or_have_no_type_are_refused(tmp_path: Path, modules: str, said: str) -> None:
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ModelLoadError, match=said):
        read_sentence(tmp_path)
