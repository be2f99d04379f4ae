"""The libraries that compute models: imported when a model needs one, with the remedy where it is not installed."""

from __future__ import annotations

import importlib
from typing import Any, Final

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
                f"{what} needs the package {package}, which is not installed; pip install 'inferd[{_EXTRAS[package]}]'.",
                param="runtime",
            ) from None
        raise ModelLoadError(f"{package} cannot be imported: {error}; install it again.", param="runtime") from None
    except (ImportError, OSError) as error:
        raise ModelLoadError(f"{package} cannot be imported: {error}; install it again.", param="runtime") from None
