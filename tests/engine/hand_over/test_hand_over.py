"""Hand-overs between two engines, of one process each or of a group of ranks: equal answers whatever becomes of the
frames, and every block back in its place."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.deltas import stats_of
from tests.tiers import THOROUGH

from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.engine import Engine
from inferd.engine.hand_over.contents import cut, joined
from inferd.engine.hand_over.frames import HEADER, Blocks, Done, Frame, FrameError, FrameReader, Offer, Refusal, encode
from inferd.engine.hand_over.incoming import LEASE_S, Incoming
from inferd.engine.hand_over.link import EngineLink
from inferd.engine.load import create_backend
from inferd.native.kv_cache import KVCache
from inferd.types import GenerateRequest, Handed, Link, Output, SamplingParams, TokenPrompt

KEY = b"k" * 32
NUM_FAULTS = 1000
BLOCK = 4
LAYOUTS = [(2, 2), *(pytest.param(layout, marks=pytest.mark.soak) for layout in ((2, 1), (1, 2)))]
"""(tensor, pipeline) of groups of ranks."""


def load(folder: Path, *, dtype: str = "auto", num_blocks: int = 128, layout: tuple[int, int] = (1, 1)) -> Engine:
    config = ModelConfig(
        source=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=128,
        scheduler=SchedulerConfig(max_num_batched_tokens=16),  # a prompt takes several steps
        kv_cache=KVCacheConfig(block_size=BLOCK, num_blocks=num_blocks, dtype=dtype),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor=layout[0], pipeline=layout[1]),
    )
    return create_backend("tiny", config, lambda phase, done, total: None)


class Written:
    """The frames of hand-overs as bytes, instead of a socket. ``num_unwanted``: blocks that the receiver has."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.num_unwanted = 0
        self.is_done = threading.Event()
        self._name = b""

    def begin(self, offer: Offer, num_tokens: int, address: str) -> Written:
        self._name = offer.hand_over
        self.frames = [encode(offer, KEY)]
        self.is_done.clear()
        return self

    def give(self, first: int, contents: list[bytes]) -> None:
        for place, content in enumerate(contents, first):
            self.frames.append(encode(Blocks(self._name, place, [content]), KEY))

    def finish(self, *, num_computed: int) -> None:
        self.frames.append(encode(Done(self._name), KEY))
        self.is_done.set()


def join(engine: Engine, begin: Callable[[Offer, int, str], Written] | None) -> Incoming:
    contents = engine._runner.contents()
    link = Link(role="both", address="", key=KEY)
    engine.link = EngineLink(link, engine._scheduler, contents, engine.info.fingerprint, _ignore, begin)
    return engine.link.incoming


def _ignore(handed: Handed) -> None:
    pass


class Pair:
    def __init__(self, folder: Path, *, dtype: str = "auto", layout: tuple[int, int] = (1, 1)) -> None:
        self.written = Written()
        self.prefill, self.decode = (load(folder, dtype=dtype, layout=layout) for _ in range(2))
        join(self.prefill, self.written.begin)
        self.incoming = join(self.decode, None)

    def clear(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.pool.clear_cache()

    def compute(self, asked: GenerateRequest) -> list[bytes]:
        """The frames of the prompt's hand-over."""
        sampling = msgspec.structs.replace(asked.sampling, max_tokens=0)
        run(
            self.prefill,
            msgspec.structs.replace(
                asked, id=f"{asked.id}:prefill", sampling=sampling, hands_over_to="there", hands_over_for=asked.id
            ),
        )
        assert self.written.is_done.wait(60), "ranks give their parts of blocks from a thread"
        return self.written.frames

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.close()

    def take(self, frame: bytes, now: float = 0.0) -> list[Frame | None]:
        return [self.incoming.take(one, now) for one in FrameReader(KEY).feed(frame)]


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Pair:
    return Pair(tiny_model)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tensor {layout[0]} x pipeline {layout[1]}")
def groups(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Pair]:
    pair = Pair(tiny_model, layout=request.param)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Engine:
    return load(tiny_model)


def ask(number: int, prompt: list[int], *, tenant: str = "", max_tokens: int = 6) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(
        id=f"r{number}", model="tiny", prompt=TokenPrompt(token_ids=prompt), sampling=sampling, tenant=tenant
    )


def run(engine: Engine, asked: GenerateRequest) -> tuple[list[int], int]:
    """The ids of an answer, and the tokens of its prompt that were cached."""
    engine.add(engine.prepare(asked), 0.0)
    outputs = [output for _ in iter(lambda: engine.due(0.0), None) for output in engine.step(0.0)[0]]
    ends = [output.end for output in outputs if output.end is not None]
    return ids_of(outputs), ends[0].usage.cached_tokens


def ids_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for delta in output.deltas for token in delta.token_ids]


def bits_of(engine: Engine, asked: GenerateRequest) -> list[tuple[int, float]]:
    """The ids of an answer with their log-probabilities."""
    sampling = msgspec.structs.replace(asked.sampling, logprobs=0)
    engine.add(engine.prepare(msgspec.structs.replace(asked, sampling=sampling)), 0.0)
    outputs = [output for _ in iter(lambda: engine.due(0.0), None) for output in engine.step(0.0)[0]]
    return [
        (one.token_id, one.logprob) for output in outputs for delta in output.deltas for one in delta.logprobs or ()
    ]


def draw_prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(3, 200) for _ in range(draw.randint(2 * BLOCK + 1, 22 * BLOCK))]


def hit_tokens(engine: Engine, asked: GenerateRequest) -> int:
    """Tokens that the scheduler finds in the cache for a request."""
    engine.add(engine.prepare(asked), 0.0)
    found = 0
    while engine.due(0.0) is not None:
        found += stats_of(engine, 0.0).prefix_hit_tokens
    return found


def test_an_answer_goes_on_from_the_blocks_of_another_engine(pair: Pair, alone: Engine) -> None:
    pair.clear()
    draw = random.Random(1)
    for number in range(8):
        asked = ask(number, draw_prompt(draw), tenant="t", max_tokens=8)
        for frame in pair.compute(asked):
            pair.take(frame)
        num_full = (len(asked.prompt.token_ids) - 1) // BLOCK  # type: ignore[union-attr]
        assert pair.incoming.num_handed(asked.id) == num_full
        pair.decode.add(pair.decode.prepare(asked), 0.0)
        stats = stats_of(pair.decode, 0.0)
        assert stats.prefix_hit_tokens == num_full * BLOCK
        while pair.decode.due(0.0) is not None:
            pair.decode.step(0.0)
        assert len(pair.incoming) == 0
        again = msgspec.structs.replace(asked, id="again")
        assert run(pair.decode, again)[0] == run(alone, asked)[0]
    assert pair.decode.pool.num_used == pair.prefill.pool.num_used == 0


def test_what_another_worker_computed_is_not_told_as_cached(pair: Pair) -> None:
    pair.clear()
    asked = ask(1, list(range(5, 45)))
    for frame in pair.compute(asked):
        pair.take(frame)
    assert run(pair.decode, asked)[1] == 0
    assert run(pair.decode, msgspec.structs.replace(asked, id="again"))[1] > 0


def test_blocks_of_one_tenant_are_not_found_by_another(pair: Pair) -> None:
    pair.clear()
    asked = ask(1, list(range(5, 45)), tenant="one")
    for frame in pair.compute(asked):
        pair.take(frame)
    assert hit_tokens(pair.decode, msgspec.structs.replace(asked, id="other", tenant="two")) == 0
    assert hit_tokens(pair.decode, msgspec.structs.replace(asked, id="own")) == 36
    pair.incoming.release_all()


def faulty(frames: list[bytes], stale: list[bytes], draw: random.Random, rate: float) -> tuple[list[bytes], int]:
    """The frames with losses, duplicates, reorderings, corruptions and frames of earlier hand-overs; the faults."""
    sent: list[bytes] = []
    num_faults = 0
    for frame in frames:
        if draw.random() >= rate:
            sent.append(frame)
            continue
        num_faults += 1
        match draw.choice(("lost", "double", "changed", "moved", "stale")):
            case "double":
                sent += [frame, frame]
            case "changed":
                changed = bytearray(frame)
                changed[draw.randrange(4, len(changed))] ^= 1 << draw.randrange(8)  # after the length
                sent.append(bytes(changed))
            case "moved":
                sent.insert(draw.randint(0, len(sent)), frame)
            case "stale":
                sent += [*stale[-1:], *stale[:1], frame]
    return sent, num_faults


def test_lost_doubled_moved_changed_and_late_frames_change_no_answer(pair: Pair, alone: Engine) -> None:
    check_under_faults(pair, alone, NUM_FAULTS)


@THOROUGH
def test_faults_of_frames_change_no_answer_of_groups(groups: Pair) -> None:
    check_under_faults(groups, groups.prefill, 150)


@pytest.mark.soak
def test_a_thousand_faults_of_frames_change_no_answer_of_groups(groups: Pair) -> None:
    check_under_faults(groups, groups.prefill, NUM_FAULTS)


def check_under_faults(pair: Pair, alone: Engine, at_least: int) -> None:
    """Hand over prompts until there were so many faults. ``alone``: computes the answers that are expected."""
    draw = random.Random(19)
    num_faults = number = num_complete = num_partial = 0
    stale: list[bytes] = []
    while num_faults < at_least:
        number += 1
        alone.pool.clear_cache()
        asked = ask(number, draw_prompt(draw), tenant=draw.choice(("", "a", "b")), max_tokens=3)
        expected = run(alone, asked)[0]
        pair.clear()
        frames = pair.compute(asked)
        sent, faults = faulty(frames, stale, draw, rate=draw.choice((0.0, 0.05, 0.3, 0.9)))
        comes_at = len(sent) if draw.random() < 0.5 else draw.randint(0, len(sent))  # later frames are late
        num_faults += faults + len(sent) - comes_at
        for frame in sent[:comes_at]:
            pair.take(frame)
        num_handed = pair.incoming.num_handed(asked.id)
        num_complete += num_handed == len(frames) - 2
        num_partial += 0 < num_handed < len(frames) - 2
        pair.decode.add(pair.decode.prepare(asked), 0.0)
        for frame in sent[comes_at:]:
            pair.take(frame)
        outputs: list[Output] = []
        while pair.decode.due(0.0) is not None:
            outputs += pair.decode.step(0.0)[0]
            if draw.random() < 0.2 and frames:
                pair.take(draw.choice(frames))
        assert ids_of(outputs) == expected
        pair.decode.pool.check()
        pair.incoming.expire(math.inf)
        assert len(pair.incoming) == 0
        assert pair.decode.pool.num_used == 0, "a block was leaked"
        pair.decode.pool.check()
        stale = [*stale, *frames][-200:]
    assert min(num_complete, num_partial) > at_least // 100, "both kinds, or the test shows little"
    print(f"{num_faults} faults of {number} hand-overs, {num_complete} whole and {num_partial} in part")


def test_a_request_that_does_not_come_keeps_no_block_for_ever(pair: Pair) -> None:
    pair.clear()
    frames = pair.compute(ask(1, list(range(5, 45))))
    for frame in frames[:4]:
        pair.take(frame, now=10.0)
    assert pair.decode.pool.num_used == 9  # full blocks of 40 tokens, whose last one is left to compute
    pair.incoming.expire(10.0 + LEASE_S - 1)
    assert pair.decode.pool.num_used == 9
    pair.incoming.expire(10.0 + LEASE_S)
    assert pair.decode.pool.num_used == 0
    assert pair.decode.pool.num_cached == 3
    pair.decode.pool.check()


def test_blocks_that_wait_make_room_where_sequences_wait_for_memory(tiny_model: Path) -> None:
    engine = load(tiny_model, num_blocks=40)
    incoming = join(engine, None)
    waiting = Offer(b"x" * 16, "absent", engine.link._layout, [bytes([i]) * 32 for i in range(60)], "", 1.0)  # type: ignore[union-attr]
    grant = incoming.take(waiting, 0.0)
    assert getattr(grant, "count", 0) == 20, "at most half of the memory"
    ids, _ = run(engine, ask(1, list(range(5, 125)), max_tokens=3))  # 30 blocks and one more
    assert len(ids) == 3
    assert engine.pool.num_used == 0


def test_blocks_of_another_layout_are_refused(pair: Pair, tiny_model: Path) -> None:
    pair.clear()
    other = load(tiny_model, dtype="int8")
    incoming = join(other, None)
    (offer,) = FrameReader(KEY).feed(pair.compute(ask(1, list(range(5, 45))))[0])
    answer = incoming.take(offer, 0.0)
    assert isinstance(answer, Refusal)
    assert "another kind" in answer.reason
    assert other.pool.num_used == 0


def test_int8_blocks_are_handed_over_with_their_scales(tiny_model: Path) -> None:
    pair = Pair(tiny_model, dtype="int8")
    asked = ask(1, list(range(5, 60)))
    for frame in pair.compute(asked):
        pair.take(frame)
    ids, _ = run(pair.decode, asked)
    assert ids == run(pair.prefill, asked)[0]


# -- groups of ranks -----------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_what_is_cut_into_parts_of_ranks_and_joined_is_the_same(
    sizes: list[int], num_blocks: int, draw: random.Random
) -> None:
    contents = [draw.randbytes(sum(sizes)) for _ in range(num_blocks)]
    parts = cut(contents, sizes)
    assert [[len(content) for content in part] for part in parts] == [[size] * num_blocks for size in sizes]
    assert joined(parts) == contents


@THOROUGH
def test_answers_of_groups_go_on_from_the_blocks_of_another_group(groups: Pair) -> None:
    """Bit for bit, also where a prompt's beginning was cached by the sender or by the receiver."""
    groups.clear()
    draw = random.Random(1)
    for number in range(4):
        asked = ask(number, draw_prompt(draw), max_tokens=8)
        num_full = (len(asked.prompt.token_ids) - 1) // BLOCK  # type: ignore[union-attr]
        expected = bits_of(groups.prefill, msgspec.structs.replace(asked, id="expected", tenant="another"))
        for name in ("first", "again"):  # the sender has all of it in its cache then
            groups.decode.pool.clear_cache()
            one = msgspec.structs.replace(asked, id=name)
            for frame in groups.compute(one):
                groups.take(frame)
            assert groups.incoming.num_handed(name) == num_full
            assert bits_of(groups.decode, one) == expected
    assert groups.decode.pool.num_used == groups.prefill.pool.num_used == 0


@THOROUGH
def test_ranks_give_and_take_their_parts_of_blocks(groups: Pair, alone: Engine) -> None:
    """All bytes of a block, in the order of ranks: what was read, written to another group and read there is equal."""
    one, other = groups.prefill._runner.contents(), groups.decode._runner.contents()
    assert one.layout == other.layout
    assert one.block_bytes == alone._runner.cache.block_bytes, "no rank has a copy of another one's heads"
    found: list[list[bytes]] = []
    is_read = threading.Event()
    sent = [random.Random(5).randbytes(one.block_bytes) for _ in range(4)]
    one.write([0, 1, 2, 3], sent)
    one.read([0, 1, 2, 3], found.append)
    one.after_reads(is_read.set)
    assert is_read.wait(60)
    other.write([3, 1, 0, 2], found[0])
    is_read.clear()
    other.read([3, 1], found.append)
    other.read([0, 2], found.append)
    other.after_reads(is_read.set)
    assert is_read.wait(60)
    assert found == [sent, sent[:2], sent[2:]]


@THOROUGH
def test_groups_of_another_layout_are_refused(groups: Pair, pair: Pair) -> None:
    for sender, receiver in ((groups, pair), (pair, groups)):
        sender.clear()
        (offer,) = FrameReader(KEY).feed(sender.compute(ask(1, list(range(5, 45))))[0])
        answer = receiver.incoming.take(offer, 0.0)
        assert isinstance(answer, Refusal)
        assert "another kind" in answer.reason
        assert receiver.decode.pool.num_used == 0


def test_a_long_prompt_is_read_between_several_steps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind its end, when another request may have its memory."""
    block_bytes = pair.prefill._runner.cache.block_bytes
    monkeypatch.setattr("inferd.engine.hand_over.link.MOST_GIVEN_BYTES", 2 * block_bytes)
    pair.clear()
    asked = ask(1, list(range(5, 50)))
    whole = pair.compute(asked)
    part = msgspec.structs.replace(
        asked,
        id="again:prefill",
        sampling=SamplingParams(temperature=0.0, max_tokens=0),
        hands_over_to="there",
        hands_over_for="again",
    )
    pair.prefill.add(pair.prefill.prepare(part), 0.0)  # all of it is cached, so there is one step
    num_given = []
    while pair.prefill.due(0.0) is not None:
        pair.prefill.step(0.0)
        num_given.append(len(pair.written.frames) - 1)
        assert (pair.prefill.pool.num_used == 0) == pair.written.is_done.is_set()
    assert num_given == [2, 4, 6, 8, 10, 12]
    assert pair.written.frames[1:-1] != whole[1:-1], "another hand-over"
    assert bodies(pair.written.frames[1:-1]) == bodies(whole[1:-1])
    pair.prefill.pool.check()


def bodies(frames: list[bytes]) -> list[tuple[int, list[bytes]]]:
    found = [one for frame in frames for one in FrameReader(KEY).feed(frame)]
    return [(one.first, one.contents) for one in found if isinstance(one, Blocks)]


def test_blocks_that_the_receiver_has_are_not_read(pair: Pair) -> None:
    pair.clear()
    pair.written.num_unwanted = 4
    try:
        assert [first for first, _ in bodies(pair.compute(ask(1, list(range(5, 50)))))] == [4, 5, 6, 7, 8, 9, 10]
    finally:
        pair.written.num_unwanted = 0


def contents(cache: KVCache) -> list[bytes]:
    return cache.read_blocks(list(range(4)))


def test_blocks_that_are_read_and_written_are_equal(pair: Pair) -> None:
    one, other = pair.prefill._runner.cache, pair.decode._runner.cache
    read = contents(one)
    assert {len(block) for block in read} == {one.block_bytes}
    other.write_blocks([3, 1, 0, 2], read)
    assert other.read_blocks([3, 1, 0, 2]) == read
    assert other.read_blocks([1]) == [read[1]]


def test_a_frame_that_claims_too_much_ends_the_connection() -> None:
    with pytest.raises(FrameError, match="at most"):
        list(FrameReader(KEY).feed(HEADER.pack(2**32 - 1, b"\0" * 16)))


def test_frames_are_found_wherever_the_stream_is_cut() -> None:
    frames: list[Frame] = [Done(b"a"), Blocks(b"b", 3, [b"xyz"]), Done(b"c")]
    stream = b"".join(encode(frame, KEY) for frame in frames)
    for size in (1, 7, 1000):
        reader = FrameReader(KEY)
        got = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
        assert got == frames
    assert list(FrameReader(b"another").feed(encode(Done(b"a"), KEY))) == [None]


# -- through sockets ---------------------------------------------------------------------------


class Turns:
    """Actions for the loop thread, which the test is."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def put(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._actions.append(action)

    def turn(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, []
        for action in actions:
            action()


@pytest.fixture
def linked(tiny_model: Path, tmp_path: Path) -> tuple[Engine, Engine, Turns, list[Handed]]:
    prefill, decode, turns, reports = load(tiny_model), load(tiny_model), Turns(), list[Handed]()
    decode.open_link(Link(role="decode", address=str(tmp_path / "s"), key=KEY), turns.put, reports.append)
    prefill.open_link(Link(role="prefill", address=str(tmp_path / "p"), key=KEY), turns.put, reports.append)
    return prefill, decode, turns, reports


def hand_over(prefill: Engine, turns: Turns, reports: list[Handed], asked: GenerateRequest, address: str) -> Handed:
    sampling = msgspec.structs.replace(asked.sampling, max_tokens=0)
    part = msgspec.structs.replace(
        asked, id=f"{asked.id}:prefill", sampling=sampling, hands_over_to=address, hands_over_for=asked.id
    )
    prefill.add(prefill.prepare(part), 0.0)
    while prefill.due(0.0) is not None:
        prefill.step(0.0)
    while not reports:  # the report comes from a thread, after a limit at the latest
        turns.turn()
    return reports.pop()


def test_blocks_go_through_a_socket(
    linked: tuple[Engine, Engine, Turns, list[Handed]], tmp_path: Path, alone: Engine
) -> None:
    prefill, decode, turns, reports = linked
    draw = random.Random(3)
    for number in range(5):
        asked = ask(number, draw_prompt(draw))
        num_full = (len(asked.prompt.token_ids) - 1) // BLOCK  # type: ignore[union-attr]
        handed = hand_over(prefill, turns, reports, asked, str(tmp_path / "s"))
        assert (handed.failure, handed.num_blocks) == ("", num_full)
        assert handed.num_tokens == handed.num_computed == len(asked.prompt.token_ids)  # type: ignore[union-attr]
        assert handed.num_bytes == num_full * decode._runner.cache.block_bytes
        assert run(decode, asked) == (run(alone, asked)[0], 0)
    assert decode.pool.num_used == prefill.pool.num_used == 0


def test_a_receiver_that_is_not_there_is_told(
    linked: tuple[Engine, Engine, Turns, list[Handed]], tmp_path: Path
) -> None:
    prefill, _, turns, reports = linked
    handed = hand_over(prefill, turns, reports, ask(1, list(range(5, 45))), str(tmp_path / "absent"))
    assert "the connection to the receiver broke" in handed.failure
    assert handed.num_blocks == 0
    assert prefill.pool.num_used == 0
