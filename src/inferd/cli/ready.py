"""The screen of ``inferd serve`` when models are ready: their inputs and outputs, and examples to paste.

Knows the terminal and the metadata of models; knows no HTTP.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click

from inferd.cli.predict.layout import example_input, takes_pictures
from inferd.config import Config, ModelConfig, ServerConfig
from inferd.types import ModelInfo, TensorSpec

_MOST_VALUES: Final = 32  # of an example in a line to paste
_MOST_LABELS: Final = 6


def show_ready(
    address: str,
    config: Config,
    infos: Mapping[str, ModelInfo],
    *,
    needs_key: bool = False,
    grpc_address: str | None = None,
    failed: Mapping[str, str] | None = None,
    away: Mapping[str, str] | None = None,
    waiting: Mapping[str, str] | None = None,
) -> None:
    """The address, each predictive model's contract and batching, and examples to paste. ``infos``: models that are
    ready. ``failed``: models that could not be loaded, with the reasons. ``away``: models whose remote servers do not
    answer. ``waiting``: models that wait for a machine, with what is missing."""
    failed, away, waiting = failed or {}, away or {}, waiting or {}
    names = [name for name in config.models if name not in {**failed, **away, **waiting}]
    grpc = f", gRPC at {grpc_address}" if grpc_address is not None else ""
    # Without rich: its import would delay a server of remote models.
    head = click.style("inferd is ready at", fg="green", bold=True)
    if not names:
        head = click.style("inferd listens at", fg="yellow", bold=True)
    click.echo(f"\n{head} {click.style(address, bold=True)}{grpc}  ({', '.join(names) or 'no model is ready'})\n")
    where = _where(address, config)
    for one in config.models:
        info = infos.get(one)
        if info is None:
            continue
        lines = (
            contract_lines(one, info, config.models[one], where)
            if info.kind == "predict"
            else [engine_line(one, info, config.models[one])]
        )
        click.echo("\n".join(lines) + "\n")
    for one, why in failed.items():
        click.secho(f"{one} is not served: {shown(why)}\n", fg="red")
    for one, why in away.items():
        url = ", ".join(upstream.url for upstream in config.models[one].upstreams)
        said = f"{one} is unreachable at {url}: {shown(why.rstrip('.'))}. It is asked again until it answers."
        click.secho(f"{said}\n", fg="yellow")
    joining = f" inferd node token{where} prints what to run on a node." if config.nodes.listen is not None else ""
    for one, why in waiting.items():
        click.secho(f"{one} is not ready yet: {shown(why.rstrip('.'))}.{joining}\n", fg="yellow")
    if needs_key:
        click.echo("Clients need an API key: inferd keys create makes one; below it is read from INFERD_API_KEY.\n")
    known = next((name for name in names if name in infos or config.models[name].upstreams), None)
    if known is not None:
        _show_example(address, known, infos.get(known), needs_key=needs_key)
    elif names:
        click.echo(f"Load the first of them, and see what it takes: inferd predict {shlex.quote(names[0])}{where}\n")
    pages = [f"API reference {address}/docs", f"metrics {address}/metrics"]
    if config.server.console:
        pages.insert(0, f"console {address}/")
    click.echo("   ".join([*pages, *_talk(names, config, infos, where), "stop: Ctrl-C"]) + "\n")
    sys.stdout.flush()


def _show_example(address: str, name: str, info: ModelInfo | None, *, needs_key: bool) -> None:
    client = "openai" if info is None or info.kind == "generate" else python_client(info)
    examples = [("Ask it from a shell:", curl_line(address, name, info, needs_key=needs_key))]
    if info is None or info.kind == "generate" or _is_plain(info):
        lines = python_lines(address, name, info, needs_key=needs_key)
        examples.append((f"or from Python (pip install {shlex.quote(client) if '[' in client else client}):", lines))
    for title, text in examples:
        click.secho(title, dim=True)
        click.echo("\n".join("  " + line for line in text.splitlines()) + "\n")


def _is_plain(info: ModelInfo) -> bool:
    """Whether one request with made-up values for every input gets one answer."""
    is_made_up = any(spec.is_optional or (spec.datatype == "BYTES" and takes_pictures(spec)) for spec in info.inputs)
    return not info.is_decoupled and not is_made_up


def _where(address: str, config: Config) -> str:
    """The options with which commands find this server; none for the usual port and folder."""
    if config.state.data_dir is not None:
        return f" --url {address}"
    port = address.rpartition(":")[2]
    return "" if port == str(ServerConfig().port) else f" --port {port}"


def _talk(names: Sequence[str], config: Config, infos: Mapping[str, ModelInfo], where: str) -> list[str]:
    """Examples of commands for the model that generates text; none where there is no such model."""
    writing = [infos[name] for name in names if name in infos and infos[name].kind == "generate"]
    is_far = any(name not in infos and config.models[name].upstreams for name in names)
    if is_far or any(info.has_chat_template for info in writing):
        return [f"chat: inferd chat{where}"]
    return [f"go on with a text: inferd generate{where} 'Once upon'"] if writing else []


# -- inputs and outputs of models --------------------------------------------------------------


def contract_lines(name: str, info: ModelInfo, config: ModelConfig, where: str = "") -> list[str]:
    """The effective configuration of a predictive model, line by line. ``where``: the options that name this server."""
    parts = [info.platform, batching_text(info, config), threads_text(info.num_threads, info.cores), _copies(config)]
    lines = [f"{click.style(name, bold=True)}  {', '.join(filter(None, parts))}"]
    ask = f"  ask    inferd predict {shlex.quote(name)} {example_input(info.inputs)}{where}"
    return [*lines, *tensor_lines(info.inputs, info.outputs), *([ask] if info.inputs else [])]


def engine_line(name: str, info: ModelInfo, config: ModelConfig) -> str:
    """What computes a model that generates, and where."""
    kernels = {"": "", "none": "plain torch"}.get(info.kernels, f"{info.kernels} kernels")
    weights = "" if info.quantization in ("", "none") else f"{info.quantization} weights"
    cache = "" if config.kv_cache.dtype == "auto" else f"{config.kv_cache.dtype} KV cache"
    threads = threads_text(info.num_threads, info.cores)
    parts = [info.architecture, info.dtype, weights, cache, kernels, threads, info.layout, _copies(config)]
    return f"{click.style(name, bold=True)}  {', '.join(filter(None, map(shown, parts)))}"


def threads_text(num_threads: int, cores: Sequence[int]) -> str:
    """How many threads compute, and on which cores: runs of numbers as first-last."""
    if not num_threads:
        return ""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    where = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    on = f" on core{'s' * (len(cores) != 1)} {where}" if where else ""
    return f"{num_threads} thread{'s' * (num_threads != 1)}{on}"


def _copies(config: ModelConfig) -> str:
    return f"{config.replicas} copies" if config.replicas > 1 else ""


def tensor_lines(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> list[str]:
    """A line for each input and output."""
    width = max((len(shown(spec.name)) for spec in (*inputs, *outputs)), default=0)
    lines = []
    for word, specs in (("takes", inputs), ("gives", outputs)):
        for place, spec in enumerate(specs):
            lines.append(f"  {word if place == 0 else '':5}  {shown(spec.name):{width}}  {spec_text(spec)}")
    return lines


def shown(text: str, *, keep: str = "") -> str:
    """A text from a model's file or answer for a terminal. Control characters are escaped, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def spec_text(spec: TensorSpec) -> str:
    """A datatype and shape, with the names of the last dimension's places."""
    shape = ", ".join("any" if size == -1 else str(size) for size in spec.shape)
    optional = ", may be left out" if spec.is_optional else ""
    labels = ""
    if spec.labels:
        more = ", ..." if len(spec.labels) > _MOST_LABELS else ""
        labels = f": {', '.join(map(shown, spec.labels[:_MOST_LABELS]))}{more}"
    return f"{spec.datatype} [{shape}]{optional}{labels}"


def batching_text(info: ModelInfo, config: ModelConfig) -> str:
    """How its requests are computed together."""
    batching = config.batching
    rows = info.max_batch_size
    if rows <= 1 or batching.mode == "off":
        return "one request at a time" + (f" ({info.not_batched})" if info.not_batched else "")
    if batching.mode == "static":
        return f"always {rows} rows together"
    return f"up to {rows} rows together, waiting at most {batching.max_delay_ms:g} ms"


# -- lines to paste ----------------------------------------------------------------------------


def curl_line(address: str, name: str, info: ModelInfo | None = None, *, needs_key: bool = False) -> str:
    """One request from a shell, in the API that the model is for."""
    key = ' -H "authorization: Bearer $INFERD_API_KEY"' if needs_key else ""
    path, body = _example(name, info)
    if body is None:
        return f"curl{key} {address}{path}"
    text = json.dumps(body, ensure_ascii=False)
    if not text.isprintable():
        text = json.dumps(body)
    return f"curl {address}{path} -H 'content-type: application/json'{key} -d {shlex.quote(text)}"


def _example(name: str, info: ModelInfo | None) -> tuple[str, dict[str, object] | None]:
    if info is not None and info.kind == "generate" and not info.has_chat_template:
        return "/v1/completions", {"model": name, "prompt": "Once upon a time", "max_tokens": 32}
    if info is None or info.kind == "generate":
        return "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "What is inferd?"}]}
    if "embed" in info.tasks:
        return "/v1/embeddings", {"model": name, "input": "What is inferd?"}
    if "rerank" in info.tasks:
        documents = ["A server for models.", "A kind of bread."]
        return "/rerank", {"model": name, "query": "What is inferd?", "documents": documents}
    if "classify" in info.tasks:
        return "/classify", {"model": name, "input": "What a fine day."}
    if not info.inputs or not _is_plain(info) or any(_count(spec) > _MOST_VALUES for spec in info.inputs):
        return f"/v2/models/{name}", None
    inputs = [
        {"name": spec.name, "shape": _sizes(spec), "datatype": spec.datatype, "data": _values(spec)}
        for spec in info.inputs
    ]
    return f"/v2/models/{name}/infer", {"inputs": inputs}


def _sizes(spec: TensorSpec) -> list[int]:
    return [1 if size == -1 else size for size in spec.shape]


def _count(spec: TensorSpec) -> int:
    return math.prod(_sizes(spec))


def _values(spec: TensorSpec) -> list[object]:
    value: object = {"BYTES": "text", "BOOL": False}.get(spec.datatype, 0.5 if "FP" in spec.datatype else 0)
    return [value] * _count(spec)


def python_client(info: ModelInfo) -> str:
    """The package that ``python_lines`` uses."""
    return "openai" if "embed" in info.tasks else "tritonclient[http]"


def python_lines(address: str, name: str, info: ModelInfo | None = None, *, needs_key: bool = False) -> str:
    """The same from Python, with a public client."""
    key = 'os.environ["INFERD_API_KEY"]' if needs_key else '"none"'
    imports = "import os\n" if needs_key else ""
    if info is not None and info.kind == "predict" and "embed" not in info.tasks:
        return imports + _triton_lines(address, name, info, needs_key=needs_key)
    head = f'{imports}from openai import OpenAI\nclient = OpenAI(base_url="{address}/v1", api_key={key})\n'
    if info is not None and info.kind == "predict":
        return f'{head}print(client.embeddings.create(model={name!r}, input="What is inferd?").data[0].embedding[:4])'
    if info is not None and not info.has_chat_template:
        example_call = f"client.completions.create(model={name!r}, prompt='Once upon a time', max_tokens=32)"
        return f"{head}print({example_call}.choices[0].text)"
    return f"""{head}messages = [{{"role": "user", "content": "What is inferd?"}}]
for chunk in client.chat.completions.create(model={name!r}, messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""


def _triton_lines(address: str, name: str, info: ModelInfo, *, needs_key: bool) -> str:
    host = address.partition("://")[2]
    headers = ', headers={"authorization": "Bearer " + os.environ["INFERD_API_KEY"]}' if needs_key else ""
    lines = ["import numpy as np", "from tritonclient import http", "from tritonclient.utils import triton_to_np_dtype"]
    lines += [f'client = http.InferenceServerClient("{host}")', f"model = client.get_model_metadata({name!r}{headers})"]
    lines += [
        "inputs = []",
        'for spec in model["inputs"]:',
        '    rows = np.zeros([max(size, 1) for size in map(int, spec["shape"])], triton_to_np_dtype(spec["datatype"]))',
        '    inputs.append(http.InferInput(spec["name"], rows.shape, spec["datatype"]))',
        "    inputs[-1].set_data_from_numpy(rows)",
        f"print(client.infer({name!r}, inputs{headers}).get_response())",
    ]
    return "\n".join(lines)
