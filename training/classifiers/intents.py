"""Trains the classifier of intents on the phrases of ``phrases.py``: ``python -m training.classifiers.intents``.

Words and pairs of words, weighted by how rare they are, and one linear layer: scikit-learn's logistic regression.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from . import scores
from .graph import TOKENS, bag_of_words, save
from .phrases import LABELS, Split, phrases

_ABOUT = (
    "Intents of short English requests, in lower case. Trained by training/classifiers/intents.py on phrases we wrote."
)
_SIZES: dict[Split, int] = {"train": 40, "held-out": 10}


def examples(split: Split, *, of_words: Split | None = None) -> tuple[list[str], list[str]]:
    """Texts and their intents. ``of_words`` as for ``phrases``."""
    found = list(phrases(split, _SIZES[of_words or split], seed=1 if split == "train" else 2, of_words=of_words))
    return [text for text, _ in found], [intent for _, intent in found]


def fitted() -> tuple[TfidfVectorizer, LogisticRegression]:
    texts, intents = examples("train")
    vectors = TfidfVectorizer(token_pattern=TOKENS, ngram_range=(1, 2), lowercase=False, min_df=3)
    model = LogisticRegression(C=5.0, max_iter=1000)
    model.fit(vectors.fit_transform(texts), intents)
    return vectors, model


def train() -> bytes:
    """The model as an ONNX file. The same scikit-learn and machine give the same file."""
    vectors, model = fitted()
    entries = {tuple(re.findall(TOKENS, entry)): place for entry, place in vectors.vocabulary_.items()}
    vocabulary = sorted(entries, key=lambda entry: (len(entry), entry))
    order = [entries[entry] for entry in vocabulary]
    assert tuple(model.classes_) == LABELS
    return bag_of_words(
        vocabulary,
        vectors.idf_[order].astype(np.float32),
        (model.coef_.T[order], model.intercept_),
        LABELS,
        _ABOUT,
    )


def measure(content: bytes) -> dict[str, float]:
    """How many held-out phrases are told right."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content)

    def accuracy(texts: list[str], intents: list[str]) -> float:
        (found,) = session.run(["label"], {"text": np.array(texts, dtype=object)})
        return float(np.mean(found == np.array(intents)))

    return {
        "wordings and words that are in no training phrase": accuracy(*examples("held-out")),
        "wordings of the training, with other words in them": accuracy(*examples("train", of_words="held-out")),
    }


def main(path: Path = scores.MODELS / "demo-intents" / "model.onnx") -> None:
    """Write the model and its scores."""
    content = train()
    save(content, path)
    scores.write("intents", measure(content))


if __name__ == "__main__":
    main()
