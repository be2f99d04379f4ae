"""A checkpoint's sampling defaults are read, and wrong ones named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd.checkpoints.generation_config import GenerationDefaults, load_generation_defaults
from inferd.errors import ModelLoadError


def write(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_a_folder_without_the_file_has_no_opinion(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_the_defaults_are_read(tmp_path: Path) -> None:
    given = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 64,
        "eos_token_id": [151645, 151643],
        "do_sample": True,
    }
    assert load_generation_defaults(write(tmp_path, json.dumps(given))) == GenerationDefaults(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.05,
        max_new_tokens=64,
        eos_token_ids=(151645, 151643),
    )


def test_one_end_of_sequence_id_or_none_will_do(tmp_path: Path) -> None:
    assert load_generation_defaults(write(tmp_path, '{"eos_token_id": 2}')).eos_token_ids == (2,)
    assert load_generation_defaults(write(tmp_path, '{"eos_token_id": null}')).eos_token_ids == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"temperature": "hot"}', "temperature is 'hot'"),
        ('{"temperature": -1}', "temperature is -1"),
        ('{"temperature": NaN}', "temperature"),
        ('{"top_p": 1.5}', "top_p is 1.5"),
        ('{"top_k": -2}', "top_k is -2"),
        ('{"top_k": 2.5}', "top_k is 2.5"),
        ('{"repetition_penalty": true}', "repetition_penalty is True"),
        ('{"max_new_tokens": 0}', "max_new_tokens is 0"),
    ],
)
def test_a_bad_file_is_named_with_its_field(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json.*{words}"):
        load_generation_defaults(write(tmp_path, text))
