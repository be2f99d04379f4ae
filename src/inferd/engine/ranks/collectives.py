"""The messages between ranks on devices within a step: torch's process groups bring tensors from device to device.

NCCL on CUDA devices; gloo on processors, where the tests run the same class. The groups copy and add nothing: partial
sums are added here, in the order of the ranks. The order in which NCCL adds depends on the size of a tensor, so a row's
result would depend on the rest of its batch.

A kernel of NCCL waits on its device for those of other ranks, and CUDA does not promise that two such kernels run at
once. So each begins when the one before it has ended: the stream that computes waits for it, and a receive begins when
it is waited for. The host waits for none of them. A step is therefore not cut into micro-batches.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    Backend,
    GatherOptions,
    PrefixStore,
    Store,
    Work,
)

from inferd.engine.model.share import Share
from inferd.engine.ranks.peers import GroupPeers, added, gloo_group

WHOLE_BYTES: Final = 1 << 20
"""Of a partial sum that every rank gets from every other one: the fewest messages. Of a larger one each rank adds a
part for all ranks, which moves fewer bytes where there are more than two. The bits are the same. An estimate, which no
GPU has confirmed."""


def peers_of(
    share: Share, store: Store, memory: int | None, device: torch.device, timeout_s: float
) -> GroupPeers | CollectivePeers:
    """The way between the ranks of one machine, which this rank has not joined. The arguments are those of
    ``GroupPeers`` and ``CollectivePeers``."""
    if device.type == "cpu":
        return GroupPeers(share, store, memory, timeout_s)
    return CollectivePeers(share, store, device, timeout_s)


def _group(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Backend:
    if device.type == "cpu":
        return gloo_group(store, rank, size, timeout)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only torch's builds for CUDA have it

    # All ranks are on this machine, so they need not find each other through its networks. Devices talk directly.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # of one exchange; the group's watchdog then ends this process
    return ProcessGroupNCCL(store, rank, size, options)


class CollectivePeers:
    """Implements ``Peers`` for the ranks of one machine, each on a device of its own.

    One process group for each stage, and one for each pair of ranks that hand hidden states over.
    """

    meeting: Final = None
    cuts_steps: Final = False

    def __init__(self, share: Share, store: Store, device: torch.device, timeout_s: float) -> None:
        """``store``: where the ranks find each other; NCCL uses it as long as the groups live. ``timeout_s``: after
        which the supervisor takes a worker for hung; it says why, so the groups wait twice as long."""
        self._share, self._store, self._device = share, store, device
        self._timeout = timedelta(seconds=2 * timeout_s)
        self._stage: Backend | None = None
        self._pairs: dict[int, Backend] = {}  # by the other rank
        self._num_exchanges = 0
        self.waits_in: int | None = None
        """The number of the exchange that the host waits in. Over NCCL it waits in none."""

    def join(self) -> None:
        """Meet the other ranks, which call this too. Raises RuntimeError where they do not in time.

        Groups connect in their first exchange, so each has one here. All ranks meet in one order.
        """
        share = self._share
        token = torch.zeros(1, device=self._device)
        if share.tensor > 1:
            store = PrefixStore(f"stage {share.stage}", self._store)
            self._stage = _group(store, share.place, share.tensor, self._device, self._timeout)
            self.gather(token)
        for one, other in share.links():
            if share.rank in (one, other):
                is_other, store = share.rank == other, PrefixStore(f"{one} and {other}", self._store)
                peer = one if is_other else other
                self._pairs[peer] = _group(store, int(is_other), 2, self._device, self._timeout)
                for receives in (is_other, not is_other):  # in both directions
                    (self.receive(token, peer) if receives else self.send(token, peer)).wait()
        token.tolist()  # waits for the device

    def sum(self, partial: Tensor) -> Tensor:
        ranks = self._share.tensor
        if ranks == 2 or partial.nbytes <= WHOLE_BYTES:
            return added(self.gather(partial))
        each = -(-partial.numel() // ranks)
        mine = partial.new_zeros(ranks * each)
        mine[: partial.numel()] = partial.flatten()
        parts = torch.empty_like(mine)  # this rank's part of the tensor, of every rank
        self._exchange(self._of_stage.alltoall_base(parts, mine, [], [], AllToAllOptions()))  # type: ignore[attr-defined]
        total = added(list(parts.view(ranks, each)))
        return torch.cat(self.gather(total))[: partial.numel()].view(partial.shape)

    def gather(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = part.new_empty((self._share.tensor, *part.shape))
        self._exchange(self._of_stage._allgather_base(parts.view(-1), part.view(-1), AllgatherOptions()))  # type: ignore[attr-defined]
        return list(parts)

    def concat(self, part: Tensor) -> Tensor:
        return torch.cat(self.gather(part), dim=1)

    def collect(self, part: Tensor) -> list[Tensor]:
        part, options = part.contiguous(), GatherOptions()
        options.rootRank = 0
        parts = [] if self._share.place else list(part.new_empty((self._share.tensor, *part.shape)))
        self._exchange(self._of_stage.gather([parts] if parts else [], [part], options))  # type: ignore[attr-defined]
        return parts or [part]

    def send(self, tensor: Tensor, rank: int) -> Arrived:
        self._exchange(self._pairs[rank].send([tensor.contiguous()], int(rank > self._share.rank), 0))  # type: ignore[attr-defined]
        return Arrived()

    def receive(self, into: Tensor, rank: int) -> Arriving:
        return Arriving(self, into, rank)

    def fill(self, into: Tensor, rank: int) -> None:
        """Receive the next tensor of ``rank``."""
        self._exchange(self._pairs[rank].recv([into], int(rank > self._share.rank), 0))  # type: ignore[attr-defined]

    @property
    def _of_stage(self) -> Backend:
        assert self._stage is not None, "join() was not called"
        return self._stage

    def _exchange(self, work: Work) -> None:
        """What is computed from here on waits for it; over gloo the host waits."""
        self._num_exchanges += 1
        self.waits_in = self._num_exchanges
        work.wait()
        self.waits_in = None


class Arrived:
    """A tensor that the stream has sent before anything else that it computes."""

    def wait(self) -> None:
        pass


class Arriving:
    """A tensor that is received when it is waited for."""

    __slots__ = ("_into", "_peers", "_rank")

    def __init__(self, peers: CollectivePeers, into: Tensor, rank: int) -> None:
        self._peers, self._into, self._rank = peers, into, rank

    def wait(self) -> None:
        self._peers.fill(self._into, self._rank)
