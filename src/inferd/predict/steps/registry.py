"""The operations by name. An operation is imported when a model uses it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Final

import msgspec

from inferd.predict.steps.operation import Operation

OPERATIONS: Final[Mapping[str, str]] = {
    "image.decode": "image:Decode",
    "image.resize": "image:Resize",
    "image.crop": "image:Crop",
    "image.ink": "image:Ink",
    "image.encode": "image:Encode",
    "text.normalize": "text:NormalizeText",
    "tokenize": "text:Tokenize",
    "normalize": "arrays:Normalize",
    "rescale": "arrays:Rescale",
    "transpose": "arrays:Transpose",
    "reshape": "arrays:Reshape",
    "cast": "arrays:Cast",
    "concat": "arrays:Concat",
    "either": "arrays:Either",
    "softmax": "scores:Softmax",
    "sigmoid": "scores:Sigmoid",
    "argmax": "scores:Argmax",
    "top_k": "scores:TopK",
    "labels": "scores:Labels",
    "threshold": "scores:Threshold",
    "l2_normalize": "scores:L2Normalize",
    "mean_pool": "scores:MeanPool",
    "boxes.split": "boxes:Split",
    "boxes": "boxes:Boxes",
    "json": "document:Json",
}


def operation_type(name: str) -> type[Operation]:
    """The operation's struct of options. Raises ValueError for a name that nothing has."""
    place = OPERATIONS.get(name)
    if place is None:
        close = difflib.get_close_matches(name, OPERATIONS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(OPERATIONS))}."
        raise ValueError(f"there is no operation {name!r}; {hint}")
    module, _, struct = place.partition(":")
    found = getattr(importlib.import_module(f"inferd.predict.steps.{module}"), struct)
    assert isinstance(found, type)
    assert issubclass(found, Operation)
    return found


def operation(name: str, options: Mapping[str, object]) -> Operation:
    """The operation with its options. Raises ValueError with the problem of the options."""
    kind = operation_type(name)
    unknown = [option for option in options if option not in kind.__struct_fields__]
    if unknown:
        close = difflib.get_close_matches(unknown[0], kind.__struct_fields__, n=1)
        known = ", ".join(kind.__struct_fields__) or "none"
        hint = f"did you mean {close[0]}?" if close else f"its options are {known}."
        raise ValueError(f"{name} has no option {unknown[0]!r}; {hint}")
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}.") from None
