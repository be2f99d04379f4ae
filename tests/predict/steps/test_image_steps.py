"""Images of untrusted clients: intact files are decoded exactly, others are refused, and memory stays bounded."""

from __future__ import annotations

import base64
import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.predict.steps.pictures import file_of, picture, png

from inferd.config.pipeline_graph import Spec
from inferd.errors import InvalidRequest
from inferd.predict.contract import Array, object_array
from inferd.predict.steps.registry import operation


def decode(*files: bytes, **options: object) -> Array:
    return operation("image.decode", options).load()({"image": object_array(files)})["image"]


def resize(image: Array, **options: object) -> tuple[Array, Array]:
    made = operation("image.resize", options).load()({"image": image})
    return made["image"], made["transform"]


def test_pixels_are_what_was_saved() -> None:
    pixels = picture(7, 5)
    assert np.array_equal(decode(png(pixels)), pixels[np.newaxis])
    assert np.array_equal(decode(png(pixels), mode="BGR"), pixels[np.newaxis, ..., ::-1])
    assert np.array_equal(decode(file_of(pixels, "WEBP", lossless=True)), pixels[np.newaxis])
    grey = picture(7, 5, 1)
    assert np.array_equal(decode(png(grey), mode="L"), grey[np.newaxis])
    assert decode(png(pixels), mode="RGBA").shape == (1, 5, 7, 4)
    lossy = decode(file_of(np.full((16, 16, 3), 90, np.uint8), "JPEG", quality=95))
    assert np.abs(lossy.astype(int) - 90).max() <= 3


def test_sixteen_bits_become_eight() -> None:
    wide = np.linspace(0, 65535, 20, dtype=np.uint16).reshape(4, 5)
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    assert np.abs(decode(file.getvalue(), mode="L")[0, ..., 0].astype(int) - wide // 257).max() <= 1


def test_a_photo_is_turned_as_its_camera_was_held() -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned to the left
    file = file_of(pixels, "JPEG", exif=exif)
    turned = decode(file)
    assert turned.shape == (1, 16, 8, 3)
    assert turned[0, 2, 4, 0] > 200 > 50 > turned[0, 13, 4, 0]
    assert decode(file, orient=False).shape == (1, 8, 16, 3)


def test_json_carries_images_as_base64() -> None:
    pixels = picture(6, 6)
    plain = base64.b64encode(png(pixels))
    for text in (plain, b"data:image/png;base64," + plain, base64.b64encode(file_of(pixels, "WEBP", lossless=True))):
        assert np.array_equal(decode(text), pixels[np.newaxis])
    for wrong in (b"data:image/png," + plain, b"data:x" * 100, plain[:9]):
        with pytest.raises(InvalidRequest, match="row 0"):
            decode(wrong)


def test_images_of_different_sizes_travel_together_until_they_are_resized() -> None:
    images = decode(png(picture(4, 6)), png(picture(8, 3)))
    assert images.dtype == np.object_
    assert [image.shape for image in images] == [(6, 4, 3), (3, 8, 3)]
    small, transform = resize(images, width=5, height=5)
    assert small.shape == (2, 5, 5, 3)
    assert transform[:, 4:6].tolist() == [[4, 6], [8, 3]]


def test_a_picture_of_nothing_but_rows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="row 0 has 1 x 65536 pixels; expected at most 65,535 on a side"):
        decode(png(np.zeros((65_536, 1, 3), np.uint8)))
    assert decode(png(np.zeros((1, 65_535, 3), np.uint8))).shape == (1, 1, 65_535, 3)


def test_the_header_is_believed_before_any_pixel_is_made() -> None:
    bomb = file_of(np.zeros((6000, 6000, 1), np.uint8), "PNG")
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="row 0 has 6000 x 6000 pixels; expected at most 30,000,000"):
            decode(bomb, max_pixels=30_000_000)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_all_images_of_a_request_share_the_bound() -> None:
    for width, height in ((20, 5), (5, 20)):
        file = png(picture(width, height))
        assert decode(file, file, max_pixels=200).shape == (2, height, width, 3)
        with pytest.raises(InvalidRequest, match="row 1"):
            decode(file, file, max_pixels=199)
        with pytest.raises(InvalidRequest, match="row 2"):
            decode(file, file, file, max_pixels=200)


def test_what_libraries_call_a_bomb_is_a_refusal() -> None:
    header = bytearray(png(picture(2, 2)))
    header[16:24] = (60_000).to_bytes(4) * 2
    crc = __import__("zlib").crc32(bytes(header[12:29])).to_bytes(4)
    header[29:33] = crc
    with pytest.raises(InvalidRequest, match="row 0"):
        decode(bytes(header))


def test_only_the_formats_that_are_listed_are_opened() -> None:
    gif = file_of(picture(4, 4, 1), "GIF")
    with pytest.raises(InvalidRequest, match="expected a whole file of JPEG, PNG, WEBP"):
        decode(gif)
    assert decode(gif, formats=["GIF"]).shape == (1, 4, 4, 3)


_FILES = [file_of(picture(12, 9), format) for format in ("JPEG", "PNG", "WEBP")]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(_FILES), st.integers(0, 400), st.binary(max_size=12), st.booleans())
def test_a_damaged_file_is_an_image_or_a_refusal_and_nothing_else(
    file: bytes, at: int, noise: bytes, cut: bool
) -> None:
    damaged = file[:at] + noise + (b"" if cut else file[at + len(noise) :])
    try:
        pixels = decode(damaged, max_pixels=100_000)
    except InvalidRequest:
        return
    assert pixels.dtype == np.uint8


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["stretch", "letterbox", "cover"]),
)
def test_every_size_becomes_the_one_size_and_the_way_back_is_known(
    w: int, h: int, width: int, height: int, fit: str
) -> None:
    image = picture(w, h)[np.newaxis]
    made, (way,) = resize(image, width=width, height=height, fit=fit)
    assert made.shape == (1, height, width, 3)
    scale, offset = way[:2], way[2:4]
    assert way[4:].tolist() == [w, h, width, height]
    middle = np.array([w, h]) / 2 * scale + offset
    assert np.abs(middle - np.array([width, height]) / 2).max() <= 1.0
    corners = np.array([w, h]) * scale
    if fit == "stretch":
        assert np.allclose(corners, [width, height])
    elif fit == "letterbox":
        assert (corners <= np.array([width, height]) + 1).all()
    else:
        assert (corners >= np.array([width, height]) - 1).all()


def test_a_letterbox_keeps_proportions_and_fills_the_rest() -> None:
    made, _ = resize(np.full((1, 10, 20, 3), 200, np.uint8), width=20, height=20, fit="letterbox", fill=7)
    assert (made[0, :5] == 7).all()
    assert (made[0, 5:15] == 200).all()
    assert (made[0, 15:] == 7).all()


def test_covering_a_strip_makes_nothing_larger_than_the_answer() -> None:
    strip = np.zeros((1, 1, 16_000, 3), np.uint8)
    tracemalloc.start()
    try:
        assert resize(strip, width=400, height=400, fit="cover")[0].shape == (1, 400, 400, 3)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_a_size_that_is_right_is_not_computed() -> None:
    image = picture(8, 8)[np.newaxis]
    assert np.shares_memory(resize(image, width=8, height=8)[0], image)


def test_a_crop_is_a_part_of_the_image() -> None:
    pixels = picture(10, 8)[np.newaxis]
    crop = operation("image.crop", {"width": 4, "height": 4}).load()
    assert np.array_equal(crop({"image": pixels})["image"], pixels[:, 2:6, 3:7])
    corner = operation("image.crop", {"width": 4, "height": 4, "left": 0, "top": 1}).load()
    assert np.array_equal(corner({"image": pixels})["image"], pixels[:, 1:5, :4])
    with pytest.raises(InvalidRequest, match="3 x 3 pixels is too small; expected one that holds 4 x 4"):
        crop({"image": picture(3, 3)[np.newaxis]})


@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_encoded_pixels_are_decoded_again(format: str) -> None:
    pixels = np.full((1, 8, 8, 3), 77, np.uint8)
    files = operation("image.encode", {"format": format}).load()({"image": pixels})["image"]
    assert np.abs(decode(files[0]).astype(int) - 77).max() <= 3


def ink(image: Array, **options: object) -> Array:
    return operation("image.ink", options).load()({"image": image})["image"]


@given(
    paper=st.integers(0, 255),
    pen=st.integers(0, 255),
    place=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_ink_is_cut_out_of_any_background_wherever_it_is(
    paper: int, pen: int, place: tuple[int, int], size: tuple[int, int]
) -> None:
    image = np.full((1, 40, 44, 1), paper, dtype=np.uint8)
    image[0, place[0] : place[0] + size[0], place[1] : place[1] + size[1]] = pen
    (found,) = ink(image)
    if paper == pen:
        assert found.shape == (40, 44, 1)
        assert not found.any()
        return
    side = max(size)
    assert found.shape == (side, side, 1)
    assert (found == 255).sum() == size[0] * size[1]
    assert (found == 0).sum() == side * side - size[0] * size[1]


def test_faint_ink_and_a_margin_are_as_asked_for() -> None:
    image = np.zeros((1, 20, 20, 1), dtype=np.uint8)
    image[0, 5, 5:10] = 200
    image[0, 15, 5] = 50  # a quarter as strong
    assert ink(image).shape == (1, 5, 5, 1)
    assert ink(image, threshold=0.2).shape == (1, 11, 11, 1)
    assert ink(image, margin=0.2).shape == (1, 7, 7, 1)


def test_ink_of_colours_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be grey; give image\.decode the option mode: L"):
        operation("image.ink", {}).describe({"image": Spec("UINT8", (-1, -1, -1, 3))})


@pytest.mark.parametrize(("shape", "rows"), [(None, -1), ((-1,), -1), ((3,), 3)])
def test_each_file_is_an_image_of_a_size_that_is_not_known_before(shape: tuple[int, ...] | None, rows: int) -> None:
    for mode, channels in (("RGB", 3), ("BGR", 3), ("RGBA", 4), ("L", 1)):
        described = operation("image.decode", {"mode": mode}).describe({"image": Spec("BYTES", shape)})
        assert described == {"image": Spec("UINT8", (rows, -1, -1, channels))}


@pytest.mark.parametrize("spec", [Spec("UINT8", (-1,)), Spec("BYTES", (-1, 2)), Spec("BYTES", ())])
def test_what_is_no_file_in_each_row_is_refused_before_any_request(spec: Spec) -> None:
    with pytest.raises(ValueError, match="must be BYTES of the shape"):
        operation("image.decode", {}).describe({"image": spec})
