"""The processes of a cell's ranks, and how they find each other.

A follower is this very command, started again with its place in the environment. What it prints, a traceback above all, appears on its starter's
stderr behind its rank. On each further host of a cell the coordinator starts the first follower, which starts the others there; torchrun's ranks come
with their places.

Invariants: all sockets of a cell of one host are on loopback, unless torchrun started it; a follower ends when its starter's end of its pipe closes,
which the kernel sees to, the first one of a further host when its connections to the other hosts do.

Not here: what the ranks do (ranks.py).
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gyre.config import Config
from gyre.errors import UsageError, WorkFailed
from gyre.train.group import host_and_port, open_store, own_host
from gyre.train.model import device_of

log = logging.getLogger(__name__)

PLACE: Final = "GYRE_RANK"  # in the environment: see `Place`
EXIT_BEREFT: Final = 76  # a follower that lost another rank: a consequence, never the cause
_NOTICE_S: Final = 5.0
_AGAIN_S: Final = 0.2
_SIOCGIFADDR: Final = 0x8915


class Place(NamedTuple):
    """Which rank this is, of how many, how many of them are on each host, and where all meet."""

    rank: int
    ranks: int
    here: int
    meet: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place | None:
        """Written as RANK/RANKS/HERE@tcp://HOST:PORT."""
        numbers, at, meet = environ.get(PLACE, "").partition("@")
        if not at:
            return None
        rank, ranks, here = map(int, numbers.split("/"))
        return cls(rank, ranks, here, meet)

    def __str__(self) -> str:
        return f"{self.rank}/{self.ranks}/{self.here}@{self.meet}"

    def others(self) -> list[Follower]:
        """Start the ranks that this host has after this one."""
        return [Follower(self._replace(rank=r)) for r in range(self.rank + 1, self.rank + self.here)]


class Follower:
    """A process that this one started, and the last of what it said."""

    def __init__(self, place: Place) -> None:
        self.rank = rank = place.rank
        self.failed: str | None = None  # why it ended, when it should not have
        self.said: collections.deque[str] = collections.deque(maxlen=1)
        self.expected = False  # to end
        env = {**os.environ, PLACE: str(place)}
        argv = [sys.executable, *sys.orig_argv[1:]]  # this very command
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        self.thread = threading.Thread(target=self._listen, name=f"rank {rank}", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.extend([line.strip()] if line.strip() else [])
            sys.stderr.write(f"rank {self.rank}: {line}")
        code = self.process.wait()
        if not self.expected:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            self.failed = f"rank {self.rank} {how}" + (f": {self.said[-1]}" if self.said else "")

    def end(self, deadline: float) -> None:
        """Wait for it to end; kill it at the deadline."""
        self.expected = True
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.thread.join(_NOTICE_S)


class Ranks:
    """One rank's process groups: one for data, one on the CPU for commands."""

    def __init__(self, config: Config, rank: int, local_rank: int, ranks: int, store: Any) -> None:
        kind = device_of(config.model.device).type
        if kind == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise UsageError("run.toml", f"rank {rank} has no GPU of its own", f"lower it to at most {torch.cuda.device_count()}", "train.ranks")
            torch.cuda.set_device(local_rank)
        limit = timedelta(seconds=config.train.ranks_timeout_s)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if store is not None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)  # as torchrun's environment says
        self.rank = rank
        self.control = dist.new_group(backend="gloo", timeout=limit)
        self.mesh = init_device_mesh(kind, (ranks,))

    def send(self, data: bytes) -> None:
        """From the leader to all."""
        dist.broadcast(torch.tensor([len(data)]), 0, self.control)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, self.control)

    def receive(self) -> bytes:
        """What the leader sent. Raises RuntimeError when it is gone, or silent for train.ranks_timeout_s."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, self.control)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, self.control)
        return data.numpy().tobytes()


class Followers(list[Follower]):
    """Those that this process started; none under torchrun."""

    @property
    def lost(self) -> str | None:
        """Who ended, and how, when it should not have; the cause before its consequences."""
        failed = sorted((f.process.returncode == EXIT_BEREFT, f.failed) for f in self if f.failed)
        return failed[0][1] if failed else None

    @property
    def cause_known(self) -> bool:
        return any(f.failed and f.process.returncode != EXIT_BEREFT for f in self)

    def end(self, grace_s: float) -> None:
        """Wait for all of them to end; then kill."""
        deadline = time.monotonic() + grace_s
        for f in self:
            f.end(deadline)


def lead(config: Config, followers: Followers) -> Ranks:
    """Be rank 0: start the others, unless torchrun did, and wait for them. Raises `UsageError` or `WorkFailed`."""
    if under_torchrun():
        return _as_torchrun_says(config)
    place = Place.of(os.environ) or Place(0, config.train.ranks, config.train.ranks, "tcp://127.0.0.1:0")
    try:
        store, meet = open_store(*host_and_port(place.meet))
    except OSError as e:
        raise WorkFailed(f"the ranks of this cell cannot meet at {place.meet} ({e.strerror})") from None
    place = place._replace(meet=meet)
    ranks = place.ranks
    _prepare(config, place)
    followers += place.others()
    end = time.monotonic() + config.run.start_timeout_s
    while not store.check([f"here/{r}" for r in range(1, ranks)]):
        if followers.lost:
            raise WorkFailed(f"this cell lost a rank at its start: {followers.lost}")
        if time.monotonic() > end:
            raise WorkFailed(f"gave up after {config.run.start_timeout_s} s waiting for {ranks - 1} more ranks of this cell to start")
        time.sleep(0.05)
    return Ranks(config, 0, 0, ranks, store)


def _prepare(config: Config, place: Place) -> None:
    """Threads, and the network interface on which this rank and the others talk."""
    torch.set_num_threads(config.train.threads or max(1, (os.cpu_count() or 1) // place.here))
    host, port = host_and_port(place.meet)
    own = own_host(host, port)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (found := _interface(own)) is not None:
            os.environ.setdefault(name, found)


def _interface(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def several(config: Config) -> bool:
    """Is this cell's model shared by several ranks?"""
    return how_many(config) > 1


def how_many(config: Config) -> int:
    """Ranks of this cell."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else max(1, config.train.ranks)


def under_torchrun() -> bool:
    """Did torchrun start this process, with others?"""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def leave(code: int) -> NoReturn:
    """End without the interpreter's own end, in which a thread of Gloo that lets go of a tensor may abort it (pytorch pull request 179291)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(config: Config, followers: Followers) -> Ranks:
    """Be a follower, and start those of a further host. Signals are the leader's to act upon."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    place = Place.of(os.environ)
    if place is None:
        return _as_torchrun_says(config)
    rank, ranks, here, meet = place
    if rank % here:
        threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    _prepare(config, place)
    late = threading.Timer(config.run.start_timeout_s, _end_late, (config, meet))  # torch may wait for a leader that is gone
    late.daemon = True
    late.start()
    store = find_leader(*host_and_port(meet), rank, ranks, config.run.start_timeout_s)
    followers += place.others() if rank % here == 0 else []
    store.set(f"here/{rank}", "")
    found = Ranks(config, rank, rank % here, ranks, store)
    late.cancel()
    return found


def find_leader(host: str, port: int, rank: int, ranks: int, timeout_s: float) -> Any:
    """The store of a leader that no process of this rank has joined yet. One that was joined before has lost that rank: it is about to end, and the
    next one to listen there. Raises `WorkFailed`, or RuntimeError when none is there in time."""
    end = time.monotonic() + timeout_s
    while True:
        store = dist.TCPStore(host, port, ranks, False, timedelta(seconds=max(1.0, end - time.monotonic())))  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # it has just gone
            if store.add(f"came/{rank}", 1) == 1:
                return store
        if time.monotonic() > end:
            raise WorkFailed(f"the leader at {host}:{port} has lost rank {rank} and did not end within {timeout_s:.0f} s")
        del store
        time.sleep(_AGAIN_S)


def _end_late(config: Config, meet: str) -> None:
    log.error("gave up after %s s waiting for the other ranks of this cell at %s", config.run.start_timeout_s, meet)
    leave(EXIT_BEREFT)


def _as_torchrun_says(config: Config) -> Ranks:
    rank, local, ranks = (int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if config.train.ranks not in (1, ranks):
        raise UsageError("--ranks", f"{config.train.ranks}, and torchrun started {ranks}", "leave it out", "train.ranks")
    return Ranks(config, rank, local, ranks, None)


def _end_with_starter() -> None:
    """It holds the other end of this pipe; when it is gone there is nobody to work for."""
    while os.read(0, 1):
        pass
    os._exit(1)
