"""ONNX models through onnxruntime: the contract is read from the session, and verified by a trial.

The file is checked before onnxruntime reads it (``registry/onnx_file.py``): it must be complete, and its external
weights must be beside it. Knows onnxruntime's names of types; knows no dialect and no batching.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from inferd.config import ModelConfig
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.ceiling import Ceiling, memory_ceiling
from inferd.predict.contract import NUMPY, Array, Contract, Tensors, object_array
from inferd.predict.load import num_threads
from inferd.predict.runtimes.libraries import Option, check_options, needs
from inferd.predict.runtimes.trial import Trial, common_refusal, is_open, try_rows, vetoed
from inferd.predict.stacked import Stacked
from inferd.registry.onnx_file import OnnxFile, Value, check_external, read_onnx
from inferd.registry.rows.verdict import Verdict, claimed
from inferd.registry.signature import ANY_ROWS, ZIP_MAP, onnx_datatype, onnx_output, onnx_rows, onnx_shape
from inferd.registry.source import Progress
from inferd.types import TensorSpec

if TYPE_CHECKING:
    import onnxruntime

_BFLOAT16: Final = 16  # onnx.TensorProto.BFLOAT16
_SMALL_BYTES: Final = 1 << 20  # weights below which threads wait for each other longer than they work

_log = logging.getLogger("inferd.predict.onnx")


class _TooLongError(Exception):
    """An example was given up."""


class OnnxModel:
    """One session. ``compute`` is a function of stacked arrays. ``patience_s``: for the examples of the trial."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        file: OnnxFile,
        *,
        num_threads: int,
        rows: Verdict,
        patience_s: float,
        ceiling: Ceiling,
    ) -> None:
        self._session = session
        inputs = [Value(one.name, one.type, tuple(one.shape)) for one in session.get_inputs()]
        outputs = [Value(one.name, one.type, tuple(one.shape)) for one in session.get_outputs()]
        self._maps = frozenset(value.name for value in outputs if ZIP_MAP.fullmatch(value.type))
        self._texts = frozenset(value.name for value in inputs if value.type == "tensor(string)")
        self._text_outputs = frozenset(value.name for value in outputs if value.type == "tensor(string)")
        self._has_bfloat16 = any(value.type == "tensor(bfloat16)" for value in (*inputs, *outputs))
        self._bfloat16 = frozenset(value.name for value in inputs if value.type == "tensor(bfloat16)")
        self._names = [value.name for value in outputs]
        self._is_plain = not self._maps and not self._text_outputs
        self._labels: dict[str, tuple[str, ...]] = {}
        specs = tuple(TensorSpec(value.name, onnx_datatype(value, "input"), onnx_shape(value)) for value in inputs)
        answers = tuple(onnx_output(value, file.class_labels) for value in outputs)
        self.contract = Contract(
            inputs=specs,
            outputs=answers,
            max_batch_size=ANY_ROWS if rows.because is not None else 0,
            because=rows.because,
            not_batched="" if rows.because is not None else rows.sentence,
            platform="onnxruntime_onnx",
            num_parameters=file.num_parameters,
            num_threads=num_threads,
            rounds_products=session.get_providers()[0] != "CPUExecutionProvider",
            dtype=NUMPY[specs[0].datatype].name if specs and specs[0].datatype != "BYTES" else "float32",
        )
        self._run_options: onnxruntime.RunOptions | None = None  # of the trial
        self._verify_contract(patience_s, ceiling)

    def compute(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of stacked inputs. Raises InvalidRequest for text that is no UTF-8."""
        names = self._names
        feed = dict(inputs)
        for name in self._texts:
            feed[name] = _decoded(name, feed[name])
        if self._has_bfloat16:
            return dict(zip(names, self._run_values(names, feed), strict=True))
        found = self._session.run(names, feed, self._run_options)
        if not self._is_plain:
            found = [self._plain(name, value) for name, value in zip(names, found, strict=True)]
        return dict(zip(names, found, strict=True))

    # -- outputs ----------------------------------------------------------------------------

    def _plain(self, name: str, value: Any) -> Array:
        if name in self._maps:
            return self._probabilities(name, value)
        if name in self._text_outputs:
            return _encoded(np.asarray(value, dtype=np.object_))
        return np.asarray(value)

    def _probabilities(self, name: str, rows: Sequence[Mapping[object, float]]) -> Array:
        """A sequence of maps from class to probability (scikit-learn's ZipMap) as one array; the classes are labels."""
        labels = self._labels.get(name)
        if labels is None:
            labels = self._labels[name] = tuple(str(key) for key in rows[0]) if rows else ()
        return np.array([list(row.values()) for row in rows], dtype=np.float32).reshape(len(rows), len(labels))

    def _run_values(self, names: Sequence[str], feed: Tensors) -> list[Array]:
        """Through OrtValues, as numpy has no bfloat16."""
        import onnxruntime as ort

        values = {}
        for name, array in feed.items():
            if name in self._bfloat16:
                values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _BFLOAT16)
            else:
                values[name] = ort.OrtValue.ortvalue_from_numpy(array)
        found = self._session.run_with_ort_values(list(names), values, self._run_options)
        arrays: list[Array] = []
        for value in found:
            if value.data_type() == "tensor(bfloat16)":
                raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
                arrays.append(np.frombuffer(raw, np.uint16).reshape(value.shape()))
            else:
                arrays.append(np.asarray(value.numpy()))
        return arrays

    # -- trying -----------------------------------------------------------------------------

    def _verify_contract(self, patience_s: float, ceiling: Ceiling) -> None:
        """Compute examples, which warms up, and correct the contract by what comes out.
        Raises ModelLoadError where nothing will ever come out."""
        contract = self.contract
        is_free = all(spec.shape[:1] == (-1,) for spec in contract.inputs)  # then any size of it may be used
        has_guesses = is_open(contract, has_rows=is_free)
        num_computed = 0

        def compute(inputs: Tensors) -> dict[str, Array]:
            nonlocal num_computed
            found = self.compute(inputs)
            num_computed += 1
            return found

        try:
            with self._given_up(patience_s):
                trial = try_rows(contract, compute, _failures())
                refusal = common_refusal(contract, compute, _failures()) if trial is None else None
        except _TooLongError:
            if has_guesses or num_computed:  # another size may take less
                _log.warning("trying examples of the inputs took longer than %g s and was given up", patience_s)
                self.contract = vetoed(contract, None)
                return
            raise ModelLoadError(
                f"The model does not compute an example of its inputs within hang_timeout_s = {patience_s:g} s, after "
                "which a busy replica is restarted. Raise it if the model needs longer, or export the model again.",
                param="hang_timeout_s",
            ) from None
        memory = ceiling.sentence(refusal) if refusal is not None else None
        if refusal is not None and (memory or not has_guesses):
            raise ModelLoadError(
                f"The model computes no example of its inputs: {memory}. Give it more if it needs so much, "
                "or export it again."
                if memory
                else "The model computes no example of its inputs and fails with the same words whatever they are: "
                f"{_reason(refusal)} Export it again.",
                param="memory_bytes" if memory else "source",
            )
        if trial is None:
            self.contract = vetoed(contract, None)
            return
        outputs = tuple(self._tried_spec(spec, trial) for spec in contract.outputs)
        self.contract = vetoed(msgspec.structs.replace(contract, outputs=outputs), trial)

    @contextlib.contextmanager
    def _given_up(self, patience_s: float) -> Iterator[None]:
        """Abort a computation after so long. Raises _TooLongError in place of its failure."""
        import onnxruntime as ort

        options = self._run_options = ort.RunOptions()
        is_over = threading.Event()

        def give_up() -> None:
            is_over.set()
            options.terminate = True

        timer = threading.Timer(patience_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._run_options = None
            if is_over.is_set():
                raise _TooLongError from None

    def _tried_spec(self, spec: TensorSpec, trial: Trial) -> TensorSpec:
        shape, labels = trial.shapes.get(spec.name, spec.shape), self._labels.get(spec.name, spec.labels)
        if spec.name in self._maps:
            return TensorSpec(spec.name, spec.datatype, (-1, len(labels)), labels=labels)
        # What was declared, unless the number of dimensions was not.
        return spec if len(spec.shape) == len(shape) else TensorSpec(spec.name, spec.datatype, shape, labels=labels)


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The model at ``path``. Raises ModelLoadError."""
    path = Path(path)
    file = read_onnx(path)
    check_external(path, file)
    progress("model", 0, 1)
    with memory_ceiling(config, is_kept=not _uses_gpu(config)) as ceiling:
        model = OnnxModel(
            _session(name, path, file, config, ceiling),
            file,
            num_threads=threads_for(file, config),
            rows=claimed(onnx_rows(path, file), config.batching.max_batch_size),
            patience_s=config.hang_timeout_s,
            ceiling=ceiling,
        )
    progress("model", 1, 1)
    return Stacked(model.contract, model.compute, config.batching)


def _session(
    name: str, path: Path, file: OnnxFile, config: ModelConfig, ceiling: Ceiling
) -> onnxruntime.InferenceSession:
    ort = needs("onnxruntime", "An ONNX model")
    ort.set_default_logger_severity(4)
    options = ort.SessionOptions()
    options.log_severity_level = (
        4  # some models log thousands of warnings; errors are raised, and reported by the caller
    )
    options.intra_op_num_threads = threads_for(file, config)
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Threads that spin while they wait take the core from the gateway that feeds them.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    _custom_operators(name, path, file, config, options)
    failures: tuple[type[Exception], ...] = (*_failures(), MemoryError)
    try:
        session = ort.InferenceSession(str(path), options, providers=_providers(ort, config))
    except failures as error:
        memory = ceiling.sentence(str(error)) or ("it is too large" if isinstance(error, MemoryError) else None)
        if memory is not None:
            raise ModelLoadError(
                f"{path} cannot be loaded: {memory}. Give it more if it needs so much, or export it again.",
                param="memory_bytes",
            ) from None
        raise ModelLoadError(
            f"onnxruntime cannot load {path}: {_reason(error)} Export the model again, or install a newer onnxruntime.",
            param="source",
        ) from None
    if config.device.startswith("cuda") and session.get_providers()[0] != "CUDAExecutionProvider":
        raise ModelLoadError(  # the library falls back to the CPU, and reports it only in its own log
            f"device is {config.device}, but onnxruntime could not use it; check that its CUDA and cuDNN are "
            "installed, or set device: cpu.",
            param="device",
        )
    return session


def threads_for(file: OnnxFile, config: ModelConfig) -> int:
    """Compute threads of the session: one for models that are done sooner than threads have met."""
    if config.threads is None and not file.heavy_ops and file.weights_bytes < _SMALL_BYTES:
        return 1
    return num_threads(config)


def _uses_gpu(config: ModelConfig) -> bool:
    ort = needs("onnxruntime", "An ONNX model")
    return config.device != "cpu" and "CUDAExecutionProvider" in ort.get_available_providers()


def _providers(ort: Any, config: ModelConfig) -> list[Any]:
    has_cuda = "CUDAExecutionProvider" in ort.get_available_providers()
    if config.device.startswith("cuda") and not has_cuda:
        raise ModelLoadError(
            f"device is {config.device}, but this onnxruntime has no CUDA provider; "
            "pip install onnxruntime-gpu in place of onnxruntime, or set device: cpu.",
            param="device",
        )
    if not has_cuda or config.device == "cpu":
        return ["CPUExecutionProvider"]
    settings: dict[str, object] = {"device_id": int(config.device.partition(":")[2] or 0)}
    if config.memory_bytes is not None:
        settings["gpu_mem_limit"] = config.memory_bytes
        settings["arena_extend_strategy"] = "kSameAsRequested"
    return [("CUDAExecutionProvider", settings), "CPUExecutionProvider"]


def _custom_operators(name: str, path: Path, file: OnnxFile, config: ModelConfig, options: Any) -> None:
    """Libraries of operators are code: they are named by the operator and need allow_code."""
    check_options(name, "an ONNX model", config, Option("custom_ops", (str, list), "a path or a list of paths"))
    libraries = config.options.get("custom_ops", [])
    for library in [libraries] if isinstance(libraries, str) else libraries:
        if not config.allow_code:
            raise ModelLoadError(
                f"models.{name}.options.custom_ops loads the library {library!r}, which is code; set allow_code: true "
                "if you trust it as you trust this server's own code.",
                param="allow_code",
            )
        if not Path(library).is_file():
            raise ModelLoadError(
                f"There is no library {library!r} of custom operators; check the path.", param="options"
            )
        try:
            options.register_custom_ops_library(str(library))
        except _failures() as error:
            raise ModelLoadError(
                f"The library {library!r} cannot be loaded: {_reason(error)}", param="options"
            ) from None


def _failures() -> tuple[type[Exception], ...]:
    """Every error of the library: they have no base of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("EPFail", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoaded", "NoModel")
    more = ("NoSuchFile", "NotImplemented", "RuntimeException")
    found = tuple(getattr(state, name) for name in (*names, *more) if hasattr(state, name))
    return (*found, RuntimeError, ValueError)


def _reason(error: Exception | str) -> str:
    """The library's message, without the paths of its own sources."""
    text = re.sub(r"\S*/onnxruntime_src/\S+\s?", "", str(error)).partition("\n")[0]
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", text).strip()
    return (text[:300] or "it gives no reason") + ("" if text.endswith(".") else ".")


def _decoded(name: str, array: Array) -> Array:
    """A BYTES tensor as texts for onnxruntime."""
    try:
        texts = [value.decode() for value in array.ravel().tolist()]
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"The input {name!r} holds bytes that are no UTF-8; this model takes texts.", param="inputs"
        ) from None
    return object_array(texts).reshape(array.shape)


def _encoded(array: Array) -> Array:
    return object_array([str(text).encode() for text in array.ravel().tolist()]).reshape(array.shape)
