"""The way between ranks on several machines: one connection between rank 0 and each other rank, for everything.

Messages, parts of tensors and reports of work share it, in the order in which they were sent. A thread reads each
connection at once, so two ranks that both send never wait for each other. Rank 0 passes on what other ranks send each
other. Each part tells the length of its tensor. A rank that gets another length than it awaits, or more than a step
has, tells rank 0 why it ends the group.

Knows no network and no secrets: a connection is a socket of this machine, which the server and the node join by TLS
(``nodes/relay.py``).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.config import ModelConfig
from inferd.engine.memory import most_sampled_rows
from inferd.engine.model.cuts import Transfer
from inferd.engine.model.share import Share
from inferd.engine.ranks.peers import added
from inferd.engine.ranks.watch import LOOK_S, Report, asleep_but_for
from inferd.errors import printable

PIECE_BYTES: Final = 1 << 18
"""Of a tensor in one frame."""

ANSWER_BYTES: Final = 1 << 20
"""The longest message that rank 0 takes from another rank. Those of rank 0 hold parts of adapters."""

REPORT_S: Final = LOOK_S / 2
"""Between two reports of a rank's work, so that each look of rank 0 finds a new one."""

REASON_BYTES: Final = 1024
"""The longest sentence on why a connection ends."""

LAST_S: Final = 0.2
"""Seconds for sending it to a rank that does not read."""

CLOSE_S: Final = 0.5
"""Seconds that the other end has to read it and to close the connection."""

_MESSAGE, _PIECE, _REPORT, _END = 0, 1, 2, 3
_HEAD: Final = struct.Struct("<IBHHQ")
"""Bytes behind it and what they are; of a piece the ranks that send and get it, and the bytes of its whole tensor."""
_WORK: Final = struct.Struct("<d?Q")

_log = logging.getLogger("inferd.engine")


class Line:
    """One end of the connection between rank 0 and another rank; any thread may send.

    Sends and receives messages as a ``Connection`` does.
    """

    def __init__(self, connection: socket.socket, other: int) -> None:
        """``other``: the rank at the other end. Nothing is read before ``read_into``."""
        self.other = other
        self.num_bytes = 0  # that came from there
        self._num_sent = 0  # bytes
        self._report = Report()
        self._is_ending = False  # the other end is told why, and nothing that it sends is used
        self._has_ended = threading.Event()  # nothing more is read, and the post knows why
        self._reader: threading.Thread | None = None
        self._socket = connection
        self._sending = threading.Lock()
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read_into(self, post: Post) -> None:
        """Begin to read, in a thread. Pieces of tensors go to ``post``."""
        name = f"inferd-line-{self.other}"
        self._reader = threading.Thread(target=self._read, args=(post,), name=name, daemon=True)
        self._reader.start()

    @property
    def report(self) -> Report:
        """The last one of the other end's work."""
        return replace(self._report, num_unread=self._num_sent - self._report.num_bytes)

    def send_bytes(self, message: bytes) -> None:
        """Send a message. Raises OSError where the connection ended."""
        self._send(_MESSAGE, message)

    def send_piece(self, sender: int, to: int, data: bytes | memoryview, of: int) -> None:
        """Send a part of a tensor of ``of`` bytes. Raises OSError where the connection ended."""
        self._send(_PIECE, data, sender, to, of)

    def send_report(self, report: Report) -> None:
        """Tell how much this process has worked. Raises OSError where the connection ended."""
        self._send(_REPORT, _WORK.pack(report.worked_s, report.is_asleep, report.num_bytes))

    def recv_bytes(self) -> bytes:
        """Wait for a message. Raises EOFError where the connection ended."""
        message = self._messages.get()
        if message is None:
            self._messages.put(None)
            raise EOFError(f"the connection to rank {self.other} ended")
        return message

    def end(self, why: str) -> None:
        """Tell the other end why, where it reads; it then closes the connection.

        What it sends is dropped until it has: on the way there (``nodes/relay.py``), bytes that nothing reads would
        end the connection before the other end has the reason.
        """
        self._is_ending = True
        with contextlib.suppress(OSError):
            self._socket.settimeout(LAST_S)
            if self._sending.acquire(timeout=LAST_S):
                try:
                    self._socket.sendall(_frame(_END, why.encode()[:REASON_BYTES]))
                    return
                finally:
                    self._sending.release()
        self.close()

    def close_in_time(self) -> None:
        """End a connection that the other end was told to close, at the latest after ``CLOSE_S``."""
        if threading.current_thread() is not self._reader:  # which drops what comes itself
            self._has_ended.wait(CLOSE_S)
            self.close()

    def close(self) -> None:
        """End the connection; the other end notices. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the thread that reads closes it

    def _send(self, kind: int, body: bytes | memoryview, sender: int = 0, to: int = 0, of: int = 0) -> None:
        frame = _frame(kind, body, sender, to, of)
        try:
            with self._sending:
                self._num_sent += len(frame)
                self._socket.sendall(frame)
        except OSError as error:
            self._has_ended.wait(CLOSE_S)  # the other end may have said why, and that is read at this moment
            raise ConnectionError(f"the connection to rank {self.other} ended") from error

    def _read(self, post: Post) -> None:
        """Read until the connection ends; nothing is waited for then."""
        why = ""
        with self._socket:
            try:
                why = self._read_frames(post)
            except (EOFError, OSError):
                pass
            except ValueError as error:
                why = str(error)
                post.refuse(self.other, why)  # before the thread that computes notices, and ends the process
            if self._is_ending:
                self._drop()
        post.ended(self.other, why)
        self._messages.put(None)
        self._has_ended.set()

    def _drop(self) -> None:
        """Read without using it what comes until the other end closes the connection, at most ``CLOSE_S``."""
        until = time.monotonic() + CLOSE_S
        with contextlib.suppress(OSError):
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(PIECE_BYTES):
                    return

    def _read_frames(self, post: Post) -> str:
        """Read until the other end says why it ends the connection. Raises EOFError, OSError where it ended, ValueError
        about what no rank sends."""
        while True:
            size, kind, sender, to, of = _HEAD.unpack(self._received(_HEAD.size))
            self._check(post, size, kind, sender, to)
            if kind == _PIECE:
                post.check_piece(sender, to, size, of)
            body = self._received(size, post if kind == _PIECE else None)
            if kind == _PIECE:
                post.arrived(sender, to, body, of)
            elif kind == _MESSAGE:
                self._messages.put(bytes(body))
            elif kind == _REPORT:
                self._report = Report(self._report.number + 1, *_WORK.unpack(body))
            else:
                return printable(bytes(body).decode(errors="replace"), REASON_BYTES)

    def _check(self, post: Post, size: int, kind: int, sender: int, to: int) -> None:
        """Raises ValueError where no rank sends such a frame, before there is memory for it."""
        answer = ANSWER_BYTES if self.other else None
        longest = {_MESSAGE: answer, _PIECE: PIECE_BYTES, _REPORT: _WORK.size, _END: REASON_BYTES}
        if kind not in longest:
            raise ValueError(f"rank {self.other} sent a frame of kind {kind}")
        most = longest[kind]
        if (most is not None and size > most) or (kind == _REPORT and size != _WORK.size):
            raise ValueError(f"rank {self.other} sent a frame of kind {kind} with {size} bytes")
        if kind == _PIECE and not post.takes(self.other, sender, to):
            raise ValueError(f"rank {self.other} sent a part of a tensor from rank {sender} to rank {to}")

    def _received(self, size: int, of: Post | None = None) -> memoryview:
        """The next bytes, whose reads are counted in ``of``. Raises EOFError where the connection ended."""
        data = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            count = self._socket.recv_into(data[filled:])
            if not count or self._is_ending:
                raise EOFError
            filled += count
            self.num_bytes += count
            if of is not None:
                of.num_reads += 1
        return data


def most_sent_bytes(config: ModelConfig, dims: DecoderConfig) -> int:
    """The most bytes of tensors that a rank sends another one before that one takes the first of them.

    A stage sends the branch and the residual of a step's rows, and gets no other step before these are computed. Ranks
    of one stage wait for each other in every sum, so one is ahead of another by two: of a product's columns, or of
    logits. Numbers have at most 4 bytes.
    """
    rows, share = config.scheduler.max_num_batched_tokens, config.parallel.tensor
    handed = 2 * dims.hidden_size
    if share == 1:
        return 4 * rows * handed
    inner = max(dims.intermediate_size, *(0 if one is None else one.intermediate_size for one in (*dims.moe, None)))
    widest = max(dims.hidden_size, inner, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim)
    return 4 * (rows * (handed + 2 * widest) + max(rows, most_sampled_rows(config)) * -(-dims.vocab_size // share))


def _frame(kind: int, body: bytes | memoryview, sender: int = 0, to: int = 0, of: int = 0) -> bytes:
    return b"".join((_HEAD.pack(len(body), kind, sender, to, of), body))


class _Box:
    """What one rank has sent to this one, and this one has not taken yet."""

    __slots__ = ("arriving", "pieces", "unread_bytes")

    def __init__(self) -> None:
        self.pieces: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self.arriving = 0  # bytes that are missing from the tensor whose pieces arrive now
        self.unread_bytes = 0


class Post:
    """What this rank sends to others and gets from them, over its lines.

    ``most_bytes``: of tensors that one rank may have sent to this one before it takes them (``most_sent_bytes``).
    """

    def __init__(self, rank: int, count: int, on_end: Callable[[int, str], None] = lambda other, why: None) -> None:
        """``count``: of ranks. ``on_end`` is called when the connection to another rank ended; its second argument
        says why, where that rank is at fault."""
        self.rank = rank
        self.most_bytes = 0
        self.problem = ""  # what another rank sent that ends this one
        self._on_end = on_end
        self._lines: dict[int, Line] = {}
        self._boxes = [_Box() for _ in range(count)]
        self._counting = threading.Lock()  # of unread bytes
        self._meetings = 0
        self.num_reads = 0  # of bytes of tensors: each shows that the connection works, also where a piece takes long
        self.waits_in: int | None = None  # the number of the tensor that it waits for; None: for none

    def add(self, line: Line) -> None:
        """Use a line from now on, and read it."""
        self._lines[line.other] = line
        line.read_into(self)

    @property
    def lines(self) -> Mapping[int, Line]:
        """By the rank at the other end."""
        return self._lines

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to another rank. Raises OSError where the connection ended."""
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        line = self._lines[to if self.rank == 0 else 0]
        for first in range(0, len(data), PIECE_BYTES):
            line.send_piece(self.rank, to, data[first : first + PIECE_BYTES], len(data))

    def receive(self, into: Tensor, sender: int) -> Tensor:
        """``into``, which is contiguous, filled by the next tensor of another rank. Raises EOFError where a connection
        ended, or that tensor has another length, which ends this rank's connections."""
        data = into.view(-1).view(torch.uint8).numpy().data
        box = self._boxes[sender]
        self._meetings += 1
        self.waits_in = self._meetings
        filled = 0
        while filled < len(data):
            found = box.pieces.get()
            if found is None:
                box.pieces.put(None)
                raise EOFError(f"the connection of rank {self.rank} to rank {sender} ended")
            piece, of = found
            if of != len(data):
                why = f"rank {sender} sent a tensor of {of} bytes to rank {self.rank}, which awaits {len(data)}"
                self.refuse(sender, why)
                raise EOFError(why)
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
            with self._counting:
                box.unread_bytes -= len(piece)
        self.waits_in = None
        return into

    def refuse(self, other: int, why: str) -> None:
        """End all connections because of what rank ``other`` sent: nothing of the group's can be relied on. Rank 0 is
        told why, and ends the group."""
        self.problem = why
        self._on_end(other, why)  # first: the ends of the other connections follow from it, and are no reason
        if self.rank:
            _log.error("%s; this rank ends", why)
        for line in self._lines.values():
            line.end(why)
        for line in self._lines.values():
            line.close_in_time()

    def takes(self, other: int, sender: int, to: int) -> bool:
        """Whether rank ``other`` may send a part of a tensor of rank ``sender`` for rank ``to``."""
        if self.rank == 0:
            return sender == other and to != other and (to == 0 or to in self._lines)
        return to == self.rank and sender != to and sender < len(self._boxes)

    def check_piece(self, sender: int, to: int, size: int, of: int) -> None:
        """Raises ValueError where the next piece for this rank does not go on with its tensor, or has no place, before
        there is memory for it."""
        if to != self.rank:
            return
        box = self._boxes[sender]
        missing = box.arriving or of
        if not 0 < size <= missing:
            raise ValueError(f"rank {sender} sent {size} bytes to rank {to} as a part of a tensor that lacks {missing}")
        with self._counting:
            waiting = box.unread_bytes + missing
        if waiting > self.most_bytes:
            raise ValueError(
                f"rank {sender} sent tensors of {waiting} bytes to rank {to}, and a step has at most {self.most_bytes}"
            )

    def arrived(self, sender: int, to: int, data: memoryview, of: int) -> None:
        """A piece of a tensor of ``of`` bytes came over a line: it is for this rank, or is passed on."""
        if to == self.rank:
            box = self._boxes[sender]
            box.arriving = (box.arriving or of) - len(data)
            with self._counting:
                box.unread_bytes += len(data)
            box.pieces.put((data, of))
        else:
            with contextlib.suppress(OSError):  # the thread that reads that line tells that it ended
                self._lines[to].send_piece(sender, to, data, of)

    def ended(self, other: int, why: str = "") -> None:
        """The connection to another rank ended: no rank gets anything more through it."""
        self._on_end(other, why)  # before the thread that computes notices, and tells less
        for box in self._boxes if self.rank else [self._boxes[other]]:
            box.pieces.put(None)


class _Sent:
    """A tensor that has left: the rank that it is for reads it at once."""

    def wait(self) -> None:
        """It has left."""


class _Arriving:
    """A tensor that is awaited. Those of one rank are waited for in the order in which it sends them."""

    __slots__ = ("_into", "_post", "_sender")

    def __init__(self, post: Post, into: Tensor, sender: int) -> None:
        self._post, self._into, self._sender = post, into, sender

    def wait(self) -> None:
        """Until it has arrived. Raises EOFError where a connection ended."""
        self._post.receive(self._into, self._sender)


class PostPeers:
    """Implements ``Peers`` for ranks on several machines."""

    meeting: Final = None
    cuts_steps: Final = True

    def __init__(self, share: Share, post: Post) -> None:
        self._share, self._post = share, post

    @property
    def waits_in(self) -> int | None:
        """What tells the meeting that this rank waits in from others; None: it waits in none."""
        return self._post.waits_in

    def join(self) -> None:
        """Every rank has its line from the start."""

    def _stage(self) -> range:
        """The ranks of this one's stage."""
        first = self._share.stage * self._share.tensor
        return range(first, first + self._share.tensor)

    def sum(self, partial: Tensor) -> Tensor:
        return added(self.gather(partial))

    def gather(self, part: Tensor) -> list[Tensor]:
        part, ranks, mine = part.contiguous(), self._stage(), self._share.rank
        for other in ranks:
            if other != mine:
                self._post.send(part, other)
        return [part if other == mine else self._post.receive(torch.empty_like(part), other) for other in ranks]

    def concat(self, part: Tensor) -> Tensor:
        return torch.cat(self.gather(part), dim=1)

    def collect(self, part: Tensor) -> list[Tensor]:
        part, ranks = part.contiguous(), self._stage()
        if self._share.place:
            self._post.send(part, ranks[0])
            return [part]
        return [part, *(self._post.receive(torch.empty_like(part), other) for other in ranks[1:])]

    def send(self, tensor: Tensor, rank: int) -> Transfer:
        self._post.send(tensor, rank)
        return _Sent()

    def receive(self, into: Tensor, rank: int) -> Transfer:
        return _Arriving(self._post, into, rank)


def report_work(line: Line) -> None:
    """Tell rank 0 how much the other threads of this process work, until the connection ends."""
    this = threading.get_native_id()
    while True:
        worked_s = time.process_time() - time.thread_time()
        try:
            line.send_report(Report(0, worked_s, asleep_but_for(this), line.num_bytes))
        except OSError:
            return
        time.sleep(REPORT_S)
