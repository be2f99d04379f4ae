"""The messages between ranks within a step: through memory that the ranks of a stage share, or over gloo.

Partial sums are added in the order of the ranks. A ring's order would depend on the number of rows, so a row's result
would depend on the rest of its batch.
"""

from __future__ import annotations

import fcntl
import os
from datetime import timedelta
from typing import Final, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from inferd.engine.model.share import Share
from inferd.native.compiled import CODES, is_on, kernels

_HOST: Final = "127.0.0.1"
SPIN_S: Final = 200e-6
"""For which a rank looks for the parts of others before it sleeps."""


class Stage(Protocol):
    """The ranks of a stage, which put their parts together."""

    @property
    def waits_in(self) -> int | None:
        """The number of the meeting that this rank waits in; None: in none."""
        ...

    def join(self) -> None: ...

    def sum(self, partial: Tensor) -> Tensor: ...

    def gather(self, part: Tensor) -> list[Tensor]: ...

    def concat(self, part: Tensor) -> Tensor: ...

    def collect(self, part: Tensor) -> list[Tensor]: ...


def added(parts: list[Tensor]) -> Tensor:
    """The sum of the ranks' parts, in their order."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def shared_memory(share: Share) -> int | None:
    """A file in memory for the sums of all stages, which has no name and which the caller closes.

    None: nothing is divided within a layer, the kernels were not built, or the system has or allows no such files; the
    sums then go over gloo. Raises OSError.
    """
    if share.tensor == 1 or not is_on() or not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("inferd-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except PermissionError:  # by the sysctl vm.memfd_noexec, or a filter of system calls
        return None
    try:
        os.ftruncate(file, share.pipeline * kernels.Meeting.bytes(share.tensor))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(file)
        raise
    return file


class SharedStage:
    """A stage whose ranks share memory (kernels/meeting.h)."""

    def __init__(self, share: Share, memory: int, timeout_s: float) -> None:
        """``memory``: see ``shared_memory``; it may be closed afterwards. Raises RuntimeError."""
        self._share = share
        self.meeting = kernels.Meeting(
            file=memory,
            offset=share.stage * kernels.Meeting.bytes(share.tensor),
            ranks=share.tensor,
            place=share.place,
            spin_s=SPIN_S,
            timeout_s=timeout_s,
        )

    @property
    def waits_in(self) -> int | None:
        return self.meeting.waits_in or None

    def join(self) -> None:
        self.gather(torch.zeros(1))

    def sum(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        total = torch.empty_like(partial)
        self.meeting.sum(
            partial.data_ptr(), partial.numel(), CODES[torch.float32], total.data_ptr(), torch.get_num_threads()
        )
        return total

    def gather(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = part.new_empty((self._share.tensor, *part.shape))
        self.meeting.gather(part.data_ptr(), part.nbytes, parts.data_ptr())
        return list(parts)

    def concat(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        rows, width = part.shape
        whole = part.new_empty((rows, self._share.tensor * width))
        self.meeting.concat(part.data_ptr(), rows, width * part.itemsize, whole.data_ptr())
        return whole

    def collect(self, part: Tensor) -> list[Tensor]:
        if self._share.place == 0:
            return self.gather(part)
        part = part.contiguous()
        self.meeting.gather(part.data_ptr(), part.nbytes, 0)
        return [part]


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Meet the others of a group on this machine. Raises RuntimeError where they do not come in time."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


class Gloo:
    """Groups of ranks that send each other messages with gloo."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._meetings = 0
        self.waits_in: int | None = None

    def group(self, name: str, rank: int, size: int) -> ProcessGroupGloo:
        """Meet the others of a group. Raises RuntimeError where they do not come in time."""
        return gloo_group(PrefixStore(name, self._store), rank, size, self._timeout)

    def meet(self, works: list[Work]) -> None:
        self._meetings += 1
        self.waits_in = self._meetings
        for work in works:
            work.wait()
        self.waits_in = None


class Message:
    """A tensor that gloo sends or receives, in a thread of its own. Messages between two ranks keep their order."""

    __slots__ = ("_gloo", "_tensor", "_work")

    def __init__(self, gloo: Gloo, tensor: Tensor, work: Work) -> None:
        self._gloo, self._tensor, self._work = gloo, tensor, work  # gloo has no more than the address of the numbers

    def wait(self) -> None:
        self._gloo.meet([self._work])


class GlooStage:
    """A stage whose ranks send each other messages."""

    def __init__(self, share: Share, gloo: Gloo) -> None:
        self._share, self._gloo = share, gloo
        self._group: ProcessGroupGloo | None = None

    @property
    def waits_in(self) -> int | None:
        return self._gloo.waits_in

    def join(self) -> None:
        share = self._share
        self._group = self._gloo.group(f"stage {share.stage}", share.place, share.tensor)

    def sum(self, partial: Tensor) -> Tensor:
        return added(self.gather(partial))

    def gather(self, part: Tensor) -> list[Tensor]:
        group, place = self._group, self._share.place
        assert group is not None, "join() was not called"
        part = part.contiguous()
        parts = [part if other == place else torch.empty_like(part) for other in range(self._share.tensor)]
        # Messages are sent by this thread. A collective of gloo is handed to another one, which takes longer than a
        # message of some kilobytes.
        works = [group.recv([into], other, 0) for other, into in enumerate(parts) if other != place]  # type: ignore[attr-defined]
        works += [group.send([part], other, 0) for other in range(len(parts)) if other != place]  # type: ignore[attr-defined]
        self._gloo.meet(works)
        return parts

    def concat(self, part: Tensor) -> Tensor:
        return torch.cat(self.gather(part), dim=1)

    def collect(self, part: Tensor) -> list[Tensor]:
        group, count = self._group, self._share.tensor
        assert group is not None, "join() was not called"
        part = part.contiguous()
        if self._share.place:
            self._gloo.meet([group.send([part], 0, 0)])  # type: ignore[attr-defined]
            return [part]
        parts = [part, *(torch.empty_like(part) for _ in range(count - 1))]
        self._gloo.meet([group.recv([parts[other]], other, 0) for other in range(1, count)])  # type: ignore[attr-defined]
        return parts


class GroupPeers:
    """Implements ``Peers`` for the ranks of one machine: its stage, and the links to other stages over gloo."""

    cuts_steps: Final = True

    def __init__(self, share: Share, store: Store, memory: int | None, timeout_s: float) -> None:
        """``store``: where gloo's ranks find each other; ``memory``: see ``shared_memory``; it may be closed
        afterwards; ``timeout_s``: the longest that one rank waits for another."""
        self._share = share
        self._gloo = Gloo(store, timeout_s)
        shared = None if memory is None else SharedStage(share, memory, timeout_s)
        self.meeting = None if shared is None else shared.meeting
        self._stage: Stage = shared or GlooStage(share, self._gloo)
        self._pairs: dict[int, ProcessGroupGloo] = {}  # by the other rank

    @property
    def waits_in(self) -> tuple[int | None, int | None] | None:
        """What tells the meeting that this rank waits in from others; None: it waits in none."""
        found = (self._stage.waits_in, self._gloo.waits_in)
        return None if found == (None, None) else found

    def join(self) -> None:
        """Meet the other ranks, which call this too. Raises RuntimeError where they do not in time."""
        share = self._share
        if share.tensor > 1:
            self._stage.join()
        for one, other in share.links():
            if share.rank in (one, other):
                group = self._gloo.group(f"{one} and {other}", int(share.rank == other), 2)
                self._pairs[other if share.rank == one else one] = group

    def sum(self, partial: Tensor) -> Tensor:
        return self._stage.sum(partial)

    def gather(self, part: Tensor) -> list[Tensor]:
        return self._stage.gather(part)

    def concat(self, part: Tensor) -> Tensor:
        return self._stage.concat(part)

    def collect(self, part: Tensor) -> list[Tensor]:
        return self._stage.collect(part)

    def send(self, tensor: Tensor, rank: int) -> Message:
        tensor = tensor.contiguous()
        return Message(self._gloo, tensor, self._pairs[rank].send([tensor], int(rank > self._share.rank), 0))  # type: ignore[attr-defined]

    def receive(self, into: Tensor, rank: int) -> Message:
        return Message(self._gloo, into, self._pairs[rank].recv([into], int(rank > self._share.rank), 0))  # type: ignore[attr-defined]
