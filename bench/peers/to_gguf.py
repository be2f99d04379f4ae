"""A Qwen3-shaped checkpoint as GGUF, for the peers that read nothing else.

    PEER_ENV/bin/python bench/peers/to_gguf.py CHECKPOINT OUT.gguf [bf16|f16|q8_0|q4_0]

Runs in a virtual environment with ``gguf`` and ``numpy``; knows the one architecture that bench/make_checkpoint.py writes.
Matrices get the format asked for, norms stay float32. Text is split as GPT-2 does it.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

FORMATS = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as float32."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            start = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:start]).items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] != "BF16":
                    raise SystemExit(f"{path}: {name} is {entry['dtype']}, but only BF16 is read.")
                begin, end = entry["data_offsets"]
                raw = np.frombuffer(data, dtype="<u2", count=(end - begin) // 2, offset=start + begin)
                yield name, (raw.astype("<u4") << 16).view("<f4").reshape(entry["shape"])


def renamed(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.{kind}"


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, object]) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {number: text for text, number in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for token in data["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts[i] for i in range(len(texts))])
    writer.add_token_types([kinds[i] for i in range(len(texts))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    kind, file_type = FORMATS[sys.argv[3] if len(sys.argv) > 3 else "bf16"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3":
        raise SystemExit(f"{folder} is {config['model_type']!r}, but only qwen3 is converted.")
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_name(folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, folder, config)
    for name, values in tensors(folder):
        if values.ndim == 1:
            writer.add_tensor(renamed(name), values.copy())
        else:
            writer.add_tensor(renamed(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
