"""A Python class as a model: what it declares, what is read from its annotations, and how it is called."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inferd.config import BatchingConfig, ModelConfig
from inferd.errors import InferdError, InvalidRequest, ModelLoadError
from inferd.predict.check import Checker
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import Array
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes.python import PythonModel, load

HEADER = """
import asyncio
from typing import Annotated, AsyncIterator, Iterator, Optional
import numpy as np
from numpy.typing import NDArray
"""


def silent(phase: str, done: int, total: int) -> None:
    pass


loaded: list[PythonModel] = []


@pytest.fixture(autouse=True)
def left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    yield
    while loaded:
        loaded.pop().close()


def made(folder: Path, body: str, **fields: object) -> PythonModel:
    """The class ``Model`` of this text, loaded."""
    path = folder / f"model_{abs(hash(body))}.py"
    path.write_text(HEADER + textwrap.dedent(body))
    config = ModelConfig(source=f"{path}:Model", **{"allow_code": True, **fields})  # type: ignore[arg-type]
    model = load("model", config.source, config, silent)
    loaded.append(model)
    return model


def ask(model: PythonModel, *inputs: dict[str, Array], parameters: dict[str, object] | None = None) -> list[object]:
    """What the model answers to requests with these inputs, which are checked as a backend checks them."""
    items = []
    for place, named in enumerate(inputs):
        checked, rows = Checker(model.contract).check(DecodedRequest(inputs=named))
        items.append(Item(request_id=str(place), inputs=checked, rows=rows, parameters=parameters or {}))
        model.prepare(items[-1])
    return [
        {name: array.tolist() for name, array in result.outputs.items()} if isinstance(result, Result) else result
        for result in model.predict(items)
    ]


def texts(*values: str) -> Array:
    return np.array([value.encode() for value in values], np.object_)


def specs(model: PythonModel) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(spec.name, spec.datatype, spec.shape) for spec in model.contract.inputs]


# -- what it takes and gives ---------------------------------------------------------------------


def test_declared_inputs_and_outputs_are_the_contract(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            inputs = {"x": "FP32[-1, 2]", "n": (np.int64, [1]), "free": "UINT8"}
            outputs = {"y": "FP64[-1]"}
            def predict(self, x, n, free):
                return x.sum(axis=1) * n[0]
        """,
    )
    assert specs(model) == [("x", "FP32", (-1, 2)), ("n", "INT64", (1,)), ("free", "UINT8", (-1,))]
    assert model.contract.any_rank == ("free",)
    assert model.contract.outputs[0].datatype == "FP64"
    assert model.contract.max_batch_size == 0
    x, n = np.array([[1, 2], [3, 4]], np.float32), np.array([2])
    assert ask(model, {"x": x, "n": n, "free": np.zeros((1, 1, 1), np.uint8)}) == [{"y": [6.0, 14.0]}]


def test_annotations_say_what_a_parameter_takes(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            def predict(self, name: str, images: NDArray[np.uint8], plain,
                        window: Annotated[NDArray[np.float32], (-1, 512)], words: list[str],
                        times: int = 2, nothing: Optional[float] = None) -> list[str]:
                assert nothing is None
                return [f"{name} {words} {images.shape} {plain.dtype}"] * times
        """,
    )
    assert specs(model) == [
        ("name", "BYTES", (1,)),
        ("images", "UINT8", (-1,)),
        ("plain", "FP32", (-1,)),
        ("window", "FP32", (-1, 512)),
        ("words", "BYTES", (-1,)),
        ("times", "INT64", (1,)),
        ("nothing", "FP64", (1,)),
    ]
    assert [spec.name for spec in model.contract.inputs if spec.is_optional] == ["times", "nothing"]
    inputs = {
        "name": texts("ä"),
        "images": np.zeros((2, 2), np.uint8),
        "plain": np.zeros(1),
        "window": np.zeros((1, 512), np.float32),
        "words": texts("a", "b"),
    }
    answer = "ä ['a', 'b'] (2, 2) float32".encode()
    assert ask(model, inputs) == [{"output": [answer, answer]}]
    assert ask(model, {**inputs, "times": np.array([1])}) == [{"output": [answer]}]
    with pytest.raises(InvalidRequest, match="'name' does not fit: expected BYTES"):
        ask(model, {**inputs, "name": np.zeros(1)})


def test_one_parameter_may_take_all_inputs_and_another_the_requests_parameters(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            inputs = {"a": "FP64[1]", "b": "FP64[1]"}
            def predict(self, tensors, parameters):
                return {"sum": tensors["a"] + tensors["b"] * parameters["weight"], "label": "done"}
        """,
    )
    inputs: dict[str, Array] = {"a": np.array([1.0]), "b": np.array([2.0])}
    assert ask(model, inputs, parameters={"weight": 10}) == [{"sum": [21.0], "label": [b"done"]}]


def test_probabilistic_outputs_are_kept_whole(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            outputs = {"mean": "FP32[-1]", "quantiles": "FP32[-1, 3]", "samples": "FP32[-1, 100]"}
            def predict(self, history: NDArray[np.float32]):
                return history.mean(axis=1), np.zeros((2, 3)), np.ones((2, 100))
        """,
    )
    (answer,) = ask(model, {"history": np.zeros((2, 5), np.float32)})
    assert isinstance(answer, dict)
    assert {name: np.shape(value) for name, value in answer.items()} == {
        "mean": (2,),
        "quantiles": (2, 3),
        "samples": (2, 100),
    }


# -- how it is called ----------------------------------------------------------------------------


def test_a_class_with_a_batch_size_gets_rows_of_several_requests(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            inputs = {"x": "FP32[-1, 1]"}
            max_batch_size = 8
            def predict(self, x):
                return {"y": x * 2, "rows": np.full((len(x), 1), len(x))}
        """,
    )
    assert model.contract.max_batch_size == 8
    answers = ask(model, {"x": np.array([[1.0]])}, {"x": np.array([[2.0], [3.0]])})
    assert answers == [{"y": [[2.0]], "rows": [[3]]}, {"y": [[4.0], [6.0]], "rows": [[3], [3]]}]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_predict_batch_gets_a_list_and_may_answer_one_with_an_error(tmp_path: Path, prefix: str) -> None:
    model = made(
        tmp_path,
        f"""
        from inferd.errors import InvalidRequest
        class Model:
            def predict(self, n: int) -> int:
                raise AssertionError
            {prefix}def predict_batch(self, batch):
                return [InvalidRequest("odd") if item["n"] % 2 else item["n"] * len(batch) for item in batch]
        """,
        batching=BatchingConfig(max_batch_size=5),
    )
    assert (model.contract.max_batch_size, model.contract.max_items) == (0, 5)
    first, second = ask(model, {"n": np.array([2])}, {"n": np.array([3])})
    assert first == {"output": [4]}
    assert isinstance(second, InvalidRequest)


def test_predict_batch_that_loses_an_answer_is_an_error(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            def predict(self, n: int): ...
            def predict_batch(self, batch):
                return [1]
        """,
    )
    with pytest.raises(InferdError, match="a list of 2 answers"):
        ask(model, {"n": np.array([2])}, {"n": np.array([3])})


def test_coroutines_run_together(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            async def load(self):
                self.met = asyncio.Barrier(3)
            async def predict(self, n: int) -> int:
                await self.met.wait()
                return n + 1
        """,
    )
    answers = ask(model, *({"n": np.array([n])} for n in range(3)))
    assert answers == [{"output": [1]}, {"output": [2]}, {"output": [3]}]


@pytest.mark.parametrize(("prefix", "kind"), [("", "Iterator"), ("async ", "AsyncIterator")])
def test_a_generator_answers_as_often_as_it_yields(tmp_path: Path, prefix: str, kind: str) -> None:
    model = made(
        tmp_path,
        f"""
        class Model:
            closed = False
            {prefix}def predict(self, n: int) -> {kind}[int]:
                try:
                    for i in range(n):
                        yield i
                finally:
                    Model.closed = True
        """,
    )
    assert model.contract.is_decoupled
    item = Item(request_id="r", inputs={"n": np.array([3])})
    assert [result.outputs["output"].tolist() for result in model.stream(item)] == [[0], [1], [2]]
    left_early = model.stream(item)
    next(left_early)
    left_early.close()  # type: ignore[attr-defined]
    assert type(model._model).closed  # type: ignore[attr-defined]


def test_load_gets_the_options_and_close_is_called(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            def load(self, options):
                self.factor = options["factor"]
            def predict(self, x: float) -> float:
                return x * self.factor
            async def close(self):
                Model.is_closed = True
        """,
        options={"factor": 3},
    )
    assert ask(model, {"x": np.array([2.0])}) == [{"output": [6.0]}]
    loaded.pop().close()
    assert type(model._model).is_closed  # type: ignore[attr-defined]


def test_an_answer_of_another_kind_than_declared_is_an_error_that_names_it(tmp_path: Path) -> None:
    model = made(
        tmp_path,
        """
        class Model:
            outputs = {"y": "FP32[-1]"}
            def predict(self, n: int):
                return [{"other": n}, {"y": ["text"]}, {"y": [object()]}][n]
        """,
    )
    for n, told in enumerate(["lacks the outputs y", "declared as FP32", "holds a object"]):
        with pytest.raises(InferdError, match=told):
            ask(model, {"n": np.array([n])})


# -- what cannot be loaded -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("class Other:\n    def predict(self, x): ...", "has no class Model. It has Other"),
        ("class Model: ...", "no method predict"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("class Model:\n    def __init__(self, x): ...", "is made without arguments"),
        ("class Model:\n    def load(self): 1 / 0\n    def predict(self, x): ...", "load failed: ZeroDivisionError"),
        ("class Model:\n    def predict(self, **tensors): ...", "Declare them"),
        ("class Model:\n    def predict(self, x: dict): ...", "stands for no tensor"),
        ("class Model:\n    inputs = {'x': 'FP99[1]'}\n    def predict(self, x): ...", "x is 'FP99"),
        ("class Model:\n    inputs = {'x': 'FP32[0]'}\n    def predict(self, x): ...", "x is 'FP32"),
        (
            "class Model:\n    inputs = {'x': 'FP32', 'z': 'FP32'}\n    def predict(self, x, y): ...",
            "x, z, but predict takes x, y",
        ),
        (
            "class Model:\n    requires = ['no-such-package>=1']\n    def predict(self, x): ...",
            "pip install 'no-such-package>=1'",
        ),
        ("class Model:\n    requires = ['numpy>=99,<100']\n    def predict(self, x): ...", "numpy .* is installed"),
        ("class Model:\n    requires = 'numpy'\n    def predict(self, x): ...", "expected a list"),
        ("class Model:\n    requires = ['numpy>>1']\n    def predict(self, x): ...", "'numpy>>1'; expected"),
    ],
)
def test_a_class_that_cannot_be_served_is_told_with_the_remedy(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        made(tmp_path, body)


@pytest.mark.parametrize(
    "requirement", ["numpy", "numpy>=1.20,!=1.21.0", "numpy~=2.0", "NumPy[extra] >= 1", "numpy!=3.*"]
)
def test_requirements_that_are_met_are_met(tmp_path: Path, requirement: str) -> None:
    made(tmp_path, f"class Model:\n    requires = ['{requirement}']\n    def predict(self, x): ...")


def test_requirements_are_told_before_the_import_that_would_fail_without_them(tmp_path: Path) -> None:
    body = "import nothing_of_this_name\nclass Model:\n    requires = ['nothing-of-this-name>=2']\n    def predict(self, x): ..."
    with pytest.raises(ModelLoadError, match="pip install 'nothing-of-this-name>=2'"):
        made(tmp_path, body)


@pytest.mark.parametrize("number", range(3))
def test_the_documentations_examples_are_models(tmp_path: Path, number: int) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "python-models.md"
    examples = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    model = made(tmp_path, examples[number])
    requests: list[dict[str, Array]] = [
        {"text": texts("Good, bad good")},
        {"image": np.zeros((2, 224, 224, 3), np.uint8)},
        {"age": np.array([50])},
    ]
    (answer,) = ask(model, requests[number])
    assert answer == [{"output": [0.0]}, {"probabilities": [[np.float32(0.1)] * 10] * 2}, {"output": [0.5]}][number]


def test_nothing_is_imported_where_code_is_not_allowed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    body = f"open({str(trap)!r}, 'w')\nclass Model:\n    def predict(self, x): ..."
    with pytest.raises(ModelLoadError, match="--allow-code"):
        made(tmp_path, body, allow_code=False)
    assert not trap.exists()


def test_options_that_the_model_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="options"):
        made(tmp_path, "class Model:\n    def predict(self, x): ...", options={"a": 1})
