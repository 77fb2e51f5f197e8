"""The core's side of the other cells: who may join, who attends a step's end, the reduction, the broadcast.

Invariants
- Every answer is computed from what is so now, never from what was said before; so a request may be repeated, late or doubled.
- A snapshot of a step is made at the first join, in the thread that computes, and only while its step is open: so it is of exactly that version.
- Whoever takes part in a reduction attends at that moment, under the incarnation of the manifest, and holds exactly what the manifest says.
- A reduction that fails names the dead: those who do not attend again. Survivors keep their accumulators.
- A broadcast that fails costs those cells a pull and nothing else.

Not here: what the core does about it (loop.py), bytes between cells (group.py), sockets: `send` and `handle` are all there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

import msgspec

from gyre.config import Config
from gyre.net.sockets import Peer, mint
from gyre.train.metrics import Tally
from gyre.train.protocols import Collective, CollectiveFailed, Compute, Group, Lost
from gyre.types import Version
from gyre.weights.shared import host_id
from gyre.weights.snapshot import Snapshot, SnapshotStore
from gyre.weights.transfer import reader, serve_chunk
from gyre.wire.arrays import Array
from gyre.wire.messages import AttendStep, Hold, JoinStep, Manifest, Member, Message, PullChunk, ReduceOrder, Refuse, StepEnded, StepOffer

log = logging.getLogger(__name__)

Send = Callable[[Peer, Message, Mapping[str, Array] | None], None]

_BACK_S: Final = 5.0  # after a reduction that went well its cells are back at once
_TRIES: Final = 3  # of a reduction that fails though all its cells are there; then they are given up, and the core does the step alone
_HEARD_S: Final = 10.0
_PATIENCE_S: Final = 0.5


class _Waiting(msgspec.Struct):
    """A request that is not answered yet."""

    peer: Peer
    message: JoinStep | AttendStep
    timer: asyncio.TimerHandle


class Peers:
    """The exchange of `loop.Loop`. `handle` takes the messages of ToTrain that are from satellites; `make` copies the weights, in `compute`."""

    def __init__(
        self,
        send: Send,
        collective: Collective,
        store: str,
        make: Callable[[Version], Snapshot],
        compute: Compute,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        config: Config,
        *,
        cell: str,
        mint: Callable[[], str] = mint,
        ranks: int = 1,
    ) -> None:
        self._send, self._collective, self._address, self._make, self._compute, self._spawn = send, collective, store, make, compute, spawn
        self._cell, self._mint, self._ranks = cell, mint, ranks
        self._attend_s, self._reduce_s = config.train.claim_ttl_s, config.train.reduce_timeout_s
        self._snapshots = SnapshotStore()
        self._waiting: dict[str, _Waiting] = {}  # by cell
        self._lives: dict[str, str] = {}  # the incarnation that last joined, by cell
        self._heard: dict[str, float] = {}  # cells that have not heard of the end
        self._changed = asyncio.Event()
        self._term = 0
        self._open: Version | None = None  # the weights that may be pulled
        self._done = -1  # the last step that is committed
        self._finished = self._idle = self._patient = False
        self._packing: Version | None = None
        self._order: ReduceOrder | None = None
        self._ended: StepEnded | None = None  # while it is broadcast
        self._reduced: list[Member] = []  # who took part in this step's reduction
        self._group: tuple[list[Member], str] | None = None  # the group that works, by its roster
        self._failures = 0

    # --- requests ---

    def handle(self, peer: Peer, message: Message) -> bool:
        """Take `message` if it is a satellite's; else return False."""
        match message:
            case JoinStep() if message.ranks != self._ranks:
                reason = f"it has {message.ranks} ranks, the core has {self._ranks}; start all cells of a run with the same --ranks"
                self._send(peer, Refuse(id=self._mint(), cause=message.id, reason=reason), None)
            case JoinStep():
                self._lives[message.cell] = message.incarnation
                self._wait(peer, message)
            case AttendStep():
                self._wait(peer, message)
            case PullChunk() if message.version in self._snapshots.held:
                now = asyncio.get_running_loop().time()
                self._snapshots.expire(now)
                serve_chunk(self._snapshots, now, peer, message, self._send, self._mint)
            case _:
                return False
        return True

    def _wait(self, peer: Peer, message: JoinStep | AttendStep) -> None:
        """Answer now, or become the cell's request that waits; an older one of the cell will not be missed."""
        loop = asyncio.get_running_loop()
        if (before := self._waiting.pop(message.cell, None)) is not None:
            before.timer.cancel()
        self._heard[message.cell] = loop.time()
        timer = loop.call_later(message.wait_s, self._expire, message.cell, message)
        self._waiting[message.cell] = _Waiting(peer, message, timer)
        self._changed.set()
        self._answer(message.cell)

    def _expire(self, cell: str, message: JoinStep | AttendStep) -> None:
        waiting = self._waiting.get(cell)
        if waiting is None or waiting.message is not message:
            return
        if self._patient and isinstance(message, AttendStep):  # its part is about to begin
            waiting.timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._expire, cell, message)
        else:
            self._reply(cell, Hold(id=self._mint(), cause=message.id, idle=self._idle))

    def _reply(self, cell: str, answer: Message) -> None:
        waiting = self._waiting.pop(cell)
        waiting.timer.cancel()
        leaves = isinstance(waiting.message, AttendStep) and waiting.message.leaving and isinstance(answer, Hold | StepEnded)
        if leaves or (isinstance(answer, StepEnded) and answer.finished):
            self._heard.pop(cell, None)
            self._changed.set()
        self._send(waiting.peer, answer, None)

    def _answer_all(self) -> None:
        for cell in list(self._waiting):
            self._answer(cell)

    def _answer(self, cell: str) -> None:
        waiting = self._waiting[cell]
        message = waiting.message
        answer = self._about_joining(message) if isinstance(message, JoinStep) else self._about_the_end(message)
        if isinstance(answer, StepOffer):
            self._snapshots.lease(asyncio.get_running_loop().time(), reader(waiting.peer), answer.version)
        if answer is not None:
            self._reply(cell, answer)

    def _about_joining(self, m: JoinStep) -> Message | None:
        if self._finished:
            return StepEnded(id=self._mint(), cause=m.id, version=Version(self._term, self._done), roster=[], finished=True)
        if self._open is None:
            return None
        snapshot = self._snapshots.latest
        if snapshot is None or snapshot.version != self._open:
            if self._packing != self._open:
                self._packing = self._open
                self._spawn(self._pack(self._open))
            return None
        memory = snapshot.memory if m.host and m.host == host_id() else ""
        return StepOffer(
            id=self._mint(), cause=m.id, version=snapshot.version, tensors=snapshot.tensors, nbytes=snapshot.nbytes,
            checksum=snapshot.checksum, memory=memory,
        )  # fmt: skip

    def _about_the_end(self, m: AttendStep) -> Message | None:
        if m.term < self._term:
            return Refuse(id=self._mint(), cause=m.id, reason=f"term {m.term} is over, the core's is {self._term}", stale=True)
        if m.term > self._term:
            return None  # this core is about to take that term, or about to learn that another did
        me = Member(m.cell, m.incarnation)
        if m.step <= self._done:
            if self._ended is not None and m.step == self._done and me in self._ended.roster:
                return msgspec.structs.replace(self._ended, id=self._mint(), cause=m.id)
            return StepEnded(id=self._mint(), cause=m.id, version=Version(self._term, self._done), roster=[], finished=self._finished)
        if self._order is not None and me in self._order.roster and m.attempt < self._order.attempt:
            return msgspec.structs.replace(self._order, id=self._mint(), cause=m.id)
        if m.leaving and self._idle:
            return Hold(id=self._mint(), cause=m.id, waiting_for="the step", idle=True)
        return None

    # --- snapshots ---

    async def _pack(self, version: Version) -> None:
        snapshot: Snapshot | None = await self._compute(self._take, version)
        self._packing = None
        if snapshot is not None:
            self._snapshots.publish(asyncio.get_running_loop().time(), snapshot)
            self._answer_all()

    def _take(self, version: Version) -> Snapshot | None:
        """In the thread that computes, where the update comes later if at all."""
        return self._make(version) if self._open == version else None

    # --- the loop's ---

    @property
    def idle(self) -> bool:
        """The step cannot end now (the loop says so). Who wants to leave gives back what it accumulated instead of waiting."""
        return self._idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        if idle != self._idle:
            self._idle = idle
            self._answer_all()

    def opened(self, version: Version) -> None:
        """The step after `version` is open: its weights, frozen, may be had until `closing`."""
        self._term, self._open, self._done, self._reduced = version.term, version, version.step, []
        self._answer_all()

    def closing(self) -> None:
        """The weights are about to change: no snapshot is made of them from now on."""
        self._open = None

    def again(self) -> None:
        """There is something to claim again: whoever attends the step's end is sent back."""
        for cell, waiting in list(self._waiting.items()):
            if isinstance(waiting.message, AttendStep):
                self._reply(cell, Hold(id=self._mint(), cause=waiting.message.id, idle=self._idle))

    async def reduce(self, manifest: Manifest, own: Member, attempt: int) -> list[Tally]:
        """Add the accumulators of the manifest's other cells to this one's, out of place. Returns the others' tallies. Raises `Lost`."""
        parts = {m: sorted(e.micro_steps) for e in manifest.entries if e.micro_steps and (m := Member(e.cell, e.incarnation)) != own}
        self._patient = True
        try:
            there = await self._until(parts, lambda m, a: sorted(a.micro_steps) == parts[m], self._attend_s)
            if missing := sorted(parts.keys() - there):
                raise Lost(missing, f"not there within {self._attend_s:g} s: {', '.join(m.cell for m in missing)}")
            tallies = [Tally.of(there[m].tally) for m in parts]
            group = self._group_of(sorted(parts), f"{manifest.term}.{manifest.step}.{attempt}")
            self._order = ReduceOrder(
                id="", term=manifest.term, step=manifest.step, attempt=attempt, hash=manifest.hash, roster=[own, *sorted(parts)],
                group=group.name, store=self._address, deadline_s=self._reduce_s,
            )  # fmt: skip
            self._answer_all()
            try:
                await self._collective.reduce(group, self._reduce_s)
            except CollectiveFailed as e:
                self._group = self._order = None
                back = await self._until(parts, lambda m, a: True, self._attend_s)
                self._failures += 1
                dead = sorted(parts.keys() - back) or (sorted(parts) if self._failures >= _TRIES else [])
                raise Lost(dead, str(e)) from None
        finally:
            self._order, self._patient = None, False
        self._failures, self._reduced = 0, sorted(parts)
        return tallies

    def _group_of(self, others: list[Member], name: str) -> Group:
        """The group of these cells and the core: the one that works, if it is of the same; else one that is yet to be met."""
        if self._group is None or self._group[0] != others:
            self._group = (others, name)
        return Group(self._group[1], self._address, 0, 1 + len(others))

    async def _until(self, members: Collection[Member], fits: Callable[[Member, AttendStep], bool], deadline_s: float) -> dict[Member, AttendStep]:
        """Those of `members` that attend the open step as they should: all, or those who do at the deadline, or once the others have new lives."""
        end = asyncio.get_running_loop().time() + deadline_s
        while True:
            self._changed.clear()
            there = {m: a for m in members if (a := self._attending(m)) is not None and fits(m, a)}
            if all(m in there or self._lives.get(m.cell, m.incarnation) != m.incarnation for m in members):
                return there
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return there

    def _attending(self, member: Member) -> AttendStep | None:
        waiting = self._waiting.get(member.cell)
        if waiting is None or not isinstance(waiting.message, AttendStep):
            return None
        m = waiting.message
        return m if (m.incarnation, m.term, m.step) == (member.incarnation, self._term, self._done + 1) else None

    async def committed(self, version: Version, *, finished: bool) -> list[str]:
        """The step is committed: give the new weights to those that stay. Returns their cells. A satellite's fault is not this one's."""
        await self._until(self._reduced, lambda m, a: True, _BACK_S)
        stay = sorted(
            Member(m.cell, m.incarnation) for w in self._waiting.values()
            if isinstance(m := w.message, AttendStep) and not m.leaving and self._attending(Member(m.cell, m.incarnation))
        )  # fmt: skip
        self._done, self._finished, self._open = version.step, finished, None
        if not stay or finished:
            self._answer_all()
            return []
        group = self._group_of(stay, f"{version.term}.{version.step}.broadcast")
        self._ended = StepEnded(
            id="", version=version, roster=[Member(self._cell, ""), *stay], group=group.name, store=self._address, deadline_s=self._reduce_s
        )
        self._answer_all()
        try:
            await self._collective.broadcast(group, self._reduce_s)
        except CollectiveFailed as e:
            log.warning("the weights of step %d were not broadcast, cells pull them: %s", version.step, e)
            self._group = None
            return []
        finally:
            self._ended = None
        return [m.cell for m in stay]

    async def farewell(self, deadline_s: float) -> None:
        """Stay until the cells heard of lately know that the run is over."""
        loop = asyncio.get_running_loop()
        since, end = loop.time() - _HEARD_S, loop.time() + deadline_s
        while any(t > since for t in self._heard.values()):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return
