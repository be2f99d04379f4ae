"""Writes a trained model as a Hugging Face folder that any Llama implementation loads.

Knows the files of such a folder; knows nothing of how the weights came to be.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import Llama, LlamaShape

GENERATION = {
    "do_sample": True,
    "temperature": 0.2,
    "top_p": 0.9,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "max_new_tokens": 256,
}


def save(model: Llama, tokenizer_folder: Path, folder: Path) -> None:
    """Write weights in bfloat16, the two configs, and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    temporary = folder / "model.safetensors.part"
    save_file(tensors, str(temporary), metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.shape.as_config(), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_folder / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)


def load(folder: Path) -> Llama:
    """Return the model of a folder that ``save`` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = LlamaShape(**{name: config[name] for name in LlamaShape.__dataclass_fields__})
    model = Llama(shape)
    model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(str(folder / "model.safetensors")).items()}
    )
    return model
