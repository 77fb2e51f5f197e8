"""The core's end of the wire with satellites: literal messages and what is answered; and a satellite's, against a core that fails it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.config import Config
from gyre.errors import DeadlineExceeded
from gyre.net.sockets import Peer
from gyre.train.corelink import CoreLink
from gyre.train.metrics import Tally
from gyre.train.peers import Peers
from gyre.train.protocols import CollectiveFailed, Finished, Group, Lost, Reduce, Voided
from gyre.types import Version
from gyre.weights.shared import Shared, attach, host_id
from gyre.weights.snapshot import Snapshot, checksum_of
from gyre.wire import messages as w

CONFIG = msgspec.convert({"train": {"claim_ttl_s": 0.3, "reduce_timeout_s": 0.3, "core_timeout_s": 5.0}, "net": {"request_timeout_s": 0.2}}, Config)
STATS = w.StepStats(
    groups=1, executions=1, trajectories=1, tokens=1, trainable_tokens=1, reward_mean=None, staleness_mean=None, staleness_p95=None,
    staleness_max=None, staleness_interpolated=None, staleness_predicted=None, discarded_groups=0, uniform_groups=0,
)  # fmt: skip
OWN = w.Member("core", "c")


async def compute(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Scripted:
    """A collective that records, and fails as told."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, int]] = []
        self.fails = False

    async def reduce(self, group: Group, deadline_s: float) -> None:
        self.done.append(("reduce", group.name, group.size))
        await asyncio.sleep(0.01)
        if self.fails:
            raise CollectiveFailed("a connection broke")

    async def broadcast(self, group: Group, deadline_s: float) -> None:
        self.done.append(("broadcast", group.name, group.size))


class Core:
    """Peers with what they sent, and a snapshot that counts how often it is made."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, w.Message]] = []
        self.arrays: list[Any] = []
        self.made: list[Version] = []
        self.collective = Scripted()
        self.peers = Peers(
            self._send, self.collective, "tcp://127.0.0.1:1", self._make, compute, asyncio.ensure_future, CONFIG, cell="core"  # type: ignore[arg-type]
        )  # fmt: skip

    def _send(self, peer: Peer, message: w.Message, arrays: Any) -> None:
        self.sent.append((peer.name, message))
        self.arrays.append(arrays)

    def _make(self, version: Version) -> Snapshot:
        self.made.append(version)
        data = Shared(100)
        data[:] = bytes(range(100))
        return Snapshot(version, [], memoryview(data).toreadonly(), checksum_of(data), data.path)

    def handle(self, cell: str, message: w.Message) -> None:
        assert self.peers.handle(Peer(cell.encode(), "train", cell, "p"), message)

    async def answer(self, cell: str, message: w.Message) -> Any:
        """Hand over a message and wait for its answer."""
        self.handle(cell, message)
        async with asyncio.timeout(10):
            while True:
                for name, sent in self.sent:
                    if name == cell and sent.cause == message.id:
                        return sent
                await asyncio.sleep(0.002)

    def answers(self, cell: str) -> list[w.Message]:
        return [m for name, m in self.sent if name == cell]


def attend(id: str, cell: str, step: int = 1, term: int = 1, incarnation: str = "a", wait_s: float = 5.0, **fields: Any) -> w.AttendStep:
    held = fields.pop("held", [f"m-{cell}"])
    return w.AttendStep(
        id=id, term=term, step=step, cell=cell, incarnation=incarnation, micro_steps=held, tally=Tally(trainable=3).numbers(), wait_s=wait_s, **fields
    )


def join(id: str, cell: str, incarnation: str = "a", host: str = "", wait_s: float = 5.0) -> w.JoinStep:
    return w.JoinStep(id=id, cell=cell, incarnation=incarnation, host=host, wait_s=wait_s)


def manifest(*cells: str, step: int = 1) -> w.Manifest:
    entries = [w.ManifestEntry("core", "c", ["m-core"]), *(w.ManifestEntry(c, "a", [f"m-{c}"]) for c in cells)]
    return w.Manifest(id="", term=1, step=step, entries=entries, stats=STATS, hash="h")


@pytest.mark.pain(7)
def test_a_snapshot_is_made_at_the_first_join_and_once() -> None:
    async def main() -> None:
        core = Core()
        core.handle("early", join("j0", "early"))
        assert core.made == [] and core.sent == []
        core.peers.opened(Version(1, 0))
        core.handle("two", join("j1", "two"))
        await asyncio.sleep(0.01)
        offers = [m for _, m in core.sent]
        assert len(offers) == 2 and core.made == [Version(1, 0)]
        assert all(isinstance(m, w.StepOffer) and m.version == Version(1, 0) and m.nbytes == 100 and m.memory == "" for m in offers)
        here = await core.answer("near", join("j2", "near", host=host_id()))
        assert here.memory.startswith("/proc/"), "shared memory for who is on this host"
        core.peers.closing()
        core.handle("late", join("j3", "late"))
        await asyncio.sleep(0.01)
        assert core.answers("late") == [] and len(core.made) == 1, "weights about to change are not copied"
        await core.peers.committed(Version(1, 1), finished=False)
        core.peers.opened(Version(1, 1))
        await asyncio.sleep(0.01)
        (offer,) = core.answers("late")
        assert isinstance(offer, w.StepOffer) and offer.version == Version(1, 1)
        for cell, expected in (("two", w.Chunk), ("late", w.SnapshotGone)):  # who was offered the one before may finish it
            chunk = await core.answer(cell, w.PullChunk(id=f"p-{cell}", version=Version(1, 0), offset=0, nbytes=10))
            assert isinstance(chunk, expected)

    asyncio.run(main())


def test_an_order_for_exactly_those_of_the_manifest() -> None:
    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        reducing = asyncio.ensure_future(core.peers.reduce(manifest("s1", "s2"), OWN, 1))
        core.handle("s1", attend("a1", "s1"))
        core.handle("idle", attend("a0", "idle", held=[]))
        await asyncio.sleep(0.01)
        assert core.sent == [], "not before all are there"
        core.handle("s2", attend("a2", "s2", held=["m-other"]))
        await asyncio.sleep(0.01)
        assert core.sent == [], "not with one that holds something else"
        core.handle("s2", attend("a3", "s2"))
        tallies = await reducing
        assert [t.trainable for t in tallies] == [3, 3]
        orders = {c: m for c, m in core.sent if isinstance(m, w.ReduceOrder)}
        assert orders.keys() == {"s1", "s2"} and {m.cause for m in orders.values()} == {"a1", "a3"}
        order = orders["s1"]
        assert (order.term, order.step, order.attempt, order.hash, order.group) == (1, 1, 1, "h", "1.1.1")
        assert order.roster == [OWN, w.Member("s1", "a"), w.Member("s2", "a")]
        assert core.collective.done == [("reduce", "1.1.1", 3)]

    asyncio.run(main())


def test_a_repeated_question_gets_the_order_again() -> None:
    """Its answer was lost: the satellite asks again while the reduction waits for it."""

    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        core.handle("s1", attend("a1", "s1"))
        reducing = asyncio.ensure_future(core.peers.reduce(manifest("s1"), OWN, 1))
        await asyncio.sleep(0.005)
        core.handle("s1", attend("a1", "s1"))
        await reducing
        assert [type(m) for m in core.answers("s1")] == [w.ReduceOrder, w.ReduceOrder]
        core.handle("s1", attend("a2", "s1", attempt=1))
        assert len(core.answers("s1")) == 2, "who took part waits for the end"

    asyncio.run(main())


@pytest.mark.parametrize("why", ["does not attend", "has a new life", "does not come back"])
def test_the_lost_are_named_and_no_others(why: str) -> None:
    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        core.handle("s1", attend("a1", "s1"))
        core.collective.fails = why == "does not come back"
        if why == "does not come back":
            core.handle("s2", attend("a2", "s2"))
        reducing = asyncio.ensure_future(core.peers.reduce(manifest("s1", "s2"), OWN, 1))
        await asyncio.sleep(0.005)
        if why == "has a new life":
            core.handle("s2", join("j", "s2", incarnation="b"))
        if why == "does not come back":
            core.handle("s1", attend("a3", "s1", attempt=1, failed="a connection broke"))
        with pytest.raises(Lost) as lost:
            await reducing
        assert lost.value.cells == [w.Member("s2", "a")]
        core.peers.again()
        assert isinstance(core.answers("s1")[-1], w.Hold), "the survivor claims what came back"

    asyncio.run(main())


def test_a_failure_of_all_is_tried_again_and_then_given_up() -> None:
    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        core.collective.fails = True
        found = []
        for attempt in (1, 2, 3):
            core.handle("s1", attend(f"a{attempt}", "s1", attempt=attempt - 1))
            reducing = asyncio.ensure_future(core.peers.reduce(manifest("s1"), OWN, attempt))
            await asyncio.sleep(0.005)
            core.handle("s1", attend(f"b{attempt}", "s1", attempt=attempt))
            with pytest.raises(Lost) as lost:
                await reducing
            found.append(lost.value.cells)
        assert found == [[], [], [w.Member("s1", "a")]]
        assert [g for _, g, _ in core.collective.done] == ["1.1.1", "1.1.2", "1.1.3"], "each attempt meets in a group of its own"

    asyncio.run(main())


def test_after_the_commit() -> None:
    """Who attends gets the weights in the group that works; who leaves, or comes late, is told that the step is over."""

    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        for cell in ("s1", "s2"):
            core.handle(cell, attend(f"a-{cell}", cell))
        await core.peers.reduce(manifest("s1", "s2"), OWN, 1)
        core.peers.closing()
        core.handle("s1", attend("b1", "s1", attempt=1))
        core.handle("s2", attend("b2", "s2", attempt=1))
        assert await core.peers.committed(Version(1, 1), finished=False) == ["s1", "s2"]
        assert core.collective.done[-1] == ("broadcast", "1.1.1", 3), "the group that reduced"
        ended = core.answers("s1")[-1]
        assert isinstance(ended, w.StepEnded) and w.Member("s1", "a") in ended.roster and not ended.finished
        late = await core.answer("s3", attend("c", "s3"))
        assert isinstance(late, w.StepEnded) and late.roster == [] and late.version == Version(1, 1)
        core.peers.opened(Version(1, 1))
        core.handle("s1", attend("d1", "s1", step=2, leaving=True))
        core.handle("s2", attend("d2", "s2", step=2, held=[]))
        assert await core.peers.committed(Version(1, 2), finished=False) == ["s2"]
        assert core.collective.done[-1] == ("broadcast", "1.2.broadcast", 2)
        left = core.answers("s1")[-1]
        assert isinstance(left, w.StepEnded) and left.roster == []

    asyncio.run(main())


def test_terms_and_the_end() -> None:
    async def main() -> None:
        core = Core()
        core.handle("s1", attend("a0", "s1", term=1))
        assert core.sent == [], "a core without a term knows nothing yet"
        core.peers.opened(Version(2, 0))
        (refused,) = core.answers("s1")
        assert isinstance(refused, w.Refuse) and refused.stale
        held = await core.answer("s2", attend("a1", "s2", term=3, wait_s=0.05))
        assert isinstance(held, w.Hold), "a core that was replaced keeps a newer one's satellites waiting"
        core.handle("s3", attend("a2", "s3", term=2))
        await core.peers.committed(Version(2, 1), finished=True)
        assert isinstance(ended := core.answers("s3")[-1], w.StepEnded) and ended.finished
        assert (await core.answer("s4", join("j", "s4"))).finished
        await core.peers.farewell(0.2)  # s1 and s2 were heard of and do not know: bounded

    asyncio.run(main())


def test_who_wants_to_leave_is_told_when_the_step_cannot_end() -> None:
    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        core.handle("s1", attend("a1", "s1", leaving=True))
        core.handle("s2", attend("a2", "s2"))
        assert core.sent == []
        core.peers.idle = True
        (hold,) = [m for _, m in core.sent]
        assert isinstance(hold, w.Hold) and hold.idle and hold.cause == "a1"

    asyncio.run(main())


class Link:
    """A `Requester` whose answers a test gives."""

    def __init__(self, answer: Callable[[w.Message], tuple[w.Message, Any] | None]) -> None:
        self.asked: list[w.Message] = []
        self._answer = answer

    async def request(self, message: w.Message, arrays: Any = None, *, deadline_s: float, what: str) -> Any:
        self.asked.append(message)
        answer = self._answer(message)
        if answer is None:
            raise DeadlineExceeded(what, deadline_s)
        return answer

    def send(self, message: w.Message, arrays: Any = None) -> None:
        self.asked.append(message)


def link_to(link: Link, loaded: list[bytes]) -> CoreLink:
    return CoreLink(link, lambda specs, data: loaded.append(bytes(data)), compute, CONFIG, cell="s")


def offer(data: bytes, memory: str = "") -> w.StepOffer:
    return w.StepOffer(id="o", version=Version(1, 0), tensors=[], nbytes=len(data), checksum=checksum_of(data), memory=memory)


@pytest.mark.pain(7)
def test_a_pull_that_broke_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks come and the core is away; at the next try of the same snapshot only the others are asked for."""
    monkeypatch.setattr("gyre.weights.transfer.PULLS_IN_FLIGHT", 1)
    data = bytes(range(256)) * (5 << 17)  # twenty chunks of 8 MiB
    away_after = 3

    def answer(message: w.Message) -> tuple[w.Message, Any] | None:
        if isinstance(message, w.JoinStep):
            return offer(data), {}
        assert isinstance(message, w.PullChunk)
        if sum(isinstance(m, w.PullChunk) for m in link.asked) == away_after + 1:
            return None
        part = memoryview(data)[message.offset : message.offset + message.nbytes]
        return w.Chunk(id="c", version=message.version, offset=message.offset), {"data": part}

    loaded: list[bytes] = []
    link = Link(answer)
    core = link_to(link, loaded)

    async def main() -> None:
        assert await core.join("a") is None and loaded == []
        assert await core.join("a") == Version(1, 0)

    asyncio.run(main())
    assert loaded == [data]
    offsets = [m.offset for m in link.asked if isinstance(m, w.PullChunk)]
    assert len(offsets) == 21 and len(set(offsets)) == 20, "only the chunk that was lost is asked for twice"


@pytest.mark.pain(7)
def test_shared_memory_needs_no_chunk_and_is_verified() -> None:
    shared = Shared(64)
    shared[:] = bytes(64)
    loaded: list[bytes] = []
    offers = [offer(b"x" * 64, shared.path), offer(bytes(64), shared.path)]
    link = Link(lambda message: (offers.pop(0), {}))
    core = link_to(link, loaded)

    async def main() -> None:
        assert await core.join("a") is None, "bytes without their checksum are not loaded"
        assert await core.join("a") == Version(1, 0)

    asyncio.run(main())
    assert loaded == [bytes(64)] and not any(isinstance(m, w.PullChunk) for m in link.asked)


def test_no_other_path_is_opened(tmp_path: Path) -> None:
    """What a message names as shared memory is memory of gyre's, or it is not looked at."""
    file = tmp_path / "secret"
    file.write_bytes(bytes(64))
    shared = Shared(64)
    with file.open("rb") as opened:
        of_the_file = f"/proc/{os.getpid()}/fd/{opened.fileno()}"
        for path in (str(file), "/etc/passwd", of_the_file, f"{shared.path}/../0", "/proc/self/fd/../../../etc/passwd", "\0", ""):
            assert attach(path, 64) is None, path
        assert attach(shared.path, 64) == bytes(64)


def test_snapshot_gone_is_a_new_join() -> None:
    gone = w.SnapshotGone(id="g", latest=Version(1, 1))
    link = Link(lambda m: (offer(b"abc"), {}) if isinstance(m, w.JoinStep) else (gone, {}))
    assert asyncio.run(link_to(link, []).join("a")) is None


def test_what_the_core_says() -> None:
    own, roster = w.Member("s", "a"), [w.Member("core", "c"), w.Member("s", "a")]
    said: list[w.Message] = [
        w.ReduceOrder(id="1", term=1, step=1, attempt=2, hash="h", roster=roster, group="g", store="t", deadline_s=9.0),
        w.StepEnded(id="2", version=Version(1, 1), roster=roster, group="g", store="t", deadline_s=9.0),
        w.StepEnded(id="3", version=Version(1, 1), roster=[]),
        w.Hold(id="4", idle=True),
    ]
    link = Link(lambda message: (said.pop(0), {}))
    core = link_to(link, [])

    async def ask() -> Any:
        return await core.attend(Version(1, 0), own, ["m"], Tally(), attempt=0, failed="", leaving=False)

    async def main() -> None:
        assert await ask() == Reduce(2, Group("g", "t", 1, 2), 9.0)
        assert (await ask()).group == Group("g", "t", 1, 2)
        assert (await ask()).group is None
        assert (await ask()).idle
        said.append(w.Refuse(id="5", reason="term 1 is over", stale=True))
        with pytest.raises(Voided, match="term 1"):
            await ask()
        said.append(w.StepEnded(id="6", version=Version(1, 9), roster=[], finished=True))
        with pytest.raises(Finished):
            await core.join("a")

    asyncio.run(main())


def test_a_cell_with_another_number_of_ranks_is_refused() -> None:
    async def main() -> None:
        core = Core()
        core.peers.opened(Version(1, 0))
        refused = await core.answer("two", msgspec.structs.replace(join("j1", "two"), ranks=2))
        assert isinstance(refused, w.Refuse) and refused.reason == "it has 2 ranks, the core has 1; start all cells of a run with the same --ranks"
        assert isinstance(await core.answer("one", join("j2", "one")), w.StepOffer)

    asyncio.run(main())
