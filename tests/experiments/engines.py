"""A real engine under memory pressure, hostile prompts and mixed classes (F14 to F18, F47, SEC-05, SEC-07, SEC-21)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jinja2
from tests.experiments.catalogue import experiment
from tests.experiments.client import JSON, Answer, Client
from tests.experiments.field import Field, Server, together
from tests.experiments.state import as_admin

from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.errors import InvalidRequest
from inferd.types import Chat

WORDS = ("river", "stone", "lamp", "cloud", "garden", "letter", "winter", "bridge", "candle", "harbor")


@contextlib.contextmanager
def engine(
    field: Field, defects: tuple[str, ...] = (), server: JSON | None = None, **settings: object
) -> Iterator[Server]:
    """The bundled model on the real engine."""
    config = {"models": {"demo": {"source": "demo", **settings}}, "server": server or {}}
    with field.serve(config, defects=defects, env={"EXPERIMENT_WORKER": "real"}, wait=server is None) as running:
        if server is not None:
            running.await_ready()
            as_admin(running).begin()
        yield running
        if server is not None:
            running.check()


def prompt_of(number: int, length: int = 12) -> str:
    return " ".join(WORDS[(number * 7 + place * (number + 3)) % len(WORDS)] for place in range(length))


def ask(client: Client, number: int, **options: Any) -> Answer:
    return client.complete(prompt_of(number), model="demo", temperature=0, ignore_eos=True, seconds=100, **options)


@experiment(
    "F14",
    injects="20 requests at once, of which the KV cache holds about two",
    holds="some are preempted and computed again; all finish, each with the text it has when it is alone",
    control="a KV cache that holds them all",
    red="nothing was preempted",
)
def short_of_blocks(field: Field) -> None:
    cache = {"num_blocks": field.either(20, 2000)}
    with engine(field, kv_cache=cache, max_model_len=256) as server:
        alone = [ask(server.client, number, max_tokens=90).text for number in range(20)]
        answers = together(20, lambda number: ask(server.client, number, max_tokens=90))
        assert [answer.text for answer in answers] == alone, "an answer depends on what else ran"
        assert server.metrics().sum("inferd_preemptions_total") > 0, "nothing was preempted"


@experiment(
    "F15",
    injects="a prompt that can never fit",
    holds="400 with the numbers, before anything is computed",
    control="one that fits",
    red="was not refused",
)
def never_fits(field: Field) -> None:
    with engine(field, max_model_len=256) as server:
        before = server.metrics().sum("inferd_prompt_tokens_total")
        text = "river " * field.either(5000, 20)
        answer = server.client.complete(text, model="demo", max_tokens=8)
        assert answer.status == 400, f"a prompt that can never fit was not refused: {answer.status}"
        assert answer.code == "context_length_exceeded"
        assert "256" in answer.json["error"]["message"]
        assert server.metrics().sum("inferd_prompt_tokens_total") == before


@experiment(
    "F17",
    injects="a storm: 24 clients that ask, leave half-way, and fork, while blocks are short",
    holds="afterwards every block is free or cached, and nothing runs",
    control="a stream's cancellation does nothing",
    red="I[24]",
)
def storm(field: Field) -> None:
    with engine(field, ("streams_are_never_cancelled",), kv_cache={"num_blocks": 40}, max_model_len=512) as server:

        def run(number: int) -> None:
            for turn in range(6):
                options: JSON = {"max_tokens": field.either(60, 400), "ignore_eos": True}
                if turn % 3 == 2:
                    options["n"] = 3
                with server.client.stream(prompt_of(number + turn), model="demo", seconds=100, **options) as stream:
                    if (number + turn) % 2 or field.is_control:
                        stream.first()
                    else:
                        stream.rest()
                        assert stream.error is None

        together(field.either(24, 4), run)


@experiment(
    "F18",
    injects="400 prompts that have nothing in common",
    holds="old prefixes are given up; the worker's memory and the blocks stay what they were",
    control="prefix_caching: false",
    red="no block is cached",
)
def unique_prefixes(field: Field) -> None:
    scheduler = {"prefix_caching": field.either(True, False)}
    with engine(field, kv_cache={"num_blocks": 64}, scheduler=scheduler, max_model_len=512) as server:
        total = server.metrics().sum("inferd_kv_blocks")
        for number in range(40):
            ask(server.client, number, max_tokens=2)
        before = _worker_rss(server)
        together(8, lambda number: [ask(server.client, 1000 * number + turn, max_tokens=2) for turn in range(50)])
        assert server.metrics().sum("inferd_kv_blocks") == total
        assert server.metrics().sum("inferd_kv_blocks", state="cached") > 0, "no block is cached"
        assert _worker_rss(server) - before < 64 << 20


def _worker_rss(server: Server) -> int:
    (pid,) = server.worker_pids()
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@experiment(
    "F47",
    injects="five times the work that fits in the batch class, and a little interactive work",
    holds="interactive time to the first token (p95) at most doubles, beside one step; batch work gets done",
    control="the interactive work is sent as batch",
    red="interactive p95",
)
def batch_and_interactive(field: Field) -> None:
    scheduler = {"max_num_seqs": 4}
    with engine(field, scheduler=scheduler) as server:
        word = field.either("interactive", "batch")
        alone = _first_tokens(server, word)
        over = threading.Event()
        done: list[int] = []

        def batch(number: int) -> None:
            while not over.is_set():
                done.append(ask(server.client, number, max_tokens=150, headers={"x-inferd-priority": "batch"}).status)

        threads = [threading.Thread(target=batch, args=(number,), daemon=True) for number in range(20)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(1.0)
            beside = _first_tokens(server, word)
        finally:
            over.set()
            for thread in threads:
                thread.join(100)
        assert beside <= 2 * alone + 0.05, f"interactive p95 went from {alone:.3f} to {beside:.3f} s beside batch work"
        assert done.count(200) >= 20, "batch work was starved"


def _first_tokens(server: Server, word: str) -> float:
    """Seconds to the first token, p95 of 40."""
    times = []
    for number in range(40):
        began = time.monotonic()
        headers = {"x-inferd-priority": word}
        with server.client.stream(prompt_of(number), model="demo", max_tokens=2, headers=headers) as stream:
            stream.first()
            times.append(time.monotonic() - began)
            stream.rest()
    return sorted(times)[37]


# -- hostile prompts and templates ---------------------------------------------------------------

ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() | length }}",
    "{{ cycler.__init__.__globals__ | length }}",
    "{{ self.__init__.__globals__ | length }}",
    "{{ lipsum.__globals__['os'].getpid() }}",
)


@experiment(
    "SEC-05",
    injects="templates that reach for Python, and one that never ends",
    holds="nothing is reached; the endless one is stopped within 2 s of processor time",
    control="jinja2's plain environment",
    red="Python was reached",
    tier="everyday",
)
def templates(field: Field) -> None:
    for source in ESCAPES:
        try:
            if field.is_control:
                said = jinja2.Environment().from_string(source).render()
            else:
                said = _render(source)
        except InvalidRequest:
            continue
        assert not said.strip().isdigit() or said == "0", f"Python was reached by {source}: {said[:100]}"
    began = time.thread_time()  # waiting for a processor is not the template's fault
    try:
        _render("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}")
    except InvalidRequest:
        assert time.thread_time() - began < 2.0
    else:
        raise AssertionError("an endless template came to an end")


def _render(source: str) -> str:
    chat = Chat(messages=[{"role": "user", "content": "hello"}])
    return ChatTemplate({"default": source}, {}, "an experiment").render(chat)


@experiment(
    "SEC-07",
    injects="requests that have killed engines: empty and odd prompts, foreign token ids, extreme penalties and biases",
    holds="4xx, or 200 with an answer; a golden stream beside them is the same; no restart",
    control="one that kills the worker",
    red="restart|golden",
)
def engine_killers(field: Field) -> None:
    with engine(field) as server:
        golden = ask(server.client, 1, max_tokens=200).text
        said: list[str] = []

        def read() -> None:
            with contextlib.suppress(AssertionError):
                said.append(ask(server.client, 1, max_tokens=200).text)

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        bodies: list[JSON] = [
            {"prompt": ""},
            {"prompt": []},
            {"prompt": [0]},
            {"prompt": [2**31 - 1]},
            {"prompt": [-1]},
            {"prompt": "\u0000\ufffd\u202e" * 10},
            {"prompt": "hi", "logit_bias": {"999999": 100}},
            {"prompt": "hi", "logit_bias": {str(token): -100 for token in range(1000)}},
            {"prompt": "hi", "repetition_penalty": 1e-30},
            {"prompt": "hi", "frequency_penalty": 2, "presence_penalty": -2, "temperature": 1e-9},
            {"prompt": "hi", "top_p": 1e-12, "top_k": 1, "min_p": 1.0, "temperature": 2},
            {"prompt": "hi", "allowed_token_ids": [5]},
            {"prompt": "hi", "stop": ["", "a"]},
            {"prompt": "hi", "logprobs": 20, "echo": True, "max_tokens": 0},
            {"prompt": "hi", "n": 64, "max_tokens": 1},
            {"prompt": "hi", "min_tokens": 5, "stop_token_ids": list(range(100)), "max_tokens": 5},
            {"prompt": "hi", "seed": 2**63 - 1, "temperature": 1},
        ]
        for body in bodies:
            answer = server.client.post("/v1/completions", {"model": "demo", "max_tokens": 3, **body}, seconds=60)
            assert answer.status in (200, 400, 422), f"{body}: {answer}"
        if field.is_control:
            os.kill(server.worker_pids()[0], signal.SIGKILL)
        reading.join(60)
        assert said == [golden], "the golden stream was disturbed"
        assert server.metrics().sum("inferd_replica_restarts_total") == 0, "a restart"


@experiment(
    "SEC-21",
    injects="a tenant asks what another one asked, to find out by the cache that it did",
    holds="no prefix of another tenant is found; one's own is",
    control="both keys are of one tenant",
    red="another tenant's prefix",
)
def prefix_side_channel(field: Field) -> None:
    with engine(field, server={"auth": "required", "public_metrics": True}) as server:
        alice = server.client.with_key(server.key("a"))
        bob = server.client.with_key(server.key(field.either("b", "a")))
        text = prompt_of(5, 60)

        def cached(client: Client) -> int:
            usage = client.complete(text, model="demo", max_tokens=1).json["usage"]
            return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

        assert cached(alice) == 0
        assert cached(alice) > 0, "one's own prefix is not found, so nothing is shown"
        assert cached(bob) == 0, "another tenant's prefix was found"
