"""How a decoder is divided among ranks: the sizes of each one's share, and what cannot be divided. Knows no tensor.

Tensor parallel (Shoeybi et al. 2019): the outputs of the first product of attention and of feed-forward are divided by
heads and by inner columns, the inputs of the second one likewise, and the ranks' partial sums are added. Where weights
are integers, the second product is divided by outputs: its inputs and its outputs are put together instead, so that
each output has its whole row of weights and its activations are quantised as in one process. The embedding and the
output layer are divided by tokens. Pipeline parallel: each stage has consecutive layers; the first one also has the
embedding and the output layer, which may be one tensor, and the last one the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import msgspec

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.checkpoints.footprint import held_bytes
from inferd.checkpoints.safetensors import Entry
from inferd.checkpoints.stored.layout import Layout as StoredLayout
from inferd.config import ModelConfig
from inferd.errors import ModelLoadError

SECOND = ("o_proj", "down_proj", "w2", "c_proj", "out_proj", "dense", "dense_4h_to_h")
"""The second product of attention and of feed-forward, in every family."""

_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in")
_HEADS = ("lm_head", "embed_out")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a decoder that one rank holds. Ranks count along the parts of a stage first, then along stages."""

    rank: int = 0
    tensor: int = 1  # parts of each layer
    pipeline: int = 1  # stages
    by_outputs: bool = False  # second products are divided by outputs, not by inputs

    def dividing(self, asked: str, stored: Iterable[StoredLayout]) -> Share:
        """This share of a model whose products are quantised or not, as the setting ``quantization`` (``asked``) and
        the checkpoint's quantised products say."""
        is_quantised = asked in ("int8", "int4", "fp8")
        is_quantised = is_quantised or (asked == "auto" and any(layout.is_integer for layout in stored))
        return replace(self, by_outputs=self.tensor > 1 and is_quantised)

    @property
    def count(self) -> int:
        return self.tensor * self.pipeline

    @property
    def place(self) -> int:
        """Which part of each layer."""
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage; where they do not divide evenly, the first stages have one more."""
        each, rest = divmod(num_layers, self.pipeline)
        first = self.stage * each + min(self.stage, rest)
        return range(first, first + each + (self.stage < rest))

    def tokens(self, vocab_size: int) -> range:
        """The tokens of this rank's part of the embedding and the output layer; the last part may be smaller."""
        each = -(-vocab_size // self.tensor)
        return range(min(self.place * each, vocab_size), min((self.place + 1) * each, vocab_size))

    def copies(self, whole: DecoderConfig) -> int:
        """Ranks that have the same keys and values."""
        return max(1, self.tensor // whole.num_kv_heads)

    def in_all(self, nbytes: int, num_layers: int) -> int:
        """Bytes of the KV caches of all ranks together where this rank's takes ``nbytes``."""
        return nbytes * self.tensor * num_layers // len(self.layers(num_layers))

    def links(self) -> list[tuple[int, int]]:
        """The pairs of ranks, the smaller one first, that send each other hidden states: stage to stage, and the last
        one to rank 0."""
        onward = [(rank, rank + self.tensor) for rank in range(self.count - self.tensor)]
        back = [(0, self.count - self.tensor)] if self.pipeline > 2 else []
        return onward + back

    def config(self, whole: DecoderConfig) -> DecoderConfig:
        """The sizes of this rank's part, as a decoder of its own."""
        if self.count == 1:
            return whole
        mine = self.layers(whole.num_layers)
        kept = slice(mine.start, mine.stop)
        experts = tuple(
            moe if moe is None else replace(moe, intermediate_size=moe.intermediate_size // self.tensor)
            for moe in whole.moe[kept]
        )
        return replace(
            whole,
            vocab_size=len(self.tokens(whole.vocab_size)),
            intermediate_size=whole.intermediate_size // self.tensor,
            num_layers=len(mine),
            num_heads=whole.num_heads // self.tensor,
            num_kv_heads=max(1, whole.num_kv_heads // self.tensor),
            windows=whole.windows[kept],
            ropes=whole.ropes[kept],
            moe=experts,
        )

    def leaves(self, name: str, num_layers: int) -> bool:
        """Whether a stored tensor belongs to other ranks only."""
        product, _, kind = name.rpartition(".")
        word = product.rpartition(".")[2]
        if self.place and kind == "bias" and word in SECOND and not self.by_outputs:
            return True  # the bias of a sum is added once
        layer = _LAYER.search(name)
        if layer is not None:
            return int(layer[1]) not in self.layers(num_layers)
        if word in _EMBEDDINGS + _HEADS:
            return not self.is_first
        return not self.is_last

    def runs(self, name: str, stored: tuple[int, ...], whole: DecoderConfig) -> tuple[int, tuple[range, ...]] | None:
        """Which part of a stored tensor this rank holds, unless it ``leaves`` it; None: all of it.

        An axis, and runs of indices along it, which are put together.

        The one place that says how the layers of a decoder are split: outputs of the first products of attention and of
        feed-forward are divided, and inputs or outputs of the second ones.
        """
        if self.tensor == 1:
            return None
        copies = self.copies(whole)

        def own(size: int, first: int = 0) -> range:
            return _piece(first, size, self.place, self.tensor)

        def of_heads(size: int, first: int = 0) -> range:
            return _piece(first, size, self.place // copies, self.tensor // copies)

        product, _, kind = name.rpartition(".")
        is_turned = whole.architecture == "GPT2LMHeadModel" and kind == "weight"  # GPT-2 stores [in, out]
        outputs, inputs = (1, 0) if is_turned else (0, 1)
        match product.rpartition(".")[2]:
            case "q_proj" | "gate_proj" | "up_proj" | "w1" | "w3" | "c_fc" | "dense_h_to_4h":
                return outputs, (own(stored[outputs]),)
            case "query_key_value":  # head by head
                return outputs, (own(stored[outputs]),)
            case "k_proj" | "v_proj":
                return outputs, (of_heads(stored[outputs]),)
            case word if word in SECOND and self.by_outputs:
                return outputs, (own(stored[outputs]),)
            case word if word in SECOND:
                return (inputs, (own(stored[inputs]),)) if kind == "weight" else None
            case "qkv_proj" | "c_attn":
                queries, keys = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
                return outputs, (own(queries), of_heads(keys, queries), of_heads(keys, queries + keys))
            case "gate_up_proj":
                half = stored[outputs] // 2
                return outputs, (own(half), own(half, half))
            case "embed_tokens" | "wte" | "embed_in" | "lm_head" | "embed_out":
                return 0, (self.tokens(whole.vocab_size),)
        return None

    def shape(self, name: str, stored: tuple[int, ...], whole: DecoderConfig) -> tuple[int, ...]:
        """The shape of this rank's part of a stored tensor, unless it ``leaves`` it."""
        found = self.runs(name, stored, whole)
        if found is None:
            return stored
        axis, runs = found
        return (*stored[:axis], sum(map(len, runs), 0), *stored[axis + 1 :])

    def weight_bytes(
        self,
        tensors: Mapping[str, Entry],
        quantised: Mapping[str, StoredLayout],
        whole: DecoderConfig,
        itemsize: int,
        asked: str,
    ) -> int:
        """Bytes of this rank's weights. The arguments are those of ``checkpoints.footprint.held_bytes``."""
        share = self.dividing(asked, quantised.values())
        parts = {layout.tensor(part) for layout in quantised.values() for part in layout.parts}
        mine = {name: entry for name, entry in tensors.items() if not share.leaves(name, whole.num_layers)}
        numbers = {
            name: replace(entry, shape=share.shape(name, entry.shape, whole))
            for name, entry in mine.items()
            if name not in parts
        }
        nbytes = held_bytes(numbers, {}, whole, itemsize, asked)
        for name, layout in quantised.items():
            its = {layout.tensor(part) for part in layout.parts}
            if its <= mine.keys():
                size = (layout.out_features, layout.in_features)
                cut = prod(share.shape(f"{name}.weight", size, whole))
                held = held_bytes({part: mine[part] for part in its}, {name: layout}, whole, itemsize, asked)
                nbytes += -(-held * cut // prod(size))
        return nbytes


def _piece(first: int, size: int, place: int, of: int) -> range:
    """One of ``of`` equal parts of ``size`` indices, which begin at ``first``."""
    each = size // of
    return range(first + place * each, first + (place + 1) * each)


ALONE = Share()


def check_layout(config: ModelConfig, dims: DecoderConfig) -> None:
    """Raises ModelLoadError, with the remedy, where the model cannot be divided as ``config.parallel`` says."""
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    if tensor * pipeline == 1:
        return

    def refused(field: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"parallel.{field} is {getattr(config.parallel, field)}, but {problem}", param="parallel")

    if config.device.startswith("cuda") and config.parallel.machines > 1:
        raise refused(
            "machines",
            "ranks on CUDA devices are on one machine. Leave machines out, or set device to cpu.",
        )
    obstacle = indivisible(dims, tensor, pipeline)
    if obstacle is not None:
        raise refused(obstacle.field, f"{obstacle.why}. {obstacle.remedy}")


def check_devices(config: ModelConfig, num_devices: int, replicas: int = 1) -> None:
    """Raises ModelLoadError, with the remedy, where ``num_devices`` CUDA devices are too few for the ranks of so many
    replicas of a model that is computed on such devices."""
    first, count = config.first_gpu, config.parallel.count
    if count > 1 and first + replicas * count > num_devices:
        of_all = "" if replicas == 1 else f" in each of {replicas} replicas"
        raise ModelLoadError(
            f"parallel has {count} ranks{of_all}, each on a CUDA device of its own from cuda:{first} on, but this "
            f"machine has {num_devices} CUDA devices that may be used (CUDA_VISIBLE_DEVICES leaves some out). Take "
            f"fewer ranks{'' if replicas == 1 else ' or replicas'}, or set device to a lower number or to cpu.",
            param="parallel",
        )


def own_devices(config: ModelConfig, replica: int, num_devices: int) -> ModelConfig:
    """The settings of a replica by its number. Its ranks have the CUDA devices behind those of the replicas before it;
    where there are no more, as on a node that has not all replicas, it begins with the first ones again."""
    first, count = config.first_gpu, config.parallel.count
    place = replica % max((num_devices - first) // count, 1)
    return msgspec.structs.replace(config, device=f"cuda:{first + place * count}") if place and count > 1 else config


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a model cannot be divided in some way."""

    field: str  # of ``parallel``
    why: str
    remedy: str


def indivisible(dims: DecoderConfig, tensor: int, pipeline: int) -> Obstacle | None:
    """Why a decoder is not divided among ``tensor`` x ``pipeline`` ranks; None: it can be."""
    if tensor * pipeline == 1:
        return None
    if pipeline > dims.num_layers:
        return Obstacle(
            "pipeline", f"the model has {dims.num_layers} layers", f"Take at most {dims.num_layers} stages."
        )
    if tensor == 1:
        return None
    wide = [dims.intermediate_size] + [moe.intermediate_size for moe in dims.moe if moe is not None]
    sizes = [("attention heads", dims.num_heads), *(("inner columns", size) for size in wide)]
    for words, size in [*sizes, ("hidden columns", dims.hidden_size)]:
        if size % tensor:
            return Obstacle("tensor", f"the model's {size} {words} do not divide by it", _possible(dims))
    heads = dims.num_kv_heads
    if heads % tensor and tensor % heads:
        return Obstacle("tensor", f"the model's {heads} key-value heads do not divide by it", _possible(dims))
    return None


def _possible(dims: DecoderConfig) -> str:
    """The numbers of parts that are possible, as the remedy."""
    wide = [dims.intermediate_size] + [moe.intermediate_size for moe in dims.moe if moe is not None]
    heads = dims.num_kv_heads
    found = [
        str(count)
        for count in range(2, dims.num_heads + 1)
        if not any(size % count for size in (dims.num_heads, dims.hidden_size, *wide))
        and (heads % count == 0 or count % heads == 0)
    ]
    return f"Take one of {', '.join(found)}." if found else "Take pipeline instead."
