"""How a decoder is divided among ranks: the sizes of each one's share, and what cannot be divided. Knows no tensor.

Tensor parallel (Shoeybi et al. 2019): the outputs of the first product of attention and of feed-forward are divided by
heads and by inner columns, the inputs of the second one likewise, and the ranks' partial sums are added. The embedding
and the output layer are divided by tokens. Pipeline parallel: each stage has consecutive layers; the first one also has
the embedding and the output layer, which may be one tensor, and the last one the final norm. ``cuts`` says which part
of each tensor a rank holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig
from inferd.config import ModelConfig
from inferd.errors import ModelLoadError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a decoder that one rank holds. Ranks count along the parts of a stage first, then along stages."""

    rank: int = 0
    tensor: int = 1  # parts of each layer
    pipeline: int = 1  # stages

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
        if self.place and name.endswith(("o_proj.bias", "down_proj.bias")):
            return True  # the bias of a sum is added once
        layer = _LAYER.search(name)
        if layer is not None:
            return int(layer[1]) not in self.layers(num_layers)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return not self.is_first
        return not self.is_last


ALONE = Share()


def check_layout(config: ModelConfig, dims: DecoderConfig) -> None:
    """Raises ModelLoadError, with the remedy, where the model cannot be divided as ``config.parallel`` says."""
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    if tensor * pipeline == 1:
        return

    def refused(field: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"parallel.{field} is {getattr(config.parallel, field)}, but {problem}", param="parallel")

    one = "tensor" if tensor > 1 else "pipeline"
    if dims.architecture not in FAMILIES:
        raise refused(one, f"{dims.architecture} cannot be divided among ranks yet. Leave parallel out.")
    if config.device.startswith("cuda"):
        raise refused(one, "ranks compute on the CPU only so far. Set device to cpu, or leave parallel out.")
    if pipeline > dims.num_layers:
        raise refused("pipeline", f"the model has {dims.num_layers} layers. Take at most {dims.num_layers} stages.")
    if tensor == 1:
        return
    wide = [dims.intermediate_size] + [moe.intermediate_size for moe in dims.moe if moe is not None]
    for words, size in [("attention heads", dims.num_heads), *(("inner columns", size) for size in wide)]:
        if size % tensor:
            raise refused("tensor", f"the model's {size} {words} do not divide by it. {_possible(dims)}")
    heads = dims.num_kv_heads
    if heads % tensor and tensor % heads:
        raise refused("tensor", f"the model's {heads} key-value heads do not divide by it. {_possible(dims)}")
    if FAMILIES[dims.architecture].qk_norm == "full":
        raise refused(
            "tensor", f"{dims.architecture} norms all heads together, which one rank cannot. Take pipeline instead."
        )


def _possible(dims: DecoderConfig) -> str:
    """The numbers of parts that are possible, as the remedy."""
    wide = [dims.intermediate_size] + [moe.intermediate_size for moe in dims.moe if moe is not None]
    heads = dims.num_kv_heads
    found = [
        str(count)
        for count in range(2, dims.num_heads + 1)
        if not any(size % count for size in (dims.num_heads, *wide)) and (heads % count == 0 or count % heads == 0)
    ]
    return f"Take one of {', '.join(found)}." if found else "Take pipeline instead."
