"""A Python class as a model: ``load``, ``predict``, and ``predict_batch`` if it computes several requests together.

The class is the operator's own code and runs only with ``allow_code``. Its inputs and outputs are declared by
attributes, or read from the annotations of ``predict`` (``python_signature.py``). Knows nothing of requests and
dialects.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from inferd.config import ModelConfig
from inferd.errors import CodeFailed, InferdError, InternalError, ModelLoadError
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes.python_requires import check_requirements, declared_requirements
from inferd.predict.runtimes.python_signature import Signature, read_signature
from inferd.predict.stacked import Stacked

Progress = Callable[[str, int, int], None]

MAX_ITEMS = 32
"""Requests given to ``predict_batch``, or awaited together, without a limit in the class or the configuration."""


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> PythonModel:
    """Import the class, check what it requires, and load it. Raises ModelLoadError."""
    if not config.allow_code:
        raise ModelLoadError(
            f"The model {name} is a Python class ({path}), and running it is not allowed. Set allow_code: true "
            "(--allow-code) if you trust it as you trust this server's own code.",
            param="allow_code",
        )
    cls = _find_class(str(path), config.source)
    model = _made(cls, config)
    runner = asyncio.Runner()
    try:
        _load_model(model, config, runner)
        signature = read_signature(model, str(path))
        return PythonModel(model, signature, config, runner)
    except BaseException:
        runner.close()
        raise


class PythonModel:
    """A ``Runtime``, and a ``Streaming`` where ``predict`` is a generator."""

    def __init__(self, model: object, signature: Signature, config: ModelConfig, runner: asyncio.Runner) -> None:
        self._model = model
        self._signature = signature
        self._runner = runner
        self._predict = _method(model, "predict")
        self._predict_batch = getattr(model, "predict_batch", None)
        self._is_async = inspect.iscoroutinefunction(self._predict)
        is_stream = inspect.isgeneratorfunction(self._predict) or inspect.isasyncgenfunction(self._predict)
        max_rows = signature.max_batch_size
        max_items = 0
        if not max_rows and not is_stream and (self._predict_batch is not None or self._is_async):
            max_items = config.batching.max_batch_size or MAX_ITEMS
        self.contract = Contract(
            inputs=signature.inputs,
            outputs=signature.outputs,
            max_batch_size=max_rows,
            because="declared" if max_rows else None,
            max_items=max_items,
            tasks=("predict",),
            platform="python",
            any_rank=signature.any_rank,
            is_decoupled=is_stream,
        )
        self._stacked: Stacked | None = None
        if max_rows and self._predict_batch is None and not is_stream:
            self._stacked = Stacked(self.contract, self._stacked_predict, config.batching)
            self.contract = self._stacked.contract

    @property
    def padded_rows(self) -> int:
        return self._stacked.padded_rows if self._stacked is not None else 0

    def prepare(self, item: Item) -> None:
        if self._stacked is not None:
            self._stacked.prepare(item)

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        if self._predict_batch is not None:
            return self._batched(items)
        if self._stacked is not None:
            return self._stacked.predict(items)
        if self._is_async and len(items) > 1:
            return self._together(items)
        return [self._result(self._called(self._predict, item)) for item in items]

    def stream(self, item: Item) -> Iterator[Result]:
        answers = self._predict(**self._signature.arguments(item.inputs, item.parameters))
        if inspect.isasyncgen(answers):
            return self._awaited(answers)
        assert isinstance(answers, Iterator), "the contract is decoupled where predict is a generator"
        return self._given(answers)

    def _given(self, answers: Iterator[object]) -> Iterator[Result]:
        while True:
            try:
                with OPERATORS_CODE:
                    answer = next(answers)
            except StopIteration:
                return
            yield self._result(answer)

    def close(self) -> None:
        try:
            close = getattr(self._model, "close", None)
            if close is not None:
                _wait(self._runner, close())
        finally:
            self._runner.close()

    # -- calling ----------------------------------------------------------------------------

    def _called(self, function: Callable[..., object], item: Item) -> object:
        arguments = self._signature.arguments(item.inputs, item.parameters)
        with OPERATORS_CODE:
            return _wait(self._runner, function(**arguments))

    def _stacked_predict(self, inputs: dict[str, Array]) -> Mapping[str, Array]:
        arguments = self._signature.arguments(inputs, {})
        with OPERATORS_CODE:
            answer = _wait(self._runner, self._predict(**arguments))
        return self._signature.outputs_of(answer)

    def _batched(self, items: Sequence[Item]) -> list[Result | InferdError]:
        """``predict_batch`` gets a list of each request's inputs, and answers in the same order; an exception among
        its answers is that request's own."""
        assert self._predict_batch is not None
        batch = [self._signature.named(item.inputs) for item in items]
        with OPERATORS_CODE:
            answers = _wait(self._runner, self._predict_batch(batch))
        if not isinstance(answers, Sequence | np.ndarray) or len(answers) != len(items):
            count = len(answers) if isinstance(answers, Sequence | np.ndarray) else type(answers).__name__
            raise InternalError(
                f"predict_batch must return a list of {len(items)} answers, one per request; got {count}."
            )
        return [self._outcome(item, answer) for item, answer in zip(items, answers, strict=True)]

    def _together(self, items: Sequence[Item]) -> list[Result | InferdError]:
        async def all_of() -> list[object]:
            calls = [self._predict(**self._signature.arguments(item.inputs, item.parameters)) for item in items]
            awaitable = [call for call in calls if inspect.isawaitable(call)]
            answers: list[object] = await asyncio.gather(*awaitable, return_exceptions=True)
            return answers

        answers = self._runner.run(all_of())
        return [self._outcome(item, answer) for item, answer in zip(items, answers, strict=True)]

    def _outcome(self, item: Item, answer: object) -> Result | InferdError:
        if isinstance(answer, InferdError):
            return answer
        if isinstance(answer, Exception):
            raise failed(
                answer
            )  # the batch is computed again one by one, and this failure is reported and logged for its own request
        return self._result(answer)

    def _result(self, answer: object) -> Result:
        return answer if isinstance(answer, Result) else Result(outputs=self._signature.outputs_of(answer))

    def _awaited(self, answers: object) -> Iterator[Result]:
        assert inspect.isasyncgen(answers)
        try:
            while True:
                try:
                    with OPERATORS_CODE:
                        answer = self._runner.run(_next(answers))
                except StopAsyncIteration:
                    return
                yield self._result(answer)
        finally:
            self._runner.run(answers.aclose())


def failed(error: Exception) -> CodeFailed:
    """The CodeFailed of an exception that the operator's own code raised."""
    made = CodeFailed(f"The model's own code raised {type(error).__name__}.")
    made.__cause__ = error
    return made


class _OperatorsCode:
    """A context in which code that came with a model is called. Its exceptions become CodeFailed, except inferd's own
    errors and the ends of iterations. A class and not a generator, because it is entered for every prediction."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, InferdError | StopIteration | StopAsyncIteration):
            raise failed(error) from error


OPERATORS_CODE: Final = _OperatorsCode()


async def _next(answers: object) -> object:
    assert inspect.isasyncgen(answers)
    return await anext(answers)


def _wait(runner: asyncio.Runner, answer: object) -> object:
    """The result of a call, awaited if it is awaitable."""

    async def awaited() -> object:
        assert inspect.isawaitable(answer)
        return await answer

    return runner.run(awaited()) if inspect.isawaitable(answer) else answer


def _method(model: object, name: str) -> Callable[..., object]:
    found = getattr(model, name, None)
    if not callable(found):
        raise ModelLoadError(
            f"{type(model).__name__} has no method {name}; a model is a class with predict, and load where there is "
            "something to load.",
            param="source",
        )
    return found  # type: ignore[no-any-return]


def _find_class(path: str, source: str) -> type:
    """The class that ``module:Class``, ``file.py:Class`` or a folder with model.py names."""
    place, _, name = path.rpartition(":") if ":" in path else (path, "", "")
    place, name = (place, name) if place else (path, "Model")
    if not name.isidentifier():
        place, name = path, "Model"
    file = Path(place).expanduser()
    if file.is_dir():
        file = file / "model.py"
    try:
        module = _import_file(file, name) if file.suffix == ".py" else _import_module(place, name)
    except InferdError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{source} could not be imported: {type(error).__name__}: {error}.", param="source"
        ) from failed(error)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, "predict")]
        hint = f" It has {', '.join(classes)}." if classes else ""
        raise ModelLoadError(f"{place} has no class {name}.{hint}", param="source")
    return found


def _import_file(file: Path, name: str) -> object:
    if not file.is_file():
        raise ModelLoadError(f"There is no file {file}; check the path.", param="source")
    check_requirements(name, declared_requirements(file, name))
    sys.path.insert(0, str(file.resolve().parent))  # for the modules beside it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str, cls: str) -> object:
    sys.path.insert(0, os.getcwd())  # relative to the folder in which the server was started
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModelLoadError(
            f"There is no module {name} in {os.getcwd()} or installed; start inferd in its folder, or give the file: "
            f"path/to/{name.rpartition('.')[2]}.py:Class.",
            param="source",
        )
    if spec.origin is not None and spec.origin.endswith(".py"):
        check_requirements(cls, declared_requirements(Path(spec.origin), cls))
    return importlib.import_module(name)


def _made(cls: type, config: ModelConfig) -> object:
    check_requirements(cls.__name__, getattr(cls, "requires", ()))
    try:
        return cls()
    except Exception as error:
        raise ModelLoadError(
            f"{cls.__name__}() failed: {type(error).__name__}: {error}. It is made without arguments; what it needs of "
            "the configuration is given to load(options).",
            param="source",
        ) from failed(error)


def _load_model(model: object, config: ModelConfig, runner: asyncio.Runner) -> None:
    load = getattr(model, "load", None)
    if load is None:
        if config.options:
            raise ModelLoadError(
                f"{type(model).__name__} has no load(options), so options cannot be given to it.", param="options"
            )
        return
    takes_options = bool(inspect.signature(load).parameters)
    if config.options and not takes_options:
        raise ModelLoadError(f"{type(model).__name__}.load takes no options; leave them out.", param="options")
    try:
        _wait(runner, load(dict(config.options)) if takes_options else load())
    except InferdError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{type(model).__name__}.load failed: {type(error).__name__}: {error}.", param="source"
        ) from failed(error)
