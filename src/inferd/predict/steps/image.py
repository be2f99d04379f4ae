"""Operations on images: decoding, sizes, encoding. Pixels are uint8 with channels last: [rows, height, width,
channels].

Knows Pillow (the extra ``vision``), imported when a model with such an operation is loaded. The bytes are not trusted:
only the listed formats are opened, and no pixel is decoded before the size in the header has been checked.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import numpy as np
from msgspec import Meta

from inferd.config.pipeline_graph import Spec
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.contract import Array, Tensors, object_array
from inferd.predict.steps.operation import Function, Operation, stack

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["RGB", "BGR", "L", "RGBA"]
_MAX_SIDE: Final = (
    65_535  # what JPEG can say; Pillow allocates each row, and a picture of nothing but rows costs seconds
)
Side = Annotated[int, Meta(ge=1, le=16_384)]
TRANSFORM: Final = 8
"""Numbers by which a row's coordinates are found again: scale x, y; offset x, y; original width, height; new ones."""

_CHANNELS: Final[dict[Mode, int]] = {"RGB": 3, "BGR": 3, "L": 1, "RGBA": 4}
# How the first bytes of JPEG, PNG, WebP and GIF look in base64.
_BASE64: Final = (b"/9j/", b"iVBORw0KGgo", b"UklGR", b"R0lGOD")
# What Pillow's decoders raise for bytes that are no image, beside OSError.
_BROKEN: Final = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)


class ImageOperation(Operation, frozen=True, kw_only=True):
    """An operation on images that needs Pillow."""

    takes: ClassVar[tuple[str, ...]] = ("image",)
    gives: ClassVar[tuple[str, ...]] = ("image",)

    def load(self) -> Function:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ModelLoadError(
                "Operations on images need the package pillow; install it with pip install 'inferd[vision]'."
            ) from None
        return self.run


class Decode(ImageOperation, frozen=True, kw_only=True):
    """Files of images (JPEG, PNG, WebP; also as base64 text) to pixels, turned by their EXIF orientation.

    Images of one size become one array. Others stay images of different sizes, which ``image.resize`` makes equal.
    """

    mode: Mode = "RGB"
    formats: tuple[Literal["JPEG", "PNG", "WEBP", "BMP", "GIF"], ...] = ("JPEG", "PNG", "WEBP")
    max_pixels: Annotated[int, Meta(ge=1, le=80_000_000)] = 40_000_000
    orient: bool = True

    def expects(self, name: str) -> Spec | None:
        return Spec("BYTES", (-1,))

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = inputs["image"]
        if spec.datatype != "BYTES" or (spec.shape is not None and len(spec.shape) != 1):
            raise ValueError("its input 'image' must be BYTES of the shape [-1], a file in each row")
        return {"image": Spec("UINT8", (spec.shape[0] if spec.shape else -1, -1, -1, _CHANNELS[self.mode]))}

    def run(self, inputs: Tensors) -> Tensors:
        files = inputs["image"].tolist()
        left = self.max_pixels
        images = []
        for row, file in enumerate(files):
            images.append(self._decode(file, row, left))
            left -= images[-1].shape[0] * images[-1].shape[1]
        return {"image": stack(images)}

    def _decode(self, file: object, row: int, max_pixels: int) -> Array:
        from PIL import Image, ImageOps

        if not isinstance(file, bytes):
            raise _refused(row, "is no file")
        try:
            opened: Image.Image = Image.open(io.BytesIO(_plain(file, row)), formats=self.formats)
            width, height = opened.size
            if width * height > max_pixels:
                raise _refused(
                    row,
                    f"has {width} x {height} pixels; expected at most {self.max_pixels:,} in all images of a request",
                )
            if max(width, height) > _MAX_SIDE:
                raise _refused(row, f"has {width} x {height} pixels; expected at most {_MAX_SIDE:,} on a side")
            if self.orient:
                opened = ImageOps.exif_transpose(opened)
            pixels = np.asarray(_in_mode(opened, self.mode))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _refused(row, f"is too large: {error}") from None
        except InvalidRequest:
            raise
        except _BROKEN as error:
            formats = ", ".join(self.formats)
            raise _refused(
                row, f"cannot be decoded ({type(error).__name__}); expected a whole file of {formats}"
            ) from None
        if self.mode == "L":
            return pixels[..., np.newaxis]
        return pixels[..., ::-1] if self.mode == "BGR" else pixels


def _in_mode(image: Image, mode: Mode) -> Image:
    wanted = "RGB" if mode == "BGR" else mode
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits a channel: Pillow would cut, not scale
        values = np.asarray(image).astype(np.float64)
        top = 65535.0 if values.max(initial=0) > 255 else 255.0
        from PIL import Image as Images

        image = Images.fromarray(np.clip(values * (255.0 / top), 0, 255).astype(np.uint8))
    return image if image.mode == wanted else image.convert(wanted)


def _plain(file: bytes, row: int) -> bytes:
    """The bytes of a file that came as base64 or as a data URL, the forms that JSON can contain."""
    text = file
    if file.startswith(b"data:"):
        head, comma, text = file[:128].partition(b",")
        if not comma or not head.endswith(b";base64"):
            raise _refused(row, "is a data URL without base64 content")
        text = file[len(head) + 1 :]
    elif not file.startswith(_BASE64):
        return file
    try:
        return base64.b64decode(text, validate=False)
    except binascii.Error:
        raise _refused(row, "is not valid base64") from None


def _refused(row: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"The image in row {row} {what}.", param="inputs")


class Resize(ImageOperation, frozen=True, kw_only=True):
    """Pixels to one size. ``stretch`` changes proportions, ``letterbox`` keeps them and fills the rest with ``fill``
    around the middle, ``cover`` keeps them and cuts the rest.

    ``transform`` lets operations on boxes return to the original image: [rows, 8].
    """

    gives: ClassVar[tuple[str, ...]] = ("image", "transform")

    width: Side
    height: Side
    fit: Literal["stretch", "letterbox", "cover"] = "stretch"
    fill: Annotated[int, Meta(ge=0, le=255)] = 114
    filter: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] = "bilinear"

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        rows, channels = _pixels(inputs["image"])
        return {
            "image": Spec("UINT8", (rows, self.height, self.width, channels)),
            "transform": Spec("FP32", (rows, TRANSFORM)),
        }

    def run(self, inputs: Tensors) -> Tensors:
        made = [self._resize(row) for row in inputs["image"]]
        transform = np.stack([way for _, way in made])
        return {"image": stack([image for image, _ in made]), "transform": transform}

    def _resize(self, image: Array) -> tuple[Array, Array]:
        height, width = image.shape[:2]
        if not height or not width:
            raise InvalidRequest("An image has no pixels.", param="inputs")
        if self.fit == "stretch":
            new_width, new_height = self.width, self.height
        else:
            ratios = (self.width / width, self.height / height)
            ratio = min(ratios) if self.fit == "letterbox" else max(ratios)
            new_width, new_height = max(1, round(width * ratio)), max(1, round(height * ratio))
        left, top = (self.width - new_width) // 2, (self.height - new_height) // 2
        # Parts that are cut are not computed: a thin strip would become an enormous image.
        cut = (max(0, -left), max(0, -top))
        scale = (new_width / width, new_height / height)
        box = (
            cut[0] / scale[0],
            cut[1] / scale[1],
            min(width, (cut[0] + min(self.width, new_width)) / scale[0]),
            min(height, (cut[1] + min(self.height, new_height)) / scale[1]),
        )
        size = (min(self.width, new_width), min(self.height, new_height))
        pixels = resized(image, size, self.filter, box)
        if self.fit == "letterbox" and size != (self.width, self.height):
            framed = np.full((self.height, self.width, image.shape[2]), self.fill, dtype=np.uint8)
            framed[top : top + size[1], left : left + size[0]] = pixels
            pixels = framed
        way = np.array([*scale, left, top, width, height, self.width, self.height], dtype=np.float32)
        return pixels, way


def resized(image: Array, size: tuple[int, int], filter: str, box: tuple[float, float, float, float]) -> Array:
    """The pixels inside ``box`` (left, top, right, bottom) at ``size`` (width, height), by Pillow's filters."""
    from PIL import Image

    channels = image.shape[2]
    flat = np.ascontiguousarray(image[..., 0] if channels == 1 else image)
    if (image.shape[1], image.shape[0]) == size and box == (0, 0, *size):
        return image
    made = Image.fromarray(flat).resize(size, Image.Resampling[filter.upper()], box=box)
    pixels = np.asarray(made)
    return pixels[..., np.newaxis] if channels == 1 else pixels


class Crop(Operation, frozen=True, kw_only=True):
    """A rectangle of each image: around the middle, or from ``left`` and ``top``. Copies nothing."""

    takes: ClassVar[tuple[str, ...]] = ("image",)
    gives: ClassVar[tuple[str, ...]] = ("image",)

    width: Side
    height: Side
    left: Annotated[int, Meta(ge=0)] | None = None
    top: Annotated[int, Meta(ge=0)] | None = None

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        rows, channels = _pixels(inputs["image"])
        return {"image": Spec("UINT8", (rows, self.height, self.width, channels))}

    def run(self, inputs: Tensors) -> Tensors:
        return {"image": stack([self._crop(row) for row in inputs["image"]])}

    def _crop(self, image: Array) -> Array:
        height, width = image.shape[:2]
        left = (width - self.width) // 2 if self.left is None else self.left
        top = (height - self.height) // 2 if self.top is None else self.top
        if min(left, top) < 0 or left + self.width > width or top + self.height > height:
            raise InvalidRequest(
                f"An image of {width} x {height} pixels is too small; expected one that holds {self.width} x "
                f"{self.height} from ({max(left, 0)}, {max(top, 0)}).",
                param="inputs",
            )
        return image[top : top + self.height, left : left + self.width]


class Ink(Operation, frozen=True, kw_only=True):
    """A drawing on one background as ink alone: 0 for the background (the usual value of the image's border), 255 for
    the values that differ most from it, darker or lighter.

    The image is cut to the ink and widened to a square, so that its place and size in the image do not matter. An image
    without ink keeps its size, with all values 0.
    """

    takes: ClassVar[tuple[str, ...]] = ("image",)
    gives: ClassVar[tuple[str, ...]] = ("image",)

    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.3  # of the strongest ink: fainter values do not count
    margin: Annotated[float, Meta(ge=0, le=1)] = 0.0  # left around the ink, in parts of its larger side

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        rows, channels = _pixels(inputs["image"])
        if channels != 1:
            raise ValueError("its input 'image' must be grey; give image.decode the option mode: L")
        return {"image": Spec("UINT8", (rows, -1, -1, 1))}

    def run(self, inputs: Tensors) -> Tensors:
        return {"image": stack([self._ink(row) for row in inputs["image"]])}

    def _ink(self, image: Array) -> Array:
        grey = image[..., 0].astype(np.int16)
        if not grey.size:
            raise InvalidRequest("An image has no pixels.", param="inputs")
        border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        ink = np.abs(grey - np.int16(np.median(border)))
        strongest = int(ink.max())
        if not strongest:
            return np.zeros_like(image)
        made = np.rint(ink.astype(np.float32) * (255 / strongest)).astype(np.uint8)
        rows, columns = (np.flatnonzero((made > 255 * self.threshold).any(axis=axis)) for axis in (1, 0))
        cut = made[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        side = round(max(cut.shape) * (1 + 2 * self.margin))
        square = np.zeros((side, side, 1), dtype=np.uint8)
        top, left = (side - cut.shape[0]) // 2, (side - cut.shape[1]) // 2
        square[top : top + cut.shape[0], left : left + cut.shape[1], 0] = cut
        return square


class Encode(ImageOperation, frozen=True, kw_only=True):
    """Pixels (grey, RGB or RGBA) to files."""

    format: Literal["PNG", "JPEG", "WEBP"] = "PNG"
    quality: Annotated[int, Meta(ge=1, le=100)] = 90

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        rows, channels = _pixels(inputs["image"])
        if channels == 4 and self.format == "JPEG":
            raise ValueError("JPEG has no fourth channel; choose PNG or WEBP")
        return {"image": Spec("BYTES", (rows,))}

    def run(self, inputs: Tensors) -> Tensors:
        from PIL import Image

        files = []
        for image in inputs["image"]:
            flat = np.ascontiguousarray(image[..., 0] if image.shape[2] == 1 else image)
            file = io.BytesIO()
            Image.fromarray(flat).save(file, self.format, **({} if self.format == "PNG" else {"quality": self.quality}))
            files.append(file.getvalue())
        return {"image": object_array(files)}


def _pixels(spec: Spec) -> tuple[int, int]:
    """Rows and channels. Raises ValueError for what is no pixels."""
    if spec.datatype != "UINT8" or spec.shape is None or len(spec.shape) != 4:
        raise ValueError("its input 'image' must be pixels: UINT8 of the shape [rows, height, width, channels]")
    rows, _, _, channels = spec.shape
    if channels not in (1, 3, 4, -1):
        raise ValueError(f"its input 'image' has {channels} channels; expected 1, 3 or 4 in the last dimension")
    return rows, channels
