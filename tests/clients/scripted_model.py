"""A real checkpoint whose every answer is known: the next token depends on the last one alone.

A Llama of one layer that adds nothing to the stream: embeddings are one-hot, and the head gives the
token that the script says comes next a logit of ``MARGIN``, every other token 0. So greedy decoding
follows the script, and each log-probability is a number one can write down.

The chat template opens the answer with a token of its own for a plain question, a question with tools
and the result of a tool, which is how the script can tell them apart.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARGIN: Final = 8.0
SPECIAL: Final = ("<|end|>", "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>", "<|call|>", "<|answer|>")
HELLO: Final = ("Hello", " from", " a", " scripted", " model.")
# Where a grammar forces text, only its usual spelling is allowed: each forced part is one phrase.
CALL: Final = (
    "<tool_call>\n",
    '{"name": "get_weather", "arguments": {',
    '"city": "Paris"}}',
    "\n</tool_call>",
)
ANSWER: Final = ("It is", " sunny", " in Paris.")
EMOJI: Final = "~😀"  # the bytes of a character are tokens of their own: a stream may not show half of one
CYCLES: Final = ("abcdefghijklmnopqrstuvwxyz", "0123456789", EMOJI)

_TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{% if messages[-1].role == 'tool' %}<|answer|>"
    "{% elif tools %}<|call|>{% else %}<|assistant|>{% endif %}{% endif %}"
)
_TOOLS: Final = "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
_REASONING: Final = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_TOKENS: Final = len(SPECIAL) + 256 + len(HELLO) + len(CALL) + len(ANSWER)

SURE: Final = MARGIN - math.log(math.exp(MARGIN) + _TOKENS - 1)
"""The log-probability of the token that the script says comes next."""
ELSE: Final = SURE - MARGIN
"""The log-probability of each other token."""


def write_scripted_model(
    folder: Path, *, max_positions: int = 65536, reasons: bool = False, reads_tools: bool = False
) -> Path:
    """The checkpoint as files in ``folder``: configuration, weights (float32, 0.8 MB), tokenizer, template.

    ``reasons``: the template also has a notation of reasoning, in ``<think>``; ``reads_tools``: a prompt begins with
    the tools.
    """
    template = _TOOLS + _TEMPLATE if reads_tools else _TEMPLATE
    ids = _write_tokenizer(
        folder, template.replace("{{ m.content", _REASONING + "{{ m.content") if reasons else template
    )
    tensors = _weights(_script(ids), size=len(ids))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": len(ids),
        "hidden_size": len(ids),
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-12,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": ids["<|end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _write_tokenizer(folder: Path, template: str) -> dict[str, int]:
    """Bytes, and each phrase of the script as one token; all tokens' ids by their text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in (*HELLO, *CALL, *ANSWER)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    assert len(ids) == _TOKENS
    return ids


def _script(ids: dict[str, int]) -> dict[int, int]:
    """Which token comes after which; the end after all that are not named."""
    end = ids["<|end|>"]
    after = dict.fromkeys(ids.values(), end)
    for opening, phrases in (("<|assistant|>", HELLO), ("<|call|>", CALL), ("<|answer|>", ANSWER)):
        after |= pairwise(ids[token] for token in (opening, *phrases))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for cycle in CYCLES:
        ((shown, _),) = letters.pre_tokenize_str(cycle)
        chain = [ids[letter] for letter in shown]
        after |= pairwise([*chain, chain[0]])
    return after


def _weights(after: dict[int, int], size: int) -> dict[str, npt.NDArray[np.float32]]:
    zeros = {
        "self_attn.q_proj": (8, size),
        "self_attn.k_proj": (8, size),
        "self_attn.v_proj": (8, size),
        "self_attn.o_proj": (size, 8),
        "mlp.gate_proj": (8, size),
        "mlp.up_proj": (8, size),
        "mlp.down_proj": (size, 8),
    }
    head = np.zeros((size, size), np.float32)
    for token, following in after.items():
        head[following, token] = MARGIN / math.sqrt(size)  # the norm makes a one-hot vector sqrt(size) long
    ones = np.ones(size, np.float32)
    return {
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "model.norm.weight": ones,
        "model.layers.0.input_layernorm.weight": ones.copy(),
        "model.layers.0.post_attention_layernorm.weight": ones.copy(),
        "lm_head.weight": head,
        **{f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()},
    }
