"""The kind of a file by its content: first bytes, a zip's table of contents, a protobuf's outermost fields.

Reads a few kilobytes, and never more than a table allows. Decodes no model and runs no code. Knows no runtime.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import BinaryIO, Final, Literal

from inferd.errors import ModelLoadError

Content = Literal[
    "onnx", "ort", "pt2", "torchscript", "torch_pickle", "torch_archive", "skops", "pickle", "compressed",
    "xgboost_json", "xgboost_ubj", "xgboost_binary", "lightgbm", "catboost", "safetensors", "npz", "npy", "keras",
    "hdf5", "gguf", "tflite", "tensorrt", "openvino", "pmml", "archive", "zip", "json", "empty", "unknown",
]  # fmt: skip

_HEAD = 4096
_MAGIC: Final[tuple[tuple[int, bytes, Content], ...]] = (
    (0, b"\x89HDF\r\n\x1a\n", "hdf5"),
    (0, b"GGUF", "gguf"),
    (0, b"ggjt", "gguf"),
    (4, b"TFL3", "tflite"),
    (4, b"ORTM", "ort"),
    (0, b"ftrt", "tensorrt"),
    (0, b"ptrt", "tensorrt"),
    (0, b"CBM1", "catboost"),
    (0, b"binf", "xgboost_binary"),
    (0, b"bs64", "xgboost_binary"),
    (0, b"\x93NUMPY", "npy"),
    (0, b"7z\xbc\xaf\x27\x1c", "archive"),
    (257, b"ustar", "archive"),
)
_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x04\x22\x4d\x18")
_ZLIB: Final = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_ASCII_PICKLE = re.compile(
    rb"\A(?:\(?c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\((?:[ldit]p?\d*\n?)|c__builtin__\n|cbuiltins\n)"
)
_MAX_ENTRIES = 100_000


def content_of(path: Path) -> Content:
    """The kind of the file at ``path``. Raises ModelLoadError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return _content(file)
    except OSError as error:
        raise ModelLoadError(
            f"{path} cannot be read: {error.strerror or error}; check its permissions.", param="source"
        ) from None


def _content(file: BinaryIO) -> Content:
    head = file.read(_HEAD)
    size = file.seek(0, 2)
    if not head:
        return "empty"
    for offset, magic, content in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return content
    if head[0] == 0x80 and len(head) > 1 and 2 <= head[1] <= 9:
        return "pickle"
    # A zip is read from its end, so a zip behind other bytes is one too.
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_content(file)
    if head.startswith(_COMPRESSED) or head[:2] in _ZLIB:
        return "compressed"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"{"):
        if b"learner" in head[:64] and head[1:2] in (b"L", b"l", b"i", b"U", b"I"):
            return "xgboost_ubj"
        return (
            "xgboost_json"
            if re.match(rb'\{\s*"(learner|version|Config)"', text) and b'"learner"' in _ends(file, size)
            else "json"
        )
    if text.startswith(b"tree") and b"version=" in text[:200]:
        return "lightgbm"
    if text.startswith(b"<"):
        if b"<PMML" in text:
            return "pmml"
        if b"<net " in text:
            return "openvino"
    if _ASCII_PICKLE.match(head) and _ends(file, size).rstrip().endswith(b"."):
        return "pickle"
    if size > 8 and struct.unpack("<Q", head[:8].ljust(8, b"\0"))[0] < size and head[8:9] == b"{":
        return "safetensors"
    return "onnx" if _is_model_proto(file, size) else "unknown"


def _ends(file: BinaryIO, size: int) -> bytes:
    """The first and last 64 KiB."""
    file.seek(0)
    first = file.read(65536)
    file.seek(max(size - 65536, 0))
    return first + file.read(65536)


def _zip_content(file: BinaryIO) -> Content:
    import zipfile  # importing zipfile also imports four compressors, and most models are no archives

    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, ValueError, struct.error):
        return "unknown"
    if len(names) > _MAX_ENTRIES:
        return "zip"
    inside = {name.split("/", 1)[1] if "/" in name else name for name in names}
    if "archive_format" in inside or "serialized_exported_program.json" in set(names):
        return "pt2"
    if "MAR-INF/MANIFEST.json" in names:
        return "torch_archive"
    if "constants.pkl" in inside or any(name.startswith("code/") for name in inside):
        return "torchscript"
    if "data.pkl" in inside:
        return "torch_pickle"
    if "schema.json" in names:
        return "skops"
    if "config.json" in names and any(name.endswith(".weights.h5") for name in names):
        return "keras"
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    return "zip"


def _is_model_proto(file: BinaryIO, size: int) -> bool:
    """Whether the outermost fields are those of an ONNX ModelProto, each within the file: it has a graph (field 7)."""
    at, has_graph, has_version = 0, False, False
    while at < size:
        file.seek(at)
        window = file.read(24)
        key, used = varint(window, 0)
        field, wire = key >> 3, key & 7
        if used <= 0 or not (1 <= field <= 100):
            return False
        if wire == 0:
            _, end = varint(window, used)
            if end < 0:
                return False
            has_version |= field == 1
            at += end
        elif wire == 2:
            length, end = varint(window, used)
            if end < 0:
                return False
            has_graph |= field == 7
            at += end + length
        else:
            return False
    return at == size and has_graph and has_version


def varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """A protobuf varint and the place behind it; -1 for the place where there is none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return 0, -1
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, -1
