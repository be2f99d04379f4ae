"""A picture as the numbers of an input: its size, its channels and their place, its brightness.

Knows Pillow (the extra ``vision``), imported when a picture is turned into numbers; knows no server.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Final, Literal

import numpy as np

from inferd.cli.predict.layout import layout_of
from inferd.cli.ready import spec_text
from inferd.errors import InvalidRequest
from inferd.predict.contract import Array
from inferd.types import TensorSpec

Range = Literal["0-1", "0-255", "imagenet"]
"""The range of a picture's brightness in numbers: 0 to 1, 0 to 255, or ImageNet's mean and deviation."""

_IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def pixels_of(spec: TensorSpec, data: bytes, origin: str, brightness: Range, say: Callable[[str], None]) -> Array:
    layout = layout_of(spec)
    if layout is None:
        raise InvalidRequest(
            f"The input {spec.name!r} takes {spec_text(spec)}, which is no picture's layout; {origin} is a picture."
        )
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InvalidRequest(
            f"The model takes pixels, and reading {origin} needs the package pillow: pip install 'inferd[vision]'."
        ) from None
    try:
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        picture = picture.convert({1: "L", 3: "RGB", 4: "RGBA"}[layout.channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"{origin} is no picture that can be read: {error}.") from None
    size = (layout.width or picture.width, layout.height or picture.height)
    if picture.size != size:
        say(f"{origin}: resized from {picture.width} x {picture.height} to {size[0]} x {size[1]} pixels")
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    pixels: Array = np.asarray(picture).reshape(size[1], size[0], layout.channels)
    if spec.datatype.startswith(("FP", "BF")):
        pixels = _scaled(pixels, brightness)
        say(f"{origin}: brightness as {brightness} (--brightness chooses another)")
    if layout.is_channels_first:
        pixels = pixels.transpose(2, 0, 1)
    if layout.is_channels_first is None:
        pixels = pixels[..., 0]
    return np.ascontiguousarray(pixels)


def _scaled(pixels: Array, brightness: Range) -> Array:
    values = pixels.astype(np.float32)
    if brightness == "0-255":
        return values
    values /= 255
    if brightness == "imagenet" and pixels.shape[2] == 3:
        mean, deviation = (np.array(one, dtype=np.float32) for one in _IMAGENET)
        return (values - mean) / deviation
    return values
