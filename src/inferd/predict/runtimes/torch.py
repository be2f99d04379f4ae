"""torch programs: archives of torch.export.save (.pt2), and TorchScript with ``allow_code``.

A .pt2 is checked before torch loads it (``pt2_check.py``), so that it is only a graph of tensor operators. Its contract
is read from the exported signature. TorchScript has no shapes, so the operator may declare them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.contract import Array, Contract, Tensors
from inferd.predict.load import num_threads
from inferd.predict.runtimes.libraries import Option, bound_memory, check_options, needs
from inferd.predict.runtimes.pt2_check import check_archive
from inferd.predict.runtimes.trial import example, try_rows, vetoed
from inferd.predict.stacked import Stacked
from inferd.registry.content import content_of
from inferd.registry.rows.verdict import CLAIM, Verdict, claimed
from inferd.registry.signature import ANY_ROWS, exported_rows
from inferd.registry.source import Progress
from inferd.types import TensorSpec

if TYPE_CHECKING:
    import torch

_DATATYPES: Final[Mapping[str, str]] = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8", "int16": "INT16",
    "int32": "INT32", "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "bool": "BOOL",
}  # fmt: skip
_SCALARS: Final[Mapping[str, str]] = {"int": "INT64", "float": "FP64", "bool": "BOOL"}
_SPEC: Final = re.compile(r"\s*([A-Z0-9]+)\s*\[\s*((?:-?\d+\s*(?:,\s*-?\d+\s*)*)?)\]\s*")


class TorchModel:
    """A program and how its inputs and outputs are called. ``compute`` is a function of stacked arrays."""

    def __init__(self, program: Program, contract: Contract, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._names = tuple(spec.name for spec in contract.outputs)
        self.contract = contract
        self._try_examples()

    def compute(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of stacked inputs."""
        import torch

        with torch.inference_mode():
            tensors = {spec.name: self._tensor(spec, inputs[spec.name]) for spec in self.contract.inputs}
            found = self._program(tensors)
        if self._names and len(found) != len(self._names):
            raise RuntimeError(f"The program gave {len(found)} outputs instead of {len(self._names)}.")
        outputs = dict(zip(self._names or _numbered(len(found)), found, strict=True))
        return {name: _array(tensor) for name, tensor in outputs.items()}

    def _tensor(self, spec: TensorSpec, array: Array) -> torch.Tensor:
        import torch

        if not array.flags.writeable or not array.flags.c_contiguous:
            array = array.copy()
        tensor = torch.from_numpy(array)
        if spec.datatype == "BF16":
            tensor = tensor.view(torch.bfloat16)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _try_examples(self) -> None:
        """Try example rows: this warms up, shows TorchScript's outputs, and whether rows are independent."""
        contract = self.contract
        if contract.any_rank:
            return
        if not contract.outputs:
            self._learn_outputs()
            contract = self.contract
        trial = try_rows(contract, self.compute, (RuntimeError, ValueError, IndexError, TypeError, AssertionError))
        self.contract = vetoed(contract, trial)

    def _learn_outputs(self) -> None:
        """From one example, where the program does not say them."""
        has_rows = self.contract.max_batch_size > 0
        try:
            outputs = self.compute({spec.name: example(spec, 8, has_rows=has_rows) for spec in self.contract.inputs})
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ModelLoadError(
                f"The program does not take an example of the inputs in options.inputs: {str(error)[:300]}. Correct "
                "them.",
                param="options",
            ) from None
        is_open = any(-1 in spec.shape[1:] for spec in self.contract.inputs)
        specs = []
        for name, array in outputs.items():
            shape = (-1,) * array.ndim if is_open else ((-1, *array.shape[1:]) if has_rows else array.shape)
            specs.append(TensorSpec(name, _word(array), shape))
        self._names = tuple(outputs)
        self.contract = msgspec.structs.replace(self.contract, outputs=tuple(specs))


class Program:
    """A callable of tensors by name that gives a list of tensors."""

    def __init__(self, module: Any, names: Sequence[str], in_spec: Any, scalars: Mapping[str, str]) -> None:
        self._module = module
        self._names = tuple(names)
        self._in_spec = in_spec
        self._scalars = scalars

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        from torch.utils import _pytree as pytree

        values: list[Any] = [tensors[name] for name in self._names]
        if self._in_spec is not None:
            args, kwargs = pytree.tree_unflatten(values, self._in_spec)
            found = self._module(*args, **kwargs)
        else:
            found = self._module(
                *(
                    value.item() if name in self._scalars else value
                    for name, value in zip(self._names, values, strict=True)
                )
            )
        return [leaf for leaf in pytree.tree_leaves(found) if hasattr(leaf, "detach")]


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The program at ``path``. Raises ModelLoadError."""
    torch = needs("torch", "A torch program")
    path = Path(path)
    torch.set_num_threads(num_threads(config))
    device = _device(torch, config.device)
    bound_memory(torch, device, config.memory_bytes)
    progress("model", 0, 1)
    if content_of(path) == "torchscript":
        program, contract = _torchscript(torch, name, path, config, device)
    else:
        program, contract = _exported(torch, path, config, device)
    progress("model", 1, 1)
    model = TorchModel(program, contract, device)
    return Stacked(model.contract, model.compute, config.batching)


def _device(torch: Any, wanted: str) -> Any:
    has_cuda = torch.cuda.is_available()
    if wanted.startswith("cuda") and not has_cuda:
        raise ModelLoadError(
            f"device is {wanted}, but torch finds no CUDA device; set device: cpu, or install a torch for CUDA.",
            param="device",
        )
    return torch.device(wanted if wanted != "auto" else "cuda" if has_cuda else "cpu")


# -- torch.export ------------------------------------------------------------------------------


def _exported(torch: Any, path: Path, config: ModelConfig, device: Any) -> tuple[Program, Contract]:
    from torch.export.passes import move_to_device_pass

    with path.open("rb") as file:
        if not config.allow_code:
            check_archive(file, str(path))
        try:
            exported = torch.export.load(file)
        except _load_failures() as error:
            raise ModelLoadError(
                f"torch {torch.__version__} cannot load {path}: {type(error).__name__}: {str(error)[:300]}. Export it "
                "again with this version of torch.",
                param="source",
            ) from None
    if device.type != "cpu":
        exported = move_to_device_pass(exported, device)
    inputs = _placeholders(exported, path)
    rows = claimed(exported_rows(path), config.batching.max_batch_size)
    specs = tuple(TensorSpec(name, _datatype(name, value), _shape(value)) for name, value in inputs.items())
    outputs = _outputs(exported)
    contract = Contract(
        inputs=specs,
        outputs=outputs,
        max_batch_size=_rows(exported, inputs) if rows.because is not None else 0,
        because=rows.because,
        not_batched="" if rows.because is not None else rows.sentence,
        platform="pytorch_pt2",
        num_threads=torch.get_num_threads(),
        rounds_products=device.type != "cpu",
        num_parameters=sum(parameter.numel() for parameter in exported.state_dict.values()),
        dtype=next((str(p.dtype).removeprefix("torch.") for p in exported.state_dict.values()), "float32"),
    )
    # Guards would be code made of names; the contract has checked what they check.
    module = exported.module(check_guards=False)
    return Program(module, list(inputs), exported.call_spec.in_spec, {}), contract


def _load_failures() -> tuple[type[Exception], ...]:
    """What a program that was changed, or made by another version, makes torch raise."""
    from torch._export.verifier import SpecViolationError

    plain = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError, IndexError, EOFError)
    return (*plain, SpecViolationError)


def _placeholders(exported: Any, path: Path) -> dict[str, Any]:
    """The user's inputs and their example values, which carry symbols for sizes."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    found = {}
    for name in exported.graph_signature.user_inputs:
        value = nodes[name].meta.get("val") if isinstance(name, str) and name in nodes else None
        if value is None or not hasattr(value, "dtype"):
            raise ModelLoadError(
                f"{path} has the input {name!r}, which is no tensor; export a model of tensors alone.", param="source"
            )
        found[name] = value
    return found


def _rows(exported: Any, inputs: Mapping[str, Any]) -> int:
    """The batch limit: all inputs begin with one symbol, and it may be this large."""
    first: Any = next(iter(inputs.values())).shape[0]
    limits = exported.range_constraints.get(first.node.expr)
    upper = getattr(limits, "upper", None)
    try:
        return min(int(upper), ANY_ROWS) if upper is not None else ANY_ROWS
    except (TypeError, ValueError, OverflowError, AttributeError):
        return ANY_ROWS  # infinite


def _outputs(exported: Any) -> tuple[TensorSpec, ...]:
    from torch.utils import _pytree as pytree

    by_name = {node.name: node for node in exported.graph.nodes}
    values = [by_name[name].meta["val"] for name in exported.graph_signature.user_outputs if isinstance(name, str)]
    spec = exported.call_spec.out_spec
    names = _numbered(len(values))
    if spec is not None and spec.num_leaves == len(values):
        tree = pytree.tree_unflatten(list(range(len(values))), spec)
        if isinstance(tree, dict) and all(isinstance(value, int) for value in tree.values()):
            names = [str(key) for key in sorted(tree, key=tree.__getitem__)]
    return tuple(
        TensorSpec(name, _datatype(name, value), _shape(value)) for name, value in zip(names, values, strict=True)
    )


def _numbered(count: int) -> list[str]:
    return ["output"] if count == 1 else [f"output_{place}" for place in range(count)]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in value.shape)


def _datatype(name: str, value: Any) -> str:
    word = str(value.dtype).removeprefix("torch.")
    if word not in _DATATYPES:
        raise ModelLoadError(f"{name!r} is a tensor of {word}, for which KServe v2 has no word.", param="source")
    return _DATATYPES[word]


# -- TorchScript -------------------------------------------------------------------------------


def _torchscript(torch: Any, name: str, path: Path, config: ModelConfig, device: Any) -> tuple[Program, Contract]:
    try:
        module = torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(
            f"torch {torch.__version__} cannot load {path}: {str(error).partition(chr(10))[0][:300]}", param="source"
        ) from None
    arguments = module.forward.schema.arguments[1:]
    check_options(
        name,
        "a TorchScript program",
        config,
        Option("inputs", (dict,), 'a datatype and a shape for each input, such as {"x": "FP32 [-1, 3, 224, 224]"}'),
        Option("outputs", (list,), "a list of names"),
    )
    declared = _declared_inputs(name, config)
    specs, scalars, any_rank = [], {}, []
    for argument in arguments:
        kind = str(argument.type)
        if kind in _SCALARS:
            scalars[argument.name] = kind
            specs.append(TensorSpec(argument.name, _SCALARS[kind], ()))
        elif kind == "Tensor":
            spec = declared.pop(argument.name, None)
            if spec is None:
                any_rank.append(argument.name)
            specs.append(spec or TensorSpec(argument.name, "FP32", (-1,)))
        elif not argument.has_default_value():
            raise ModelLoadError(f"{path} takes {argument.name}: {kind}, which is no tensor.", param="source")
        else:
            break  # positional: what follows has defaults too
    if declared:
        raise ModelLoadError(
            f"models.{name}.options.inputs names {sorted(declared)[0]!r}; the program's inputs are "
            f"{', '.join(argument.name for argument in arguments)}.",
            param="options",
        )
    rows = claimed(_script_rows(specs, any_rank, scalars), config.batching.max_batch_size)
    contract = Contract(
        inputs=tuple(specs),
        outputs=tuple(TensorSpec(one, "FP32", (-1,)) for one in _declared_outputs(config)),
        max_batch_size=ANY_ROWS if rows.because is not None else 0,
        because=rows.because,
        not_batched="" if rows.because is not None else rows.sentence,
        platform="pytorch_torchscript",
        any_rank=tuple(any_rank),
        num_threads=torch.get_num_threads(),
        rounds_products=device.type != "cpu",
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )
    return Program(module, [spec.name for spec in specs], None, scalars), contract


def _script_rows(specs: Sequence[TensorSpec], any_rank: Sequence[str], scalars: Mapping[str, str]) -> Verdict:
    """The verdict for a script, whose rows only the operator can declare."""
    if any_rank:
        return Verdict(None, f"nothing is known of its inputs; options.inputs tells their shapes, and {CLAIM} the rows")
    closed = next((spec.name for spec in specs if not spec.shape or spec.shape[0] != -1), None)
    if scalars or closed is not None:
        return Verdict(None, f"the first dimension of the input {closed!r} is not free")
    doubt = "its rows may depend on each other: a script does not say"
    return Verdict(None, f"{doubt}; {CLAIM} declares that they do not", is_open=True)


def _declared_inputs(name: str, config: ModelConfig) -> dict[str, TensorSpec]:
    """``options.inputs``: a datatype and shape for each input, as FP32 [-1, 3, 224, 224]."""
    found = {}
    for key, text in dict(config.options.get("inputs", {})).items():
        matched = _SPEC.fullmatch(str(text))
        if matched is None or matched[1] not in _DATATYPES.values():
            raise ModelLoadError(
                f"models.{name}.options.inputs.{key} is {text!r}; write a datatype and a shape, such as FP32 [-1, 3, "
                "224, 224].",
                param="options",
            )
        sizes = tuple(int(size) for size in matched[2].split(",")) if matched[2].strip() else ()
        found[str(key)] = TensorSpec(str(key), matched[1], sizes)
    return found


def _declared_outputs(config: ModelConfig) -> tuple[str, ...]:
    declared = config.options.get("outputs", ())
    return tuple(map(str, declared))


def _array(tensor: torch.Tensor) -> Array:
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.contiguous().view(torch.uint16)
    return np.asarray(tensor.numpy())


def _word(array: Array) -> str:
    return _DATATYPES.get(array.dtype.name, "FP32")
