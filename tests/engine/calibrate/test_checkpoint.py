"""A checkpoint is quantised, written, and as good as its card says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import FAMILIES, Source
from inferd.checkpoints.stored.writing import Shards, description, stored_parts
from inferd.checkpoints.weights import Weights
from inferd.cli.main import cli, main
from inferd.config.units import bytes_text
from inferd.engine.calibrate import checkpoint
from inferd.engine.calibrate.checkpoint import quantise
from inferd.engine.calibrate.layers import observed_layers
from inferd.engine.calibrate.measure import measure
from inferd.engine.calibrate.tuning import Divergence, Tuned
from inferd.engine.calibrate.wish import Method, Wish
from inferd.engine.perplexity import Perplexity
from inferd.errors import InvalidRequest, ModelLoadError, QualityError
from inferd.native.quantized import QuantizedWeight

CPU = torch.device("cpu")


def silent(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (3000,), generator=draw).tolist()
    path.write_text("".join(map(chr, letters)))
    return path


def run(model: Path, output: Path, text: Path | None, **wish: Any) -> Any:
    wish = {"context": 64, "num_samples": 16, "group_size": 16, **wish}
    return quantise(model, output, Wish(**wish), data=text, source="tiny", progress=silent)


@pytest.mark.parametrize("method", ["int8", "int4", "gptq", "tuned"])
def test_what_is_written_has_the_perplexity_on_its_card(
    tiny_model: Path, text: Path, tmp_path: Path, method: Method
) -> None:
    result = run(tiny_model, tmp_path / "out", text, method=method)
    assert result.after is not None
    # The measurement, made again from the folder: the text's last fifth.
    (tmp_path / "end.txt").write_text(text.read_text()[-600:])
    again = measure(str(tmp_path / "out"), tmp_path / "end.txt", context=64, progress=silent)
    assert again.value == pytest.approx(result.after.value, rel=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{result.after.value:.5g}" in card
    assert "sha256:" in card
    assert f"| size | {bytes_text(result.before_bytes)} -> {bytes_text(result.after_bytes)} (" in card
    assert ("nats a token from the original's answers" in card) == (method == "tuned")
    assert result.after_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size < result.before_bytes
    assert not (tmp_path / "out.unfinished").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_gptq_loses_less_than_rounding(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    """By the second moments that it was made with, over all products."""
    plain = load_file(tiny_model / "model.safetensors")
    lost = {}
    source = Source(tiny_model / "config.json")
    config = read_config(source)
    ids = torch.tensor(list(text.read_bytes()[:2400])).view(-1, 60) + 3
    seen = {
        name: product.moments.clone()
        for layer in observed_layers(
            lambda: Weights(tiny_model, dtype=torch.float32, device=CPU), config, FAMILIES[config.architecture], ids
        )
        for product in layer
        for name, _ in product.parts
    }
    for method in ("int4", "gptq"):
        run(tiny_model, tmp_path / method, text, method=method)
        quantization = Source(tmp_path / method / "config.json").quantization
        weights = Weights(tmp_path / method, dtype=torch.float32, device=CPU, quantization=quantization)
        lost[method] = 0.0
        for name, moments in seen.items():
            exact = plain[f"{name}.weight"]
            off = weights.lend(f"{name}.weight", *exact.shape) - exact
            lost[method] += float(((off @ moments) * off).sum())
    assert lost["gptq"] < 0.95 * lost["int4"]


def test_products_see_what_they_see_in_transformers(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM
    oracle = load.from_pretrained(tiny_model, dtype=torch.float32)
    moments: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def see(module: Any, args: tuple[torch.Tensor], out: Any) -> None:
            x = args[0].flatten(0, 1)
            moments[name] = x.t() @ x

        return see

    for name, module in oracle.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(hook(name))
    ids = torch.randint(3, 250, (5, 33), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        oracle(ids)
    config = read_config(Source(tiny_model / "config.json"))
    count = 0
    for layer in observed_layers(
        lambda: Weights(tiny_model, dtype=torch.float32, device=CPU), config, FAMILIES[config.architecture], ids
    ):
        for product in layer:
            assert product.num_rows == 5 * 33
            for name, _ in product.parts:
                torch.testing.assert_close(product.moments, moments[name], rtol=1e-3, atol=1e-2)
                count += 1
    assert count == len(moments) == 14


def test_a_result_that_is_too_bad_fails_loudly_and_leaves_nothing(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(QualityError, match=r"Perplexity went from .* --max-perplexity-change allows -50\.00%"):
        run(tiny_model, tmp_path / "out", text, method="int4", max_change=-0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_model_too_large_to_learn_in_time_stays_as_gptq_made_it(
    tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.engine.calibrate.fitting._MOST_WORK", 1e6)
    result = run(tiny_model, tmp_path / "tuned", text, method="tuned")
    assert result.divergence is None
    run(tiny_model, tmp_path / "gptq", text, method="gptq")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("tuned", "gptq")]
    assert files[0] == files[1]


def test_what_was_learned_beside_the_integers_is_written_in_the_format_it_had(
    tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.norm.weight"
    monkeypatch.setattr(
        "inferd.engine.calibrate.fitting.tuned",
        lambda _, quantised, *rest, **more: Tuned(quantised, {name: torch.full((32,), 1.5)}, Divergence(0.2, 0.1)),
    )
    run(tiny_model, tmp_path / "tuned", text, method="tuned")
    found, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "tuned", tiny_model))
    assert torch.equal(found[name], torch.full_like(before[name], 1.5))
    others = {other for other in before if other in found} - {name}
    assert "model.embed_tokens.weight" in others
    assert all(torch.equal(found[other], before[other]) for other in others)


def test_the_products_that_lose_most_get_more_bits_until_enough_is_kept(
    tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter(
        [10.0, 11.0, 10.5, 10.1]
    )  # before, then with none, an eighth and a quarter of the weights in 8 bits
    monkeypatch.setattr(checkpoint, "_measured", lambda *_: Perplexity(next(measured), 0.1, 100, 2))
    mixed = run(tiny_model, tmp_path / "mixed", text, method="gptq", group_size=32, mixed=True, max_change=0.02)
    assert next(measured, None) is None
    assert 0 < mixed.wide_share <= 0.25
    assert 4.5 < mixed.bits_per_weight < 8
    quantization = Source(tmp_path / "mixed" / "config.json").quantization
    assert quantization is not None
    assert {quantization.bits(name) for name in mixed.wide} == {8}
    others = {f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")} - set(mixed.wide)
    assert {quantization.bits(name) for name in others} == {4}
    # Parts of one product have the same width, so they stay one product.
    for i in (0, 1):
        assert len({f"model.layers.{i}.self_attn.{n}_proj" in mixed.wide for n in "qkv"}) == 1
    monkeypatch.undo()
    again = measure(str(tmp_path / "mixed"), text, context=64, progress=silent)
    plain = measure(str(tiny_model), text, context=64, progress=silent)
    assert abs(again.change(plain)) < 0.2
    with pytest.raises(
        InvalidRequest, match="--mixed needs the method gptq or tuned, 4 bits and --max-perplexity-change"
    ):
        run(tiny_model, tmp_path / "other", text, method="int4", mixed=True, max_change=0.1)


def test_wishes_that_cannot_be_are_refused_before_work(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"groups of 48 do not divide\. Take 32, 16\."):
        run(tiny_model, tmp_path / "out", text, method="int4", group_size=48)
    with pytest.raises(InvalidRequest, match="gptq calibrates on a text"):
        run(tiny_model, tmp_path / "out", None, method="gptq")
    with pytest.raises(InvalidRequest, match="measures on a text"):
        run(tiny_model, tmp_path / "out", None, method="int8", max_change=0.1)
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(InvalidRequest, match="has 3 tokens, too few"):
        run(tiny_model, tmp_path / "out", short, method="gptq")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidRequest, match="not empty"):
        run(tiny_model, tmp_path / "full", text, method="int8")
    run(tiny_model, tmp_path / "once", None, method="int8")
    with pytest.raises(ModelLoadError, match=r"quantised already .* quantising twice"):
        run(tmp_path / "once", tmp_path / "twice", None, method="int8")


@pytest.mark.parametrize("symmetric", [True, False])
def test_stored_parts_are_read_back(tmp_path: Path, symmetric: bool) -> None:
    draw = torch.Generator().manual_seed(5)
    values = torch.randint(-8, 8, (12, 32), dtype=torch.int8, generator=draw)
    zero = None if symmetric else torch.randint(-8, 8, (12, 2), dtype=torch.int8, generator=draw)
    weight = QuantizedWeight(values, torch.rand(12, 2, generator=draw), zero, 4, 16)
    shards = Shards(tmp_path)
    for name, tensor in stored_parts("m.x", weight, torch.float32).items():
        shards.add(name, tensor)
    shards.close()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": description(4, 16, symmetric=symmetric)}))
    quantization = Source(tmp_path / "config.json").quantization
    found = Weights(tmp_path, dtype=torch.float32, device=CPU, quantization=quantization).integers([("m.x", 12)], 32)
    assert found is not None
    back = found[0]
    assert torch.equal(back.values, values)
    assert torch.equal(back.scale, weight.scale)
    assert (back.zero is None) == symmetric or torch.equal(back.zero, zero)  # type: ignore[arg-type]


def test_shards_are_files_that_the_formats_library_reads(tmp_path: Path) -> None:
    shards = Shards(tmp_path, most_bytes=100)
    tensors = {f"t{i}": torch.randn(3, 5).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(7)}
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert re.fullmatch(r"model-0000\d-of-00003\.safetensors", file)
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
        header = int.from_bytes((tmp_path / file).read_bytes()[:8], "little")
        assert header % 8 == 0, "tensors begin where a mapped file can be read as numbers"
    assert torch.equal(Weights(tmp_path, dtype=torch.float32, device=CPU).read("t3", 3, 5), tensors["t3"].float())


def test_the_commands_write_and_measure(
    tiny_model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    words = ["quantize", str(tiny_model), "--method", "gptq", "--data", str(text), "--output", str(out)]
    words += ["--context", "64", "--group-size", "16", "--samples", "8", "--max-perplexity-change", "900%"]
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 0, found.output
    assert re.search(r"perplexity +\d", found.output)
    (tmp_path / "inferd.yaml").write_text(f"models: {{small: {{source: {out}}}}}")
    found = CliRunner().invoke(cli, ["check", str(tmp_path / "inferd.yaml")])
    assert "small is a quantised checkpoint: compressed-tensors, int4, groups of 16." in found.output
    found = CliRunner().invoke(cli, ["perplexity", str(out), "--data", str(text), "--context", "64", "--json"])
    assert json.loads(found.stdout)["perplexity"] > 1
    found = CliRunner().invoke(cli, ["perplexity", str(out), "--data", str(text), "--context", "999999"])
    most = json.loads((out / "config.json").read_text())["max_position_embeddings"]
    assert f" of {most}, mean loss" in found.output
    assert main([*words[:-1], "-99%"]) == 1
    assert "not empty" in capsys.readouterr().err
    words[words.index(str(out))] = str(tmp_path / "other")
    assert main([*words[:-1], "-99%"]) == 1
    assert "Nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
