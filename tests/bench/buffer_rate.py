"""How fast rollouts pass through a buffer: a real gyre-buffer, durable, beside a plain write and fsync of the same bytes in the same batches, a Ray
queue and TransferQueue, which keep them in memory. `python tests/bench/buffer_rate.py` prints MB/s in and out; `… memory [GB]` its memory while
so much passes.

The peers run in an environment of their own, made once in ~/.cache/gyre-bench (`buffer_peers.py`); where they cannot be installed, a line says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from gyre.net.sockets import Client, mint
from gyre.types import Ending, GraphNode, LeafClass, TrajectoryMeta, Version
from gyre.wire import messages as w
from gyre.wire.arrays import f32, i32

SIZES: Final = {"64 kB": (1 << 16, 64), "1 MB": (1 << 20, 32), "8 MB": (8 << 20, 8)}  # bytes of a rollout, rollouts at a time
TOTAL: Final = 1 << 27  # bytes of a round
ROUNDS: Final = 3
PIECE: Final = 256 << 10  # of a write; a virtual machine may be several times slower at one of megabytes
GROUP: Final = 4
CELLS: Final = "abcdefghijklmnop"
NODE: Final = 500  # tokens of a prompt's new part or of a reply
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gyre-bench"
DEADLINE_S: Final = 120.0
PEER_S: Final = 180.0


class Rate(NamedTuple):
    """MB/s."""

    taken: float
    given: float


class Passing:
    """A buffer under way, with a sandbox that has rollouts of `size` bytes to report, `at_once` at a time, and the cells that claim them."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], size: int, at_once: int) -> None:
        address = f"ipc://{folder}/run/sock/buffer"
        self.process, self.payload = process, folder / "run" / "payload"
        self.at_once, self.step, self.term = at_once, 0, 0
        n = size // 12
        versions = i32([-1]) * n
        nodes = [GraphNode(i - 1, min(NODE, n - at), f"c{i}" if i % 2 else None) for i, at in enumerate(range(0, n, NODE))]
        sampled = list(range(1, len(nodes), 2))
        for i in sampled:
            versions[i * NODE : i * NODE + nodes[i].n_tokens] = i32([0]) * nodes[i].n_tokens
        trainable = sum(nodes[i].n_tokens for i in sampled)
        self.size = 12 * n
        self._arrays = {"token_ids": i32(range(n)), "logprobs": f32([-1.0]) * n, "versions": versions}
        self._graph: dict[str, Any] = {
            "nodes": nodes,
            "trajectories": [TrajectoryMeta(0, LeafClass.MAIN, list(range(len(nodes))), sampled, n, trainable)],
        }
        self._sandbox = Client.connect(address, w.FromBuffer, kind="sandbox", name="s", incarnation="1", resend_s=DEADLINE_S)
        self._cells = [Client.connect(address, w.FromBuffer, kind="train", name=c, incarnation="1", resend_s=DEADLINE_S) for c in CELLS]

    async def ask(self, message: w.Message, client: Client | None = None, arrays: Any = None) -> Any:
        return (await (client or self._cells[0]).request(message, arrays, deadline_s=DEADLINE_S, what="the buffer"))[0]

    async def begin(self) -> None:
        """Its core's term, and a policy, so that groups are admitted."""
        self.term = (await self.ask(w.AcquireTerm(id=mint(), cell="a", step=0))).term
        await self._publish()

    async def _publish(self) -> None:
        await self.ask(w.Published(id=mint(), version=Version(self.term, self.step), cells=["a"], seconds=0.0))

    async def take(self, rollouts: int) -> float:
        """Seconds until so many rollouts are acknowledged."""
        tickets: list[Any] = []
        while len(tickets) < rollouts:
            tickets += (await self.ask(w.LeaseTickets(id=mint(), n=rollouts - len(tickets), wait_s=5.0), self._sandbox)).tickets
        started, left = time.perf_counter(), iter(tickets)

        async def report() -> None:
            for t in left:
                ended = w.RolloutEnded(
                    id=mint(), rollout_id=t.rollout_id, epoch=t.epoch, ending=Ending.FINISHED, reward=float(t.index % 2), **self._graph
                )  # fmt: skip
                assert isinstance(await self.ask(ended, self._sandbox, self._arrays), w.Ack)

        await asyncio.gather(*[report() for _ in range(self.at_once)])
        return time.perf_counter() - started

    async def give(self) -> float:
        """Seconds until all of the step is claimed; then it is accumulated, committed and saved, and the next policy published."""
        step, claimed = self.step + 1, []

        async def claim(cell: str, client: Client) -> None:
            who: dict[str, Any] = {"term": self.term, "step": step, "cell": cell, "incarnation": "1"}
            while isinstance(m := await self.ask(w.ClaimMicroStep(id=mint(), wait_s=5.0, **who), client), w.MicroStepClaimed):
                claimed.append(m)
                await self.ask(w.Accumulated(id=mint(), micro_step_id=m.micro_step_id, **who), client)

        started = time.perf_counter()
        await asyncio.gather(*[claim(c, client) for c, client in zip(CELLS, self._cells, strict=True)])
        took = time.perf_counter() - started
        assert sum(len(m.trajectories) for m in claimed)
        sealed = await self.ask(w.SealStep(id=mint(), term=self.term, step=step, wait_s=5.0))
        await self.ask(w.CommitStep(id=mint(), term=self.term, step=step, hash=sealed.hash, metrics={}))
        self.step = step
        await self.ask(w.CheckpointSaved(id=mint(), term=self.term, step=step, path=f"step-{step}"))
        await self._publish()
        return took

    def rss(self) -> int:
        """Bytes of the buffer that are in memory."""
        return 4096 * int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])

    def close(self) -> None:
        for client in (self._sandbox, *self._cells):
            client.close()


@asynccontextmanager
async def passing(folder: Path, rollouts: int, steps: int, size: int, at_once: int, *sets: str) -> AsyncIterator[Passing]:
    """A buffer whose steps have so many rollouts each."""
    task = folder / "tasks" / "t"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("x")
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "tests" / "test.sh").write_text("#!/bin/sh\n")
    sets = (
        f"tasks.train={task.parent}", f"system.groups_per_step={rollouts // GROUP}", f"system.rollouts_per_group={GROUP}",
        "system.target_staleness=0", f"train.steps={steps}", f"train.micro_step_tokens={max(16384, size // 12)}", *sets,
    )  # fmt: skip
    argv = [sys.executable, "-m", "gyre_commands.buffer", "--run", str(folder / "run"), *(x for s in sets for x in ("--set", s))]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stderr=log)  # noqa: ASYNC220 (nothing else runs yet)
    it = Passing(folder, process, size, at_once)
    try:
        await it.begin()
        yield it
    finally:
        it.close()
        process.terminate()
        process.wait(60)


def gyre(folder: Path, size: int, at_once: int) -> Rate:
    """Of a step's rollouts, in and out; those of the step before warm it up."""
    n = TOTAL // size

    async def rates() -> Rate:
        async with passing(folder, n, 3, size, at_once) as buffer:
            mb = n * buffer.size / 1e6
            await buffer.take(n)
            await buffer.give()
            return Rate(mb / await buffer.take(n), mb / await buffer.give())

    return asyncio.run(rates())


def disk(folder: Path, size: int, at_once: int, piece: int) -> Rate:
    """The same bytes written to a file, as many before, and synced after each batch; read back, as fast as the page cache is."""
    rollout = memoryview(os.urandom(size))
    fd = os.open(folder / "plain", os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    for _ in range(2):
        started = time.perf_counter()
        for i in range(TOTAL // size):
            for at in range(0, size, piece):
                os.write(fd, rollout[at : at + piece])
            if (i + 1) % at_once == 0:
                os.fsync(fd)
        wrote = time.perf_counter()
    os.lseek(fd, TOTAL, os.SEEK_SET)
    while os.read(fd, min(size, piece)):
        pass
    read = time.perf_counter()
    os.close(fd)
    return Rate(TOTAL / 1e6 / (wrote - started), TOTAL / 1e6 / (read - wrote))


def peers_python() -> Path | str:
    """The interpreter that has the peers, made at the first call; or why there is none."""
    python = CACHE / "bin" / "python"
    if not (CACHE / "made").exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", CACHE], check=True, timeout=120)
        packages = next((CACHE / "lib").glob("python*")) / "site-packages"
        (packages / "gyre.pth").write_text(f"{next(p for p in sys.path if p.endswith('site-packages'))}\n")  # torch is there already
        done = subprocess.run([python, "-m", "pip", "install", "-q", "ray", "TransferQueue"], capture_output=True, text=True, timeout=900)
        if done.returncode:
            return f"peers: skipped, they cannot be installed ({done.stderr.strip().splitlines()[-1]})"
        (CACHE / "made").touch()
    return python


def peer(name: str) -> list[Rate] | str:
    """Of a peer, by size; or why there is none."""
    if isinstance(python := peers_python(), str):
        return python
    argv = [python, Path(__file__).with_name("buffer_peers.py"), name, json.dumps([TOTAL, list(SIZES.values())])]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PEER_S)
    except subprocess.TimeoutExpired:
        return f"{name}: skipped, it was not done in {PEER_S:.0f} s"
    if done.returncode:
        return f"{name}: skipped ({done.stderr.strip().splitlines()[-1]})"
    return [Rate(*r) for r in json.loads(done.stdout.splitlines()[-1])]


def compare() -> None:
    """A line for each size and way: MB/s, and ratios to each yardstick; medians of rounds in which all take turns."""
    rounds: list[dict[str, list[Rate]]] = []
    peers = ["Ray queue", "TransferQueue"]
    for _ in range(ROUNDS):
        found: dict[str, list[Rate]] = {"gyre": [], "disk": [], "disk in pieces": []}
        for size, at_once in SIZES.values():
            folder = Path(tempfile.mkdtemp(prefix="gyre-bench-", dir=Path.cwd()))
            try:
                found["gyre"].append(gyre(folder, size, at_once))
                found["disk"].append(disk(folder, size, at_once, size))
                found["disk in pieces"].append(disk(folder, size, at_once, PIECE))
            finally:
                shutil.rmtree(folder)
        rounds.append(found)
        for name in list(peers):
            if isinstance(rates := peer(name), str):
                print(rates)
                peers.remove(name)
            else:
                found[name] = rates
    for n, name in enumerate(SIZES):
        for i, way in enumerate(Rate._fields):
            median = {k: statistics.median(r[k][n][i] for r in rounds if k in r) for k in rounds[0]}
            others = "".join(
                f"   {k} {x:5.0f}: {median['gyre'] / x:4.2f}"
                for k, x in median.items()
                if k != "gyre" and not (k.startswith("disk") and way == "given")
            )
            print(f"buffer: rollouts of {name}, {way} {median['gyre']:5.0f} MB/s{others}", flush=True)


def memory(total: float = 10e9) -> None:
    """How much the buffer holds while `total` bytes pass through it and what nothing needs any more is removed; ten lines."""
    size, at_once = SIZES["1 MB"]
    per_step = 64
    steps = max(10, round(total / size / per_step))
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-", dir=Path.cwd()))

    async def stream() -> None:
        async with passing(folder, per_step, steps + 1, size, at_once, 'run.keep_payloads="needed"') as buffer:
            for step in range(1, steps + 1):
                await buffer.take(per_step)
                await buffer.give()
                if step % (steps // 10) == 0:
                    held = sum(f.stat().st_size for f in buffer.payload.iterdir())
                    passed = step * per_step * buffer.size
                    print(f"{passed / 1e9:5.1f} GB passed: {buffer.rss() / 1e6:.0f} MB in memory, {held / 1e6:.0f} MB of payload on disk", flush=True)

    try:
        asyncio.run(stream())
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        memory(*(1e9 * float(x) for x in sys.argv[2:]))
    else:
        compare()
