"""Memory of a checkpoint's weights once they are loaded, computed from file headers alone. Knows no tensor.

The planner uses it before a worker exists, and the worker before it imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inferd.checkpoints.architecture import is_ignorable
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.safetensors import Entry, read_table, weight_files
from inferd.checkpoints.stored.layout import Layout, layouts, served_bytes
from inferd.errors import ModelLoadError
from inferd.native.forms import Rule, padding


def weight_bytes(folder: Path, source: Source, dims: DecoderConfig, itemsize: int, asked: str) -> int:
    """Bytes of the tensors that the model uses, by the headers of its files.

    A tensor counts in the model's number format, as its stored integers, or as the integers that ``asked`` (the setting
    ``quantization``) makes of it. Raises ModelLoadError.
    """
    used = used_tensors(folder, dims)
    stored = {} if source.quantization is None else layouts(source.quantization, used, str(folder))
    return held_bytes(used, stored, dims, itemsize, asked)


def used_tensors(folder: Path, dims: DecoderConfig) -> dict[str, Entry]:
    """The tensors of a checkpoint's files that the model uses, by name. Raises ModelLoadError."""
    tables = {}
    for path in weight_files(folder):
        try:
            tables.update(read_table(path))
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    ignorable = is_ignorable(dims)
    taken = [name for name in tables if not ignorable(name)]
    if dims.tie_word_embeddings and not any(name.endswith(("embed_tokens.weight", "wte.weight")) for name in taken):
        taken += [name for name in tables if name == "lm_head.weight"]  # the other name of the one tensor
    return {name: tables[name] for name in taken}


def held_bytes(
    used: Mapping[str, Entry], stored: Mapping[str, Layout], dims: DecoderConfig, itemsize: int, asked: str
) -> int:
    """Bytes of the tensors ``used`` in a loaded model; of a part of its tensors, that part's. ``stored``: its quantised
    products. ``itemsize`` and ``asked`` as of ``weight_bytes``."""
    rule, turned = Rule(asked, dims.hidden_size), dims.architecture == "GPT2LMHeadModel"

    def added(name: str, rows: int, columns: int) -> int:
        """The bytes that a matrix takes beside its numbers; negative where it becomes integers."""
        if turned and not name.endswith(("wte.weight", "lm_head.weight")):
            rows, columns = columns, rows
        form = rule.form(name)
        if form is None:
            return padding(name, rows, columns) * itemsize
        return form.nbytes(rows, columns) - rows * columns * itemsize

    def keeps(layout: Layout) -> bool:
        return layout.is_integer and asked in ("auto", f"int{layout.bits}")

    parts = {layout.tensor(part) for layout in stored.values() for part in layout.parts}
    plain = [(name, *entry.shape) for name, entry in used.items() if name not in parts and len(entry.shape) == 2]
    made = [(f"{one.name}.weight", one.out_features, one.in_features) for one in stored.values() if not keeps(one)]
    return served_bytes(used, stored, itemsize, keeps) + sum(added(*matrix) for matrix in (*plain, *made))
