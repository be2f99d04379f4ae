"""A reference is taken from first requests, is a file of counts, and a file that is none is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.config import Config
from inferd.drift.reference import Collection, Reference, StreamReference, decode_reference, read_references
from inferd.errors import ConfigError

GOOD: dict[str, Any] = {
    "model": "m",
    "version": "1",
    "requests": 1000,
    "taken_at": 1.0,
    "streams": {
        "label": {"names": ["a", "b"], "counts": [6, 3, 0]},
        "score": {"edges": [0.5, 0.9], "counts": [1, 2, 6]},
    },
}
MEAN: dict[str, Any] = {"num": 9, "sums": [0.5] * 32, "spread": {"eigenvalues": [0.1] * 32}}


def changed(stream: str, **fields: object) -> dict[str, Any]:
    streams = {**GOOD["streams"], stream: {**GOOD["streams"].get(stream, {}), **fields}}
    return {**GOOD, "streams": streams}


def config_of(path: Path, **drift: object) -> Config:
    drift = {"enabled": True, "reference": str(path), **drift}
    return msgspec.convert({"models": {"m": {"source": "x", "drift": drift}, "n": {"source": "x"}}}, Config)


def test_the_first_values_choose_the_cells_and_the_others_are_counted() -> None:
    collection = Collection(1000)
    for number in range(20):
        is_last = collection.add(50, {"score": [number / 20] * 50, "label": ["a"] * 25, "output": []})
        assert is_last == (number == 19)
    streams = collection.streams(least=100)
    assert sum(streams["score"].counts) == 950, "5 % of 1,000 chose the cells"
    assert sum(streams["label"].counts) == 450
    assert streams["label"].names == ("a",)
    assert set(collection.streams(least=451)) == {"score"}


def test_a_file_of_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    reference = Reference(
        model="m",
        version="3",
        requests=1000,
        taken_at=12.5,
        streams={"score": StreamReference(edges=(0.25, 0.5), counts=(1, 2, 3))},
    )
    path = tmp_path / "m.json"
    path.write_bytes(msgspec.json.encode(reference))
    assert read_references(config_of(path)) == {"m": reference}
    assert decode_reference(json.dumps(GOOD).encode()).streams["label"].names == ("a", "b")


def test_no_file_is_read_for_a_model_that_is_not_watched(tmp_path: Path) -> None:
    assert read_references(config_of(tmp_path / "missing", enabled=False)) == {}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({**GOOD, "streams": {}}, "streams: there are none"),
        ({**GOOD, "streams": {"colour": {"names": ["a"], "counts": [1, 1]}}}, "colour"),
        ({**GOOD, "more": 1}, "more"),
        (changed("label", edges=[1.0]), "either edges or names"),
        (changed("label", names=None), "either edges or names"),
        (changed("label", names=["a", "a"]), "a name twice"),
        (changed("label", counts=[1, 2]), "counts has 2 numbers"),
        (changed("label", counts=[1, 2, -3]), "0 or more"),
        (changed("label", counts=[0, 0, 0]), "not all of them 0"),
        (changed("score", edges=[0.9, 0.5]), "finite numbers that grow"),
        (changed("score", edges=[0.5, "x"]), "float"),
        (changed("score", edges=[], counts=[5]), "at least 2"),
        (changed("score", mean=MEAN), "mean is for the stream embedding"),
        (changed("embedding", edges=[1.0], counts=[1, 2]), "mean is for the stream embedding"),
        (changed("embedding", mean={**MEAN, "num": 0}), "a num of 1 or more"),
        (changed("embedding", mean={**MEAN, "sums": [0.5]}), "32 sums"),
        (changed("embedding", mean={**MEAN, "spread": {"eigenvalues": [-0.1] * 32}}), "0 or more"),
        (changed("embedding", mean={**MEAN, "spread": {"eigenvalues": [0.1]}}), "32 eigenvalues"),
        (changed("embedding", mean={**MEAN, "spread": {"trace": 1, "square": 1, "fourth": 1}}), "inferd drift reset"),
    ],
)
def test_what_is_no_reference_is_refused_with_its_setting(tmp_path: Path, document: object, said: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"models\.m\.drift\.reference: .* is no reference") as error:
        read_references(config_of(path))
    assert said in error.value.message
    assert "inferd drift save" in error.value.message


def test_a_missing_or_endless_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_references(config_of(tmp_path / "missing"))
    path = tmp_path / "long"
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ConfigError, match="too large"):
        read_references(config_of(path))
