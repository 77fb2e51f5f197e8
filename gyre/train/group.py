"""Collectives between cells: one process group per roster, of torch's own Gloo or NCCL, met over a store that the core keeps.

Invariants
- A reduction is out of place: accumulators are read, a copy of a bucket of them travels, and only the core's `totals` are written.
- fp32 all the way. The core divides, once, elsewhere.
- A group that failed is closed at once, so that who waits for this member in it fails too instead of waiting for the deadline.
- The store listens on the interface the core's own address names, loopback unless told otherwise.

A group is met again under its name while it works; the core names a new one when the roster changed or the last one failed. torchft's
`ProcessGroupGloo` wraps the same class but has no reduction to one member; see docs/decisions/0006.

Not here: who takes part (peers.py), several ranks of a cell (rank r of each meets under a name of its own: shards.py).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed
from torch import Tensor

from gyre.errors import UsageError
from gyre.train.protocols import CollectiveFailed, Compute, Group

BUCKET_BYTES: Final = 64 << 20

dist: Any = torch.distributed  # its stubs leave out most of what is here


class Sums(Protocol):
    """What a collective needs of a learner."""

    totals: list[Tensor] | None

    @property
    def sums(self) -> list[Tensor]:
        """The accumulator, fp32, in the order of the parameters."""

    @property
    def weights(self) -> list[Tensor]:
        """The weights, each storage once, in the order of the model."""


def buckets(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Neighbours of one type together up to `limit` bytes; a larger tensor alone."""
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        nbytes = t.numel() * t.element_size()
        if bucket and (size + nbytes > limit or t.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += nbytes
    if bucket:
        yield bucket


def host_of(address: str) -> str:
    """The host that an address of ours names: loopback for ipc."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]") if address.startswith("tcp://") else "127.0.0.1"


def host_and_port(address: str) -> tuple[str, int]:
    """Of a tcp address."""
    return host_of(address), int(address.rpartition(":")[2])


def open_store(host: str, port: int = 0) -> tuple[Any, str]:
    """A store that listens on `host` alone, and its address. Raises OSError."""
    sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = sock.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
    return store, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class TorchCollective:
    """One member. `compute` runs the blocking part (None: only `together` is called); a core makes its store with `open_store`."""

    def __init__(self, learner: Sums, compute: Compute | None, backend: str) -> None:
        self._learner: Any = learner
        self._compute: Any = compute
        self._backend = backend
        if backend == "nccl" and not torch.cuda.is_available():
            raise UsageError("run.toml", "no usable GPU for NCCL", "set it to auto or gloo", "train.backend")
        self._store: Any = None
        self._held: tuple[str, Any] | None = None  # the group in use, by name

    def open_store(self, host: str) -> str:
        """Keep the store where members meet. Returns its address."""
        self._store, address = open_store(host)
        return address

    async def reduce(self, group: Group, deadline_s: float) -> None:
        """See `protocols.Collective`."""
        await self._compute(self.together, group, deadline_s, False)

    async def broadcast(self, group: Group, deadline_s: float) -> None:
        """See `protocols.Collective`."""
        await self._compute(self.together, group, deadline_s, True)

    def together(self, group: Group, deadline_s: float, weights: bool) -> None:
        """Reduce accumulators, or broadcast `weights`, in the thread that computes. Raises `CollectiveFailed`."""
        end = time.monotonic() + deadline_s
        try:
            (_broadcast if weights else _reduce)(self._group(group, deadline_s), self._learner, group.rank, end, self._backend == "gloo")
        except RuntimeError as e:  # what torch raises for a peer that is gone, and for a deadline
            self.close()
            raise CollectiveFailed(str(e).partition("] ")[2].partition(". ")[0] or str(e).partition("\n")[0]) from None

    def _group(self, group: Group, deadline_s: float) -> Any:
        if self._held is not None and self._held[0] == group.name:
            return self._held[1]
        self.close()
        timeout = timedelta(seconds=deadline_s)
        host, port = host_and_port(group.store)
        store = self._store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store.set_timeout(timeout)
        met = dist.PrefixStore(group.name, store)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            made = dist.ProcessGroupNCCL(met, group.rank, group.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host(host, port))]
            options._timeout = timeout
            made = dist.ProcessGroupGloo(met, group.rank, group.size, options)
        self._held = (group.name, made)
        return made

    def close(self) -> None:
        """Leave the group, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            held[1].abort()


def own_host(host: str, port: int) -> str:
    """The address of this machine that the store's host is reached from."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _left(end: float) -> timedelta:
    return timedelta(seconds=max(0.001, end - time.monotonic()))


def _copy(bucket: Sequence[Tensor], host: bool) -> Tensor:
    """A bucket as one vector, which the collective may write; on the host, where Gloo has all its operations."""
    flat = torch.cat([t.reshape(-1) for t in bucket])
    return flat.cpu() if host else flat


def _split(flat: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat.to(bucket[0].device), [t.numel() for t in bucket])
    return [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)]


def _reduce(group: Any, learner: Sums, rank: int, end: float, host: bool) -> None:
    totals: list[Tensor] = []
    for bucket in buckets(learner.sums):
        flat = _copy(bucket, host)
        options = dist.ReduceOptions()
        options.rootRank, options.timeout = 0, _left(end)
        group.reduce([flat], options).wait()
        if rank == 0:
            totals += _split(flat, bucket)
    if rank == 0:
        learner.totals = totals


@torch.no_grad()
def _broadcast(group: Any, learner: Sums, rank: int, end: float, host: bool) -> None:
    for bucket in buckets(learner.weights):
        flat = _copy(bucket, host)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _left(end)
        group.broadcast([flat], options).wait()
        if rank != 0:
            for part, t in zip(_split(flat, bucket), bucket, strict=True):
                t.copy_(part)
