"""Reduction and broadcast in memory: the promises and the failures of `train.group.TorchCollective`.

Invariants
- Members meet by the group's name, which is used again while the group works; the k-th collective of one member is the k-th of every other, and of
  one kind (`Mismatch`: a bug that would sum weights into gradients). Nothing moves before all are there.
- A reduction reads each accumulator and changes none; the core's learner gets the sum at once and whole, or nothing.
- Whoever waits longer than the deadline fails. A member that fails closes its part, so the others in it fail too; those that were through already
  have succeeded. A broadcast that fails may leave a member's weights torn.
- It occupies the cell's compute, as the real one does: whatever is asked meanwhile comes after it, also when the asker was cancelled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gyre.train.protocols import CollectiveFailed, Group
from theorem.clock import VirtualLoop
from theorem.compute import Compute


class Learner(Protocol):
    """What a collective needs of a learner, as `train.group` has it."""

    totals: list[Tensor] | None

    @property
    def sums(self) -> list[Tensor]: ...

    @property
    def weights(self) -> list[Tensor]: ...


class Mismatch(AssertionError):
    """Two members of a group were not doing the same."""


@dataclass
class _Operation:
    """The k-th collective of a group: who is there, and what each brought."""

    kind: str = ""
    here: set[int] = field(default_factory=set)
    parts: dict[int, Any] = field(default_factory=dict)


class _Group:
    """The members that met under a name."""

    def __init__(self, size: int, bugs: list[str]) -> None:
        self.size = size
        self.bugs = bugs
        self.operations: list[_Operation] = []
        self.members: dict[int, MemoryCollective] = {}
        self.broken = ""
        self._changed = asyncio.Event()

    def operation(self, k: int, kind: str, rank: int) -> _Operation:
        while len(self.operations) <= k:
            self.operations.append(_Operation())
        operation = self.operations[k]
        operation.kind = operation.kind or kind
        if operation.kind != kind or rank in operation.here:
            self.bugs.append(f"rank {rank} came to a {kind}, where {sorted(operation.here)} are in a {operation.kind}")
            raise Mismatch(self.bugs[-1])
        operation.here.add(rank)
        self.tell()
        return operation

    def meet(self, rank: int, member: MemoryCollective) -> None:
        """Come to the group for the first time. One who left it, or another in its place, is not met again: the others hold what it closed."""
        if self.members.setdefault(rank, member) is not member or any(rank in o.here for o in self.operations):
            self.close(f"rank {rank} came again")

    def tell(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def close(self, why: str) -> None:
        self.broken = self.broken or why
        self.tell()

    async def until(self, condition: Any) -> None:
        while not condition():
            if self.broken:
                raise CollectiveFailed(self.broken)
            await self._changed.wait()


class Meetings:
    """Where groups meet. `trouble` is the probability that a part of a member's work fails."""

    def __init__(self, loop: VirtualLoop, seed: int, *, trouble: float, seconds: float) -> None:
        self.loop = loop
        self.trouble, self.seconds = trouble, seconds
        self.rng = random.Random(f"{seed}/meetings")
        self._groups: dict[tuple[str, str], _Group] = {}

    def group(self, group: Group) -> _Group:
        met = self._groups.setdefault((group.store, group.name), _Group(group.size, self.loop.errors))
        if met.size != group.size:
            self.loop.errors.append(f"group {group.name} has {met.size} members for one and {group.size} for another")
            raise Mismatch(self.loop.errors[-1])
        return met


class MemoryCollective:
    """One member's part."""

    def __init__(self, meetings: Meetings, learner: Learner, compute: Compute, moment: Callable[[str], None] = lambda kind: None) -> None:
        self._meetings, self._learner, self._compute, self._moment = meetings, learner, compute, moment
        self._held: tuple[str, int] = ("", 0)  # the group in use and how many collectives it had

    async def reduce(self, group: Group, deadline_s: float) -> None:
        """See `protocols.Collective`."""
        await self._compute.long(lambda: self._together("reduce", group, deadline_s))

    async def broadcast(self, group: Group, deadline_s: float) -> None:
        """See `protocols.Collective`."""
        await self._compute.long(lambda: self._together("broadcast", group, deadline_s))

    async def _together(self, kind: str, group: Group, deadline_s: float) -> None:
        name, k = self._held if self._held[0] == group.name else (group.name, 0)
        self._held = (name, k + 1)
        self._moment(kind)
        met = self._meetings.group(group)
        try:
            async with asyncio.timeout(deadline_s):
                if k == 0:
                    met.meet(group.rank, self)
                if met.broken:
                    await self._travel()
                    raise CollectiveFailed(met.broken)
                operation = met.operation(k, kind, group.rank)
                await met.until(lambda: len(operation.here) == group.size)
                if kind == "reduce":
                    await self._reduce(met, operation, group)
                else:
                    await self._broadcast(met, operation, group)
        except (TimeoutError, CollectiveFailed) as e:
            self._held = ("", 0)
            met.close(f"rank {group.rank} left: {e}")
            raise CollectiveFailed(f"rank {group.rank} of {group.name}: {e or 'the deadline'}") from None

    async def _reduce(self, met: _Group, operation: _Operation, group: Group) -> None:
        await self._travel()
        operation.parts[group.rank] = [t.detach().clone() for t in self._learner.sums]
        met.tell()
        if group.rank == 0:
            await met.until(lambda: len(operation.parts) == group.size)
            await self._travel()
            self._learner.totals = [torch.stack(same).sum(0) for same in zip(*operation.parts.values(), strict=True)]

    async def _broadcast(self, met: _Group, operation: _Operation, group: Group) -> None:
        if group.rank == 0:
            operation.parts[0] = [t.detach().clone() for t in self._learner.weights]
            met.tell()
            await self._travel()
            return
        await met.until(lambda: 0 in operation.parts)
        weights = [t.detach() for t in self._learner.weights]
        for n, (t, source) in enumerate(zip(weights, operation.parts[0], strict=True)):
            half = len(t) // 2
            t[:half] = source[:half]
            if n == 0:
                await self._travel()  # torn, if this fails
            t[half:] = source[half:]

    async def _travel(self) -> None:
        rng = self._meetings.rng
        await asyncio.sleep(self._meetings.seconds * rng.random())
        if rng.random() < self._meetings.trouble:
            raise CollectiveFailed("a connection was reset")
