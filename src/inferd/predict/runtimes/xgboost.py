"""XGBoost's native files (.json, .ubj), which hold trees and numbers and no code. NaN is a missing value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.contract import Array
from inferd.predict.load import num_threads
from inferd.predict.runtimes.boosters import Objective, boosted
from inferd.predict.runtimes.libraries import Option, check_options, needs
from inferd.predict.stacked import Stacked
from inferd.registry.content import content_of
from inferd.registry.source import Progress


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The booster at ``path``. Raises ModelLoadError."""
    xgboost = needs("xgboost", "An XGBoost model")
    check_options(name, "an XGBoost model", config, Option("margin", (bool,), "true or false"))
    path = Path(path)
    progress("model", 0, 1)
    try:
        with xgboost.config_context(verbosity=0):
            booster = xgboost.Booster(model_file=_readable(path))
            booster.set_param({"nthread": num_threads(config), "device": _device(config)})
        model = _served(xgboost, booster, f"xgboost_{_format(path)}", config)
    except (xgboost.core.XGBoostError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        # The library's message about a truncated file may contain bytes that are no text.
        said = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        reason = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
        raise ModelLoadError(
            f"XGBoost {xgboost.__version__} cannot load {path}: {_cut_off(reason, path) or _shortened(reason)}. Copy "
            "it again, or save the model again with booster.save_model.",
            param="source",
        ) from None
    progress("model", 1, 1)
    return model


def _served(xgboost: Any, booster: Any, platform: str, config: ModelConfig) -> Stacked:
    learner = json.loads(booster.save_config())["learner"]
    word = str(learner["objective"]["name"])
    is_linear = learner["gradient_booster"]["name"] == "gblinear"
    if word == "multi:softmax":  # trained to return only the best class; the trees have the scores of all
        booster.set_param({"objective": "multi:softprob"})
    best = booster.attr("best_iteration")
    rounds = (0, int(best) + 1) if best is not None and best.isdecimal() else (0, 0)

    def predict(rows: Array, with_margin: bool) -> Array:
        rows = np.ascontiguousarray(rows)
        if is_linear:  # in-place prediction is for trees
            matrix = xgboost.DMatrix(rows, missing=np.nan, feature_names=booster.feature_names)
            return np.asarray(booster.predict(matrix, output_margin=with_margin), dtype=np.float32)
        found = booster.inplace_predict(
            rows,
            iteration_range=rounds,
            predict_type="margin" if with_margin else "value",
            missing=np.nan,
            validate_features=False,
        )
        return np.asarray(found, dtype=np.float32)

    return boosted(
        predict,
        Objective(
            is_classes=word.startswith("multi:") or word == "binary:logistic",
            quantiles=_quantiles(learner),
            is_rank=word.startswith("rank:"),
        ),
        config,
        num_features=booster.num_features(),
        datatype="FP32",
        platform=platform,
    )


def _readable(path: Path) -> str | bytearray:
    """Load the file. XGBoost chooses its parser by the file's name; for any other name it is given the bytes."""
    return str(path) if path.suffix == f".{_format(path)}" else bytearray(path.read_bytes())


def _format(path: Path) -> str:
    return "ubj" if content_of(path) == "xgboost_ubj" else "json"


def _device(config: ModelConfig) -> str:
    return config.device if config.device.startswith("cuda") else "cpu"


def _quantiles(learner: dict[str, Any]) -> tuple[float, ...]:
    found = learner["objective"].get("quantile_loss_param", {}).get("quantile_alpha", "")
    values = json.loads(found) if isinstance(found, str) and found else found
    return tuple(float(value) for value in values) if isinstance(values, list) else ()


def _shortened(text: str) -> str:
    """The library's message without the time and its own file and line."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text)[:300].rstrip(".")


def _cut_off(reason: str, path: Path) -> str:
    """A sentence that the file is truncated, where the library's reader stopped at its end; otherwise empty."""
    found = re.search(r"(?:character position|\.Pos\(\)): (\d+)", reason)
    size = path.stat().st_size
    is_at_the_end = found is not None and int(found[1]) >= size - 1
    is_beyond = re.search(rf"\bsize_ \(\d+ vs\. {size}\)", reason) is not None
    return f"the file has {size} bytes and ends within the model" if is_at_the_end or is_beyond else ""
