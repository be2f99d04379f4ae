"""``inferd predict``: one prediction of a running server, from files, photos, tables and values.

Uses KServe v2 with binary tensors, so it works with any server that has this protocol. The model's metadata are read
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar, get_args
from urllib.parse import quote

import click
import msgspec

from inferd import clock
from inferd.cli.predict.inputs import tensors_of
from inferd.cli.predict.layout import example_input
from inferd.cli.predict.outputs import document_of, table_of
from inferd.cli.predict.pictures import Range
from inferd.cli.ready import tensor_lines
from inferd.cli.running.control import Answered, Server, server_options, working
from inferd.cli.terminal import console
from inferd.errors import InvalidRequest, Unavailable
from inferd.predict.codecs.tensors import from_bytes, from_json, to_bytes
from inferd.predict.contract import NUMPY, Array, widened
from inferd.types import TensorSpec

_HEAD: Final = "inference-header-content-length"

Shape = TypeVar("Shape")


class _TensorParameters(msgspec.Struct, frozen=True):
    optional: bool = False
    labels: tuple[str, ...] = ()


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _TensorParameters = _TensorParameters()

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, self.shape, self.parameters.optional, self.parameters.labels)


class _ModelParameters(msgspec.Struct, frozen=True):
    tasks: str = ""


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    platform: str = ""
    inputs: tuple[_Tensor, ...] = ()
    outputs: tuple[_Tensor, ...] = ()
    parameters: _ModelParameters = _ModelParameters()


class _Readiness(msgspec.Struct, frozen=True):
    condition: str = ""


class _OutputParameters(msgspec.Struct, frozen=True):
    binary_data_size: int | None = None


class _Output(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: _OutputParameters = _OutputParameters()


class _Answer(msgspec.Struct, frozen=True):
    outputs: tuple[_Output, ...]
    model_version: str = ""


class _Text(msgspec.Struct, frozen=True):
    """What generate answers."""

    text_output: str


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Chat(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


@click.command("predict")
@click.argument("model")
@click.option(
    "--input",
    "-i",
    "inputs",
    multiple=True,
    metavar="VALUE",
    help="A file (picture, .json, .npy, .csv, .txt), text, numbers, - for stdin, or NAME=VALUE for one of several "
    "inputs; again for more rows.",
)
@click.option("--output", "-o", "wanted", multiple=True, metavar="NAME", help="Show this output alone; again for more.")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Classes to show of each row.  [default: 5, fewer where there are many rows]",
)
@click.option("--lines", is_flag=True, help="Each line of a text file or of stdin is a text of its own.")
@click.option(
    "--brightness",
    type=click.Choice(get_args(Range)),
    default="0-1",
    show_default=True,
    help="What a picture's pixels become where the model takes numbers with fractions.",
)
@click.option("--version", default="", help="Version of the model.  [default: the newest]")
@click.option("--json", "as_json", is_flag=True, help="Print the outputs for programs.")
@server_options
def command(
    server: Server,
    model: str,
    inputs: tuple[str, ...],
    wanted: tuple[str, ...],
    top: int | None,
    lines: bool,
    brightness: Range,
    version: str,
    as_json: bool,
) -> int:
    """Get a prediction of MODEL from a running server, and show it.

    The inputs are converted to the model's inputs, as its metadata describe them. A picture is sent as a file to models
    that read files, and as pixels to models that read numbers. Without --input: show the model's inputs and outputs.

    \b
    Examples:
      inferd predict digits --input seven.png
      inferd predict intents -i "Wake me at seven" -i "Where is my parcel?"
      inferd predict iris --input 5.1,3.5,1.4,0.2
      inferd predict iris --input flowers.csv --json | jq .outputs[0].data
      inferd predict reranker -i query="What is it?" -i text="A server."
      cat letter.txt | inferd predict intents -i - --url http://127.0.0.1:8000
    """
    path = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    metadata = _metadata(server, model, path)
    specs = [tensor.spec() for tensor in metadata.inputs]
    outputs = {tensor.name: tensor.spec() for tensor in metadata.outputs}
    if not inputs:
        _describe(model, metadata, specs, list(outputs.values()))
        return 0
    for name in wanted:
        if name not in outputs:
            raise InvalidRequest(f"The model has no output {name!r}; its outputs are {', '.join(outputs)}.")
    tasks = metadata.parameters.tasks.split(",")
    if "generate" in tasks:
        return _write(server, model, path, tasks, inputs, as_json=as_json)

    def say(sentence: str) -> None:
        click.secho(sentence, dim=True, err=True)

    tensors = tensors_of(inputs, specs, brightness=brightness, lines=lines, say=say)
    body, head_bytes = _body({spec.name: spec for spec in specs}, tensors, wanted)
    headers = {"content-type": "application/octet-stream", _HEAD: str(head_bytes)}
    began = clock.now()
    with working(f"Asking {model}"):
        answered = server.send(f"{path}/infer", body, headers)
    took_s = clock.now() - began
    answer, arrays = _read(answered)
    # What an answer brings beyond the metadata has no labels; of what it has, the answer's datatype counts.
    shown = {one.name: outputs.get(one.name, TensorSpec(one.name, one.datatype, ())) for one in answer.outputs}
    shown = {one.name: msgspec.structs.replace(shown[one.name], datatype=one.datatype) for one in answer.outputs}
    if as_json:
        document = document_of(metadata.name, answer.model_version, arrays, shown)
        click.echo(msgspec.json.encode(document))
        return 0
    out = console()
    out.print(table_of(arrays, shown, top))
    about = f"{metadata.name}, {metadata.platform or 'v2'}: {took_s * 1000:.1f} ms, the server {server.name}"
    out.print(about, style="dim", markup=False)
    return 0


def _metadata(server: Server, model: str, path: str) -> _Metadata:
    """Show the model's inputs and outputs. A model that waits for its first request is loaded, because they are known
    only then."""
    try:
        return server.get(path, _Metadata)
    except Unavailable:
        if server.get(f"{path}/ready", _Readiness, accept=(400, 503)).condition != "cold":
            raise
    with working(f"Loading {model}"):
        server.send(f"/v2/repository/models/{quote(model, safe='')}/load", b"{}", {"content-type": "application/json"})
    return server.get(path, _Metadata)


def _describe(model: str, metadata: _Metadata, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
    click.echo(f"{model}  {metadata.platform}")
    for line in tensor_lines(inputs, outputs):
        click.echo(line)
    click.echo(f"\nAsk it: inferd predict {model} {example_input(inputs)}")


def _write(server: Server, model: str, path: str, tasks: list[str], inputs: tuple[str, ...], *, as_json: bool) -> int:
    """The text of a generating model: its answer, or its continuation when it has no chat template."""
    spec = TensorSpec("text_input", "BYTES", (-1,))
    tensors = tensors_of(inputs, [spec], brightness="0-1", lines=False, say=lambda sentence: None)
    texts = [value.decode(errors="replace") for value in tensors["text_input"].ravel().tolist()]
    if len(texts) != 1:
        raise InvalidRequest(f"A language model takes one text at a time here; {len(texts)} were given.")
    body: dict[str, object] = {"text_input": texts[0]}
    if "chat" in tasks:
        path, body = "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": texts[0]}]}
    else:
        path = f"{path}/generate"
    with working(f"Asking {model}"):
        answer = server.send(path, msgspec.json.encode(body), {"content-type": "application/json"}).body
    if as_json:
        click.echo(answer)
    elif "chat" in tasks:
        click.echo(_decoded(answer, _Chat).choices[0].message.content or "")
    else:
        click.echo(_decoded(answer, _Text).text_output)
    return 0


# -- KServe v2 -----------------------------------------------------------------------------------


def _body(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Array], wanted: tuple[str, ...]) -> tuple[bytes, int]:
    """A request with binary tensors in both directions, and the length of its JSON part."""
    parts = {name: to_bytes(specs[name].datatype, array) for name, array in tensors.items()}
    described = [
        {
            "name": name,
            "datatype": specs[name].datatype,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(parts[name])},
        }
        for name, array in tensors.items()
    ]
    head: dict[str, object] = {"inputs": described, "parameters": {"binary_data_output": True}}
    if wanted:
        head["outputs"] = [{"name": name} for name in wanted]
    text = msgspec.json.encode(head)
    return text + b"".join(parts.values()), len(text)


def _read(answered: Answered) -> tuple[_Answer, dict[str, Array]]:
    """The outputs of an answer, in JSON or binary."""
    body = answered.body
    at = int(answered.headers.get(_HEAD, len(body)))
    answer = _decoded(body[:at], _Answer)
    arrays: dict[str, Array] = {}
    for output in answer.outputs:
        if output.datatype not in NUMPY:
            raise Unavailable(f"The output {output.name!r} has the datatype {output.datatype!r}, which is unknown.")
        size = output.parameters.binary_data_size
        if size is None:
            arrays[output.name] = from_json(output.name, output.datatype, output.shape, bytes(output.data))
            continue
        array = from_bytes(output.name, output.datatype, output.shape, body, at, size)
        arrays[output.name] = widened(array) if output.datatype == "BF16" else array
        at += size
    return answer, arrays


def _decoded(body: bytes, shape: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.DecodeError as error:
        raise Unavailable(f"The server's answer is no prediction of KServe v2 ({error}); check the address.") from None
