"""Tokenizers of every kind that checkpoints have, trained in the test run on a few lines of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_LINES = [
    "The quick brown fox jumps over the lazy dog. It's 12,345 o'clock, isn't it?",
    "Größe, naïve café, Ωmega, Привет мир, 你好，世界, こんにちは, 안녕하세요",
    "def f(x):\n    return x  +  1\n\n\tindented",
    "😀 👩‍👩‍👧 e\u0301 é ñ",
] * 4
_SPECIALS = ["<unk>", "<s>", "</s>"]
KINDS = ("byte_level", "llama", "gemma", "wordpiece", "unigram", "words")


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True, normalized=False), AddedToken("<｜end▁of▁turn｜>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("  ", normalized=False), AddedToken("<tool>", normalized=False)])
    return tokenizer


def _sentencepiece(strips: bool) -> Tokenizer:
    """BPE with byte fallback, as converted from Llama 2 (strips) or Gemma (does not)."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*|[^▁]+"), "isolated")
    trained.train_from_iterator(
        [line for line in _LINES if line.isascii()],
        trainers.BpeTrainer(vocab_size=160, special_tokens=_SPECIALS, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    names = [*_SPECIALS, *bytes_, *(t for t in sorted(model["vocab"], key=model["vocab"].get) if t not in _SPECIALS)]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        _LINES, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        _LINES,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=_SPECIALS, unk_token="<unk>", show_progress=False),
    )
    return tokenizer


def _words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(_LINES, trainers.WordLevelTrainer(special_tokens=_SPECIALS, show_progress=False))
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind (of KINDS) -> a folder with tokenizer.json and tokenizer_config.json."""
    made = {
        "byte_level": _byte_level(),
        "llama": _sentencepiece(strips=True),
        "gemma": _sentencepiece(strips=False),
        "wordpiece": _wordpiece(),
        "unigram": _unigram(),
        "words": _words(),
    }
    assert tuple(made) == KINDS
    folders = {}
    for kind, tokenizer in made.items():
        folder = folders[kind] = tmp_path_factory.mktemp(kind)
        tokenizer.save(str(folder / "tokenizer.json"))
        ends = ("[CLS]", "[SEP]") if kind == "wordpiece" else ("<s>", "</s>")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": ends[0], "eos_token": ends[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folders


@pytest.fixture(params=KINDS)
def tokenizer_folder(request: pytest.FixtureRequest, tokenizer_folders: dict[str, Path]) -> Path:
    return tokenizer_folders[request.param]
