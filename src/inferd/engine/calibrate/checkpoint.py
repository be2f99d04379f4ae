"""Makes a quantised checkpoint from an unquantised one: choose integers, write, load again, measure, judge.

Only a result that passed is kept: the folder gets its name after it was written, measured and found good enough.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from inferd.checkpoints.architecture import GPT, dtype_name, read_config
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.longrope import with_factors
from inferd.checkpoints.safetensors import weight_files
from inferd.checkpoints.stored.writing import Shards, description, stored_parts
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.checkpoints.weights import Weights
from inferd.engine.calibrate.card import card
from inferd.engine.calibrate.fitting import (
    Job,
    Loss,
    gptq_products,
    rounded_products,
    stored_scales,
    tuned_products,
)
from inferd.engine.calibrate.measure import read_text
from inferd.engine.calibrate.result import Result
from inferd.engine.calibrate.rounding import Form
from inferd.engine.calibrate.student import Handed
from inferd.engine.calibrate.tuning import Tuned
from inferd.engine.calibrate.wish import Wish
from inferd.engine.model.load import load_model
from inferd.engine.perplexity import Perplexity, measuring, perplexity
from inferd.errors import InvalidRequest, ModelLoadError, QualityError

Progress = Callable[[str, int, int], None]

_CARRIED = (".json", ".jinja", ".model", ".txt")
"""Files beside the weights that belong to the model: configuration, tokenizer, chat template, licence."""

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of the weights that mixed widths try in 8 bits


class _Texts:
    """Calibration windows and the held-out ids of one text."""

    def __init__(self, path: Path, tokenizer: Tokenizer, wish: Wish, context: int) -> None:
        text = read_text(path)
        self.digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        self.leading = tokenizer.encode("")
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut = len(ids) - max(int(len(ids) * wish.held_out), 2 * context)
        calibration = ids[: max(cut, 0)]
        self.held_out = ids[max(cut, 0) :][: wish.most_measured]
        fresh = context - len(self.leading)
        count = len(calibration) // fresh
        if count < 1:
            raise InvalidRequest(
                f"{path} has {len(ids)} tokens, too few: {2 * context} are measured on and {context} at least "
                "calibrated with. "
                "Give a longer text, or a smaller context.",
                param="data",
            )
        self._calibration, self._fresh, self.num_windows = calibration, fresh, count
        self.windows = self.spread(wish.num_samples)

    def spread(self, count: int) -> Tensor:
        """Calibration windows spread over the text's beginning, at most all there are: [N, context] of token ids."""
        all_of_them, fresh = self.num_windows, self._fresh
        count = min(count, all_of_them)
        starts = [i * (all_of_them - 1) // max(count - 1, 1) for i in range(count)]
        return torch.tensor([self.leading + self._calibration[s * fresh : (s + 1) * fresh] for s in starts])


def quantise(folder: Path, output: Path, wish: Wish, *, data: Path | None, source: str, progress: Progress) -> Result:
    """Write ``output``. ``data``: a text, whose end is reserved for measuring. ``source``: the model's name on the
    card.

    Raises ModelLoadError for the model, InvalidRequest for settings or a text that cannot be used, and QualityError for
    a result that is worse than ``wish.max_change``.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequest(
            f"{output} exists already and is not empty. Name another folder, or remove it.", param="output"
        )
    if data is None and (wish.calibrates or wish.max_change is not None):
        what = f"{wish.method} calibrates" if wish.calibrates else "max_perplexity_change measures"
        raise InvalidRequest(f"{what} on a text. Give one with --data.", param="data")
    config, open_weights = _opened(folder)
    widths = _widths(open_weights())
    form = wish.form(config.hidden_size, widths.values())
    _check_groups(widths, form, folder)
    context = min(wish.context, config.max_position_embeddings)
    texts = None if data is None else _Texts(data, Tokenizer.load(folder), wish, context)
    before = None if texts is None else _measured(folder, texts, context, progress, "before")
    if wish.mixed and (not wish.calibrates or form.bits != 4 or wish.max_change is None):
        raise InvalidRequest(
            "--mixed needs the method gptq or tuned, 4 bits and --max-perplexity-change. Give these, or leave it out.",
            param="mixed",
        )
    making = output.with_name(output.name + ".unfinished")
    shutil.rmtree(making, ignore_errors=True)
    try:
        losses: dict[tuple[str, ...], Loss] = {}
        for share in _SHARES if wish.mixed else (0.0,):
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            wide = _widest(losses, share)
            counts = _write(making, folder, config, wish, form, wide, open_weights, texts, progress)
            after = None if texts is None else _measured(making, texts, context, progress, "after")
            losses = losses or counts.losses
            if before is None or after is None or wish.max_change is None or after.change(before) <= wish.max_change:
                break
        result = Result(
            folder=output,
            wish=wish,
            form=form,
            source=source,
            architecture=config.architecture,
            before_bytes=_weights_bytes(folder),
            after_bytes=_weights_bytes(making),
            bits_per_weight=counts.bits,
            num_quantised=counts.weights,
            before=before,
            after=after,
            context=context,
            data="" if data is None else data.name,
            data_digest="" if texts is None else texts.digest,
            wide=tuple(sorted(wide)),
            wide_share=counts.wide_weights / max(counts.weights, 1),
            divergence=None if counts.tuned is None else counts.tuned.divergence,
            num_calibration=0 if texts is None or not wish.calibrates else texts.windows.numel(),
        )
        _judge(result)
        (making / "README.md").write_text(card(result), encoding="utf-8")
        if output.exists():
            output.rmdir()
        making.rename(output)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return result


def _opened(folder: Path) -> tuple[DecoderConfig, Callable[[], Handed]]:
    """The model's configuration, and a function that opens its weights. Raises ModelLoadError."""
    source = Source(folder / "config.json")
    if source.quantization is not None:
        raise ModelLoadError(
            f"{source.path}: the checkpoint is quantised already ({source.quantization.label}). "
            "Give the unquantised one: "
            "quantising twice loses twice."
        )
    config = with_factors(read_config(source), "auto", None)  # as it is served where nothing else is said
    if config.architecture in GPT or config.architecture == "Gemma3ForConditionalGeneration":
        raise ModelLoadError(
            f"{source.path}: {config.architecture} checkpoints are not quantised by this command. Serve the model with "
            "quantization: int8 or int4, which quantises any of them when it is loaded.",
            param="architectures",
        )
    dtype: torch.dtype = getattr(torch, dtype_name("auto", config.dtype, on_cpu=True, source=source))
    return config, lambda: Handed(folder, dtype=dtype, device=torch.device("cpu"))


def _is_product(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a layer's product. Embedding, head, norms and routers of experts are not
    quantised."""
    return (
        tensor.dim() == 2
        and name.startswith("model.layers.")
        and name.endswith(".weight")
        and not name.endswith(".gate.weight")
    )


def _widths(weights: Weights) -> dict[str, int]:
    """The inputs of each product."""
    return {name: tensor.shape[1] for name in weights if _is_product(name, tensor := weights.stored(name))}


def _check_groups(widths: dict[str, int], form: Form, folder: Path) -> None:
    for name, width in widths.items():
        if not form.fits(width):
            others = [str(size) for size in (128, 64, 32, 16) if all(w % size == 0 for w in widths.values())]
            remedy = f"Take {', '.join(others)}." if others else "Take int8."
            raise InvalidRequest(
                f"{folder}: {name} has {width} inputs, which groups of {form.group_size} do not divide. {remedy}",
                param="group_size",
            )


def _widest(losses: dict[tuple[str, ...], Loss], share: float) -> frozenset[str]:
    """The names of the products with the largest loss, up to this share of all weights."""
    room = share * sum(loss.num_weights for loss in losses.values())
    found: list[str] = []
    for names, loss in sorted(losses.items(), key=lambda item: -item[1].share):
        room -= loss.num_weights
        if room < 0:
            break
        found += names
    return frozenset(found)


@dataclass(slots=True)
class _Counts:
    weights: int = 0  # quantised
    wide_weights: int = 0
    stored_bits: int = 0
    tuned: Tuned | None = None
    losses: dict[tuple[str, ...], Loss] = field(default_factory=dict)  # by the names of a product's parts

    @property
    def bits(self) -> float:
        return self.stored_bits / max(self.weights, 1)


def _write(
    making: Path,
    folder: Path,
    config: DecoderConfig,
    wish: Wish,
    form: Form,
    wide: frozenset[str],
    open_weights: Callable[[], Handed],
    texts: _Texts | None,
    progress: Progress,
) -> _Counts:
    """The folder's files. Integers of a product are written as soon as they are chosen."""
    weights = open_weights()
    products = [name for name in weights if _is_product(name, weights.stored(name))]
    shards, counts = Shards(making), _Counts()
    scale_dtype = stored_scales(weights.stored(products[0]).dtype)
    form = replace(form, scale_dtype=scale_dtype)

    def record_loss(names: tuple[str, ...], loss: Loss) -> None:
        counts.losses[names] = loss

    if texts is None or wish.method in ("int8", "int4"):
        fitted = rounded_products(weights, products, form, progress)
    else:

        def record_tuned(found: Tuned) -> None:
            counts.tuned = found

        job = Job(
            config, open_weights, texts.windows, texts.spread, form, wide, wish, record_loss, record_tuned, progress
        )
        fitted = tuned_products(job, weights) if wish.method == "tuned" else gptq_products(job, weights)
    for name, quantised in fitted:
        for part, tensor in stored_parts(name, quantised, scale_dtype, packed=name in wide).items():
            shards.add(part, tensor)
            counts.stored_bits += 8 * tensor.nbytes
        counts.weights += quantised.values.numel()
        counts.wide_weights += quantised.values.numel() if name in wide else 0
    floats = {} if counts.tuned is None else counts.tuned.floats
    for name in weights:
        if name not in products:
            as_it_was = weights.stored(name)
            shards.add(name, floats[name].to(as_it_was.dtype) if name in floats else as_it_was)
    shards.close()
    for path in sorted(folder.iterdir()):
        belongs = path.suffix in _CARRIED or path.name.startswith(("LICENSE", "NOTICE"))
        if path.is_file() and belongs and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, making / path.name)
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole["quantization_config"] = description(form.bits, form.group_size, symmetric=form.symmetric, wide=sorted(wide))
    (making / "config.json").write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return counts


def _measured(folder: Path, texts: _Texts, context: int, progress: Progress, which: str) -> Perplexity:
    """Perplexity of the model as it is served: the same number format, kernels and activations."""
    decoder = load_model(folder, dtype="auto", device=torch.device("cpu"))

    def report(phase: str, done: int, total: int) -> None:
        progress(f"{phase} {which}", done, total)

    runner = measuring(decoder, num_tokens=max(2048, 2 * context))
    return perplexity(runner, texts.held_out, context=context, leading=texts.leading, progress=report)


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def _judge(result: Result) -> None:
    most, change = result.wish.max_change, result.change
    if most is None or change is None or change <= most:
        return
    assert result.before is not None
    assert result.after is not None
    raise QualityError(
        f"Perplexity went from {result.before.value:.4g} to {result.after.value:.4g} on {result.data}, {change:+.2%}, "
        "and "
        f"--max-perplexity-change allows {most:+.2%}. Nothing was written. Take --method tuned, smaller groups, "
        "--mixed or int8, or allow more."
    )
