"""What must hold between settings, and between settings and this machine: rules that no type can express.

Given a configuration in which each field has an allowed value. Does not know how it was read. A problem never repeats a
secret, nor a value that may be one by mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from inferd.config.config import Config
from inferd.config.model import ModelConfig
from inferd.config.patterns import problem_of
from inferd.config.pipeline_rules import problems_of
from inferd.config.remote import RemoteSettings
from inferd.config.tree import Path as Place
from inferd.config.tree import Problem
from inferd.config.units import bytes_text
from inferd.config.versioning import RolloutConfig, VerifyConfig

_STATE_SCHEMES = ("sqlite", "postgresql", "postgres")
_CACHE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Settings of local workers, which say nothing where every replica is remote.
_LOCAL_ONLY = (
    "replicas",
    "scaling",
    "roles",
    "placement",
    "load",
    "idle_after_s",
    "memory_bytes",
    "memory_fraction",
    "resume_streams",
    "chat_template",
    "speculation",
    "watermark",
    "parallel",
    "adapters",
    "adapter_roots",
    "adapter_memory_bytes",
)


def problems_between(config: Config, env: Mapping[str, str]) -> Iterator[Problem]:
    """Everything wrong with settings that are each fine alone."""
    yield from _server(config)
    yield from _state(config)
    yield from _tracing(config)
    yield from _mlflow(config, env)
    for name, model in config.models.items():
        yield from _model(name, model, env)
        yield from problems_of(("models", name), model, config.models)
        yield from _rollout(("models", name), model)
        yield from _verify(("models", name), model)
        yield from _scaling(("models", name), model)
        yield from _roles(("models", name), model)
        yield from _placement(("models", name), model, config)
        yield from _machines(("models", name), model, config)
    yield from _shared_gpus(config)
    yield from _adapters(config)
    yield from _registry(config)
    yield from _payloads(config)
    yield from _memory(config)
    yield from _regions(config)


def _adapters(config: Config) -> Iterator[Problem]:
    """An adapter's name is one that clients use, so it stands for nothing else."""
    taken = {name: f"the model {name}" for name in config.models}
    for name, model in config.models.items():
        for adapter, source in model.adapters.items():
            here: Place = ("models", name, "adapters", adapter)
            sentence = adapter_name_problem(adapter)
            if sentence:
                yield Problem(here, sentence)
            elif adapter in taken:
                yield Problem(here, f"{adapter!r} is the name of {taken[adapter]} already; choose another one.")
            if not source.strip():
                yield Problem(here, "its source is empty; give the folder that peft saved, or a hub id.")
            taken.setdefault(adapter, f"an adapter of {name}")


def adapter_name_problem(name: str) -> str:
    """Why this is no name for an adapter; empty: it is one."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > 256:
        return f"{name[:80]!r} is not an adapter's name: it is empty, too long, or has blanks around it."
    if "@" in name:
        return f"{name!r} is not an adapter's name: '@' is for versions of models."
    return ""


def _server(config: Config) -> Iterator[Problem]:
    if config.server.grpc_port and config.server.grpc_port == config.server.port:
        yield Problem(("server", "grpc_port"), f"{config.server.port} is server.port already; choose another one.")
    listen = config.nodes.listen
    if listen is not None:
        host, _, port = listen.rpartition(":")
        if int(port) > 65535:
            yield Problem(("nodes", "listen"), f"{port} is no port; take one of at most 65535, or 0 for a free one.")
        if not is_host(host):
            yield Problem(("nodes", "listen"), f"{host[:80]!r} is no name of a host; write one, or its address.")
    if config.nodes.key is not None and config.nodes.certificate is None:
        yield Problem(("nodes", "certificate"), "missing; name the certificate's file, or leave nodes.key out.")
    if config.nodes.token_file is not None and (sentence := _unreadable(config.nodes.token_file, "the token")):
        yield Problem(("nodes", "token_file"), sentence)
    if config.server.tls.key is not None and config.server.tls.certificate is None:
        yield Problem(
            ("server", "tls", "certificate"), "missing; name the certificate's file, or leave server.tls.key out."
        )
    if config.server.log_file is not None:
        sentence = _file_problem(Path(config.server.log_file).expanduser())
        if sentence:
            yield Problem(("server", "log_file"), sentence)
    for index, origin in enumerate(config.server.cors_origins):
        if origin != "*" and not _is_origin(origin):
            yield Problem(
                ("server", "cors_origins", index), f"{origin!r} is not a web origin such as https://app.example.com."
            )
    for index, host in enumerate(config.server.allowed_hosts):
        if not host or "/" in host or "://" in host:
            yield Problem(
                ("server", "allowed_hosts", index), f"{host!r} is not a host name such as inferd.example.com."
            )


def _placement(here: Place, model: ModelConfig, config: Config) -> Iterator[Problem]:
    """Everything wrong with where the replicas of a model may run. ``here``: the model's place."""
    placement = model.placement
    if placement.nodes == "local" and placement.labels:
        yield Problem(
            (*here, "placement", "labels"), "only nodes have labels, and placement.nodes is local; keep one of the two."
        )
    elif placement.cores is not None and placement.nodes != "ray":
        yield Problem(
            (*here, "placement", "cores"),
            f"only a Ray cluster reserves cores, and placement.nodes is {placement.nodes}; set threads, or leave it "
            "out.",
        )
    elif placement.nodes == "ray":
        if config.nodes.ray is None:
            yield Problem(
                (*here, "placement", "nodes"),
                "ray, and no cluster is named; set nodes.ray to auto, or to the cluster's HOST:PORT.",
            )
    elif (placement.nodes == "only" or placement.labels) and config.nodes.listen is None and not model.is_remote:
        yield Problem(
            (*here, "placement"),
            "its replicas run on nodes alone, and none can join; set nodes.listen to HOST:PORT, or leave this out.",
        )


def _machines(here: Place, model: ModelConfig, config: Config) -> Iterator[Problem]:
    """Everything wrong with ranks on several machines. ``here``: the model's place."""
    parallel, at = model.parallel, (*here, "parallel", "machines")
    if parallel.machines == 1 or model.is_remote:
        return
    if parallel.count % parallel.machines:
        has = "1 rank does" if parallel.count == 1 else f"{parallel.count} ranks do"
        yield Problem(
            at,
            f"{parallel.machines}, but {has} not divide by it; take another number of machines, or of stages "
            "(parallel.pipeline).",
        )
    if config.nodes.listen is None:
        yield Problem(at, "ranks on other machines run on nodes, and none can join; set nodes.listen to HOST:PORT.")
    if model.placement.nodes != "any":
        yield Problem(
            (*here, "placement", "nodes"),
            f"{model.placement.nodes}, but a replica on several machines begins on this one; leave it out. Labels say "
            "which nodes may have the other ranks.",
        )
    if config.server.devices.memory_bytes is not None:
        yield Problem(
            at, "all ranks are placed on this machine by server.devices.memory_bytes; leave one of the two out."
        )
    if model.scaling is not None:
        yield Problem((*here, "scaling"), "replicas on several machines do not follow the load yet; set replicas.")
    if model.verify is not None:
        yield Problem((*here, "verify"), "files on other machines are not verified yet; leave verify or machines out.")


def _shared_gpus(config: Config) -> Iterator[Problem]:
    """Groups of ranks of several models that would have the same GPUs: each would take all of their memory."""
    groups = [
        (name, model)
        for name, model in config.models.items()
        if model.owned_gpus and not model.is_on_demand and runs_here(model, config)
    ]
    for (one, first), (other, second) in combinations(groups, 2):
        shared = range(
            max(first.owned_gpus.start, second.owned_gpus.start), min(first.owned_gpus.stop, second.owned_gpus.stop)
        )
        if shared and not (first.kv_cache.memory_bytes and second.kv_cache.memory_bytes):
            yield Problem(
                ("models", other, "device"),
                f"{second.device}, but ranks of {one} have {', '.join(f'cuda:{number}' for number in shared)} too; set "
                f"it to cuda:{first.owned_gpus.stop}, or kv_cache.memory_bytes of both models to have them share GPUs.",
            )


def machines_setting(count: int, model: ModelConfig, config: Config) -> str:
    """What to set, and to leave out, so that a model has a stage of its layers on each of ``count`` machines; empty:
    it cannot be divided so, whatever is set."""
    if model.device.startswith("cuda"):
        return ""
    return ", ".join((f"set parallel to {{pipeline: {count}, machines: {count}}}", *_against_machines(model, config)))


def may_choose_machines(model: ModelConfig, config: Config) -> bool:
    """Whether the server may divide a model among machines by itself: no layout is set, and nothing that excludes
    several machines. With ``placement.labels`` its replicas run whole, on nodes with these labels."""
    is_free = model.parallel.count == 1 and not model.placement.labels and not model.is_remote
    return is_free and not model.device.startswith("cuda") and not _against_machines(model, config)


def may_choose_gpus(model: ModelConfig, config: Config) -> bool:
    """Whether the server may divide a model among GPUs of its machine by itself: no layout, no number of a GPU and no
    budgets of devices are set, and its replicas are on this machine."""
    is_free = model.parallel.count == 1 and model.parallel.machines == 1 and model.device in ("auto", "cuda")
    return is_free and runs_here(model, config) and config.server.devices.memory_bytes is None


def runs_here(model: ModelConfig, config: Config) -> bool:
    """Whether all replicas of a model that are not remote run on this machine, and there are any."""
    no_nodes = config.nodes.listen is None and config.nodes.ray is None
    return model.num_local > 0 and (no_nodes or model.placement.nodes == "local")


def _against_machines(model: ModelConfig, config: Config) -> list[str]:
    """What is set, or not set, so that the ranks of a model cannot be on several machines: the remedies."""
    remedies = (
        (model.roles is not None, "leave roles out"),
        (model.placement.nodes != "any", "leave placement.nodes out"),
        (model.scaling is not None, "set replicas in place of scaling"),
        (model.verify is not None, "leave verify out"),
        (config.server.devices.memory_bytes is not None, "leave server.devices.memory_bytes out"),
        (config.nodes.listen is None, "set nodes.listen to HOST:PORT, and start inferd node on the others"),
    )
    return [text for is_so, text in remedies if is_so]


def _payloads(config: Config) -> Iterator[Problem]:
    for name, pattern in config.payloads.patterns.items():
        sentence = problem_of(pattern)
        if sentence:
            yield Problem(("payloads", "patterns", name), f"{pattern!r} cannot be used: {sentence}.")
    for index, model in enumerate(config.payloads.models):
        if model not in config.models:
            yield Problem(("payloads", "models", index), f"there is no model {model!r}; name one below 'models:'.")


def is_host(text: str) -> bool:
    """Whether a text may be the name of a host or its address: a part of a name has 1 to 63 characters."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"


def _state(config: Config) -> Iterator[Problem]:
    for section, url, schemes in (
        ("state", config.state.url, _STATE_SCHEMES),
        ("cache", config.cache.url, _CACHE_SCHEMES),
    ):
        if url is not None and url.partition("://")[0] not in schemes:
            # Only its scheme is repeated: such a URL may hold a password.
            shown = f"its scheme {url.partition('://')[0][:16]!r}" if "://" in url else "a text without ://"
            yield Problem((section, "url"), f"{shown} is not one of {', '.join(f'{scheme}://' for scheme in schemes)}.")
    folder = config.state.data_dir
    if folder is not None:
        sentence = _unwritable(Path(folder).expanduser())
        if sentence:
            yield Problem(("state", "data_dir"), sentence)


def _file_problem(path: Path) -> str | None:
    """Why a file cannot be appended to; None: it can, as far as can be seen without writing."""
    if path.is_dir():
        return f"{path} is a folder; name a file in it."
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; make it, or choose another file."
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} cannot be written by this user; choose another file or change its owner."
    return None


def _tracing(config: Config) -> Iterator[Problem]:
    tracing = config.tracing
    if tracing.endpoint is not None and (sentence := url_problem(tracing.endpoint)):
        yield Problem(("tracing", "endpoint"), sentence)
    if tracing.headers_env is not None and tracing.headers_file is not None:
        yield Problem(("tracing", "headers_file"), "headers_env is given as well; keep one of them.")


def _mlflow(config: Config, env: Mapping[str, str]) -> Iterator[Problem]:
    mlflow = config.mlflow
    if mlflow.url is not None and (sentence := url_problem(mlflow.url)):
        sentence = sentence.replace("api_key_env", "token_env").replace("api_key_file", "token_file")
        yield Problem(("mlflow", "url"), sentence)
    if mlflow.token_env is not None and mlflow.token_file is not None:
        yield Problem(("mlflow", "token_file"), "token_env is given as well; keep one of them.")
    if mlflow.username is not None and (mlflow.token_env is not None or mlflow.token_file is not None):
        yield Problem(("mlflow", "username"), "a token is given as well; keep one of them.")
    if mlflow.webhook_secret_env is not None and mlflow.webhook_secret_file is not None:
        yield Problem(("mlflow", "webhook_secret_file"), "webhook_secret_env is given as well; keep one of them.")
    for field in ("token_env", "password_env", "webhook_secret_env"):
        variable = getattr(mlflow, field)
        if variable is not None and not _VARIABLE.fullmatch(variable):
            sentence = "this is not the name of an environment variable; write the variable's name, never the secret."
            yield Problem(("mlflow", field), sentence)
        elif variable is not None and not env.get(variable, "").strip():
            yield Problem(("mlflow", field), f"the environment variable {variable} is not set; set it to the secret.")
    for field in ("token_file", "webhook_secret_file"):
        path = getattr(mlflow, field)
        if path is not None and (sentence := _unreadable(path, "the secret")):
            yield Problem(("mlflow", field), sentence)
    for index, root in enumerate(mlflow.artifact_roots):
        if not Path(root).expanduser().is_dir():
            yield Problem(("mlflow", "artifact_roots", index), f"there is no folder {root!r}; check the path.")


def _unwritable(folder: Path) -> str | None:
    """Why a folder cannot be made or written to; None: it can."""
    for existing in (folder, *folder.parents):
        try:
            if not existing.exists():
                continue
        except OSError as error:
            return f"{folder} cannot be used ({error.strerror}); choose another folder."
        if not existing.is_dir():
            return f"{existing} is not a folder; choose another one."
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} cannot be written to by this user; choose another folder or change its owner."
        return None
    return None


def _model(name: str, model: ModelConfig, env: Mapping[str, str]) -> Iterator[Problem]:
    here: Place = ("models", name)
    if not model.source.strip():
        yield Problem((*here, "source"), "the source is empty; give a folder, a hub id or 'demo'.")
    elif model.is_remote:
        sentence = url_problem(model.source.partition(":")[2])
        if sentence:
            yield Problem((*here, "source"), sentence)
        for field in _LOCAL_ONLY:
            if getattr(model, field) != _default(model, field):
                yield Problem(
                    (*here, field),
                    "it is for local replicas, and this model's source is a remote server; leave it out.",
                )
        yield from _secrets((*here, "remote"), model.remote, env)
    elif model.remote != _default(model, "remote"):
        yield Problem(
            (*here, "remote"),
            "it belongs to a source such as openai:https://host/v1; list the servers beside a local model below "
            "'remotes'.",
        )
    for index, remote in enumerate(model.remotes):
        place: Place = (*here, "remotes", index)
        sentence = url_problem(remote.url)
        if sentence:
            yield Problem((*place, "url"), sentence)
        yield from _secrets(place, remote, env)
    if model.is_remote and all(upstream.fallback for upstream in model.upstreams):
        yield Problem(here, "every replica of it is a fallback; at least one must not be.")
    if model.speculation.method == "draft" and model.speculation.draft is None:
        yield Problem(
            (*here, "speculation", "method"),
            "it is 'draft', and no draft model is named; set speculation.draft to a smaller model with the same "
            "tokenizer, or take 'auto'.",
        )
    if model.watermark is not None and (sentence := _unreadable(model.watermark.key_file, "the key")):
        yield Problem((*here, "watermark", "key_file"), sentence)
    if model.chat_template is not None and not Path(model.chat_template).expanduser().is_file():
        yield Problem((*here, "chat_template"), f"there is no file {model.chat_template!r}; check the path.")


def _verify(here: Place, model: ModelConfig) -> Iterator[Problem]:
    """Everything wrong with what a model's files must be. ``here``: the model's place."""
    settings = model.verify
    if settings is None or settings.mode == "off":
        return
    at, signature = (*here, "verify"), settings.signature
    if model.is_remote:
        yield Problem(at, "its source is a remote server, whose files are not here; leave it out.")
    if model.is_pipeline:
        yield Problem(at, "a pipeline has no files of its own; set it at the models of its steps.")
    if model.speculation.draft is not None:
        yield Problem(
            (*here, "speculation", "draft"),
            "the files of a draft model are not verified; leave it out where verify is set.",
        )
    if settings.digest is None and signature is None:
        yield Problem(
            at, "neither a digest nor a signature is given; give one (inferd registry digest prints digests)."
        )
    yield from _signature(at, settings)


def _registry(config: Config) -> Iterator[Problem]:
    """Everything wrong with what the versions of models need."""
    settings, at = config.registry.verify, ("registry", "verify")
    if settings is None or settings.mode == "off":
        return
    if settings.digest is not None:
        yield Problem((*at, "digest"), "each version has its own, which is always compared; leave it out.")
    if settings.signature is None:
        yield Problem((*at, "signature"), "missing; name the key or the roots of the signer, or leave verify out.")
    yield from _signature(at, settings)


def _signature(at: Place, settings: VerifyConfig) -> Iterator[Problem]:
    """Everything wrong with a signature. ``at``: the place of ``settings``."""
    signature = settings.signature
    if signature is None:
        if settings.ignore_unsigned_files:
            yield Problem((*at, "ignore_unsigned_files"), "it belongs to a signature, and none is given; leave it out.")
        return
    files = [one for one in (signature.public_key_file, signature.certificate_chain_file) if one is not None]
    if len(files) != 1:
        yield Problem(
            (*at, "signature"), "set one of public_key_file and certificate_chain_file: whose signature is accepted."
        )
    if signature.identity is not None and signature.certificate_chain_file is None:
        yield Problem(
            (*at, "signature", "identity"), "a bare key has no name; set certificate_chain_file, or leave it out."
        )
    for one in files:
        if not Path(one).expanduser().is_file():
            yield Problem((*at, "signature"), f"there is no file {one!r}; check the path.")


def _rollout(here: Place, model: ModelConfig) -> Iterator[Problem]:
    """Everything wrong with a model's rollout, beside the versions that are served. ``here``: the model's place."""
    rollout = model.rollout
    if rollout is None:
        return
    at = (*here, "rollout")
    if model.versions.weights:
        yield Problem(at, "versions.weights divides the requests as well; leave the weights out, a rollout moves them.")
    if model.sequence.states:
        yield Problem(
            at,
            "a growing share would move sequences away from their states (sequence.states); leave the rollout out, and "
            "replace the version with a reload.",
        )
    if rollout.new == rollout.stable:
        yield Problem((*at, "new"), f"{rollout.new} is rollout.stable as well; name the version that is to serve.")
    yield from _rollout_steps(at, rollout)
    yield from _rollout_guards(at, rollout, model)


def _roles(here: Place, model: ModelConfig) -> Iterator[Problem]:
    """Everything wrong with roles of replicas. ``here``: the model's place."""
    if model.roles is None or model.is_remote:
        return
    if model.replicas != _default(model, "replicas"):
        total = model.roles.prefill + model.roles.decode
        yield Problem((*here, "replicas"), f"roles gives the number, {total}; leave replicas out.")
    if model.scaling is not None:
        yield Problem(
            (*here, "scaling"), "roles gives a fixed number of replicas for each role; keep one of the two settings."
        )
    if model.remotes:
        yield Problem((*here, "remotes"), "a remote server takes part in no hand-over; leave remotes or roles out.")
    if model.placement.nodes not in ("any", "local") or model.placement.labels:
        yield Problem(
            (*here, "placement"),
            "blocks are handed over on this machine alone; leave placement out, or roles.",
        )
    if model.parallel.machines > 1:
        yield Problem(
            (*here, "parallel", "machines"),
            f"{model.parallel.machines}, but blocks are handed over on this machine alone; leave machines out, or "
            "roles.",
        )
    if not model.scheduler.prefix_caching:
        yield Problem(
            (*here, "scheduler", "prefix_caching"),
            "false leaves no place for blocks that are handed over; leave it out, or roles.",
        )


def _scaling(here: Place, model: ModelConfig) -> Iterator[Problem]:
    """Everything wrong with a number of replicas that follows the load. ``here``: the model's place."""
    scaling = model.scaling
    if scaling is None or model.is_remote:
        return
    at = (*here, "scaling")
    if scaling.min > scaling.max:
        yield Problem((*at, "min"), f"{scaling.min} is above scaling.max = {scaling.max}; lower it, or raise the max.")
    if model.replicas != _default(model, "replicas"):
        yield Problem(
            (*here, "replicas"),
            "scaling is given as well; keep replicas for a fixed number, or scaling for one that follows the load.",
        )
    if scaling.spare_memory and scaling.spare is False:
        yield Problem(
            (*at, "spare_memory"), "it is memory of the spare process; set scaling.spare to true, or leave it out."
        )
    if scaling.min > 0 and model.load == "on_demand":
        yield Problem(
            (*here, "load"),
            f"on_demand begins without a replica, and scaling.min is {scaling.min}; leave load out, or set the min to "
            "0.",
        )
    if scaling.min > 0 and model.idle_after_s is not None:
        yield Problem(
            (*here, "idle_after_s"),
            f"it unloads the model, and scaling.min keeps {scaling.min}; leave it out, or set the min to 0.",
        )
    if scaling.max > 1 and model.sequence.states:
        yield Problem(
            at,
            "the states of sequences (sequence.states) are in one replica, and a replica that leaves would lose them; "
            "set replicas to a fixed number instead.",
        )


def _rollout_steps(at: Place, rollout: RolloutConfig) -> Iterator[Problem]:
    if not rollout.steps:
        yield Problem((*at, "steps"), "there are none; write at least one, such as {weight: 100}.")
    weights = rollout.weights
    for index, (before, weight) in enumerate(pairwise(weights), start=1):
        is_same = weight == before and rollout.steps[index].shadow == rollout.steps[index - 1].shadow
        if weight < before or is_same:
            yield Problem(
                (*at, "steps", index, "weight"),
                f"{weight:g} is not above {before:g}, the step before; the new version's percentages grow, and only a "
                "step with another 'shadow' may keep one. To take units back, use inferd rollout abort.",
            )
    for index, (step, weight) in enumerate(zip(rollout.steps, weights, strict=True)):
        if step.weight is None and not step.shadow:
            yield Problem((*at, "steps", index), "it has neither weight nor shadow; write one: {weight: 5}.")
        elif step.shadow and weight == 100:
            yield Problem(
                (*at, "steps", index, "shadow"),
                "the new version serves every unit in this step, so nothing is left to be copied; leave it out.",
            )


def _rollout_guards(at: Place, rollout: RolloutConfig, model: ModelConfig) -> Iterator[Problem]:
    guards = rollout.guards
    for name in guards.__struct_fields__:
        guard = getattr(guards, name)
        if name != "differs" and guard is not None and guard.max_ratio is None and guard.max_fraction is None:
            yield Problem(
                (*at, "guards", name),
                f"max_ratio and max_fraction are both unset, so nothing is too much; set one, or write {name}: null.",
            )
    objectives = model.objectives
    if guards.slow is not None and guards.slow.limits_ms(objectives.total_ms, objectives.ttft_ms) == (None, None):
        yield Problem(
            (*at, "guards", "slow", "over_ms"),
            "missing; give milliseconds here, in first_over_ms, or as objectives.total_ms or objectives.ttft_ms.",
        )
    if guards.differs is not None and not any(step.shadow for step in rollout.steps):
        yield Problem(
            (*at, "guards", "differs"),
            "no step copies requests, so nothing is compared; begin the steps with {shadow: 100, for_s: 600}.",
        )


def _default(struct: msgspec.Struct, field: str) -> object:
    info = next(info for info in msgspec.structs.fields(struct) if info.name == field)
    return info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()


def url_problem(url: str) -> str | None:
    """The problems of a remote server's base URL."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        return "this is not a URL; write it as https://host/v1, with a host's name and a port from 1 to 65535 if any."
    if parts.username is not None or parts.password is not None:
        return "a URL holds no credentials; name a variable with api_key_env or a file with api_key_file."
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or re.search(r"[\s\x00-\x1f]", url):
        return f"{url!r} is not the base URL of a server such as https://host/v1."
    if parts.query or parts.fragment:
        return "this URL has more than a path; write the base URL alone, such as https://host/v1."
    return None


def _secrets(here: Place, remote: RemoteSettings, env: Mapping[str, str]) -> Iterator[Problem]:
    variable, file = remote.api_key_env, remote.api_key_file
    if variable is not None and file is not None:
        yield Problem((*here, "api_key_file"), "api_key_env is given as well; keep one of them.")
    if variable is not None:
        if not _VARIABLE.fullmatch(variable):
            yield Problem(
                (*here, "api_key_env"),
                "this is not the name of an environment variable; write the variable's name, never the key itself.",
            )
        elif not env.get(variable, "").strip():
            yield Problem((*here, "api_key_env"), f"the environment variable {variable} is not set; set it to the key.")
    for field, path, what in (("api_key_file", file, "the API key"), ("ca_file", remote.ca_file, "the certificates")):
        if path is not None:
            sentence = _unreadable(path, what)
            if sentence:
                yield Problem((*here, field), sentence)


def _unreadable(path: str, what: str) -> str | None:
    try:
        with Path(path).expanduser().open("rb") as opened:
            is_blank = not opened.read(65536).strip()
    except OSError as error:
        return f"the file {path!r} cannot be read ({error.strerror}); check the path and its permissions."
    return f"the file {path!r} is empty; write {what} into it." if is_blank else None


def _memory(config: Config) -> Iterator[Problem]:
    """Memory budgets that contradict each other for any models."""
    whole, devices = config.server.memory_bytes, config.server.devices
    if devices.memory_bytes is None and (devices.count > 1 or devices.linked is not None):
        yield Problem(("server", "devices", "memory_bytes"), "missing; say how much memory each of the devices has.")
    if devices.linked is not None and devices.linked > devices.count and devices.memory_bytes is not None:
        yield Problem(
            ("server", "devices", "linked"),
            f"{devices.linked} is more than server.devices.count = {devices.count}; lower it, or leave it out.",
        )
    for name, model in config.models.items():
        if model.memory_fraction is None:
            continue
        if whole is None:
            yield Problem(
                ("models", name, "memory_fraction"),
                f"{model.memory_fraction:g} is a part of server.memory_bytes, which is not set; set it.",
            )
        if model.memory_bytes is not None:
            yield Problem(("models", name, "memory_fraction"), "memory_bytes is set as well; keep one of the two.")
    if whole is None:
        return
    fixed = 0
    for name, model in config.models.items():
        size = model.memory_bytes if model.memory_fraction is None else int(whole * model.memory_fraction)
        if model.is_remote or size is None:
            continue
        wanted = size * model.num_local
        if wanted > whole:
            yield Problem(
                ("models", name, "memory_bytes" if model.memory_fraction is None else "memory_fraction"),
                f"{model.num_local} times {bytes_text(size)} is more than server.memory_bytes = "
                f"{bytes_text(whole)}; lower it, the number of replicas, or raise the server's.",
            )
        elif not model.is_on_demand:
            fixed += wanted
    if fixed > whole:
        yield Problem(
            ("server", "memory_bytes"),
            f"{bytes_text(whole)} is less than the {bytes_text(fixed)} of the models that load at the start; "
            "raise it, lower theirs, or let some load on_demand.",
        )


def _regions(config: Config) -> Iterator[Problem]:
    known = {model.region for model in config.models.values() if not model.is_remote}
    known |= {upstream.region for model in config.models.values() for upstream in model.upstreams}
    if not config.models:
        return
    for name, tenant in config.tenants.items():
        if tenant.region is not None and tenant.region not in known:
            named = ", ".join(sorted(region for region in known if region is not None))
            yield Problem(
                ("tenants", name, "region"),
                f"no replica of any model is in the region {tenant.region!r}; regions are: {named or 'none'}.",
            )
