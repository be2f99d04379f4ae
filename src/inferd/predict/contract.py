"""The inputs and outputs of a predictive model: names, datatypes and shapes, in the terms of KServe v2.

Knows numpy's arrays and the Open Inference Protocol's datatypes; knows no runtime and no dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from inferd.registry.rows.verdict import Because
from inferd.types import TensorSpec

Array = npt.NDArray[np.generic]
Tensors = Mapping[str, Array]
"""Named arrays. BYTES are arrays of dtype object that hold ``bytes``; BF16 are uint16 (the upper half of a float32)."""

NUMPY: Final[Mapping[str, np.dtype[np.generic]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(np.uint16),
    "BYTES": np.dtype(np.object_),
}
_DATATYPES: Final[Mapping[np.dtype[np.generic], str]] = {dtype: name for name, dtype in NUMPY.items() if name != "BF16"}


MASKS: Final = frozenset({"attention_mask", "padding_mask", "mask"})
"""Names of inputs that mark real values with 1 and padding with 0."""


def datatype_of(dtype: np.dtype[np.generic]) -> str:
    """The protocol's word for a numpy dtype. Raises KeyError for one it has no word for."""
    if dtype.kind in "SU":
        return "BYTES"
    return _DATATYPES[dtype]


def object_array(values: Sequence[object]) -> Array:
    """[n] objects of Python: bytes in a tensor of BYTES, texts for a library."""
    made = np.empty(len(values), np.object_)
    made[:] = values
    return made


def widened(array: Array) -> npt.NDArray[np.float32]:
    """A tensor of BF16 as numbers: the upper halves of float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs and outputs of a loaded model, and what its batches may be.

    Shapes have the batch dimension in front where ``max_batch_size`` is not 0; -1 stands for any size.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0  # rows that the artifact itself can compute together; 0: it is not known to have rows
    because: Because | None = None  # why rows of several requests may be computed together
    tasks: tuple[str, ...] = ("predict",)  # also embed, rerank, score, classify, token_classify, generate
    platform: str = "python"
    is_stateful: bool = False
    refuses_nan: bool = False  # NaN in an input is the client's error
    num_parameters: int = 0
    dtype: str = "float32"
    max_tokens: int = 0  # of one text, for models that read text; 0: none do
    max_rows: int = 65_536  # of one request
    max_elements: int = 1 << 22  # values of one request that are read one by one (``bounds``)
    max_items: int = 0  # requests computed together although they have no batch dimension; 0: each alone
    max_size: int = 0  # sum of ``Item.size`` computed together (tokens, mostly); 0: no such limit
    typical_rows: int = 0  # limit of a batch without a configured one, by the model's measured time; 0: not measured
    rounds_products: bool = False  # computed on a device that rounds products of float32 to fewer bits
    keeps_rows: bool = False  # a row has the same bits beside any other rows
    num_threads: int = 0  # compute threads; 0: not said
    casts: tuple[str, ...] = ()  # inputs that accept numbers of any datatype, if no value is lost
    any_rank: tuple[str, ...] = ()  # inputs whose number of dimensions is free; their shape is reported as [-1]
    not_batched: str = ""  # why requests are computed one by one, where the model's files are the reason
    is_decoupled: bool = False  # one request may have several answers (or none): the runtime is a ``Streaming``

    def __post_init__(self) -> None:
        if self.max_batch_size and self.because is None:
            raise ValueError("a contract with rows says why they may be computed together")
