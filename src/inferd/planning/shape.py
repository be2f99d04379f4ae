"""The shape of a language model: its sizes and tensors, from config.json alone or from a folder with weights.

The bytes are those that loading takes (``checkpoints.footprint``), in each format of weights. Knows no device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from inferd.checkpoints.architecture import GPT, read_config
from inferd.checkpoints.declared_tensors import declared_tensors
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.footprint import held_bytes, used_tensors
from inferd.checkpoints.safetensors import Entry, weight_files
from inferd.checkpoints.stored.layout import Layout as StoredLayout
from inferd.checkpoints.stored.layout import layouts
from inferd.engine.model.layouts import Layout
from inferd.engine.model.share import Share
from inferd.errors import ModelLoadError

Format = Literal["stored", "fp32", "fp16", "fp8", "int8", "int4"]
"""How weights are held. fp16 stands for float16 and bfloat16. stored: as a quantised checkpoint's files have them."""

FORMATS: Final[tuple[Format, ...]] = ("fp32", "fp16", "fp8", "int8", "int4")
"""The formats of every model, the largest first."""

SHAPES: Final = Path(__file__).parent / "shapes"
"""A file per shape that has a name of its own: the fields of a published config.json, its title and its source."""

_ASKED: Final[Mapping[Format, str]] = {
    "stored": "auto", "fp32": "none", "fp16": "none", "fp8": "fp8", "int8": "int8", "int4": "int4",
}  # fmt: skip
_LAYER: Final = re.compile(r"\.(\d+)\.")
_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|wte|wpe|embed_in)\.weight$")
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, eq=False)
class Shape:
    """A language model that may be planned."""

    name: str
    source: str  # where its sizes are from
    dims: DecoderConfig
    tensors: Mapping[str, Entry]
    stored: Mapping[str, StoredLayout]  # its quantised products
    label: str = ""  # how its files are quantised; empty: they are not

    @property
    def formats(self) -> tuple[Format, ...]:
        return ("stored", *FORMATS) if self.label else FORMATS

    @property
    def num_parameters(self) -> int:
        parts = {layout.tensor(part) for layout in self.stored.values() for part in layout.parts}
        products = sum(layout.out_features * layout.in_features for layout in self.stored.values())
        return products + sum(entry.count for name, entry in self.tensors.items() if name not in parts)


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of a model's parts."""

    layers: tuple[int, ...]
    embedding: int
    head: int  # the last norm, and the output layer where it is not tied to the embedding
    tied: int  # of the embedding that the output layer shares; 0: it has its own
    experts: int  # of the layers' bytes, those of experts

    @property
    def total(self) -> int:
        return sum(self.layers) + self.embedding + self.head

    @property
    def read_once(self) -> int:
        """Bytes that every step reads, whatever its rows: all but the embedding's rows, and without experts."""
        return sum(self.layers) - self.experts + self.head + self.tied


@lru_cache(maxsize=64)
def parts(shape: Shape, form: Format) -> Parts:
    """Bytes of the parts of a model in a format."""
    layers: list[dict[str, Entry]] = [{} for _ in range(shape.dims.num_layers)]
    embedding: dict[str, Entry] = {}
    head: dict[str, Entry] = {}
    experts: dict[str, Entry] = {}
    for name, entry in shape.tensors.items():
        found = _LAYER.search(name)
        if found is not None:
            layers[int(found[1])][name] = entry
            if _EXPERT.search(name):
                experts[name] = entry
        elif _EMBEDDING.search(name):
            embedding[name] = entry
        else:
            head[name] = entry
    words = {name: entry for name, entry in embedding.items() if "wpe" not in name}

    def nbytes(tensors: Mapping[str, Entry]) -> int:
        products = {name.rpartition(".")[0] for name in tensors}
        stored = {name: layout for name, layout in shape.stored.items() if name in products}
        return held_bytes(tensors, stored, shape.dims, itemsize(form), _ASKED[form])

    return Parts(
        layers=tuple(map(nbytes, layers)),
        embedding=nbytes(embedding),
        head=nbytes(head),
        tied=nbytes(words) if shape.dims.tie_word_embeddings else 0,
        experts=nbytes(experts),
    )


@lru_cache(maxsize=1024)
def fullest_bytes(shape: Shape, form: Format, layout: Layout) -> int:
    """Bytes of the weights of the rank that has most of them."""
    return max(
        Share(stage * layout.tensor, layout.tensor, layout.pipeline).weight_bytes(
            shape.tensors, shape.stored, shape.dims, itemsize(form), _ASKED[form]
        )
        for stage in range(layout.pipeline)
    )


def divides_by_outputs(shape: Shape, form: Format, layout: Layout) -> bool:
    """Whether devices exchange inputs and outputs of second products, not partial sums."""
    share = Share(0, layout.tensor, layout.pipeline)
    return share.dividing(_ASKED[form], shape.stored.values()).by_outputs


def layer_products(dims: DecoderConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of the products of a layer; of experts, those of one."""
    hidden, heads = dims.hidden_size, dims.num_heads * dims.head_dim
    widths = [dims.intermediate_size if moe is None else moe.intermediate_size for moe in dims.moe]
    wide = max(widths, default=dims.intermediate_size)
    inner = wide if dims.architecture in GPT else 2 * wide  # the gate and what it multiplies
    return [
        (heads + 2 * dims.num_kv_heads * dims.head_dim, hidden),
        (hidden, heads),
        (inner, hidden),
        (hidden, wide),
    ]


def itemsize(form: Format) -> int:
    """Bytes of a number that is not quantised, which activations and the KV cache have too."""
    return 4 if form == "fp32" else 2


def names() -> list[str]:
    """The shapes that have a name of their own, the smallest first."""
    return sorted((path.stem for path in SHAPES.glob("*.json")), key=lambda name: float(name.removesuffix("b")))


def named(name: str) -> Shape:
    """A shape by its name, for example 70b. Raises ModelLoadError."""
    path = SHAPES / f"{name.lower()}.json"
    if name.lower() not in names():
        raise ModelLoadError(f"There is no shape {name!r}; there are {', '.join(names())}.", param="model")
    source = Source(path)
    dims = read_config(source)
    return Shape(
        name=source.get(str, "_title"),
        source=source.get(str, "_source"),
        dims=dims,
        tensors=declared_tensors(dims),
        stored={},
    )


def of_folder(folder: Path, name: str, said: str = "") -> Shape:
    """The shape of a checkpoint's folder: by the headers of its weights where they are there, else by config.json.
    ``said``: where it is from, instead of the folder.

    Raises ModelLoadError where config.json is missing or at fault, or the weights' files are.
    """
    source = Source(folder / "config.json")
    dims = read_config(source)
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights and source.quantization is not None:
        raise ModelLoadError(
            f"{folder} says that its weights are quantised ({source.quantization.label}), but has none, and their "
            "layout is in the headers of the weights' files. Download the checkpoint, or plan the model that it was "
            "made from.",
            param="model",
        )
    if has_weights:
        weight_files(folder)  # an index that names a missing file is an error
    tensors = used_tensors(folder, dims) if has_weights else declared_tensors(dims)
    stored = {} if source.quantization is None else layouts(source.quantization, tensors, str(folder))
    return Shape(
        name=name,
        source=said or f"{folder / 'config.json'}" + (" and the headers of its weights" if has_weights else ""),
        dims=dims,
        tensors=tensors,
        stored=stored,
        label="" if source.quantization is None else source.quantization.label,
    )
