"""Ranks on other machines than rank 0, without a network: their sockets are joined as a server and its nodes do."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.ranks.test_groups import adapters, requests
from tests.engine.test_engine import run

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.ranks import rank as rank_module
from inferd.engine.ranks.lead import Lead
from inferd.engine.ranks.messages import build
from inferd.engine.ranks.post import PIECE_BYTES, Line, Post, most_sent_bytes
from inferd.engine.ranks.watch import EXIT_RANK_LOST, MOST_LOOKS, STILL_LOOKS, UNREAD_LOOKS, Report, Stillness
from inferd.errors import ModelLoadError
from inferd.registry.source import resolve

__all__ = ["adapters"]  # a fixture


class Elsewhere:
    """Starts the ranks of other machines, each when rank 0 asks for its connection."""

    def __init__(self, folder: Path, parallel: ParallelConfig, *options: str, source: str = "demo") -> None:
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for rank in range(parallel.per_machine, parallel.count):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / str(rank)))
            listener.listen()
            self._listeners.append(listener)
            words = ["--line", str(rank), str(parallel.count), "--source", source, "--memory", str(1 << 40), *options]
            thread = threading.Thread(target=self._start, args=(listener, rank, words), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _start(self, listener: socket.socket, rank: int, words: list[str]) -> None:
        with contextlib.suppress(OSError):  # it is closed
            connection, _ = listener.accept()
            with connection:
                command = [sys.executable, "-P", "-m", "inferd.engine.ranks.rank", "--fd", str(connection.fileno())]
                self.processes[rank] = subprocess.Popen(
                    [*command, "--parent", str(os.getpid()), *words], pass_fds=[connection.fileno()]
                )

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for listener in self._listeners:
            listener.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


HEAD = struct.Struct("<IBHHQ")  # as in inferd.engine.ranks.post
ANY = sys.maxsize


def configured(parallel: ParallelConfig, **settings: object) -> ModelConfig:
    return ModelConfig(
        source="demo",
        threads=1,
        dtype="float32",
        max_model_len=128,
        parallel=parallel,
        scheduler=SchedulerConfig(max_num_seqs=4),
        kv_cache=KVCacheConfig(num_blocks=12),
        **settings,  # type: ignore[arg-type]
    )


def answers(engine: Engine, names: dict[str, str]) -> list[list[int]]:
    """Tokens of requests for the base and for an adapter that is loaded while the engine serves."""
    first, second = names
    found = run(engine, *requests("before", ("", first)))
    engine.set_adapters(names)
    found += run(engine, *requests("beside", ("", second)))
    return [answer.tokens() for answer in found]


@pytest.fixture(scope="module")
def expected(adapters: dict[str, str]) -> list[list[int]]:
    first = next(iter(adapters))
    engine = create_backend("m", configured(ParallelConfig(), adapters={first: adapters[first]}), lambda *_: None)
    try:
        return answers(engine, adapters)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(pipeline=2, machines=2),
        pytest.param(ParallelConfig(tensor=2, machines=2), marks=pytest.mark.thorough),
        pytest.param(ParallelConfig(pipeline=3, machines=3), marks=pytest.mark.soak),
        pytest.param(ParallelConfig(tensor=2, pipeline=2, machines=2), marks=pytest.mark.soak),
        pytest.param(ParallelConfig(tensor=2, pipeline=2, machines=4), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_machines_answer_as_one_process(
    parallel: ParallelConfig, adapters: dict[str, str], expected: list[list[int]], tmp_path: Path
) -> None:
    first = next(iter(adapters))
    with Elsewhere(tmp_path, parallel) as elsewhere:
        config = configured(parallel, adapters={first: adapters[first]})
        engine = create_backend("m", config, lambda *_: None, far=str(tmp_path))
        try:
            assert answers(engine, adapters) == expected
        finally:
            engine.close()
        assert {process.wait(30) for process in elsewhere.processes.values()} <= {0, 2}


def refused(folder: Path, *options: str, source: str = "demo") -> str:
    """What rank 0 is told where a rank on another machine cannot be part of its group."""
    parallel = ParallelConfig(pipeline=2, machines=2)
    with Elsewhere(folder, parallel, *options, source=source):
        made = Lead(configured(parallel), resolve("demo"), 1, far=str(folder))
        try:
            with pytest.raises(ModelLoadError) as error:
                made.loaded(b"")
        finally:
            made.close()
    return error.value.message


@pytest.mark.thorough  # of ranks on one machine: tests/engine/ranks/test_groups.py
def test_a_rank_with_other_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.ranks.lead.build", lambda: "inferd 0.0.9, kernels avx2 7.7")
    said = refused(tmp_path)
    assert f"rank 1: it would run {build()}, but rank 0 runs inferd 0.0.9, kernels avx2 7.7" in said
    assert said.endswith("install the same inferd on its machine, for the same kind of processor.")


def test_a_rank_whose_machine_lacks_memory_reads_no_weights(tmp_path: Path) -> None:
    said = refused(tmp_path, "--memory", "1000")
    assert said.startswith("rank 1: its part of the weights takes 4.50 MiB, and its machine has 0 B for it. Spread")
    assert said.endswith("or let the node give more memory (inferd node --memory).")


def test_a_rank_that_is_lost_while_it_loads_ends_the_group(tmp_path: Path) -> None:
    """The server knows whether the machine is gone, and starts the replica anew."""
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "1"))
        listener.listen()
        config = configured(ParallelConfig(pipeline=2, machines=2))
        made = Lead(config, resolve("demo"), 1, end=ended.set, far=str(tmp_path))
        try:
            assert made.folder.parent == tmp_path, "the server removes it where rank 0 is killed"
            listener.accept()[0].close()
            with pytest.raises((EOFError, OSError)):
                made.loaded(b"")
        finally:
            made.close()
    assert ended.is_set()


def test_only_a_server_with_nodes_starts_ranks_elsewhere() -> None:
    with pytest.raises(ModelLoadError, match=r"parallel.machines is 2, but only a server with nodes"):
        Lead(configured(ParallelConfig(pipeline=2, machines=2)), resolve("demo"), 1)


STILL = Report(1, 5.0, is_asleep=True, num_bytes=3)


@pytest.mark.parametrize(
    ("reports", "is_lost"),
    [
        (lambda look: replace(STILL, number=look), True),
        (lambda look: replace(STILL, number=look, worked_s=look / 100), False),
        (lambda look: replace(STILL, number=look, num_bytes=look), False),  # a long transfer
        (lambda look: replace(STILL, number=look, num_unread=1), False),  # the way there is slow
        (lambda look: replace(STILL, number=1 + look // 2), True),  # a busy machine tells at every other look
        (lambda look: replace(STILL, number=look, is_asleep=look % 3 > 0), False),  # it waits for a processor
        (
            lambda look: STILL,
            False,
        ),  # no report arrives: the machine may be busy, and its node tells whether it is gone
        (lambda look: Report(), False),  # it has not begun to report
    ],
)
def test_a_rank_elsewhere_is_still_where_its_reports_say_so(reports: Callable[[int], Report], *, is_lost: bool) -> None:
    look = 1
    stillness = Stillness([], far=[lambda: reports(look)])
    found = []
    for number in range(2, 4 * STILL_LOOKS):
        look = number
        found.append(stillness.is_lost(7))
    assert any(found) == is_lost


def looks_until_lost(told: Callable[[int], Report], meeting: Callable[[int], int] = lambda look: 7) -> int:
    look = 1
    stillness = Stillness([], far=[lambda: told(look)])
    while not stillness.is_lost(meeting(look)):
        look += 1
        assert look < 100 * UNREAD_LOOKS, "the group never counts as lost"
    return look


def test_a_connection_that_brings_nothing_there_is_lost_in_the_end() -> None:
    assert looks_until_lost(lambda look: replace(STILL, number=look, num_unread=1)) == 1 + UNREAD_LOOKS


def test_reports_that_were_held_up_count_for_few_looks_each() -> None:
    """The machine told nothing for long, and then once that the rank had not worked since."""
    told = looks_until_lost(lambda look: replace(STILL, number=2 + max(0, look - 50)))
    assert told == 50 + -(-STILL_LOOKS // MOST_LOOKS) + 1


def test_a_rank_that_works_in_between_is_waited_for_however_seldom_its_machine_tells() -> None:
    """What one report says is true of all the time since the one before it."""
    looks = iter(range(10, 1000))
    stillness = Stillness([], far=[lambda: replace(STILL, number=(look := next(looks)) // 10, worked_s=look // 10)])
    assert not any(stillness.is_lost(7) for _ in range(200))


def test_what_was_sent_and_not_read_is_known_of_each_connection() -> None:
    posts, _ = joined(ANY)
    line = posts[0].lines[1]
    line.send_bytes(b"1234")
    assert posts[1].lines[0].recv_bytes() == b"1234"
    for unread in (0, HEAD.size + 4):
        read = posts[1].lines[0].num_bytes
        posts[1].lines[0].send_report(Report(0, 1.0, is_asleep=True, num_bytes=read - unread))
        deadline = time.monotonic() + 30
        while line.report.num_unread != unread and time.monotonic() < deadline:
            time.sleep(0.001)
        assert line.report.num_unread == unread
    close(posts)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3 * PIECE_BYTES)), max_size=6))
@settings(max_examples=15)
def test_tensors_reach_the_rank_that_they_are_for_in_their_order(sent: list[tuple[int, int, int]]) -> None:
    """Also where all ranks send before any receives, and between ranks that have no connection of their own."""
    posts = [Post(rank, 3) for rank in range(3)]
    for rank in (1, 2):
        posts[rank].most_bytes = posts[0].most_bytes = ANY
        ours, theirs = socket.socketpair()
        posts[0].add(Line(ours, rank))
        posts[rank].add(Line(theirs, 0))
    try:
        sent = [(sender, to, size) for sender, to, size in sent if sender != to]
        tensors = [torch.full((size,), number, dtype=torch.uint8) for number, (_, _, size) in enumerate(sent)]
        for (sender, to, _), tensor in zip(sent, tensors, strict=True):
            posts[sender].send(tensor, to)
        for (sender, to, _), tensor in zip(sent, tensors, strict=True):
            assert torch.equal(posts[to].receive(torch.empty_like(tensor), sender), tensor)
    finally:
        for post in posts:
            for line in post.lines.values():
                line.close()
    with pytest.raises(EOFError):
        posts[2].receive(torch.empty(1), 1)


def test_the_rank_that_is_lost_is_named_and_not_one_that_sends_to_it() -> None:
    ended: list[int] = []
    is_told = threading.Event()

    def on_end(other: int, why: str) -> None:
        ended.append(other)
        is_told.set()

    posts = [Post(0, 3, on_end), Post(1, 3), Post(2, 3)]
    posts[0].most_bytes = posts[2].most_bytes = ANY
    for rank in (1, 2):
        ours, theirs = socket.socketpair()
        posts[0].add(Line(ours, rank))
        posts[rank].add(Line(theirs, 0))
    try:
        posts[2].lines[0].close()
        assert is_told.wait(30)
        posts[1].send(torch.zeros(3), 2)
        posts[1].send(torch.ones(3), 0)
        assert torch.equal(posts[0].receive(torch.empty(3), 1), torch.ones(3)), "its connection is as it was"
        assert ended == [2]
    finally:
        for post in posts:
            for line in post.lines.values():
                line.close()


def test_a_part_of_a_tensor_that_takes_long_is_no_stillness() -> None:
    """At 2 Mbit/s it takes a second."""
    post = Post(0, 2)
    post.most_bytes = ANY
    ours, theirs = socket.socketpair()
    post.add(Line(ours, 1))
    with theirs:
        theirs.sendall(HEAD.pack(3, 1, 1, 0, 3))
        for number in range(1, 4):
            theirs.sendall(b"1")
            deadline = time.monotonic() + 30
            while post.num_reads < number and time.monotonic() < deadline:
                time.sleep(0.001)
            assert post.num_reads == number
        assert post.receive(torch.empty(3, dtype=torch.uint8), 1).tolist() == [ord("1")] * 3


@pytest.mark.parametrize(
    "head",
    [
        (1 << 31, 0, 0, 0, 0),  # a message of 2 GiB
        (1 << 31, 1, 1, 0, 1 << 31),
        (4, 1, 2, 0, 4),  # as if it were another rank
        (4, 1, 1, 1, 4),
        (4, 1, 1, 9, 4),
        (4, 2, 0, 0, 0),  # a report of four bytes
        (4, 7, 0, 0, 0),
    ],
)
def test_what_no_rank_sends_ends_its_connection(head: tuple[int, int, int, int, int]) -> None:
    ended = threading.Event()
    post = Post(0, 3, lambda other, why: ended.set())
    post.most_bytes = ANY
    ours, theirs = socket.socketpair()
    beside, far = socket.socketpair()
    with theirs, far:
        post.add(Line(ours, 1))
        post.add(Line(beside, 2))
        theirs.sendall(HEAD.pack(*head) + b"1234")
        assert ended.wait(30)
        theirs.close()
        far.close()
        with pytest.raises(EOFError):
            post.receive(torch.empty(1), 1)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([(4, 1 << 40)], "rank 1 sent tensors of 1099511627776 bytes to rank 0, and a step has at most 64"),
        ([(60, 60), (8, 8)], "rank 1 sent tensors of 68 bytes to rank 0, and a step has at most 64"),
        ([(8, 16), (9, 16)], "rank 1 sent 9 bytes to rank 0 as a part of a tensor that lacks 8"),
        ([(0, 16)], "rank 1 sent 0 bytes to rank 0 as a part of a tensor that lacks 16"),
    ],
    ids=["huge", "too many", "too long", "empty"],
)
def test_more_of_a_tensor_than_a_step_has_ends_the_group_before_it_is_read(
    frames: list[tuple[int, int]], said: str
) -> None:
    """The body of the last frame is never sent: its head is enough."""
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    post = Post(0, 2, lambda other, why: ended.put((other, why)))
    post.most_bytes = 64
    ours, theirs = socket.socketpair()
    with theirs:
        post.add(Line(ours, 1))
        for size, of in frames[:-1]:
            theirs.sendall(HEAD.pack(size, 1, 1, 0, of) + bytes(size))
        size, of = frames[-1]
        theirs.sendall(HEAD.pack(size, 1, 1, 0, of))
        assert ended.get(timeout=30) == (1, said)


def joined(most_bytes: int) -> tuple[list[Post], queue.SimpleQueue[tuple[int, str]]]:
    """Three ranks, and what rank 0 hears of their ends."""
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    posts = [Post(0, 3, lambda other, why: ended.put((other, why))), Post(1, 3), Post(2, 3)]
    for post in posts:
        post.most_bytes = most_bytes
    for rank in (1, 2):
        ours, theirs = socket.socketpair()
        posts[0].add(Line(ours, rank))
        posts[rank].add(Line(theirs, 0))
    return posts, ended


def close(posts: list[Post]) -> None:
    for post in posts:
        for line in post.lines.values():
            line.close()


@pytest.mark.parametrize("sent", [3, 5, 2 * PIECE_BYTES])
@pytest.mark.parametrize(("sender", "to"), [(0, 1), (1, 0), (1, 2)])
def test_rank_0_hears_of_a_tensor_of_another_length_than_is_awaited(sent: int, sender: int, to: int) -> None:
    """It would be read as a part of the next one, or as all of it."""
    posts, ended = joined(ANY)
    posts[sender].send(torch.zeros(sent, dtype=torch.uint8), to)
    said = f"rank {sender} sent a tensor of {sent} bytes to rank {to}, which awaits 4"
    with pytest.raises(EOFError) as error:
        posts[to].receive(torch.empty(1), sender)
    assert str(error.value) == posts[to].problem == said
    assert ended.get(timeout=30) == (to or sender, said)
    with pytest.raises(EOFError):
        posts[0].lines[to or sender].recv_bytes()
    close(posts)


def test_rank_0_hears_of_more_than_a_step_has_that_another_rank_gets() -> None:
    posts, ended = joined(64)
    posts[1].send(torch.zeros(65, dtype=torch.uint8), 2)
    said = "rank 1 sent tensors of 65 bytes to rank 2, and a step has at most 64"
    assert ended.get(timeout=30) == (2, said)
    assert posts[2].problem == said
    close(posts)


def test_a_rank_that_does_not_read_is_not_waited_for_at_the_end() -> None:
    ours, theirs = socket.socketpair()
    line, post = Line(ours, 1), Post(0, 2)
    post.add(line)
    with theirs:

        def send() -> None:
            with contextlib.suppress(OSError):
                line.send_bytes(bytes(1 << 24))

        sending = threading.Thread(target=send)
        sending.start()
        theirs.recv(1)  # it has begun
        post.refuse(1, "rank 1 sent what no rank sends")
        sending.join(30)
    assert not sending.is_alive()


@pytest.mark.parametrize("reader", [0, 1])
def test_rank_0_tells_the_server_why_its_group_ends(
    reader: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It found the wrong length itself, or the rank on the other machine did."""
    ended, told = threading.Event(), list[str]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "1"))
        listener.listen()
        config = configured(ParallelConfig(pipeline=2, machines=2))
        made = Lead(config, resolve("demo"), 1, end=ended.set, far=str(tmp_path), leaving=told.append)
        most = most_sent_bytes(config, read_config(Source(resolve("demo") / "config.json")))
        made._has_loaded.set()
        with listener.accept()[0] as rank:
            lengths = (
                f"rank {1 - reader} sent tensors of {most + 1} bytes to rank {reader}, and a step has at most {most}"
            )
            told_by_rank = HEAD.pack(len(lengths), 3, 0, 0, 0) + lengths.encode()
            rank.sendall(told_by_rank if reader else HEAD.pack(8, 1, 1, 0, most + 1))
            assert ended.wait(30)
        made.close()
    assert told == [lengths]
    assert f"{lengths}; the replica ends with all its ranks" in caplog.text


KIND = "rank 1 sent a frame of kind 7"


def test_rank_0_names_the_rank_at_fault_before_it_ends_the_other_connections() -> None:
    posts, ended = joined(ANY)
    heard: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
    for line in posts[0].lines.values():
        line.end = lambda why: heard.put(None if ended.empty() else ended.get())  # type: ignore[method-assign]
    posts[1].lines[0]._socket.sendall(HEAD.pack(4, 7, 0, 0, 0))
    assert heard.get(timeout=30) == (1, KIND)
    close(posts)


@contextlib.contextmanager
def lead_and_ranks(folder: Path, told: list[str], count: int) -> Iterator[tuple[Lead, list[socket.socket]]]:
    """Rank 0 and its connections at the ranks of other machines, which are none but these sockets."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(1, count)]
        for rank, listener in enumerate(listeners, 1):
            listener.bind(str(folder / str(rank)))
            listener.listen()
        config = configured(ParallelConfig(pipeline=count, machines=count))
        made = Lead(config, resolve("demo"), 1, end=lambda: None, far=str(folder), leaving=told.append)
        stack.callback(made.close)
        yield made, [stack.enter_context(listener.accept()[0]) for listener in listeners]


@pytest.mark.parametrize("awaited", [1, 2])
def test_while_the_model_loads_the_rank_at_fault_is_named_whichever_is_awaited(awaited: int, tmp_path: Path) -> None:
    told: list[str] = []
    with lead_and_ranks(tmp_path, told, 3) as (made, ranks):
        ranks[0].sendall(HEAD.pack(4, 7, 0, 0, 0))
        for rank in ranks:  # each closes its connection when rank 0 has said why
            while rank.recv(1 << 16):
                if made._problems:
                    break
            rank.close()
        with pytest.raises((EOFError, OSError)):
            made._answer(awaited)
    assert told == [KIND]


def test_while_the_model_loads_a_rank_beside_rank_0_that_is_at_fault_is_named(tmp_path: Path) -> None:
    told: list[str] = []
    with lead_and_ranks(tmp_path, told, 2) as (made, ranks):
        made._is_far = lambda rank: False  # type: ignore[method-assign]
        ranks[0].sendall(HEAD.pack(4, 7, 0, 0, 0))
        ranks[0].shutdown(socket.SHUT_WR)
        with pytest.raises(ModelLoadError, match=f"^R{KIND[1:]} while the model was loading"):
            made._answer(1)


def test_rank_0_tells_what_the_other_rank_said_also_where_its_own_message_fails_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is closed, and the thread that reads has not read yet why."""
    later = threading.Event()
    read = Line._read_frames

    def read_late(self: Line, post: Post) -> str:
        why = read(self, post)
        later.wait(0.1)
        return why

    monkeypatch.setattr(Line, "_read_frames", read_late)
    monkeypatch.setattr("inferd.engine.ranks.post.CLOSE_S", 30)
    told: list[str] = []
    said = "rank 0 sent what no rank\x1b[2J sends"
    with lead_and_ranks(tmp_path, told, 2) as (made, ranks):
        made._has_loaded.set()
        ranks[0].sendall(HEAD.pack(len(said), 3, 0, 0, 0) + said.encode())
        ranks[0].close()
        with pytest.raises(ConnectionError, match="the connection to rank 1 ended"), made.together():
            made._tell(bytes(4), made._connections)
    assert told == [said.replace("\x1b", " ")], "and no log gets its control characters"


def test_a_connection_that_ended_while_the_group_began_is_the_reason(tmp_path: Path) -> None:
    told: list[str] = []
    with lead_and_ranks(tmp_path, told, 2) as (made, ranks):
        ranks[0].close()
        assert made._connections[0]._has_ended.wait(30)  # type: ignore[attr-defined]
        made._has_loaded.set()
        with pytest.raises(EOFError), made.together():
            made._connections[0].recv_bytes()
    assert told == ["the connection to rank 1 ended"]


@pytest.mark.parametrize("sent", [b"", HEAD.pack(4, 7, 0, 0, 0)], ids=["left", "refused"])
def test_a_rank_ends_with_another_status_where_it_refused_between_two_steps(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(connection: Line, *_: object) -> int:
        rank_module.follow(connection, None, None, {})  # type: ignore[arg-type]
        return rank_module.EXIT_DONE

    monkeypatch.setattr(rank_module, "serve", serve)
    ours, theirs = socket.socketpair()
    post, line = Post(1, 2), Line(theirs, 0)
    post.add(line)
    ours.sendall(sent)
    ours.shutdown(socket.SHUT_WR)
    with ours:
        assert rank_module.exit_code(line, post, None) == (EXIT_RANK_LOST if sent else rank_module.EXIT_DONE)


@pytest.mark.parametrize("parallel", [ParallelConfig(pipeline=4, machines=2), ParallelConfig(tensor=2, machines=2)])
def test_the_tensors_of_a_step_are_bounded_by_its_rows(parallel: ParallelConfig) -> None:
    dims = read_config(Source(resolve("demo") / "config.json"))
    config = configured(parallel)
    rows = config.scheduler.max_num_batched_tokens
    handed = 2 * rows * dims.hidden_size * 4
    most = most_sent_bytes(config, dims)
    assert most == handed if parallel.tensor == 1 else most > handed + rows * dims.vocab_size // parallel.tensor * 4


def test_a_rank_that_cannot_load_stays_until_rank_0_has_read_why(tmp_path: Path) -> None:
    """The server ends a group with the first rank that ends, and rank 0 may still be reading its weights."""
    parallel = ParallelConfig(pipeline=2, machines=2)
    with Elsewhere(tmp_path, parallel, "--memory", "1000") as elsewhere:
        made = Lead(configured(parallel), resolve("demo"), 1, far=str(tmp_path))
        try:
            with pytest.raises(ModelLoadError, match="its part of the weights takes"):
                made.loaded(b"")
            with pytest.raises(subprocess.TimeoutExpired):
                elsewhere.processes[1].wait(0.5)
        finally:
            made.close()
        assert elsewhere.processes[1].wait(30) == rank_module.EXIT_LOAD_FAILED


def test_ranks_beside_each_other_on_a_node_share_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.ranks.rank.rss_bytes", lambda pid: 30)
    monkeypatch.setattr("inferd.engine.ranks.rank.available_bytes", lambda: 1000)
    node = rank_module.Elsewhere("demo", 200)
    assert (node.given_bytes(1), node.free_bytes(1)) == (170, 170)
    assert (node.given_bytes(2), node.free_bytes(2)) == (70, 140)
    monkeypatch.setattr("inferd.engine.ranks.rank.available_bytes", lambda: 100)
    assert node.free_bytes(2) == 100


def test_a_rank_on_a_node_computes_with_the_threads_that_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.ranks.rank.num_threads", lambda ranks: 8 // ranks)
    assert rank_module.Elsewhere("demo", 1).num_threads(2) == 4
    assert rank_module.Elsewhere("demo", 1, 3).num_threads(2) == 3
