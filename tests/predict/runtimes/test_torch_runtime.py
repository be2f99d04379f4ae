"""torch programs: the exported signature is the contract, and an archive that is more than a graph is not loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.predict.runtimes.loading import answered, loaded
from tests.predict.runtimes.programs import Centred, Scores, export, export_tokens

from inferd.config import BatchingConfig
from inferd.errors import ModelLoadError
from inferd.predict.runtimes.pt2_check import is_arithmetic
from inferd.registry.artifact import recognise
from inferd.registry.signature import read_signature


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return export(Scores(), tmp_path_factory.mktemp("pt2") / "scores.pt2", torch.randn(2, 4))


def test_the_contract_is_the_exported_signature(program: Path) -> None:
    contract = loaded(program).contract
    assert [(spec.name, spec.datatype, spec.shape) for spec in contract.inputs] == [("x", "FP32", (-1, 4))]
    assert [(spec.name, spec.shape) for spec in contract.outputs] == [("scores", (-1, 3)), ("total", (-1,))]
    assert (contract.max_batch_size, contract.platform, contract.num_parameters) == (512, "pytorch_pt2", 18)


def test_the_archive_says_its_inputs_before_it_is_loaded(program: Path, tmp_path: Path) -> None:
    for path in (program, export_tokens(tmp_path / "t.pt2")):
        signature = read_signature(recognise(str(path)))
        assert signature is not None
        assert signature.inputs == loaded(path).contract.inputs
        assert signature.max_batch_size() > 1
    fixed = read_signature(recognise(str(export(Scores(), tmp_path / "f.pt2", torch.randn(2, 4), is_dynamic=False))))
    assert fixed is not None
    assert (fixed.max_batch_size(), fixed.inputs[0].shape) == (0, (2, 4))


def test_the_answer_is_the_programs_own(program: Path) -> None:
    rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    torch.manual_seed(0)
    expected = Scores()(torch.from_numpy(rows))
    found = answered(loaded(program), {"x": rows})
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.detach().numpy(), rtol=1e-5)


def test_a_program_over_tokens_of_any_length_passes_the_check(tmp_path: Path) -> None:
    runtime = loaded(export_tokens(tmp_path / "m.pt2"))
    assert [(spec.datatype, spec.shape) for spec in runtime.contract.inputs] == [
        ("INT64", (-1, -1)),
        ("FP32", (-1, -1)),
    ]
    assert [(spec.name, spec.shape) for spec in runtime.contract.outputs] == [("vector", (-1, 8))]
    ids, mask = np.arange(14).reshape(2, 7) % 50, np.ones((2, 7), np.float32)
    longer = np.pad(ids, ((0, 0), (0, 3))), np.pad(mask, ((0, 0), (0, 3)))
    short = answered(runtime, {"ids": ids, "mask": mask})["vector"]
    np.testing.assert_allclose(short, answered(runtime, {"ids": longer[0], "mask": longer[1]})["vector"], rtol=1e-5)


class WithNone(torch.nn.Module):
    """One tensor, and beside it nothing, as models give that have an optional output."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"doubled": x * 2, "attentions": None}


def test_an_output_that_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    runtime = loaded(export(WithNone(), tmp_path / "n.pt2", torch.randn(2, 4)))
    assert [(spec.name, spec.shape) for spec in runtime.contract.outputs] == [("output", (-1, 4))]
    found = answered(runtime, {"x": np.ones((3, 4), np.float32)})
    np.testing.assert_array_equal(found["output"], np.full((3, 4), 2.0))


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"doubled": x * 2, "both": (x * 3, x * 4)}


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"z": x * 2, "a": x * 3}


@pytest.mark.parametrize(
    ("module", "factors"),
    [(Named(), {"a": 3.0, "z": 2.0}), (Nested(), {"output_0": 2.0, "output_1": 3.0, "output_2": 4.0})],
)
def test_outputs_are_called_as_in_a_flat_dictionary_and_else_numbered(
    tmp_path: Path, module: torch.nn.Module, factors: dict[str, float]
) -> None:
    runtime = loaded(export(module, tmp_path / "n.pt2", torch.randn(2, 4)))
    assert {spec.name for spec in runtime.contract.outputs} == set(factors)
    found = answered(runtime, {"x": np.ones((3, 4), np.float32)})
    assert {name: float(array[0, 0]) for name, array in found.items()} == factors


def test_rows_that_know_of_each_other_and_fixed_rows_are_no_batch(tmp_path: Path) -> None:
    assert loaded(export(Centred(), tmp_path / "c.pt2", torch.randn(2, 4))).contract.max_batch_size == 0
    fixed = loaded(export(Scores(), tmp_path / "f.pt2", torch.randn(2, 4), is_dynamic=False)).contract
    assert (fixed.max_batch_size, fixed.inputs[0].shape) == (0, (2, 4))


def test_a_script_needs_the_operators_word_and_may_be_told_its_shapes(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(4, 2)), path)
    with pytest.raises(ModelLoadError, match="allow_code"):
        loaded(path)
    free = loaded(path, allow_code=True)
    assert (free.contract.any_rank, free.contract.max_batch_size) == (("input",), 0)
    rows = np.ones((3, 4), np.float32)
    shapes = {"inputs": {"input": "FP32 [-1, 4]"}}
    told = loaded(path, allow_code=True, options=shapes)
    assert [len(spec.shape) for spec in told.contract.outputs] == [2]
    assert told.contract.max_batch_size == 0
    assert "batching.max_batch_size declares that they do not" in told.contract.not_batched
    np.testing.assert_allclose(answered(told, {"input": rows})["output"], answered(free, {"input": rows})["output"])
    told = loaded(path, allow_code=True, options=shapes, batching=BatchingConfig(max_batch_size=16))
    assert [(spec.name, spec.shape) for spec in told.contract.outputs] == [("output", (-1, 2))]
    assert told.contract.max_batch_size > 1
    np.testing.assert_allclose(answered(told, {"input": rows})["output"], answered(free, {"input": rows})["output"])
    for options, said in (
        ({"inputs": {"x": "FP32 [-1, 4]"}}, "names 'x'"),
        ({"inputs": {"input": "float"}}, "write a datatype and a shape"),
        ({"inputs": "x"}, "options.inputs is 'x'; write a datatype and a shape for each input"),
        ({"input": {}}, "no option 'input'"),
        ({"inputs": {"input": "FP32 [-1, 5]"}}, "does not take an example"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            loaded(path, allow_code=True, options=options)


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("second", "most", "shape"),
    [("FP32 [-1, 5]", 4, (-1, 3)), ("FP32 [-1, -1]", 4, (-1, -1)), ("FP32 [-1, 5]", 2, (-1, 3))],
)
def test_an_output_of_a_script_has_a_known_size_where_all_inputs_have(
    tmp_path: Path, second: str, most: int, shape: tuple[int, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Sum()), tmp_path / "m.pt")
    options = {"inputs": {"x": "FP32 [-1, 3]", "y": second}}
    batching = BatchingConfig(max_batch_size=most)
    contract = loaded(tmp_path / "m.pt", allow_code=True, options=options, batching=batching).contract
    assert [spec.shape for spec in contract.outputs] == [shape]


# -- archives that are more than a graph ---------------------------------------------------------


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


Change = Callable[[dict[str, bytes]], None]


def changed(program: Path, path: Path, change: Change) -> Path:
    """A copy of the archive with other records, written as torch writes one."""
    with zipfile.ZipFile(program) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in records.items():
        if not name.startswith(".data/") and name != "version":
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def in_program(edit: Callable[[Any], None]) -> Change:
    def change(records: dict[str, bytes]) -> None:
        document = json.loads(records["models/model.json"])
        edit(document)
        records["models/model.json"] = json.dumps(document).encode()

    return change


def node(document: Any) -> Any:
    return document["graph_module"]["graph"]["nodes"][0]


def call_of(name: str) -> Change:
    return in_program(lambda document: node(document).update(target=name))


def set_expression(text: str) -> Change:
    def edit(document: Any) -> None:
        sizes = document["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = text

    return in_program(edit)


def pickled_weight(canary: Path) -> Change:
    def change(records: dict[str, bytes]) -> None:
        config = json.loads(records["data/weights/model_weights_config.json"])
        entry = next(iter(config["config"].values()))
        entry["use_pickle"] = True
        buffer = io.BytesIO()
        torch.save(Canary(canary), buffer)
        records[f"data/weights/{entry['path_name']}"] = buffer.getvalue()
        records["data/weights/model_weights_config.json"] = json.dumps(config).encode()

    return change


def pickled_sample(canary: Path) -> Change:
    def change(records: dict[str, bytes]) -> None:
        buffer = io.BytesIO()
        torch.save(Canary(canary), buffer)
        records["data/sample_inputs/model.pt"] = buffer.getvalue()

    return change


def opaque_constant(canary: Path) -> Change:
    def change(records: dict[str, bytes]) -> None:
        config = {
            "config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}
        }
        records["data/constants/opaque_obj_0"] = pickle.dumps(Canary(canary))
        records["data/constants/model_constants_config.json"] = json.dumps(config).encode()

    return change


def imported_container(document: Any) -> None:
    spec = {
        "type": "collections.defaultdict",
        "context": '{"default_factory_module": "antigravity"}',
        "children_spec": [],
    }
    document["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, spec])


def test_a_copy_of_an_archive_is_loaded(program: Path, tmp_path: Path) -> None:
    """What the attacks below change is the only reason why they are refused."""
    copy = changed(program, tmp_path / "copy.pt2", lambda records: None)
    whole, again = loaded(program).contract, loaded(copy).contract
    assert msgspec.structs.replace(again, typical_rows=whole.typical_rows) == whole  # these are measured


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (pickled_weight, "kept as a pickle"),
        (pickled_sample, "a pickle of more than tensors"),
        (opaque_constant, "no part of an exported program"),
        (lambda canary: call_of("torch.serialization.os.system"), "none of torch's tensor operators"),
        (lambda canary: call_of("torch.ops.aten.from_file.default"), "none of torch's tensor operators"),
        (lambda canary: call_of("_operator.attrgetter"), "none of torch's tensor operators"),
        (lambda canary: call_of("torch.hub.load"), "none of torch's tensor operators"),
        (lambda canary: set_expression(f"__import__('os').mkdir({str(canary)!r})"), "no arithmetic"),
        (lambda canary: set_expression("Symbol('s77').__class__.__init__.__globals__"), "no arithmetic"),
        (lambda canary: in_program(lambda d: node(d)["inputs"][0].update(name="x=open('/tmp/x','w')")), "is none"),
        (lambda canary: in_program(imported_container), "other kinds than lists"),
        (lambda canary: lambda records: records.update({"data/aotinductor/model/a.so": b"\x7fELF"}), "no part of"),
        (lambda canary: lambda records: records.update({"models/other.json": b"{}"}), "no part of"),
        (lambda canary: lambda records: records.update({"models/model.json": b"{"}), "no JSON"),
    ],
)
def test_an_archive_that_is_more_than_a_graph_is_not_loaded(
    program: Path, tmp_path: Path, attack: Callable[[Path], Change], said: str
) -> None:
    canary = tmp_path / "canary"
    bad = changed(program, tmp_path / "bad.pt2", attack(canary))
    with pytest.raises(ModelLoadError) as caught:
        loaded(bad)
    assert said in caught.value.message
    assert not canary.exists()


def nested(levels: int, kind: str) -> Change:
    """Beside the program: so many lists or dictionaries, each within another."""
    inner: object = ""
    for _ in range(levels):
        inner = [inner] if kind == "lists" else {"x": inner}
    return in_program(lambda document: document.update(beside=inner))


@pytest.mark.parametrize("kind", ["lists", "dictionaries"])
def test_a_program_is_nested_to_200_levels_at_most(program: Path, tmp_path: Path, kind: str) -> None:
    loaded(changed(program, tmp_path / "deep.pt2", nested(199, kind)))
    with pytest.raises(ModelLoadError, match="nested too deeply"):
        loaded(changed(program, tmp_path / "deeper.pt2", nested(200, kind)))


@pytest.mark.parametrize(
    "attack",
    [pickled_weight, pickled_sample, lambda canary: set_expression(f"__import__('os').mkdir({str(canary)!r})")],
)
@pytest.mark.filterwarnings("ignore")
def test_the_attacks_are_real_where_the_operator_allows_code(
    program: Path, tmp_path: Path, attack: Callable[[Path], Change]
) -> None:
    """So it is the check that keeps the canary away, and nothing else."""
    canary = tmp_path / "canary"
    bad = changed(program, tmp_path / "bad.pt2", attack(canary))
    with pytest.raises(ModelLoadError):
        loaded(bad, allow_code=True)
    assert canary.exists()


def test_an_archive_that_is_cut_off_is_refused(program: Path, tmp_path: Path) -> None:
    data = program.read_bytes()
    for size in (100, len(data) // 2, len(data) - 10):
        path = tmp_path / "cut.pt2"
        path.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match="copy it again"):
            loaded(path)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Symbol('s77', positive=True, integer=True)", True),
        ("Mul(Integer(2), Symbol('s0'))", True),
        ("2*s0 + Max(1, s1)//4", True),
        ("FloorDiv(s0, 2)**2", True),
        ("Pow(Symbol('s64', positive=True, integer=True), Integer(2))", True),
        ("Pow(s0, -1)", True),
        ("Pow(9, Pow(9, 9))", False),
        ("Pow(9, 99999999)", False),
        ("((((9**8)**8)**8)**8)**8", False),
        ("9**9**9", False),
        ("s0**s1", False),
        ("().__class__", False),
        ("[1][0]", False),
        ("lambda: 1", False),
        ("__import__('os')", False),
        ("sympify('1')", False),
        ("f(1)", False),
        ("(" * 300 + ")" * 300, False),
        ("Symbol('a b')", False),
        ("1\n2", False),
    ],
)
def test_an_expression_is_arithmetic_or_refused(text: str, is_allowed: bool) -> None:
    assert is_arithmetic(text) is is_allowed
