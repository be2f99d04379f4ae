"""The server itself: its ports, its state, files and batch jobs, the response cache and the tenants.

Settings of models are in ``model.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.patterns import ADDRESS
from inferd.config.section import Section


class TlsConfig(Section, frozen=True, kw_only=True):
    """The listeners' certificate; without one they do not use TLS."""

    certificate: Annotated[
        str | None,
        Meta(
            description=(
                "PEM file with the server's certificate and the intermediate ones: clients use https and gRPC over "
                "TLS. Read again by a reload."
            )
        ),
    ] = None
    key: Annotated[
        str | None,
        Meta(description="PEM file with the certificate's key, without a password; unset: it is in the same file."),
    ] = None


class ServerDevicesConfig(Section, frozen=True, kw_only=True):
    """Budgets of memory, as of NUMA nodes: a replica on processors that exceeds one is divided among several."""

    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Memory of each device; unset: a replica may take what the machine leaves."),
    ] = None
    count: Annotated[int, Meta(description="Devices that replicas may be placed on.", ge=1, le=64)] = 1
    linked: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(
            description="Devices that fast links join, counted from the first; a layer is divided within them. Unset: "
            "all of them."
        ),
    ] = None


class ServerConfig(Section, frozen=True, kw_only=True):
    """Where the server listens and how it behaves towards clients."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port for KServe v2 over gRPC; 0 takes a free one, unset: there is none."),
    ] = None
    max_body_bytes: Annotated[int, Meta(description="Largest request body accepted, in bytes.", ge=1024)] = (
        16 * 1024 * 1024
    )
    drain_delay_s: Annotated[
        float,
        Meta(
            description="Seconds after SIGTERM during which readiness is already false and requests are still "
            "accepted.",
            ge=0,
        ),
    ] = 0.0
    grace_s: Annotated[float, Meta(description="Seconds that requests in flight get to finish at shutdown.", ge=0)] = (
        30.0
    )
    v2_name: Annotated[
        str,
        Meta(
            description="The server's name in KServe v2's metadata; Triton's example clients expect 'triton'.",
            min_length=1,
        ),
    ] = "inferd"
    access_log: Annotated[bool, Meta(description="Write one line per request to the log (never its text).")] = True
    request_records: Annotated[
        int,
        Meta(
            description="Calls of which times and causes are kept for inferd why, some 400 bytes each; 0: none.",
            ge=0,
            le=1_000_000,
        ),
    ] = 16_384
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Meta(description="Form of the log on stderr: JSON lines, or words; auto: words on a terminal, JSON elsewhere."),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The lowest level of the lines in the log, of the server and of its workers."),
    ] = "info"
    log_file: Annotated[
        str | None,
        Meta(
            description=(
                "File that the log is appended to instead of stderr, as JSON lines unless log_format is text. Opened "
                "again within a second after it was renamed or removed, so logrotate needs no signal."
            )
        ),
    ] = None
    log_speed: Annotated[
        bool,
        Meta(description="Tokens per second, time to first token and time per output token in a request's line."),
    ] = False
    auth: Annotated[
        Literal["auto", "required", "off"],
        Meta(
            description=(
                "When requests need an API key. auto: as soon as one key exists, and always on an address other than "
                "loopback (such a server does not start without keys); required: always; off: never."
            )
        ),
    ] = "auto"
    public_metrics: Annotated[bool, Meta(description="Allow reading /metrics without a key where keys are needed.")] = (
        False
    )
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins whose pages may call the API; none by default.")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names that requests may be addressed to; none: on loopback localhost and addresses, "
            "elsewhere any."
        ),
    ] = ()
    tls: TlsConfig = TlsConfig()
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Memory that all local models together may take; a model that does not fit is refused, or the "
            "least recently used on-demand model leaves. Unset: the machine's memory."
        ),
    ] = None
    devices: ServerDevicesConfig = ServerDevicesConfig()
    send_timeout_s: Annotated[
        float,
        Meta(description="A client that reads no byte of its answer for this long is disconnected.", gt=0),
    ] = 60.0
    max_connections: Annotated[
        int,
        Meta(
            description="Concurrent client connections; a further one gets 503 and is closed. Never more than half of "
            "the files that the process may open.",
            ge=1,
        ),
    ] = 10_000
    body_timeout_s: Annotated[
        float,
        Meta(
            description="Longest time for the whole body of a request; every 16 KiB that arrive add a second.",
            gt=0,
        ),
    ] = 120.0
    reload: Annotated[bool, Meta(description="Follow changes of the configuration file while serving.")] = True
    console: Annotated[
        bool, Meta(description="Serve the console at /console/, and send browsers that open / to it.")
    ] = True
    console_session_s: Annotated[
        float, Meta(description="Seconds after which a person who signed in to the console signs in again.", ge=60)
    ] = 43_200.0
    console_viewers: Annotated[
        int, Meta(description="Streams of live numbers that are open at once; a further one gets 503.", ge=1)
    ] = 100


class StoredConfig(Section, frozen=True, kw_only=True):
    """Responses and conversations that clients let the server store."""

    enabled: Annotated[
        bool,
        Meta(description="Whether responses are stored; off: a request that needs a stored one is refused."),
    ] = True
    max_bytes: Annotated[
        int, Meta(description="Bytes that each tenant may have stored; beyond them the oldest are deleted.", ge=1)
    ] = 1024**3
    max_age_s: Annotated[
        float, Meta(description="Seconds after which a response, or an unused conversation, is deleted.", gt=0)
    ] = 30 * 86_400.0


class StateConfig(Section, frozen=True, kw_only=True):
    """What outlives the process: keys, usage, limits."""

    url: Annotated[
        str | None,
        Meta(
            description="postgresql://user@host/database, or sqlite:///path; unset: state.db in data_dir. Servers that "
            "share a database share keys and limits."
        ),
    ] = None
    data_dir: Annotated[
        str | None,
        Meta(description="Folder for state, journals and the control socket; unset: inferd in the user's data folder."),
    ] = None
    idempotency_ttl_s: Annotated[
        float, Meta(description="Seconds that an answer is kept for its Idempotency-Key.", gt=0)
    ] = 86_400.0
    usage_retention_days: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Days that usage is kept; unset: for ever.")
    ] = None
    responses: StoredConfig = StoredConfig()


class JobsConfig(Section, frozen=True, kw_only=True):
    """Files of clients and batch jobs: /v1/files and /v1/batches."""

    enabled: Annotated[
        bool, Meta(description="Whether files and batches are served; off: their routes answer 400.")
    ] = True
    folder: Annotated[
        str | None,
        Meta(
            description="Folder of the contents of files; unset: jobs in state.data_dir. Servers that share a database "
            "and should work on the same batches share this folder."
        ),
    ] = None
    max_file_bytes: Annotated[
        int, Meta(description="Largest file that can be uploaded; a larger one is refused.", ge=1024)
    ] = 200 * 1024 * 1024
    max_bytes: Annotated[
        int,
        Meta(
            description="Bytes of files that each tenant may have, results included; beyond them an upload is refused "
            "and a running batch pauses.",
            ge=1024,
        ),
    ] = 10 * 1024**3
    max_age_s: Annotated[
        float,
        Meta(description="Seconds after which a file, and a batch that has ended, is deleted.", gt=0),
    ] = 30 * 86_400.0
    max_lines: Annotated[
        int, Meta(description="Requests that one batch may have; a file with more is refused.", ge=1, le=1_000_000)
    ] = 100_000
    max_running: Annotated[
        int, Meta(description="Batches that this server works on at the same time; the others wait.", ge=1, le=64)
    ] = 4
    max_in_flight: Annotated[
        int,
        Meta(
            description="Requests of one batch that are asked at the same time, at most; fewer while the model has "
            "other work.",
            ge=1,
            le=4096,
        ),
    ] = 256
    max_open: Annotated[
        int, Meta(description="Batches of one tenant that have not ended; one more is refused.", ge=1)
    ] = 100


class NodesConfig(Section, frozen=True, kw_only=True):
    """Other machines that give memory and cores to the server: where they join it (``inferd node``)."""

    listen: Annotated[
        Annotated[str, Meta(pattern=ADDRESS)] | None,
        Meta(
            description="HOST:PORT where nodes join, over TLS and with a token; port 0 takes a free one. Unset: "
            "no machine can join; with ray, 0.0.0.0 and a free port."
        ),
    ] = None
    ray: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Ray cluster for models with placement.nodes ray: auto for the one that this machine is part "
            "of (ray start), or its HOST:PORT. Unset: none."
        ),
    ] = None
    certificate: Annotated[
        str | None,
        Meta(
            description="PEM file with the certificate that nodes are shown; unset: one is made and kept in "
            "state.data_dir."
        ),
    ] = None
    key: Annotated[
        str | None,
        Meta(description="PEM file with the certificate's key, without a password; unset: it is in the same file."),
    ] = None
    token_expires_s: Annotated[
        float,
        Meta(description="Seconds in which a token of inferd node token lets machines join.", gt=0, le=31_536_000),
    ] = 86_400.0
    token_file: Annotated[
        str | None,
        Meta(
            description="File with a token of inferd node token --certificate FILE, which lets machines join at any "
            "time, as in a pod that starts with the server; --revoke does not change it."
        ),
    ] = None


class CacheConfig(Section, frozen=True, kw_only=True):
    """Where answers are cached; each model's settings say whether its answers are cached."""

    url: Annotated[
        str | None, Meta(description="redis://host:port/0 of a Redis or Valkey server; unset: this process's memory.")
    ] = None
    max_bytes: Annotated[int, Meta(description="Bytes of answers kept in memory.", ge=0)] = 64 * 1024 * 1024
    max_entry_bytes: Annotated[int, Meta(description="A larger answer is not kept.", ge=1)] = 1024 * 1024


AliasDialect = Literal["vllm", "triton", "fastapi"]


class MetricsConfig(Section, frozen=True, kw_only=True):
    """What /metrics shows, and what of it continues after a restart."""

    aliases: Annotated[
        tuple[AliasDialect, ...],
        Meta(
            description="Servers whose names for the same values are on the page too, for dashboards made for them: "
            "vllm, triton, fastapi (the FastAPI instrumentator)."
        ),
    ] = ()
    keep: Annotated[
        bool,
        Meta(description="Whether counters continue after a restart of the server; they are kept in state.data_dir."),
    ] = True
    keep_every_s: Annotated[
        float,
        Meta(description="Seconds between two savings of the counters: the most that a killed server loses.", gt=0),
    ] = 10.0


class TenantConfig(Section, frozen=True, kw_only=True):
    """One tenant: the limits of all its keys together."""

    weight: Annotated[float, Meta(description="Its share of a busy model, relative to the others'.", gt=0, le=1000)] = (
        1.0
    )
    rpm: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Requests per minute; unset: no limit.")] = None
    tpm: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Tokens per minute, prompt and answer; unset: no limit.")
    ] = None
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Requests at the same time; unset: no limit.")
    ] = None
    region: Annotated[
        str | None, Meta(description="Its requests run only on replicas of this region; unset: anywhere.")
    ] = None
