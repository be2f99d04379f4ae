"""Declared inputs and outputs of a model: names, shapes and labels that differ from the artifact's.

Wraps any runtime. Fills the inputs that give a stateful model the place of a request in its sequence. Copies no tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from inferd.config import ModelConfig, TensorConfig
from inferd.errors import InferdError, ModelLoadError
from inferd.predict.contract import NUMPY, Array, Contract, Tensors
from inferd.predict.runtime import Item, Result, Runtime
from inferd.predict.stacked import Stacked
from inferd.predict.steps.operation import read_lines
from inferd.types import TensorSpec

_PLACE = re.compile(r".*__(\d+)")


def declared(name: str, runtime: Runtime, config: ModelConfig) -> Runtime:
    """The runtime with its declared inputs and outputs; the same runtime without declarations. Raises ModelLoadError
    with everything that does not fit the artifact."""
    if not (config.inputs or config.outputs or config.sequence.controls):
        return runtime
    problems: list[str] = []
    inputs = _matched("inputs", config.inputs, runtime.contract.inputs, problems)
    outputs = _matched("outputs", config.outputs, runtime.contract.outputs, problems)
    filled = {*config.sequence.controls, *config.sequence.states.values()}
    if config.inputs:
        for spec in runtime.contract.inputs:
            if spec.name not in inputs.values() and spec.name not in filled and not spec.is_optional:
                problems.append(f"inputs: the artifact also takes {spec.name!r}, which is not declared")
    for control in config.sequence.controls:
        if all(spec.name != control for spec in runtime.contract.inputs):
            problems.append(f"sequence.controls: the artifact has no input {control!r}")
    problems += _misfits("inputs", config.inputs, inputs, runtime.contract, runtime.contract.inputs)
    problems += _misfits("outputs", config.outputs, outputs, runtime.contract, runtime.contract.outputs)
    if problems:
        listed = "\n  - ".join(f"models.{name}.{problem}" for problem in problems)
        raise ModelLoadError(
            f"{listed}."
            if len(problems) == 1
            else f"What is declared of {name} does not fit its artifact:\n  - {listed}",
            param="inputs",
        )
    batched = _batched(runtime, config, inputs)
    made = Declared(batched, config, inputs, outputs)
    return batched if made.contract == batched.contract and not _renames(inputs, outputs) else made


def _renames(*names: Mapping[str, str]) -> bool:
    return any(name != own for matched in names for name, own in matched.items())


def _matched(
    what: str, declarations: Sequence[TensorConfig], specs: Sequence[TensorSpec], problems: list[str]
) -> dict[str, str]:
    """Declared names to the artifact's: the same name, or for NAME__0 the one at place 0."""
    known = [spec.name for spec in specs]
    found: dict[str, str] = {}
    for one in declarations:
        place = _PLACE.fullmatch(one.name)
        if one.name in known or not known:
            found[one.name] = one.name
        elif place is not None and int(place[1]) < len(known):
            found[one.name] = known[int(place[1])]
        else:
            problems.append(f"{what}: the artifact has none called {one.name!r}; there are {', '.join(known)}")
    return found


def _misfits(
    what: str,
    declarations: Sequence[TensorConfig],
    names: Mapping[str, str],
    contract: Contract,
    specs: Sequence[TensorSpec],
) -> list[str]:
    found = []
    by_name = {spec.name: spec for spec in specs}
    for one in declarations:
        spec = by_name.get(names.get(one.name, ""))
        if spec is None or spec.name in contract.any_rank:
            continue
        shape = one.shape if one.reshape is None else one.reshape
        if one.datatype != spec.datatype:
            found.append(f"{what}.{one.name}: {one.datatype} is declared, but the artifact has {spec.datatype}")
        fits = len(shape) == len(spec.shape) and all(
            -1 in (wants, has) or wants == has for wants, has in zip(shape, spec.shape, strict=True)
        )
        if not fits:
            found.append(
                f"{what}.{one.name}: the shape {list(shape)} is declared, but the artifact has {list(spec.shape)}"
            )
    return found


def _batched(runtime: Runtime, config: ModelConfig, names: Mapping[str, str]) -> Runtime:
    """A program without known shapes (TorchScript) has rows if the declaration has them."""
    contract = runtime.contract
    rows = config.batching.max_batch_size
    if contract.max_batch_size or rows is None or not contract.any_rank:
        return runtime
    declarations = {names[one.name]: one for one in config.inputs}
    inputs = tuple(
        TensorSpec(
            spec.name,
            declarations[spec.name].datatype,
            declarations[spec.name].reshape or declarations[spec.name].shape,
        )
        if spec.name in declarations
        else spec
        for spec in contract.inputs
    )

    def compute(inputs: dict[str, Array]) -> Mapping[str, Array]:
        (result,) = runtime.predict([Item(request_id="", inputs=inputs)])
        if isinstance(result, InferdError):
            raise result
        return result.outputs

    changed = msgspec.structs.replace(
        contract, inputs=inputs, any_rank=(), max_batch_size=rows, because="declared", not_batched=""
    )
    return Stacked(changed, compute, config.batching, close=runtime.close)


class Declared:
    """A ``Runtime`` around another."""

    def __init__(
        self, runtime: Runtime, config: ModelConfig, inputs: Mapping[str, str], outputs: Mapping[str, str]
    ) -> None:
        self._runtime = runtime
        contract = runtime.contract
        declarations = {one.name: one for one in (*config.inputs, *config.outputs)}
        self._controls = {
            spec.name: (config.sequence.controls[spec.name], spec)
            for spec in contract.inputs
            if spec.name in config.sequence.controls
        }
        visible = [spec for spec in contract.inputs if spec.name not in self._controls]
        self._inputs = inputs or {spec.name: spec.name for spec in visible}
        self._outputs = outputs or {spec.name: spec.name for spec in contract.outputs}
        self._backwards = {artifact: name for name, artifact in self._outputs.items()}
        self._unnamed = not contract.outputs  # the artifact's outputs are known with its first answer
        self._reshaped_inputs = {one.name: one.reshape for one in config.inputs if one.reshape is not None}
        self._reshaped_outputs = {one.name: one.shape for one in config.outputs if one.reshape is not None}
        self._has_rows = contract.max_batch_size > 0
        specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
        self.contract = msgspec.structs.replace(
            contract,
            inputs=tuple(_spec(declarations.get(name), specs[own]) for name, own in self._inputs.items()),
            outputs=tuple(_spec(declarations.get(name), specs.get(own)) for name, own in self._outputs.items()),
            any_rank=tuple(
                name for name, own in self._inputs.items() if own in contract.any_rank and name not in declarations
            ),
            is_stateful=contract.is_stateful or bool(config.sequence.controls or config.sequence.states),
        )

    @property
    def padded_rows(self) -> int:
        padded = getattr(self._runtime, "padded_rows", 0)
        return padded if isinstance(padded, int) else 0

    def prepare(self, item: Item) -> None:
        wanted = tuple(self._outputs[name] for name in item.wanted) if not self._unnamed else ()
        inner = item.about(self._given(item), wanted, item.rows, item.size)
        self._runtime.prepare(inner)
        item.prepared, item.size, item.bucket = inner, inner.size, inner.bucket

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        inner = [item.prepared for item in items if isinstance(item.prepared, Item)]
        assert len(inner) == len(items)
        return [
            result if isinstance(result, InferdError) else self._seen(result) for result in self._runtime.predict(inner)
        ]

    def close(self) -> None:
        self._runtime.close()

    def _given(self, item: Item) -> dict[str, Array]:
        """What the artifact is given: its own names and shapes, and where in its sequence the request is."""
        inputs: dict[str, Array] = {}
        for name, array in item.inputs.items():
            reshape = self._reshaped_inputs.get(name)
            inputs[self._inputs[name]] = (
                array if reshape is None else _reshaped(array, reshape, has_rows=self._has_rows)
            )
        for name, (kind, spec) in self._controls.items():
            shape = [size if size != -1 else 1 for size in spec.shape]
            if self._has_rows:
                shape[0] = item.rows
            inputs[name] = np.full(shape, _control(kind, spec, item), dtype=NUMPY[spec.datatype])
        return inputs

    def _seen(self, result: Result) -> Result:
        """The result under the declared names; outputs that are not declared are left out."""
        outputs: Tensors = result.outputs
        if self._unnamed:
            values = list(result.outputs.values())
            outputs = {
                own: values[int(place[1]) if (place := _PLACE.fullmatch(own)) else number]
                for number, own in enumerate(self._backwards)
            }
        seen: dict[str, Array] = {}
        for own, array in outputs.items():
            name = self._backwards.get(own)
            if name is not None:
                shape = self._reshaped_outputs.get(name)
                seen[name] = array if shape is None else _reshaped(array, shape, has_rows=self._has_rows)
        return Result(
            outputs=seen, num_tokens=result.num_tokens, parameters=result.parameters, stages_s=result.stages_s
        )


def _spec(declarations: TensorConfig | None, spec: TensorSpec | None) -> TensorSpec:
    if declarations is None:
        assert spec is not None
        return spec
    labels = (
        read_lines(declarations.labels_file)
        if declarations.labels_file is not None
        else spec.labels
        if spec is not None
        else ()
    )
    is_optional = declarations.optional or (spec is not None and spec.is_optional)
    return TensorSpec(declarations.name, declarations.datatype, declarations.shape, is_optional, labels)


def _reshaped(array: Array, shape: Sequence[int], *, has_rows: bool) -> Array:
    """The array in another shape with as many elements. The dimension of the rows stays."""
    return array.reshape((len(array), *shape[1:]) if has_rows else tuple(shape))


def _control(kind: str, spec: TensorSpec, item: Item) -> object:
    match kind:
        case "start":
            return item.sequence_start
        case "end":
            return item.sequence_end
        case "ready":
            return True
    if spec.datatype == "BYTES":
        return item.sequence.encode()
    if item.sequence.isdecimal():
        return int(item.sequence) & 0x7FFFFFFFFFFFFFFF
    bits = 31 if spec.datatype.endswith("32") else 63
    return int.from_bytes(hashlib.blake2b(item.sequence.encode(), digest_size=8).digest(), "little") >> (64 - bits)
