"""Text encoders behind the runtime's interface: embeddings, reranking, classes of texts and of tokens.

The texts of a batch are sorted by length and computed as flat lists of tokens without padding, a few hundred tokens at
a time, which fit into the caches. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from inferd.config import ModelConfig
from inferd.errors import InferdError, InvalidRequest, ModelLoadError
from inferd.predict.contract import Array, Contract, object_array
from inferd.predict.encoder.checkpoint import read_options
from inferd.predict.encoder.entities import entities
from inferd.predict.encoder.load import TextModel, load_text_model
from inferd.predict.encoder.ragged import ragged
from inferd.predict.encoder.text_options import TextOptions, cut_of, dimensions_of, prompt_of, text_options_of
from inferd.predict.encoder.texts import Among, Encoded
from inferd.predict.load import num_threads
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes.libraries import bound_memory
from inferd.types import TensorSpec

Progress = Callable[[str, int, int], None]
Floats = npt.NDArray[np.float32]

MAX_ROWS: Final = 65536
# On a CPU more tokens at a time raise the latency and not the throughput (bench/micro_encoder.py).
CPU_TOKENS: Final = 512
CPU_CHUNK: Final = 256
SMALLEST_CHUNK: Final = 96
GPU_TOKENS: Final = 16384
# A request with many texts is computed in parts, so that other requests are computed in between. A part has as many
# texts of full length as fit into CPU_PART_TOKENS, within the bounds CPU_PART_ROWS, so that short texts are not
# computed one by one.
CPU_PART_TOKENS: Final = 8192
CPU_PART_ROWS: Final = (8, 64)

_TASKS: Final[dict[str, tuple[str, ...]]] = {
    "embed": ("predict", "embed", "score", "rerank"),
    "rerank": ("predict", "rerank", "score"),
    "classify": ("predict", "classify"),
    "token_classify": ("predict", "classify", "token_classify"),
}
_TEXT: Final = TensorSpec("text", "BYTES", (-1,))
_QUERY: Final = TensorSpec("query", "BYTES", (-1,))


_Row = tuple[int, int, int]
"""A text of a batch: its tokens, its item's place, its place in the item."""


class _Prepared(msgspec.Struct, frozen=True):
    texts: tuple[str, ...]
    encoded: list[Encoded]
    text_options: TextOptions


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> EncoderRuntime:
    """Raises ModelLoadError."""
    options = read_options(config.options)
    torch.set_num_threads(num_threads(config))
    device = _device(config.device)
    bound_memory(torch, device, config.memory_bytes)
    model = load_text_model(
        Path(path),
        task=config.task,
        dtype=config.dtype,
        device=device,
        max_tokens=config.max_model_len,
        rope_factors=config.rope_factors,
        options=options,
        progress=progress,
    )
    runtime = EncoderRuntime(model, max_tokens=config.batching.max_batch_tokens)
    progress("warm-up", 0, 1)
    runtime.warm_up()
    progress("warm-up", 1, 1)
    return runtime


def _device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(f"device is {requested!r}, but torch finds no CUDA device here; use cpu.", param="device")
    return torch.device(requested)


class EncoderRuntime:
    """Implements ``inferd.predict.runtime.Runtime`` over a ``TextModel``."""

    def __init__(self, model: TextModel, *, max_tokens: int | None = None) -> None:
        self._model = model
        on_cpu = model.device.type == "cpu"
        budget = max_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS)
        self._chunk = min(budget, CPU_CHUNK) if on_cpu else budget
        self._threads = torch.get_num_threads() if on_cpu else 1
        self._pool: ThreadPoolExecutor | None = None
        if self._threads > 1:
            self._pool = ThreadPoolExecutor(self._threads, "inferd-encoder", torch.set_num_threads, (1,))
        self._contract = Contract(
            inputs=_inputs(model),
            outputs=_outputs(model),
            max_batch_size=MAX_ROWS,
            because="by_nature",
            tasks=_TASKS[model.task],
            platform="inferd_encoder",
            num_parameters=model.num_parameters,
            dtype=str(model.dtype).removeprefix("torch."),
            max_tokens=model.texts.max_tokens,
            max_size=budget,
            typical_rows=_part_rows(model.texts.max_tokens) if on_cpu else 0,
            num_threads=self._threads if on_cpu else 0,
            rounds_products=not on_cpu,
            keeps_rows=model.keeps_rows,
        )

    @property
    def contract(self) -> Contract:
        return self._contract

    def warm_up(self) -> None:
        """One batch: memory is touched, and a defect of the checkpoint shows now."""
        made = ["warm"] * 4
        inputs = {spec.name: _bytes(made) for spec in self._contract.inputs if not spec.is_optional}
        inputs.setdefault("text", _bytes(made))
        item = Item(request_id="warm-up", inputs=inputs, rows=len(made))
        self.prepare(item)
        self.predict([item])

    # -- texts to tokens --------------------------------------------------------------------

    def prepare(self, item: Item) -> None:
        """Tokenize; ``size`` is tokens. Raises InvalidRequest, ContextLengthExceeded."""
        model, text_options = self._model, text_options_of(item.parameters)
        cut = cut_of(text_options, model.texts.max_tokens)
        if model.task == "embed":
            dimensions_of(text_options, model.size)
        among = Among(item.first_row, item.total_rows or item.rows)
        texts: tuple[str, ...] = ()
        if "token_ids" in item.inputs:
            if "text" in item.inputs:
                raise InvalidRequest("Send either the input 'text' or 'token_ids', one of the two.", param="inputs")
            lists = _id_lists(item.inputs["token_ids"])
            encoded = [model.texts.check_ids(ids, at, among, cut) for at, ids in enumerate(lists)]
        else:
            if "text" not in item.inputs:
                raise InvalidRequest("The input 'text' is missing (or 'token_ids' instead).", param="inputs")
            first = _texts(item, "text")
            texts = tuple(first)
            other = "query" if "query" in item.inputs else "text_pair" if "text_pair" in item.inputs else None
            if other == "query":
                encoded = model.texts.encode_pairs(
                    list(zip(_texts(item, "query"), first, strict=True)), cut, among=among
                )
            elif other is not None:
                encoded = model.texts.encode_pairs(list(zip(first, _texts(item, other), strict=True)), cut, among=among)
            else:
                prompt = prompt_of(text_options, model.sentence)
                if prompt:
                    first = [prompt + text for text in first]
                encoded = model.texts.encode(first, cut, offsets=model.task == "token_classify", among=among)
        item.size = sum([len(one.ids) for one in encoded])
        item.prepared = _Prepared(texts, encoded, text_options)

    # -- tokens to results ------------------------------------------------------------------

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        prepared = [_prepared_of(item) for item in items]
        rows = [(len(one.ids), i, j) for i, many in enumerate(prepared) for j, one in enumerate(many.encoded)]
        rows.sort()
        if self._model.task == "token_classify":
            per_token: list[list[Floats]] = [[_NOTHING] * len(many.encoded) for many in prepared]
            for chunk, values in self._computed(prepared, rows):
                begin = 0
                for length, i, j in chunk:
                    per_token[i][j] = values[begin : begin + length]
                    begin += length
            return [
                Result(outputs={"entities": self._entities(many, logits)}, num_tokens=item.size)
                for item, many, logits in zip(items, prepared, per_token, strict=True)
            ]
        size = self._model.size
        per_text: list[Floats] = [np.empty((len(many.encoded), size), np.float32) for many in prepared]
        for chunk, values in self._computed(prepared, rows):
            for value, (_, i, j) in zip(values, chunk, strict=True):
                per_text[i][j] = value
        return [
            Result(outputs=self._finished(many.text_options, values), num_tokens=item.size)
            for item, many, values in zip(items, prepared, per_text, strict=True)
        ]

    def _computed(self, prepared: list[_Prepared], rows: list[_Row]) -> list[tuple[list[_Row], Floats]]:
        """The model's outputs for rows, chunk by chunk. Several chunks are computed by one thread each, so threads wait
        for each other once and not in every layer."""
        chunks = _chunks(rows, self._chunk, self._threads)

        def compute(chunk: list[_Row]) -> Floats:
            encoded = [prepared[i].encoded[j] for _, i, j in chunk]
            with torch.inference_mode():
                batch = ragged([one.ids for one in encoded], [one.types for one in encoded], self._model.device)
                values: Floats = self._model.compute(batch).float().cpu().numpy()
            return values

        is_shared = self._pool is not None and len(chunks) > 1
        found = self._pool.map(compute, chunks) if self._pool is not None and is_shared else map(compute, chunks)
        return list(zip(chunks, found, strict=True))

    def _finished(self, text_options: TextOptions, values: Floats) -> dict[str, npt.NDArray[np.generic]]:
        """Turns the model's values [n, size] for one item into the outputs of its task."""
        model = self._model
        match model.task:
            case "embed":
                values = values[:, : dimensions_of(text_options, model.size)]
                if model.normalize if text_options.normalize is None else text_options.normalize:
                    length = np.sqrt(np.einsum("ij,ij->i", values, values))
                    values = values / np.maximum(length, 1e-12)[:, None]
                return {"embedding": values}
            case "rerank":
                is_raw = model.raw_score if text_options.raw_scores is None else text_options.raw_scores
                return {"score": values[:, 0] if is_raw else _sigmoid(values[:, 0])}
            case _:
                return {"probabilities": values if text_options.raw_scores else _probabilities(model, values)}

    def _entities(self, many: _Prepared, logits: list[Floats]) -> Array:
        is_joined = many.text_options.aggregation_strategy != "none"
        return _bytes(
            [
                msgspec.json.encode(entities(text, one, _softmax(values), self._model.labels, is_joined=is_joined))
                for text, one, values in zip(many.texts, many.encoded, logits, strict=True)
            ]
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


_NOTHING: Final[Floats] = np.empty((0, 0), np.float32)


def _part_rows(max_tokens: int) -> int:
    fewest, most = CPU_PART_ROWS
    return max(fewest, min(most, CPU_PART_TOKENS // max_tokens))


def _inputs(model: TextModel) -> tuple[TensorSpec, ...]:
    if model.task == "rerank":
        return (_QUERY, _TEXT)
    if model.task == "classify":
        return (_TEXT, TensorSpec("text_pair", "BYTES", (-1,), is_optional=True))
    if model.task == "embed":
        # Each element of token_ids: a text's ids as little-endian INT32.
        return (
            TensorSpec("text", "BYTES", (-1,), is_optional=True),
            TensorSpec("token_ids", "BYTES", (-1,), is_optional=True),
        )
    return (_TEXT,)


def _outputs(model: TextModel) -> tuple[TensorSpec, ...]:
    match model.task:
        case "embed":
            return (TensorSpec("embedding", "FP32", (-1, model.size)),)
        case "rerank":
            return (TensorSpec("score", "FP32", (-1,)),)
        case "classify":
            return (TensorSpec("probabilities", "FP32", (-1, model.size), labels=model.labels),)
        case _:
            return (TensorSpec("entities", "BYTES", (-1,), labels=model.labels),)


def _prepared_of(item: Item) -> _Prepared:
    assert isinstance(item.prepared, _Prepared), "predict before prepare"
    return item.prepared


def _chunks(rows: list[_Row], budget: int, threads: int) -> list[list[_Row]]:
    """Rows of similar length in chunks with about equal numbers of tokens. A chunk exceeds the budget by half a text at
    most. There is a chunk for each thread, unless chunks would be smaller than SMALLEST_CHUNK."""
    total = sum([length for length, _, _ in rows])
    count = -(-total // budget)
    if threads > 1 and total >= threads * SMALLEST_CHUNK:
        count = -(-count // threads) * threads
    count = min(count, len(rows))
    chunks: list[list[_Row]] = [[] for _ in range(count)]
    seen = 0
    for row in rows:
        middle = seen + row[0] // 2
        chunks[min(middle * count // total, count - 1)].append(row)
        seen += row[0]
    return [chunk for chunk in chunks if chunk]


def _texts(item: Item, name: str) -> list[str]:
    try:
        return [str(value, "utf-8") for value in item.inputs[name].tolist()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The input {name!r} holds bytes that are no UTF-8 (at byte {error.start} of a text).", param="inputs"
        ) from None


def _id_lists(array: npt.NDArray[np.generic]) -> list[list[int]]:
    lists: list[list[int]] = []
    for at, value in enumerate(array.tolist()):
        if len(value) % 4:
            raise InvalidRequest(
                f"token_ids[{at}] has {len(value)} bytes; expected little-endian INT32, 4 bytes for each id.",
                param="inputs",
            )
        lists.append(np.frombuffer(value, "<i4").tolist())
    return lists


def _bytes(values: Sequence[str | bytes]) -> Array:
    return object_array([value.encode() if isinstance(value, str) else value for value in values])


def _probabilities(model: TextModel, logits: Floats) -> Floats:
    if model.problem_type == "regression":
        return logits
    if model.problem_type == "multi_label_classification" or model.size == 1:
        return _sigmoid(logits)
    return _softmax(logits)


def _sigmoid(logits: Floats) -> Floats:
    return np.reciprocal(1.0 + np.exp(-np.clip(logits, -80.0, 80.0)), dtype=np.float32)


def _softmax(logits: Floats) -> Floats:
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: Floats = grown / grown.sum(axis=-1, keepdims=True)
    return found
