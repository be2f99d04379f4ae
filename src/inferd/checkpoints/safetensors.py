"""Tables of safetensors files: names, shapes, formats and positions of tensors. Knows no tensor.

The header is validated, not trusted. A truncated file, a wrong length, an offset out of range, or a shape that does not
fit its bytes raises an error that names the file.
Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON, data).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from inferd.errors import ModelLoadError

_MAX_HEADER_BYTES = 100 * 1024 * 1024
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor."""

    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    begin: int  # of its bytes, from the start of the file

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


def read_table(path: Path) -> dict[str, Entry]:
    """The tensors of one file by name. Raises ModelLoadError; OSError where it cannot be read."""
    size = path.stat().st_size
    if size < 8:
        raise _broken(path, f"it has {size} bytes, too few for a header")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise _broken(path, f"its header claims {length} bytes, but the file has {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise _broken(path, "its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    table = {name: _check(path, name, entry, data_at=8 + length, size=size) for name, entry in header.items()}
    places = sorted((entry.begin, entry.begin + entry.nbytes) for entry in table.values())
    for (_, end), (begin, _) in pairwise(places):
        if begin < end:
            raise _broken(path, "its tensors overlap")
    return table


def _check(path: Path, name: str, entry: object, *, data_at: int, size: int) -> Entry:
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(n, int) and n >= 0 for n in shape
        ):
            pass
        case _:
            raise _broken(path, f"the entry of tensor {name!r} is malformed")
    if kind not in ITEM_BYTES:
        raise ModelLoadError(f"{path}: tensor {name!r} has dtype {kind!r}; supported are {', '.join(ITEM_BYTES)}.")
    if not 0 <= begin <= end:
        raise _broken(path, f"tensor {name!r} has offsets {begin} to {end}")
    if end > size - data_at:
        raise _broken(
            path, f"tensor {name!r} ends at byte {end}, but there are {size - data_at}: the file is truncated"
        )
    found = Entry(kind, tuple(shape), data_at + begin)
    if end - begin != found.nbytes:
        raise _broken(path, f"tensor {name!r} has shape {shape} of {kind}, but {end - begin} bytes")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files. Raises ModelLoadError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards: Any = json.loads(index.read_text())["weight_map"]
            names = sorted(set(shards.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"{index} is not a safetensors index: it needs a 'weight_map' object. Download it again."
            ) from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelLoadError(f"{index} names the shard {name!r}; a shard must be a file of the same folder.")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}. "
                "Download the checkpoint again."
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise ModelLoadError(
            f"{folder} has weights only as {pickles[0].name}, a pickle, which can run code and is never loaded. "
            "Convert it to safetensors, or take a revision that has them."
        )
    raise ModelLoadError(
        f"{folder} has no model.safetensors. Give the folder of a Hugging Face checkpoint with safetensors weights."
    )


def _broken(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a sound safetensors file: {why}. Download it again.")
