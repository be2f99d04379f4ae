"""Documents made from the code: the Config structs' page and JSON schema, and the page of architectures.

``python -m inferd.cli.reference configuration`` prints ``docs/configuration.md``, ``architectures`` prints
``docs/architectures.md``, ``schema`` prints the schema.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import msgspec

from inferd.cli.flags import MODEL_LEAVES, NODES_LEAVES, SERVER_LEAVES, flag_name
from inferd.config import Config
from inferd.config.tree import Branch, Leaf, branches, dotted
from inferd.config.units import is_count, is_size, size_text

_HEAD = """# Configuration

<!-- Made by `python -m inferd.cli.reference configuration`; edit the structs in src/inferd/config/ instead. -->

A setting comes from a YAML file. The environment overrides the file, and a flag overrides both:
`inferd serve inferd.yaml`, `INFERD_SERVER__PORT=9000`, `--port 9000`. The name of a variable is the path in capitals
with two underscores for each dot. The case and punctuation of a model's or tenant's name do not matter in it, and
positions in lists are numbers: `INFERD_MODELS__CHAT__REMOTES__0__URL`. An unknown key or an invalid value stops the
start, with all errors listed at once. Sizes may be written as `4GiB`, `512MB` or a number of bytes, counts as `200k` or
`2M`. `inferd check FILE` explains errors and shows the memory plan, `inferd config show` prints the result, and
`inferd config schema` prints a JSON schema for editors. [Operations](operations.md#change) describes the effect of a
change of the file on a running server.

```yaml
server:
  port: 8000
models:
  chat:                     # the name that clients use
    source: demo            # a folder, a hub id, or demo
    dtype: bfloat16
    scheduler:
      max_num_seqs: 32
    kv_cache:
      memory_bytes: 2GiB
    remotes:                # more replicas, on other servers
      - url: https://gpu.example.com/v1
        api_key_env: GPU_KEY
        fallback: true      # only while no replica here can take a request
tenants:
  team-a: {rpm: 600, tpm: 200k}
```
"""


def configuration() -> str:
    """The text of docs/configuration.md."""
    flags = {("server", *leaf.path): flag_name(leaf) for leaf in SERVER_LEAVES}
    flags |= {leaf.path: flag_name(leaf) for leaf in NODES_LEAVES}
    flags |= {("models", "*", *leaf.path): flag_name(leaf) for leaf in MODEL_LEAVES}
    parts = [_HEAD]
    parts += [_section(branch, flags) for branch in branches(Config) if branch.leaves]
    return "\n".join(parts)


def _section(branch: Branch, flags: dict[tuple[str, ...], str]) -> str:
    path = dotted(branch.path).replace("*", "NAME").replace("[]", "[N]")
    lines = [f"## {path}", "", inspect.getdoc(branch.type.cls) or "", ""]
    lines += ["| field | what it is | allowed | default | flag |", "| --- | --- | --- | --- | --- |"]
    for leaf in branch.leaves:
        flag = f"`{flags[leaf.path]}`" if leaf.path in flags else ""
        cells = [f"`{leaf.name}`", leaf.description, leaf.allowed, _default(leaf), flag]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(leaf: Leaf) -> str:
    if leaf.required:
        return "required"
    if leaf.default is None:
        return "unset"
    if isinstance(leaf.default, bool):
        return f"`{str(leaf.default).lower()}`"
    if leaf.is_size and isinstance(leaf.default, int):
        return f"`{size_text(leaf.default)}`"
    if isinstance(leaf.default, int):
        return f"`{leaf.default}`"
    if isinstance(leaf.default, list | tuple):
        return ", ".join(f"`{item}`" for item in leaf.default) or "none"
    return f"`{leaf.default:g}`" if isinstance(leaf.default, float) else f"`{leaf.default}`"


def config_schema() -> dict[str, object]:
    """The JSON schema of config files; sizes and counts may also be texts such as '4GiB' and '200k'."""
    schema = msgspec.json.schema(Config)
    _allow_units(schema)
    _allow_short_forms(schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "inferd configuration", **schema}


def _allow_units(node: object) -> None:
    if isinstance(node, list):
        for item in node:
            _allow_units(item)
    if not isinstance(node, dict):
        return
    properties = node.get("properties")
    if isinstance(properties, dict):
        for name, field in properties.items():
            letters = "([KMGTkmgt]i?)?[Bb]?" if is_size(name) else "[kKmMgG]?" if is_count(name) else None
            if letters is not None:
                kept = {key: field.pop(key) for key in ("anyOf", "type", "minimum", "maximum") if key in field}
                choices = kept.get("anyOf", [kept])
                field["anyOf"] = [*choices, {"type": "string", "pattern": f"^\\s*[0-9.]+\\s*{letters}\\s*$"}]
    for item in node.values():
        _allow_units(item)


def _allow_short_forms(definitions: dict[str, dict[str, Any]]) -> None:
    for section in {branch.type.cls for branch in branches(Config)}:
        short = getattr(section, "short", "")
        if short:
            whole = definitions[section.__name__]
            word = {key: value for key, value in whole["properties"][short].items() if key != "default"}
            definitions[section.__name__] = {"title": whole["title"], "anyOf": [whole, word]}


def schema() -> str:
    """The JSON schema as text."""
    return msgspec.json.format(msgspec.json.encode(config_schema()), indent=2).decode() + "\n"


_ARCHITECTURES = """# Architectures

<!-- Made by `python -m inferd.cli.reference architectures`; edit the tables in checkpoints/ and predict/encoder/. -->

A checkpoint is served if `architectures` in its config.json has one of these names. Names stand for whole families:
`LlamaForCausalLM` is Llama 2, Llama 3 and every model in their form (SmolLM 1 and 2, many others), and
`Llama4ForCausalLM` is not listed. `inferd check FOLDER` reads the same tables as the loader, and every number in
config.json that the loader reads. So a checkpoint that it accepts is not refused for its architecture. `inferd models`
prints this list. Other models are served as [ONNX, torch.export, Python classes](models.md) or behind
[their own servers](remote-servers.md).
"""


def architectures() -> str:
    """The page: which architectures are served, from the loaders' own tables."""
    from inferd.checkpoints.architecture import supported_architectures as supported_decoders
    from inferd.predict.encoder.config import HeadKind, supported_architectures

    words: dict[HeadKind, str] = {
        "none": "vectors",
        "sequence": "classes of texts; with one label a score per pair",
        "token": "classes of tokens",
    }
    lines = [_ARCHITECTURES, "## Language models\n"]
    lines += [f"- `{name}`" for name in supported_decoders()]
    lines += ["\n## Text encoders\n", "| `architectures` | answers |", "| --- | --- |"]
    kinds = supported_architectures()
    lines += [f"| `{kind.architecture}` | {words[kind.head]} |" for kind in kinds if kind.family != "decoder"]
    lines += [
        "\n## Decoders as text encoders\n",
        "With `task: embed` (or what else they answer), or with sentence-transformers' `modules.json` in their "
        "folder.\n",
        "| `architectures` | answers |",
        "| --- | --- |",
    ]
    lines += [f"| `{kind.architecture}` | {words[kind.head]} |" for kind in kinds if kind.family == "decoder"]
    return "\n".join(lines) + "\n"


def main() -> int:
    documents = {"architectures": architectures, "configuration": configuration, "schema": schema}
    if len(sys.argv) != 2 or sys.argv[1] not in documents:
        print(f"usage: python -m inferd.cli.reference {'|'.join(documents)}", file=sys.stderr)
        return 2
    sys.stdout.write(documents[sys.argv[1]]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
