"""Random checkpoints of every family of text encoders, a few kilobytes each, written by transformers."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["cat", "dog", "sits", "plays", "the", "outside", "garden", "king", "##s", "##ing", "Paris", "Berlin"]
VOCABULARY = [*SPECIAL, *WORDS, *string.ascii_letters, *(f"##{c}" for c in string.ascii_letters), *".,?!0123456789"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
POSITIONS = 40

# The prefix of a family's classes, and what its configuration needs besides the sizes.
FAMILIES: dict[str, dict[str, object]] = {
    "Bert": {"max_position_embeddings": POSITIONS},
    "Roberta": {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 1},
    "XLMRoberta": {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 1},
    "MPNet": {"max_position_embeddings": POSITIONS + 2},
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 2, "max_position_embeddings": POSITIONS},
    "ModernBert": {"max_position_embeddings": POSITIONS, "local_attention": 6, "global_attn_every_n_layers": 2},
    "Camembert": {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 1},
    **{
        name: {"max_position_embeddings": POSITIONS, "num_key_value_heads": 1, "head_dim": 16}
        for name in ("Gemma2", "Gemma3", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
    },
    **{
        name: {"max_position_embeddings": POSITIONS, "num_key_value_heads": 1}
        for name in ("Granite", "Llama", "Olmo2", "Phi3")
    },
}


def write_encoder(folder: Path, architecture: str, *, labels: int = 0, seed: int = 0, **extra: object) -> Path:
    """A checkpoint of ``architecture`` ("BertModel"), with weights large enough that differences show."""
    torch.manual_seed(seed)
    family = next(name for name in sorted(FAMILIES, key=len, reverse=True) if architecture.startswith(name))
    settings: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        **({} if family == "DistilBert" else SIZES),
        **FAMILIES[family],
        **extra,
    }
    if family == "ModernBert":
        settings |= {"cls_token_id": 2, "sep_token_id": 3}
    if labels:
        settings["num_labels"] = labels
    config = getattr(transformers, f"{'Gemma3Text' if family == 'Gemma3' else family}Config")(**settings)
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms are 0 and 1 otherwise, and mistakes in them would not show
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    make_fast: Any = transformers.PreTrainedTokenizerFast
    fast = make_fast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    fast.save_pretrained(folder)


def write_modules(
    folder: Path, *, pooling: str = "mean", normalize: bool = True, max_tokens: int | None = None, **told: object
) -> None:
    """What sentence-transformers writes beside a checkpoint."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{name}": key == pooling for key, name in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    if told:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
