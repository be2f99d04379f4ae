"""Trains the classifier of digits on scikit-learn's 8 x 8 images: ``python -m training.classifiers.digits``.

It learns the images as they are, moved by a pixel, paler and darker, and as what comes out when a drawing of them (larger,
turned, thinner, bolder) goes through the server's own steps, since pictures from elsewhere arrive that way. The last 500
images are held out: neighbours in the list tend to be by one hand, so these are mostly by others.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from inferd.predict.contract import Tensors
from inferd.predict.steps.registry import operation

from . import scores
from .graph import perceptron, save

HELD_OUT = 500
LABELS = tuple("0123456789")
_SIDE, _DRAWN = 8, 64
_ABOUT = "Digits 0 to 9 of 8 x 8 pixels, row by row, 0 (paper) to 16 (ink). Trained by training/classifiers/digits.py."

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def examples() -> tuple[tuple[Floats, npt.NDArray[np.int64]], tuple[Floats, npt.NDArray[np.int64]]]:
    """(pixels [n, 64] from 0 to 16, classes [n]) for training, and those held out."""
    found = load_digits()
    pixels, classes = found.data.astype(np.float32), found.target.astype(np.int64)
    return (pixels[:-HELD_OUT], classes[:-HELD_OUT]), (pixels[-HELD_OUT:], classes[-HELD_OUT:])


def drawn(pixels: Floats, *, degrees: float = 0.0, at: float | None = None) -> Bytes:
    """A picture [64, 64] of a digit, light on dark; ``at`` makes it two-valued: the lower, the bolder."""
    small = Image.fromarray((pixels.reshape(_SIDE, _SIDE) * (255 / 16)).astype(np.uint8))
    large = Image.new("L", (_DRAWN + 32, _DRAWN + 32))
    large.paste(small.resize((_DRAWN, _DRAWN), Image.Resampling.BICUBIC), (16, 16))
    made = np.asarray(large.rotate(degrees, Image.Resampling.BILINEAR))
    return made if at is None else np.where(made > 255 * at, 255, 0).astype(np.uint8)


def prepared(picture: Bytes) -> Floats:
    """What the steps before the model, as ``models/demo.yaml`` lists them, make of a picture [height, width]."""
    found: Tensors = {"image": picture[np.newaxis, ..., np.newaxis]}
    for name, options in (("image.ink", {}), ("image.resize", {"width": 8, "height": 8, "filter": "box"})):
        found = operation(name, options).load()(found)
    return (found["image"].reshape(-1).astype(np.float32)) * (16 / 255)


def augmented(pixels: Floats, rng: np.random.Generator) -> list[Floats]:
    """A digit in other hands."""
    square = pixels.reshape(_SIDE, _SIDE)
    found = [pixels, np.clip(pixels * rng.uniform(0.5, 1.4), 0, 16)]
    found += [np.roll(square, (int(down), int(right)), (0, 1)).ravel() for down, right in rng.integers(-1, 2, (2, 2))]
    found.append(prepared(drawn(pixels, degrees=rng.uniform(-12, 12))))
    found += [prepared(drawn(pixels, degrees=rng.uniform(-12, 12), at=at)) for at in rng.uniform(0.15, 0.75, 4)]
    return found


def train(seed: int = 0) -> bytes:
    """The model as an ONNX file. The same scikit-learn and machine give the same file."""
    (pixels, classes), _ = examples()
    rng = np.random.default_rng(seed)
    rows = [(made, label) for row, label in zip(pixels, classes, strict=True) for made in augmented(row, rng)]
    inputs = np.stack([made for made, _ in rows]).astype(np.float32) / 16
    model = MLPClassifier((96,), alpha=1e-3, learning_rate_init=2e-3, batch_size=128, max_iter=25, random_state=seed)
    model.n_iter_no_change = 100  # a fixed number of passes
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        model.fit(inputs, np.array([label for _, label in rows]))
    (first, last), (first_bias, last_bias) = model.coefs_, model.intercepts_
    return perceptron((first / 16, first_bias), (last, last_bias), LABELS, _ABOUT)


def measure(content: bytes) -> dict[str, float]:
    """How many of the held-out digits are told right: as numbers, and as pictures that go through the steps."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content)
    _, (pixels, classes) = examples()
    pictures = np.stack([prepared(255 - drawn(row, at=0.4)) for row in pixels])

    def accuracy(rows: Floats) -> float:
        (found,) = session.run(["probabilities"], {"pixels": rows})
        return float((found.argmax(axis=1) == classes).mean())

    return {"64 numbers": accuracy(pixels), "pictures, 96 x 96, black on white": accuracy(pictures)}


def main(path: Path = scores.MODELS / "demo-digits" / "model.onnx") -> None:
    """Write the model and its scores."""
    content = train()
    save(content, path)
    scores.write("digits", measure(content))


if __name__ == "__main__":
    main()
