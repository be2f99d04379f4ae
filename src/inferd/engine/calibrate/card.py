"""The model card of a quantised checkpoint: what it is, what it was made from, and its measurements."""

from __future__ import annotations

from inferd import __version__
from inferd.config.units import bytes_text
from inferd.engine.calibrate.result import Result


def card(result: Result) -> str:
    """README.md of the folder, in Markdown."""
    wish, form = result.wish, result.form
    integers = f"int{form.bits}, " + (
        f"groups of {form.group_size} inputs" if form.group_size else "a scale per output"
    )
    if result.wide:
        integers += f" ({result.wide_share:.0%} of the weights int8)"
    integers += "" if form.bits == 8 else ", symmetric" if form.symmetric else ", with zero points"
    gptq = f"GPTQ (Frantar et al. 2022), {result.num_calibration:,} tokens of calibration, damping {wish.damping:g}"
    gptq += ", columns by size" if wish.by_size else ""
    method = {
        "int8": "to the nearest",
        "int4": "to the nearest on each group's best grid",
        "gptq": gptq,
        "tuned": f"{gptq}, then integers, scales and what stays floating learned from the original's answers to "
        "these tokens",
    }[wish.method]
    kept = "as they were" if result.divergence is None else "in the format they had"
    rows = [
        ("made from", result.source),
        ("architecture", result.architecture),
        ("weights", integers),
        ("method", method),
        (
            "quantised",
            f"{result.num_quantised:,} weights, {result.bits_per_weight:.2f} bits each with their scales; "
            f"embedding, head and norms {kept}",
        ),
        (
            "size",
            f"{bytes_text(result.before_bytes)} -> {bytes_text(result.after_bytes)} "
            f"({result.after_bytes / result.before_bytes:.0%})",
        ),
        ("format", "compressed-tensors; inferd, vLLM and transformers read it"),
        ("made with", f"inferd {__version__}"),
    ]  # fmt: skip
    if result.divergence is not None:
        before, after = result.divergence.before, result.divergence.after
        rows.append(
            (
                "learned",
                f"{before:.4f} -> {after:.4f} nats a token from the original's answers, "
                "on windows that were not learned from",
            )
        )
    lines = [f"# {result.source}, {integers}", "", "| | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows), ""]
    if result.before is None or result.after is None:
        return "\n".join([*lines, "Its quality was not measured: no text was given (`--data`).", ""])
    lines += [
        "| perplexity | before | after | change |",
        "| --- | --- | --- | --- |",
        f"| {result.data} | {result.before.value:.5g} | {result.after.value:.5g} | {result.change:+.2%} |",
        "",
        f"Measured by inferd as it serves, on {result.after.num_scored:,} tokens of the text's end, "
        "which calibration did not see, in "
        f"windows of {result.context}. The standard error of the text's mean loss is {result.before.error:.3f} nats; "
        "the change is of the "
        "same tokens, so it is known better than that.",
        "",
        f"Data: {result.data}, {result.data_digest}",
        "",
    ]
    return "\n".join(lines)
