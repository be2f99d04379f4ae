"""Operations on texts: normal forms, tokens.

Knows the package ``tokenizers`` (the extra ``llm``), imported when a model with ``tokenize`` is loaded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import numpy as np
from msgspec import Meta

from inferd.config.pipeline_graph import Spec
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.predict.contract import Array, Tensors, object_array
from inferd.predict.long_text import deciding_part
from inferd.predict.steps.operation import Function, Operation

_BLANKS = re.compile(r"\s+")
_MARGIN: Final = 256  # characters beside a cut that another form of the text may change


def _text(spec: Spec, name: str) -> Spec:
    if spec.datatype != "BYTES":
        raise ValueError(f"its input {name!r} must be texts (BYTES), not {spec.datatype}")
    return spec


def _decoded(array: Array) -> list[str]:
    """The texts of a BYTES tensor. Raises InvalidRequest for bytes that are no UTF-8."""
    found = []
    for value in array.ravel().tolist():
        try:
            found.append(value.decode() if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"A text is not valid UTF-8 ({error.reason}).", param="inputs") from None
    return found


class NormalizeText(Operation, frozen=True, kw_only=True):
    """Texts in one form: Unicode's normal form, case, accents, blanks."""

    takes: ClassVar[tuple[str, ...]] = ("text",)
    gives: ClassVar[tuple[str, ...]] = ("text",)

    unicode: Literal["NFC", "NFKC", "NFD", "NFKD", "none"] = "NFC"
    lower: bool = False
    strip_accents: bool = False
    blanks: Literal["keep", "collapse"] = "collapse"  # collapse: one space for each run, none around
    max_chars: Annotated[int, Meta(ge=1)] = 65_536  # longer texts are cut, because one text delays all other requests

    def expects(self, name: str) -> Spec | None:
        return Spec("BYTES", (-1,))

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        return {"text": _text(inputs["text"], "text")}

    def run(self, inputs: Tensors) -> Tensors:
        array = inputs["text"]
        return {"text": object_array([self._cut(text).encode() for text in _decoded(array)]).reshape(array.shape)}

    def _cut(self, text: str) -> str:
        """In its form and cut. No more of a long text is worked on than is kept: a character may become eighteen."""
        size = 2 * (self.max_chars + _MARGIN)
        while len(text) > size:
            found = self._normal(text[:size])
            if len(found) >= self.max_chars + _MARGIN:
                return found[: self.max_chars]
            size *= 2
        return self._normal(text)[: self.max_chars]

    def _normal(self, text: str) -> str:
        if self.strip_accents:
            text = "".join(sign for sign in unicodedata.normalize("NFD", text) if not unicodedata.combining(sign))
        if self.unicode != "none":
            text = unicodedata.normalize(self.unicode, text)
        if self.lower:
            text = text.lower()
        if self.blanks == "collapse":
            text = _BLANKS.sub(" ", text).strip()
        return text


class Tokenize(Operation, frozen=True, kw_only=True):
    """Texts to token ids by a ``tokenizer.json``, padded to the longest of the request (or to ``pad_to``)."""

    takes: ClassVar[tuple[str, ...]] = ("text",)
    gives: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "token_type_ids")

    file: str
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 512  # longer texts are cut
    pad_to: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    add_special_tokens: bool = True

    def expects(self, name: str) -> Spec | None:
        return Spec("BYTES", (-1,))

    def describe(self, inputs: Mapping[str, Spec]) -> Mapping[str, Spec]:
        spec = _text(inputs["text"], "text")
        if spec.shape is not None and len(spec.shape) != 1:
            raise ValueError("its input 'text' must have the shape [-1], a text in each row")
        if self.pad_to is not None and self.pad_to < self.max_tokens:
            raise ValueError(f"pad_to = {self.pad_to} is below max_tokens = {self.max_tokens}")
        rows = spec.shape[0] if spec.shape else -1
        return {name: Spec("INT64", (rows, self.pad_to or -1)) for name in self.gives}

    def load(self) -> Function:
        try:
            from tokenizers import Tokenizer

            from inferd.checkpoints.text.tokenizer import forget_words
        except ImportError:
            raise ModelLoadError(
                "The operation tokenize needs the package tokenizers; install it with pip install 'inferd[llm]'."
            ) from None
        path = Path(self.file).expanduser()
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise ModelLoadError(f"The tokenizer {path} cannot be read: {error}.", param="options.file") from None
        except Exception as error:  # the library's only type
            raise ModelLoadError(f"{path} is not a tokenizer.json: {error}.", param="options.file") from None
        forget_words(tokenizer)
        padding = tokenizer.padding or {}
        pad_id, pad_type = int(padding.get("pad_id", 0)), int(padding.get("pad_type_id", 0))
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_tokens)

        def count(text: str) -> int:
            one = tokenizer.encode(text)
            return len(one.ids) + sum(len(more.ids) for more in one.overflowing)

        def run(inputs: Tensors) -> Tensors:
            parts = [deciding_part(text, self.max_tokens, count).text for text in _decoded(inputs["text"])]
            encoded = tokenizer.encode_batch(parts, add_special_tokens=self.add_special_tokens)
            length = self.pad_to or max(1, *(len(one.ids) for one in encoded))
            ids = np.full((len(encoded), length), pad_id, dtype=np.int64)
            mask = np.zeros((len(encoded), length), dtype=np.int64)
            types = np.full((len(encoded), length), pad_type, dtype=np.int64)
            for row, one in enumerate(encoded):
                ids[row, : len(one.ids)], mask[row, : len(one.ids)] = one.ids, 1
                types[row, : len(one.ids)] = one.type_ids
            return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}

        return run
