"""``inferd predict`` against a server that runs: found by itself, or by its URL and a key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper
from PIL import Image
from sklearn.datasets import load_digits
from tests.predict.live import serving
from training.classifiers.digits import drawn

from inferd.cli.main import main
from inferd.models import BUNDLE


def adder(path: Path) -> str:
    """text and numbers of several inputs: sum = a + b, and the text again."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Identity", ["name"], ["again"])],
        "adder",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, ["rows", 2]),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, ["rows", 2]),
            helper.make_tensor_value_info("name", TensorProto.STRING, ["rows"]),
        ],
        [
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["rows", 2]),
            helper.make_tensor_value_info("again", TensorProto.STRING, ["rows"]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    bundle = yaml.safe_load(BUNDLE.read_text())["models"]
    served = {"source": adder(folder / "adder.onnx"), "load": "on_demand"}
    with serving(folder, {"digits": bundle["digits"], "adder": served}) as address:
        (folder / "address").write_text(address.url)
        yield str(folder)


@pytest.fixture
def here(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address; commands without options find it."""
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", f"{server}/state")
    monkeypatch.delenv("INFERD_API_KEY", raising=False)
    return Path(server, "address").read_text()


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["predict", *words]) == 0
    return capsys.readouterr().out


def test_without_input_it_says_what_the_model_takes(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "digits")
    assert "image          BYTES [any], may be left out" in shown
    assert "probabilities  FP32 [any, 10]: 0, 1, 2" in shown
    assert "inferd predict digits --input PICTURE.jpg" in shown


@pytest.mark.parametrize("format", ["png", "jpg"])
def test_a_picture_is_told_with_its_labels(
    here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    row = load_digits().data[10].astype(np.float32)  # a zero
    file = tmp_path / f"zero.{format}"
    Image.fromarray(255 - drawn(row, at=0.4)).save(file)
    shown = told(capsys, "digits", "--input", str(file))
    assert "label           0" in shown
    classes = re.findall(r"(\d)  (\d\.\d{4})", shown)
    assert len(classes) == 5
    assert classes[0][0] == "0"
    assert float(classes[0][1]) > 0.9


def test_numbers_over_the_network_answer_for_programs(
    here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", load_digits().data[:3])
    document = json.loads(told(capsys, "digits", "-i", str(tmp_path / "x.npy"), "--json", "--url", here))
    label, probabilities = document["outputs"]
    assert label["data"] == ["0", "1", "2"]
    assert probabilities["shape"] == [3, 10]
    assert probabilities["labels"] == list("0123456789")
    assert sum(probabilities["data"]) == pytest.approx(3, abs=1e-4)


def test_a_model_that_waits_for_its_first_request_is_loaded(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only then it is known what it takes."""
    assert "sum    FP32 [any, 2]" in told(capsys, "adder")


def test_several_inputs_are_given_by_name_and_one_output_is_asked_for(
    here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-i", "a=1,2", "-i", "b=10,20", "-i", "name=né = e")
    assert "11, 22" in (shown := told(capsys, "adder", *words))
    assert "né = e" in shown
    assert "again" not in told(capsys, "adder", *words, "-o", "sum")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody", "-i", "x"), "unknown model"),
        (("digits", "-i", "1,2"), "takes FP32 [any, 64]; the value given has 2 values"),
        (("digits", "-i", "seven.png"), "There is no file seven.png"),
        (("adder", "-i", "a=1,2"), "'b' is missing"),
        (("adder", "-i", "a=1,2", "-o", "total"), "no output 'total'; its outputs are sum, again"),
        (("digits", "-i", "x", "--url", "http://127.0.0.1:9"), "does not answer"),
    ],
)
def test_mistakes_end_in_one_sentence(
    here: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["predict", *words]) == 1
    assert said in capsys.readouterr().err


def test_what_the_model_itself_refuses_is_told_in_its_words(
    here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.jpg"
    file.write_bytes(b"\xff\xd8\xff nothing more")
    assert main(["predict", "digits", "-i", str(file)]) == 1
    assert "cannot be decoded" in capsys.readouterr().err
