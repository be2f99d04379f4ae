"""Train the classifier of examples/digits.yaml on the digits that scikit-learn carries: digits.onnx, in a second.

Needs scikit-learn and skl2onnx: pip install scikit-learn skl2onnx
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def main(path: Path) -> None:
    pixels, digits = load_digits(return_X_y=True)
    train = slice(0, 1500)  # the rest is what the tests ask
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(pixels[train], digits[train])
    onnx = to_onnx(model, pixels[:1].astype(np.float32), options={"zipmap": False})
    path.write_bytes(onnx.SerializeToString())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "digits.onnx"))
