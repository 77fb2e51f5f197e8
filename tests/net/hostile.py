"""What a hostile process could send: messages of any union with any values, and servers of each kind that take them as they would from a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import zmq
from hypothesis import strategies as st
from msgspec import inspect

from gyre.buffer.ledger import Ledger
from gyre.buffer.machine import Machine
from gyre.buffer.queries import Task, TaskSet
from gyre.buffer.shell import Shell
from gyre.config import Config
from gyre.net.sockets import Peer, Server, mint
from gyre.net.worker import Worker
from gyre.rollout.scripted import Line, Script, ScriptedEngine
from gyre.rollout.shell import Desk
from gyre.train.peers import Peers
from gyre.types import Version
from gyre.weights.snapshot import Snapshot, checksum_of
from gyre.weights.transfer import PolicyServer
from gyre.wire import messages as w
from gyre.wire.arrays import ITEMSIZES
from gyre.wire.codec import encode
from gyre.wire.speakers import KINDS

TO: dict[str, Any] = {"buffer": w.ToBuffer, "rollout": w.ToRollout, "train": w.ToTrain, "coord": w.ToCoord}
WORDS = (
    "",
    "a",
    "g000000.0",
    "g000000.1",
    "g000001.2",
    "g000001",
    "core",
    "c",
    "1",
    "../../../etc/passwd",
    "/etc/passwd",
    "\0",
    "\ud7ff",
    "x" * 5000,
)
NUMBERS = (0, 1, 2, 3, -1, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
words = st.sampled_from(WORDS) | st.text(max_size=20).filter(lambda s: s.isprintable())
small = st.integers(0, 3)
numbers = small | st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**64 - 1)
leaves = (
    st.none()
    | st.booleans()
    | numbers
    | st.floats()
    | words
    | st.binary(max_size=9)
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary())
)
anything: st.SearchStrategy[Any] = st.recursive(
    leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(words | numbers, x, max_size=3), max_leaves=6
)


def of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values, as MessagePack has them, that decode to this type, and some that all but do."""
    match kind:
        case inspect.StrType():
            return words
        case inspect.IntType():
            return numbers
        case inspect.FloatType():
            return st.floats() | st.sampled_from([0.0, 1.0, 3600.0])
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from([member.value for member in kind.cls])
        case inspect.ListType():
            return st.lists(of(kind.item_type), max_size=3)
        case inspect.DictType():
            return st.dictionaries(of(kind.key_type), of(kind.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of(*map(of, kind.types))
        case inspect.StructType():
            return struct(kind)
        case inspect.AnyType():
            return anything
    raise AssertionError(f"no strategy for {kind}")


def struct(kind: inspect.StructType) -> st.SearchStrategy[Any]:
    values = [of(f.type) for f in kind.fields]
    if kind.array_like:
        return st.tuples(*values).map(list)
    needed = {f.encode_name: v for f, v in zip(kind.fields, values, strict=True) if f.required}
    optional = {f.encode_name: v for f, v in zip(kind.fields, values, strict=True) if not f.required}
    return st.fixed_dictionaries(needed, optional=optional).map(lambda d: d | ({kind.tag_field: kind.tag} if kind.tag_field else {}))


@cache
def frames(union: Any) -> st.SearchStrategy[list[bytes]]:
    """A message of the union with arrays of some lengths, or with frames that are none of its."""

    def one(cls: type[w.Message]) -> st.SearchStrategy[list[bytes]]:
        kind = inspect.type_info(cls)
        assert isinstance(kind, inspect.StructType)
        sizes = [ITEMSIZES[t] for t in cls.ARRAYS.values()]
        arrays = small.flatmap(lambda n: st.tuples(*(st.binary(min_size=n * k, max_size=n * k) for k in sizes)))
        either = st.tuples(struct(kind).map(msgspec.msgpack.encode), arrays | st.lists(st.binary(max_size=9), max_size=3))
        return (either | graphs if cls is w.RolloutEnded else either).map(lambda m: [m[0], *m[1]])

    return st.one_of(*map(one, get_args(union) or (union,)))


@st.composite
def _graph(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """An outcome whose graph adds up, though its paths may be none."""
    sizes = draw(st.lists(small, max_size=4))
    nodes = [{"parent": draw(st.integers(-1, i - 1)), "n_tokens": n, "call_id": draw(st.none() | words)} for i, n in enumerate(sizes)]
    paths = []
    for _ in range(draw(small) if nodes else 0):
        path = draw(st.lists(st.integers(0, len(nodes) - 1), max_size=4))
        trainable = draw(st.lists(st.sampled_from(path), max_size=3)) if path else []
        paths.append(
            {"index": draw(numbers), "leaf_class": "main", "nodes": path, "trainable": trainable,
             "n_tokens": sum(sizes[i] for i in path), "n_trainable": sum(sizes[i] for i in trainable)}
        )  # fmt: skip
    fields = draw(_ended) | {"op": "RolloutEnded", "ending": "finished", "reward": 1.0, "nodes": nodes, "trajectories": paths}
    fields |= {"rollout_id": draw(st.sampled_from([f"g00000{g}.{i}" for g in range(9) for i in range(4)])), "epoch": draw(small)}
    n = 4 * sum(sizes)
    return msgspec.msgpack.encode(fields), [draw(st.binary(min_size=n, max_size=n)) for _ in range(3)]


_kind = inspect.type_info(w.RolloutEnded)
assert isinstance(_kind, inspect.StructType)
_ended, graphs = struct(_kind), _graph()


class Victim:
    """A server of one kind with the real thing behind it. Messages go in where they would come from the socket; nothing that they hold may raise."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.loop = kind, asyncio.new_event_loop()
        self.peers = {speaker: f"{speaker}:1".encode() for speaker in KINDS}
        self.loop.run_until_complete(self._begin(folder))

    async def _begin(self, folder: Path) -> None:
        kind = self.kind
        self.server = Server.bind(f"ipc://{folder}/{kind}", TO[kind], kind=kind, name=kind, run_id="r")
        self.handle: Callable[..., Any] = lambda *received: None
        self.sockets = []
        for speaker, identity in self.peers.items():  # connections that answers can go to; nobody reads them
            sock = zmq.Context.instance().socket(zmq.DEALER)
            for option, value in ((zmq.ROUTING_ID, identity), (zmq.RCVHWM, 10), (zmq.LINGER, 0)):
                sock.setsockopt(option, value)
            sock.connect(self.server.address)
            sock.send_multipart(encode(w.Hello(id=mint(), wire_version=w.WIRE_VERSION, kind=speaker, name=speaker, incarnation="1")))
            self.sockets.append(sock)
        while len(self.server._peers) < len(self.peers):
            for key, (identity, *message) in await self.server._sock.receive():
                self.server._accept(key, identity, message)
        self.handle = getattr(self, f"_{kind}")(folder)

    def _buffer(self, folder: Path) -> Callable[..., Any]:
        config = msgspec.convert({"run": {"max_infra_failures": 10**9}, "tasks": {"epochs": 10**6}}, Config)
        tasks = TaskSet(tuple(Task(f"/t/{i}", "kind") for i in range(3)), ())
        self.ledger = Ledger(folder / "run")
        machine = Machine(config, tasks, (), Shell._now(), "r")
        shell = Shell(config, machine, self.ledger, self.server, Worker(None, kind="buffer", name="buffer", run_id="r"))
        shell._apply(shell._batch, machine.start(now := Shell._now()), None, now)
        core, box = self.server._peers[self.peers["train"]], self.server._peers[self.peers["sandbox"]]

        def say(peer: Peer, *messages: w.Message) -> None:
            take(*[(peer, message, {}) for message in messages])

        def take(*received: Any) -> None:
            shell._inbox += received
            shell._process()
            shell._begin()
            if shell._committing is not None:
                (batch, _), shell._committing = shell._committing, None
                self.ledger._settle()
                shell._publish(batch)

        say(core, w.AcquireTerm(id="t", cell="core", step=0), w.Published(id="p", version=Version(1, 0), cells=["a"], seconds=0.0))

        def handle(*received: Any) -> None:
            """Between what comes there is always somebody who takes every ticket and every micro-step."""
            take(received)
            say(box, w.LeaseTickets(id=mint(), n=64, wait_s=0.0))
            meta = machine.state.meta
            say(core, w.ClaimMicroStep(id=mint(), term=meta.term, step=meta.committed + 1, cell="core", incarnation="1", wait_s=0.0))
            counters = machine.counters()
            assert sum(counters.states.values()) == counters.admitted

        return handle

    def _rollout(self, folder: Path) -> Callable[..., Any]:
        script = Script([(Line(token_ids=[1, 2, 3]), [1, 2, 3])])
        desk = Desk(self.server, "a", 512)
        self.engine = desk.engine = ScriptedEngine(script, eos=frozenset({3}), context=512, slots=4, queue=4)
        desk.engine.load(Version(0, 0), [], memoryview(b"")).result(30)
        desk.version = Version(0, 0)
        return desk.handle

    def _train(self, folder: Path) -> Callable[..., Any]:
        async def compute(function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

        def snapshot(version: Version) -> Snapshot:
            return Snapshot(version, [], memoryview(bytes(100)), checksum_of(bytes(100)))

        spawn = asyncio.get_running_loop().create_task
        peers = Peers(self.server.send, None, "tcp://127.0.0.1:1", snapshot, compute, spawn, Config(), cell="core")  # type: ignore[arg-type]
        peers.opened(Version(1, 1))
        policy = PolicyServer(self.server.send)
        policy.publish(snapshot(Version(1, 0)))
        return lambda peer, message, _: peers.handle(peer, message) or policy.handle(peer, message)

    def _coord(self, folder: Path) -> Callable[..., Any]:
        return lambda peer, message, arrays: None

    def take(self, speaker: str, message: list[Any]) -> bool:
        """Did it get past the door?"""

        async def take() -> bool:
            accepted = self.server._accept("", self.peers[speaker], [bytes(frame) for frame in message])
            if accepted is not None:
                self.handle(*accepted)
            await asyncio.sleep(0)
            return accepted is not None

        return self.loop.run_until_complete(take())

    def close(self) -> None:
        for sock in self.sockets:
            sock.close(0)
        self.server.close()
        if self.kind == "buffer":
            self.ledger.close()
        if self.kind == "rollout":
            self.engine.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
