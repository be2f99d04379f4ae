"""The libraries that compute models, imported when a model needs one, and what their runtimes check alike."""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError

_EXTRAS: Final = {
    "onnxruntime": "onnx",
    "torch": "llm",
    "sklearn": "sklearn",
    "skops": "sklearn",
    "joblib": "sklearn",
    "xgboost": "boosters",
    "lightgbm": "boosters",
}


def needs(module: str, what: str) -> Any:
    """The module. ``what`` needs it, for the sentence. Raises ModelLoadError with the line that installs it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == package:
            raise ModelLoadError(
                f"{what} needs the package {package}, which is not installed; pip install "
                f"'inferd[{_EXTRAS[package]}]'.",
                param="runtime",
            ) from None
        raise ModelLoadError(f"{package} cannot be imported: {error}; install it again.", param="runtime") from None
    except (ImportError, OSError) as error:
        raise ModelLoadError(f"{package} cannot be imported: {error}; install it again.", param="runtime") from None


class Option(NamedTuple):
    """An option of a runtime: the types that its value may have, and what is written there."""

    name: str
    types: tuple[type, ...]
    wanted: str


def check_options(name: str, what: str, config: ModelConfig, *known: Option) -> None:
    """Raises ModelLoadError for options of the model ``name`` that ``what`` does not have, and for values of another
    type."""
    unknown = sorted(set(config.options) - {option.name for option in known})
    if unknown:
        names = ", ".join(option.name for option in known)
        there = f"there is {names} alone" if len(known) == 1 else f"there are {names}"
        raise ModelLoadError(f"models.{name}.options: {what} has no option {unknown[0]!r}; {there}.", param="options")
    for option in known:
        if option.name in config.options and not isinstance(config.options[option.name], option.types):
            raise ModelLoadError(
                f"models.{name}.options.{option.name} is {config.options[option.name]!r}; write {option.wanted}.",
                param="options",
            )


def bound_memory(torch: Any, device: Any, memory_bytes: int | None) -> None:
    """Bound the GPU memory of torch's allocator in this process by the model's ``memory_bytes``; None: no bound."""
    if device.type == "cuda" and memory_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), device)
