"""Write a checkpoint with random weights in the shape of a known model, for measuring speed.

Throughput does not depend on the weights' values, so nothing has to be downloaded. The tokenizer is a
byte-level BPE trained on the Python sources it is given and padded with filler tokens up to the vocabulary size.

    python bench/make_checkpoint.py /tmp/qwen3-0.6b-random

Needs ``transformers`` (in the ``dev`` extra).
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 1024,
    },
}
TRAINED_TOKENS = 16_384
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sources(folder: Path, limit: int = 1500) -> Iterator[str]:
    """The text of up to ``limit`` Python files below ``folder``."""
    for path in islice(sorted(folder.rglob("*.py")), limit):
        yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(vocab_size: int, folder: Path) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab_size`` tokens: trained ones first, fillers, special ones last."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(TRAINED_TOKENS, vocab_size - len(special)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(folder), trainer)
    fill = vocab_size - len(special) - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<filler{i}>" for i in range(fill)])
    tokenizer.add_special_tokens(special)
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="where Python sources lie"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    shape = SHAPES[options.shape]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(shape["vocab_size"], options.text),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=40_960,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(options.folder)
    print(f"tokenizer of {len(tokenizer)} tokens after {time.perf_counter() - began:.1f} s")

    torch.manual_seed(options.seed)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(options.folder)
    size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"folder": str(options.folder), "parameters": parameters, "weight_bytes": size}))
    print(f"done after {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
