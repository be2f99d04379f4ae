"""Models of a known shape with random weights, made on the device: nothing is downloaded or read."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig, Source
from inferd.checkpoints.weights import Weights
from inferd.engine.model.llama import LlamaDecoder
from inferd.native.forms import Rule

LLAMA_8B: dict[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
}
TINY: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
}
_COMMON: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def settings(shape: dict[str, object]) -> dict[str, object]:
    """config.json of a shape."""
    return {**_COMMON, **shape}


class RandomWeights(Weights):
    """Any tensor that is asked for."""

    def __init__(self, dtype: torch.dtype, device: torch.device, rule: Rule) -> None:
        self.folder, self.dtype, self.device = Path("random"), dtype, device
        self._rule, self._keep, self.weight_cache, self.around = rule, None, None, None
        self._layouts, self._where, self._read = {}, {}, set()
        self._forms = Counter()
        self._asked = self._prefix = ""
        self.num_parameters = self.num_bytes = self.read_bytes = 0

    def __contains__(self, name: str) -> bool:
        return True

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        self.num_parameters += count
        self.num_bytes += count * self.dtype.itemsize
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=0.02)


def random_decoder(
    shape: dict[str, object], dtype: torch.dtype, device: torch.device, quantization: str = "none"
) -> LlamaDecoder:
    """A Llama of this shape, with products as ``quantization`` says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(settings(shape)))
        config: DecoderConfig = read_config(Source(path))
    weights = RandomWeights(dtype, device, Rule(quantization, config.hidden_size))
    with torch.inference_mode():
        return LlamaDecoder(config, FAMILIES["LlamaForCausalLM"], weights, config.max_position_embeddings)
