"""LightGBM's text files, which hold trees and numbers and no code. NaN is a missing value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.predict.contract import Array
from inferd.predict.load import num_threads
from inferd.predict.runtimes.boosters import Objective, boosted
from inferd.predict.runtimes.libraries import Option, check_options, needs
from inferd.predict.stacked import Stacked
from inferd.registry.source import Progress

_HEAD_BYTES: Final = 16 << 20  # names and ranges of the features come before the trees
_ALPHA: Final = re.compile(rb"\[alpha: ([0-9.eE+-]+)\]")


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> Stacked:
    """The booster at ``path``. Raises ModelLoadError."""
    lightgbm = needs("lightgbm", "A LightGBM model")
    check_options(name, "a LightGBM model", config, Option("margin", (bool,), "true or false"))
    path = Path(path)
    progress("model", 0, 1)
    header = header_of(path)
    try:
        booster = lightgbm.Booster(model_file=str(path))
    except (lightgbm.basic.LightGBMError, ValueError, KeyError, OSError) as error:
        raise ModelLoadError(
            f"LightGBM {lightgbm.__version__} cannot load {path}: {str(error)[:300].rstrip('.')}. Save the model again "
            "with booster.save_model.",
            param="source",
        ) from None
    threads = num_threads(config)

    def predict(rows: Array, with_margin: bool) -> Array:
        return np.asarray(booster.predict(rows, raw_score=with_margin, num_threads=threads), dtype=np.float64)

    model = boosted(
        predict,
        _objective(header),
        config,
        num_features=booster.num_feature(),
        datatype="FP64",
        platform="lightgbm_text",
    )
    progress("model", 1, 1)
    return model


def _objective(header: Mapping[str, str]) -> Objective:
    word = header.get("objective", "").partition(" ")[0]
    return Objective(
        is_classes=word in ("binary", "multiclass", "multiclassova"),
        quantiles=(float(header["alpha"]),) if word == "quantile" and "alpha" in header else (),
        is_rank=word in ("lambdarank", "rank_xendcg"),
    )


def header_of(path: Path) -> dict[str, str]:
    """The header of a LightGBM file, and the quantile it was trained for. Raises ModelLoadError for a truncated
    file."""
    found: dict[str, str] = {}
    with path.open("rb") as file:
        text = file.read(_HEAD_BYTES)
        file.seek(max(path.stat().st_size - 65536, 0))
        tail = file.read()
    for line in text.split(b"\nTree=0", 1)[0].decode("utf-8", "replace").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found[key] = value
    # A truncated file crashes the library; a complete one marks the end of its trees and of its parameters.
    ends = (b"end of trees" in text or b"end of trees" in tail) and b"end of parameters" in tail
    if "tree_sizes" not in found or not ends:
        raise ModelLoadError(f"{path} is not a complete LightGBM model; copy or save it again.", param="source")
    alpha = _ALPHA.search(tail)
    return found if alpha is None else {**found, "alpha": alpha[1].decode()}
