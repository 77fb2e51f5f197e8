"""Several ranks as one learner: rank 0 leads, the others follow what it tells them.

The leader is the only one that talks to the rest of the run. Each of its learner's methods broadcasts a command and does it at the same time as the
followers, on its own shards (shards.py). One rank needs none of this: it is a plain `Learner`.

Invariants
- Ranks meet where processes.py says. Commands are typed and never unpickled.
- They end together. The leader dead, its end of a pipe closes and followers end at once, whatever they do; under torchrun its agent and the lost
  connections end them. A follower dead: its traceback is shown, `watch` says who it was, and a collective under way fails.
- Every wait has a deadline: a collective train.ranks_timeout_s; a follower without work the same, and the leader gives a sign of life at a third.

torch's distributed checkpoint exchanges its plan as pickles, between the ranks of one cell and nobody else.

Not here: groups over cells beyond what `Shards.reduce` and `broadcast` do; restarts (a cell that lost a rank is a cell lost).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, assert_never

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.train.group import TorchCollective
from gyre.train.metrics import Tally
from gyre.train.model import MicroStepData, Policy, takes_trees
from gyre.train.processes import EXIT_BEREFT, Followers, Ranks, join, lead
from gyre.train.protocols import CollectiveFailed, Compute, Group, Update
from gyre.train.shards import Shards
from gyre.types import PackedTrajectory, TensorSpec, Version
from gyre.weights.snapshot import Allocate, Snapshot, pack, unpack

log = logging.getLogger(__name__)

_GRACE_S: Final = 10.0  # for followers to end in order
_NOTICE_S: Final = 5.0  # from a broken connection to the death that broke it


class Build(msgspec.Struct, frozen=True, tag=True):
    """Make the learner of the model in `source`."""

    config: Config
    source: str
    total_steps: int


class Accumulate(msgspec.Struct, frozen=True, tag=True):
    """`MicroStepData` as bytes: int32, int8, fp32, int32."""

    trajectories: list[PackedTrajectory]
    arrays: list[bytes]
    version: int


class Zero(msgspec.Struct, frozen=True, tag=True):
    """Forget what was accumulated."""


class Take(msgspec.Struct, frozen=True, tag=True):
    """Update."""

    step: int
    executions: int
    trainable: int | None
    total_steps: int


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Give rank 0 the weights, or the gradient over `denominator`."""

    denominator: int = 0


class Load(msgspec.Struct, frozen=True, tag=True):
    """Take weights from rank 0."""


class Files(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint, or read its optimizer."""

    directory: str
    write: bool


class Across(msgspec.Struct, frozen=True, tag=True):
    """Reduce to the core cell, or take its weights."""

    group: Group
    deadline_s: float
    weights: bool


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Leave the device, or come back."""

    asleep: bool


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The leader lives."""


class End(msgspec.Struct, frozen=True, tag=True):
    """All is done."""


Command: TypeAlias = Build | Accumulate | Zero | Take | Gather | Load | Files | Across | Rest | Pulse | End
_DECODER: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_ARRAYS: Final = (torch.int32, torch.int8, torch.float32, torch.int32)


def perform(shards: Shards, command: Command, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """What every rank does with a command. `tensors`: what rank 0 brings to `Load`."""
    match command:
        case Accumulate(trajectories, arrays, version):
            parts = [torch.frombuffer(bytearray(a), dtype=t) if a else torch.empty(0, dtype=t) for a, t in zip(arrays, _ARRAYS, strict=True)]
            shards.accumulate(MicroStepData(trajectories, *parts), version)
        case Zero():
            shards.zero()
        case Take(step, executions, trainable, total_steps):
            shards.total_steps = total_steps
            return shards.update(step, executions, trainable)
        case Gather(denominator):
            return shards.gradient(denominator) if denominator else shards.full()
        case Load():
            shards.load(tensors)
        case Files(directory, write):
            (shards.write if write else shards.read)(Path(directory))
        case Across(group, deadline_s, weights):
            shards.across(group, deadline_s, weights)
        case Rest(asleep):
            (shards.sleep if asleep else shards.wake)()
        case Build() | Pulse() | End():
            raise AssertionError("the loop's own")
        case _:
            assert_never(command)
    return None


class RankedLearner:
    """A `Learner` of several ranks, as the leader's loop sees it. Its methods may be called from any thread, one at a time.

    Raises `WorkFailed` from any of them when a rank is lost; then there is nothing left to do but `close`.
    """

    publish_s = 0.0

    def __init__(self, config: Config, source: Path, total_steps: int) -> None:
        """Start the followers, unless torchrun did, load the model and share it out. Raises `UsageError` or `WorkFailed`."""
        self.tally = Tally()
        self.total_steps = total_steps
        self._config = config
        self._followers = Followers()
        self._group: Ranks | None = None
        self._lock = threading.Lock()
        self._zero = self._broken = False
        self._closed = threading.Event()
        try:
            group = self._group = lead(config, self._followers)
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()
            host = msgspec.structs.replace(config.model, device="cpu")
            loaded = Policy.load(source, host, config.rollout.temperature, tree=takes_trees(config))
            build = Build(config, str(source), total_steps)
            with self._lock, self._translated():
                group.send(msgspec.msgpack.encode(build))
                self._shards = Shards(config, source, loaded, group.mesh, group.control, total_steps)
        except BaseException:
            self.close()
            raise
        self.policy = self._shards.policy

    def _check(self) -> None:
        if lost := self._followers.lost:
            self._broken = True
            raise WorkFailed(f"this cell lost a rank: {lost}")

    async def watch(self) -> NoReturn:
        """Raise `WorkFailed` when a follower is lost."""
        while True:
            await asyncio.sleep(0.2)
            if self._followers.lost and not self._followers.cause_known:
                await asyncio.sleep(1.0)
            self._check()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """An error of a collective says who was lost, if somebody was. After any error the ranks are no longer in step."""
        try:
            self._check()
            yield
        except CollectiveFailed:  # on all ranks: they are in step
            raise
        except BaseException as e:
            self._broken = True
            if not isinstance(e, RuntimeError):
                raise
            if self._followers and _is_loss(e):
                end = time.monotonic() + _NOTICE_S
                while not self._followers.cause_known and time.monotonic() < end:
                    time.sleep(0.05)
            if self._followers.lost:
                raise WorkFailed(f"this cell lost a rank: {self._followers.lost}") from e
            if _is_loss(e):
                raise WorkFailed(f"the ranks of this cell lost each other: {e}") from e
            raise

    def _do(self, command: Command, tensors: Mapping[str, Tensor] | None = None) -> Any:
        assert self._group is not None
        with self._lock, self._translated():
            if self._zero:
                self._group.send(msgspec.msgpack.encode(Zero()))
                self._shards.zero()
                self._zero = False
            self._group.send(msgspec.msgpack.encode(command))
            return perform(self._shards, command, tensors)

    def _beat(self) -> None:
        while not self._closed.wait(self._config.train.ranks_timeout_s / 3):
            if self._lock.acquire(blocking=False):  # else the followers are busy
                try:
                    if self._group is not None and not self._broken and not self._closed.is_set():
                        self._group.send(msgspec.msgpack.encode(Pulse()))
                except RuntimeError as e:
                    log.warning("the other ranks do not hear: %s", e)
                    self._broken = True
                finally:
                    self._lock.release()

    def zero(self) -> None:
        """Forget what was accumulated: at once for the tally, for the ranks with the next command."""
        self._zero, self.tally = True, Tally()

    def accumulate(self, data: MicroStepData, version: int) -> None:
        """Add a micro-step's gradient, its trajectories shared among the ranks."""
        arrays = [a.numpy().tobytes() for a in (data.token_ids_S, data.loss_mask_S, data.logprobs_S, data.versions_S)]
        self._do(Accumulate(list(data.trajectories), arrays, version))
        self.tally = self._shards.tally

    def update(self, step: int, executions: int, trainable: int | None = None) -> Update:
        """As `Learner.update`, on all shards."""
        update: Update = self._do(Take(step, executions, trainable, self.total_steps))
        return update

    def gradient(self, denominator: int) -> dict[str, Tensor]:
        """The step's full gradient."""
        full: dict[str, Tensor] = self._do(Gather(denominator))
        return full

    def snapshot(self, version: Version, allocate: Allocate = bytearray) -> Snapshot:
        """A copy of the weights, gathered."""
        return pack(version, self._do(Gather()), allocate)

    def install(self, specs: list[TensorSpec], data: memoryview) -> None:
        """Take the weights of a snapshot, sharing them out."""
        self._do(Load(), unpack(specs, data))

    def write(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint that is being made."""
        self._do(Files(str(directory), True))

    def read(self, directory: Path) -> None:
        """Set the optimizer from a checkpoint that any number of ranks wrote."""
        self._do(Files(str(directory), False))

    def across(self, group: Group, deadline_s: float, weights: bool) -> None:
        """Rank by rank, sum the accumulators of the group's cells into the core's `totals`, or take its `weights`. Raises `CollectiveFailed`."""
        self._do(Across(group, deadline_s, weights))

    def sleep(self) -> None:
        """Leave the devices."""
        self._do(Rest(True))

    def wake(self) -> None:
        """Come back to them."""
        self._do(Rest(False))

    def close(self) -> None:
        """End the followers: in order if all is well, else at once. Bounded."""
        self._closed.set()
        if self._group is not None and not self._broken:
            for f in self._followers:
                f.expected = True
            with self._lock, contextlib.suppress(RuntimeError):
                self._group.send(msgspec.msgpack.encode(End()))
        self._followers.end(0.0 if self._broken or self._group is None else _GRACE_S)
        if self._group is not None and not self._broken:
            dist.destroy_process_group()
        self._group = None


class RankedCollective(TorchCollective):
    """What a cell of several ranks does together with others: each rank in a group of its own, which ends with the rank (shards.py)."""

    def __init__(self, learner: RankedLearner, compute: Compute) -> None:
        super().__init__(learner, compute, "")  # type: ignore[arg-type]  # its sums are with the ranks

    def together(self, group: Group, deadline_s: float, weights: bool) -> None:
        """Rank by rank. Raises `CollectiveFailed`."""
        self._learner.across(group, deadline_s, weights)


def _is_loss(e: RuntimeError) -> bool:
    """Is it a collective that failed, for want of another rank?"""
    return isinstance(e, dist.DistError) or any(word in str(e) for word in ("gloo", "Gloo", "NCCL", "Connection", "imed out"))


def follow(config: Config) -> int:
    """Be a follower until the leader says that all is done: 0. Returns EXIT_BEREFT when another rank, the leader too, is gone."""
    started, grace_s = Followers(), 0.0
    shards: Shards | None = None
    try:
        group = join(config, started)
        while True:
            match command := _DECODER.decode(group.receive()):
                case End():
                    grace_s = _GRACE_S
                    dist.destroy_process_group()
                    return 0
                case Build(told, source, total_steps):
                    shards = Shards(told, Path(source), None, group.mesh, group.control, total_steps)
                case Pulse():
                    pass
                case _:
                    assert shards is not None, "a learner is built first"
                    with contextlib.suppress(CollectiveFailed):
                        perform(shards, command)
    except RuntimeError as e:
        if not _is_loss(e):
            raise
        log.error("another rank of this cell is gone: %s", str(e).partition("\n")[0])
        return EXIT_BEREFT
    finally:
        started.end(grace_s)
