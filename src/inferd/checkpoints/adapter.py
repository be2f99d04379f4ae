"""Low-rank adapters (LoRA, Hu et al. 2021) as the library peft stores them: adapter_config.json and
adapter_model.safetensors.

Reads the configuration and the table of tensors, checks every field that changes what is computed, and refuses by name
what is not computed here. Knows no tensor's values and no torch. The module names of a model come from its decoder.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from inferd.checkpoints.architecture import GPT
from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig
from inferd.checkpoints.safetensors import Entry, read_table
from inferd.errors import ModelLoadError
from inferd.native.forms import padded

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_RANK: Final = 512
_MAX_CONFIG_BYTES: Final = 1 << 20
_FLOATS: Final = ("F32", "F16", "BF16")

QKV, OUT, GATE_UP, DOWN = range(4)
"""The products of a layer, as the kernels number them (kernels/decoder.h)."""

T = TypeVar("T")

_MODULE: Final = re.compile(
    r"base_model\.model\."
    r"(?P<path>(?:model|model\.language_model|language_model\.model)\.layers\.(?P<layer>[0-9]{1,5})\.(?P<module>[\w.]+))"
    r"\.lora_(?P<side>[AB])\.weight"
)

# Field -> the remedy. A value that is not empty is refused.
_REFUSED: Final = {
    "use_dora": "DoRA scales the base's own weights; train without use_dora, or merge the adapter into the base model.",
    "modules_to_save": "whole modules are replaced; merge the adapter into the base model and serve that.",
    "lora_bias": "biases are not added; train with lora_bias false, or merge the adapter into the base model.",
    "fan_in_fan_out": "it is for layers that store [in, out]; merge the adapter into the base model.",
    "trainable_token_indices": "rows of the embedding are replaced; merge the adapter into the base model.",
    "layer_replication": "the base's layers are repeated; merge the adapter into the base model.",
    "target_parameters": "parameters of experts are changed; merge the adapter into the base model.",
    "alora_invocation_tokens": "activated LoRA begins within a prompt; train a plain LoRA.",
    "use_qalora": "QALoRA pools the inputs; train a plain LoRA.",
    "megatron_config": "Megatron's layers are not known here; export the adapter for transformers' layers.",
    "use_bdlora": "block-diagonal adapters are not known here; train a plain LoRA.",
    "arrow_config": "Arrow routes between adapters; give each adapter by its own name.",
}
# Python's regular expressions backtrack. A group that is repeated may take exponential time for a name of 40 letters.
_REPEAT: Final = re.compile(r"[*+{]")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
_MAX_REPEATS: Final = 6
# These initialisations change the base's weights, so that B A alone does not give the trained model.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a layer that an adapter may change, within the product that computes it."""

    product: int  # of the layer: an index into its products
    first: int  # of the product's outputs
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices of one module: A [rank, inputs] and B [outputs, rank]."""

    layer: int
    module: str  # its name below the layer
    place: Place
    a: str  # names of tensors
    b: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's checked description. ``pairs`` is in the order of layers and products."""

    folder: Path
    pairs: tuple[Pair, ...]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    def num_bytes(self, itemsize: int) -> int:
        """Memory of the matrices in a format of so many bytes. The kernels hold B in whole panels of outputs."""
        return sum(p.rank * (p.place.inputs + padded(p.place.outputs)) for p in self.pairs) * itemsize


def places(config: DecoderConfig, layer: int) -> dict[str, Place]:
    """The modules of one layer that an adapter may change, by their names below it. Raises ModelLoadError."""
    if config.architecture in GPT:
        raise ModelLoadError(
            f"Adapters are not served for {config.architecture}. Merge the adapter into the base model, or take a base "
            "model of another family.",
            param="adapters",
        )
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    found = {"self_attn.o_proj": Place(OUT, 0, hidden, q)}
    is_fused = FAMILIES[config.architecture].fused
    if is_fused:
        found["self_attn.qkv_proj"] = Place(QKV, 0, q + 2 * kv, hidden)
    else:
        found["self_attn.q_proj"] = Place(QKV, 0, q, hidden)
        found["self_attn.k_proj"] = Place(QKV, q, kv, hidden)
        found["self_attn.v_proj"] = Place(QKV, q + kv, kv, hidden)
    if config.moe and config.moe[layer] is not None:
        return found
    wide = config.intermediate_size
    if is_fused:
        found["mlp.gate_up_proj"] = Place(GATE_UP, 0, 2 * wide, hidden)
    else:
        found["mlp.gate_proj"] = Place(GATE_UP, 0, wide, hidden)
        found["mlp.up_proj"] = Place(GATE_UP, wide, wide, hidden)
    found["mlp.down_proj"] = Place(DOWN, 0, hidden, wide)
    return found


def read_adapter(folder: Path, base: DecoderConfig) -> AdapterFiles:
    """The adapter of a folder, for a base model of this configuration.

    Raises ModelLoadError, which names the file, the field or the tensor, the value and the remedy.
    """
    config = _Config(folder)
    table = _table(folder)
    known = [places(base, layer) for layer in range(base.num_layers)]
    entries: dict[tuple[int, str, str], dict[str, tuple[str, Entry]]] = {}
    for name, entry in table.items():
        layer, module, path, side = _parse(folder, name)
        if layer >= len(known):
            raise _other_base(folder, f"{name} belongs to layer {layer}, but the base model has {len(known)} layers")
        if entry.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{folder / WEIGHTS}: {name} has dtype {entry.dtype}; an adapter's matrices are F32, F16 or BF16."
            )
        entries.setdefault((layer, module, path), {})[side] = (name, entry)
    if not entries:
        raise ModelLoadError(f"{folder / WEIGHTS} has no tensors. Save the adapter again with peft's save_pretrained.")
    config.check_targets({module for _, module, _ in entries})
    pairs: list[Pair] = []
    for (layer, module, path), sides in entries.items():
        if len(sides) != 2:
            (only,) = sides
            raise ModelLoadError(
                f"{folder / WEIGHTS} has only lora_{only} of {path}; both lora_A and lora_B are needed. Save it again."
            )
        if not config.targets(path):
            raise ModelLoadError(
                f"{folder / WEIGHTS} has matrices of {path}, which target_modules in {CONFIG} does not name. The two "
                "files do not belong together."
            )
        place = known[layer].get(module)
        if place is None:
            raise ModelLoadError(
                f"{folder}: the module {path} cannot be adapted here; the base model's modules are: "
                f"{', '.join(known[layer])}. Merge the adapter into the base model, or train it on these modules.",
                param="target_modules",
            )
        pairs.append(_pair(folder, config, (layer, module), path, place, sides["A"], sides["B"]))
    return AdapterFiles(folder, tuple(sorted(pairs, key=lambda p: (p.layer, p.place.product, p.place.first))))


def _pair(
    folder: Path,
    config: _Config,
    at: tuple[int, str],
    path: str,
    place: Place,
    a: tuple[str, Entry],
    b: tuple[str, Entry],
) -> Pair:
    rank = config.rank(path)
    for (name, entry), wanted, of in (
        (a, (rank, place.inputs), "[r, inputs]"),
        (b, (place.outputs, rank), "[outputs, r]"),
    ):
        if len(entry.shape) != 2 or entry.shape[0 if of == "[r, inputs]" else 1] != rank:
            raise ModelLoadError(
                f"{folder / WEIGHTS}: {name} has the shape {list(entry.shape)}, but {CONFIG} gives it the rank {rank}, "
                f"so it should be {list(wanted)} ({of}). The two files do not belong together.",
                param="r",
            )
        if entry.shape != wanted:
            raise _other_base(
                folder, f"{name} has the shape {list(entry.shape)}, but the base model needs {list(wanted)}"
            )
    return Pair(*at, place, a[0], b[0], rank, config.scale(path))


def _table(folder: Path) -> dict[str, Entry]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted([*folder.glob("adapter_model*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        if pickles:
            raise ModelLoadError(
                f"{folder} has the adapter's weights only as {pickles[0].name}, a pickle, which can run code and is "
                "never loaded. Save it again with peft's save_pretrained, which writes safetensors.",
                param="source",
            )
        raise ModelLoadError(
            f"{folder} has no {WEIGHTS}. Give the folder that peft's save_pretrained wrote.", param="source"
        )
    return read_table(path)


def _parse(folder: Path, name: str) -> tuple[int, str, str, str]:
    match = _MODULE.fullmatch(name)
    if match is not None:
        return int(match["layer"]), match["module"], match["path"], match["side"]
    if "lora_magnitude_vector" in name:
        raise ModelLoadError(f"{folder / WEIGHTS} has {name}: {_REFUSED['use_dora']}", param="use_dora")
    for word in ("lora_embedding_", "embed_tokens", "lm_head"):
        if word in name:
            raise ModelLoadError(
                f"{folder / WEIGHTS} has {name}, but embeddings and the output layer cannot be adapted here. Merge the "
                "adapter into the base model, or train it on the layers' projections.",
                param="target_modules",
            )
    raise ModelLoadError(
        f"{folder / WEIGHTS} has the tensor {name!r}, which is not a matrix of a LoRA on a decoder's layers "
        "(base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight). Give an adapter that peft saved for this "
        "kind of model."
    )


def _other_base(folder: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{folder / WEIGHTS}: {why}. The adapter was trained on another base model; serve it with that one.",
        param="source",
    )


class _Config:
    """adapter_config.json, checked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        data = self._read()
        self._data = data
        if data.get("peft_type") != "LORA":
            raise self._wrong("peft_type", "only LORA adapters are served; merge others into the base model.")
        if data.get("task_type") not in (None, "CAUSAL_LM"):
            raise self._wrong("task_type", "only adapters of generating models (CAUSAL_LM) are served.")
        if data.get("bias", "none") != "none":
            raise self._wrong("bias", "biases are not added; train with bias 'none', or merge the adapter.")
        for name, remedy in _REFUSED.items():
            if data.get(name):
                raise self._wrong(name, remedy)
        start = data.get("init_lora_weights", True)
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise self._wrong(
                "init_lora_weights",
                "it changes the base's weights; save the adapter with path_initial_model_for_weight_conversion, which "
                "turns it into a plain LoRA.",
            )
        self._rank = self._whole("r", data.get("r"))
        self._alpha = self._number("lora_alpha", data.get("lora_alpha", 8))
        self._rooted = data.get("use_rslora", False) is True
        self._ranks = {key: self._whole("rank_pattern", value) for key, value in self._patterns("rank_pattern")}
        self._alphas = {key: self._number("alpha_pattern", value) for key, value in self._patterns("alpha_pattern")}
        self._targets = self._named_modules("target_modules")
        self._excluded = self._named_modules("exclude_modules")
        if not self._targets:
            raise self._wrong("target_modules", "name the modules that the adapter changes.")

    def _read(self) -> dict[str, Any]:
        try:
            if self.path.stat().st_size > _MAX_CONFIG_BYTES:
                raise ModelLoadError(f"{self.path} has more than {_MAX_CONFIG_BYTES} bytes; it is no configuration.")
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(
                f"{self.path.parent} has no {CONFIG}, so it is not an adapter. Give the folder that peft's "
                "save_pretrained wrote.",
                param="source",
            ) from None
        except OSError as error:
            raise ModelLoadError(f"{self.path} cannot be read: {error.strerror}.", param="source") from error
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{self.path} is not valid JSON: {error}. Save the adapter again.") from error
        if not isinstance(data, dict):
            raise ModelLoadError(f"{self.path} must be a JSON object. Save the adapter again.")
        return data

    def _wrong(self, name: str, remedy: str) -> ModelLoadError:
        shown = repr(self._data.get(name))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelLoadError(f"{self.path}: {name} is {shown}: {remedy}", param=name)

    def _whole(self, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
            raise self._wrong(name, f"a rank must be an integer from 1 to {MAX_RANK}.")
        return value

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(name, "it must be a finite number.")
        return float(value)

    def _patterns(self, name: str) -> Iterator[tuple[re.Pattern[str], object]]:
        found = self._data.get(name) or {}
        if not isinstance(found, dict):
            raise self._wrong(name, "it must be an object of module names and values.")
        for key, value in found.items():
            yield self._pattern(name, rf"(.*\.)?({key})"), value

    def _pattern(self, name: str, pattern: str) -> re.Pattern[str]:
        if len(_REPEAT.findall(pattern)) > _MAX_REPEATS or _REPEATED_GROUP.search(pattern):
            raise self._wrong(
                name,
                f"matching it could take for ever: it repeats a group, or repeats more than {_MAX_REPEATS} times; name "
                "the modules in a list.",
            )
        try:
            return re.compile(pattern)
        except re.error as error:
            raise self._wrong(name, f"it is no regular expression: {error}.") from None

    def _named_modules(self, name: str) -> re.Pattern[str] | tuple[str, ...]:
        """A list of names, a regular expression, or every linear layer. As peft reads it."""
        found = self._data.get(name)
        if found is None:
            return ()
        if isinstance(found, str):
            return self._pattern(name, ".*" if found.lower() == "all-linear" else found)
        if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
            raise self._wrong(name, "it must be a list of module names, a regular expression, or 'all-linear'.")
        return tuple(found)

    def targets(self, path: str) -> bool:
        """Whether the configuration names the module ``path``."""
        return _names(self._targets, path) and not (self._excluded and _names(self._excluded, path))

    def check_targets(self, modules: set[str]) -> None:
        """Raises ModelLoadError for a listed module that has no matrices."""
        if isinstance(self._targets, re.Pattern):
            return
        for target in self._targets:
            if not any(_names((target.rpartition(".")[2],), module) for module in modules):
                raise ModelLoadError(
                    f"{self.path}: target_modules names {target!r}, but {WEIGHTS} has no matrices of it. The two files "
                    "do not belong together, or the base model has no such module.",
                    param="target_modules",
                )

    def rank(self, path: str) -> int:
        return _by_pattern(self._ranks, path, self._rank)

    def scale(self, path: str) -> float:
        """The factor of B A: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (Kalajdzievski 2023)."""
        alpha, rank = _by_pattern(self._alphas, path, self._alpha), self.rank(path)
        return alpha / math.sqrt(rank) if self._rooted else alpha / rank


def _names(targets: re.Pattern[str] | Sequence[str], path: str) -> bool:
    if isinstance(targets, re.Pattern):
        return targets.fullmatch(path) is not None
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _by_pattern(patterns: Mapping[re.Pattern[str], T], path: str, default: T) -> T:
    return next((value for pattern, value in patterns.items() if pattern.fullmatch(path)), default)
