"""A folder of sentence-transformers: the files beside a checkpoint that define how texts become vectors.

Reads ``modules.json`` and the files it names, ``sentence_bert_config.json`` and ``config_sentence_transformers.json``.
A plain checkpoint has none of them and gets the defaults. Knows no tensor. No file outside the folder is read. Format:
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, get_args

from inferd.errors import ModelLoadError

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)  # in the order in which they are joined
_FLAGS: Final[dict[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooling."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """How texts become vectors."""

    folder: Path  # of the checkpoint itself
    pooling: tuple[Pooling, ...] | None  # several are joined; None: not said
    dense: tuple[Dense, ...]
    normalize: bool | None  # None: not said
    max_tokens: int | None
    lower_case: bool
    prompts: Mapping[str, str]
    default_prompt: str | None


def read_sentence(folder: Path) -> Sentence:
    """Raises ModelLoadError naming the file at fault."""
    modules = _read(folder / "modules.json")
    checkpoint, pooling, dense, normalize = folder, None, [], None
    if modules is not None:
        if not isinstance(modules, list):
            raise ModelLoadError(f"{folder / 'modules.json'} must be a list of modules.")
        normalize = False
        for module in modules:
            name, place = _module(folder, module)
            match name:
                case "transformer":
                    checkpoint = place
                case "pooling":
                    pooling = _pooling(place / "config.json")
                case "dense":
                    dense.append(_dense(place))
                case "normalize":
                    normalize = True
                case "dropout":
                    pass
                case _:
                    raise ModelLoadError(
                        f"{folder / 'modules.json'} names a module of the type {module.get('type')!r}; supported are "
                        "Transformer, Pooling, Dense, Normalize and Dropout."
                    )
    settings = _object(checkpoint / "sentence_bert_config.json")
    longest = settings.get("max_seq_length")
    prompt_settings = _object(folder / "config_sentence_transformers.json")
    prompts = prompt_settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{folder / 'config_sentence_transformers.json'}: prompts must be an object of texts.")
    default = prompt_settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name is {default!r}, which prompts does "
            "not have."
        )
    return Sentence(
        folder=checkpoint,
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
        lower_case=settings.get("do_lower_case") is True,
        prompts={name: text for name, text in prompts.items() if text},
        default_prompt=default if prompts.get(default) else None,
    )


def _module(folder: Path, module: Any) -> tuple[str, Path]:
    at = folder / "modules.json"
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ModelLoadError(f"{at}: every module must be an object with a type.")
    place = str(module.get("path", ""))
    if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts or "\\" in place:
        raise ModelLoadError(f"{at}: the path {place!r} leads out of the model's folder.")
    return module["type"].rpartition(".")[2].lower(), folder / place


def _pooling(path: Path) -> tuple[Pooling, ...]:
    settings = _object(path)
    if settings.get("include_prompt") is False:
        raise ModelLoadError(f"{path}: include_prompt is false, which is not supported.")
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        unknown = [mode for mode in named if mode not in POOLINGS]
        if unknown:
            raise ModelLoadError(f"{path}: pooling_mode names {unknown[0]!r}; supported are {', '.join(POOLINGS)}.")
        requested = set(named)
    else:
        requested = {mode for flag, mode in _FLAGS.items() if settings.get(flag) is True}
    if not requested:
        raise ModelLoadError(f"{path} enables no mode of pooling; supported are {', '.join(_FLAGS)}.")
    return tuple(mode for mode in POOLINGS if mode in requested)


def _dense(folder: Path) -> Dense:
    path = folder / "config.json"
    settings = _object(path)
    sizes = settings.get("in_features"), settings.get("out_features")
    if not all(isinstance(size, int) and 1 <= size < 2**31 for size in sizes):
        raise ModelLoadError(f"{path}: in_features and out_features must be positive integers.")
    function = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].lower()
    if function not in ("identity", "tanh"):
        raise ModelLoadError(f"{path}: activation_function is {function!r}; supported are Identity and Tanh.")
    return Dense(
        folder, settings["in_features"], settings["out_features"], settings.get("bias", True) is True,
        "tanh" if function == "tanh" else "identity",
    )  # fmt: skip


def _object(path: Path) -> dict[str, Any]:
    found = _read(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must be a JSON object.")
    return found


def _read(path: Path) -> Any:
    """The file's content; None where it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}. Download it again.") from error


def check_dense(dense: Sequence[Dense], size: int) -> str | None:
    """A sentence about modules that do not fit together; None where all fit."""
    for layer in dense:
        if layer.in_features != size:
            return f"{layer.folder.name} takes {layer.in_features} features, but gets {size}"
        size = layer.out_features
    return None
