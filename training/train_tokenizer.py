"""Trains the byte-level BPE tokenizer on the corpus and writes the tokenizer's files.

Digits are single tokens, so that arithmetic sees place values. Every byte is in the alphabet, so that
every text can be written; the chat markers are special tokens.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import conversations
from .dialogue import END_OF_TEXT, IM_END, IM_START, render

VOCABULARY = 2048
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
# Words with their leading space, single digits, runs of punctuation, line breaks, spaces.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(num_dialogues: int = 40_000, seed: int = 1) -> Tokenizer:
    """Return a tokenizer trained on the first dialogues of a corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ("".join(text for text, _ in render(d)) for d in islice(conversations(seed), num_dialogues))
    stripped = (text.replace(IM_START, "").replace(IM_END, "").replace(END_OF_TEXT, "") for text in texts)
    tokenizer.train_from_iterator(stripped, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}: raise num_dialogues"
        )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": template,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL)
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Train the tokenizer and write it into each folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    tokenizer = train()
    for folder in options.folders:
        save(tokenizer, folder)


if __name__ == "__main__":
    main()
