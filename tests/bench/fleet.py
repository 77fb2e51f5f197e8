"""What one coordinator costs as the run grows: a real one over real sockets, and in a few other processes the workers of all its cells.

python tests/bench/fleet.py --cells 1000 --seconds 60        # share of a core, memory, messages; a burst every 20 s
python tests/bench/fleet.py --cells 1000 --hour 1.0          # memory over hours of virtual time: the same coordinator, statuses without sockets

Workers are production's (`net.worker`): they beat as often as they are asked to and obey orders after a second. What is not there: engines,
trainers, sandboxes, and the buffer, in whose place a script counts. Nothing is launched: the coordinator takes over what lives already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from gyre import config as configuration
from gyre.cli import Setup
from gyre.coord import cells as r
from gyre.coord import machine as m
from gyre.coord.launch import Plan
from gyre.coord.launcher import Child, Launcher
from gyre.coord.shell import Coordinator
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.net.worker import Worker
from gyre.types import Version
from gyre.wire.messages import Ack, Counters, FromCoord, Note, Routes, SetRole, Subscribe, ToBuffer, WorkerStatus

SLOTS = 8
BURST_S = 20.0
SANDBOXES = 20
SIMULATORS = 4


def plans(run_dir: Path, cells: int) -> list[Plan]:
    made = [Plan("buffer", "buffer", ["x"], {}, endpoint(run_dir, "buffer"))]
    made += [Plan(f"box{i}", "sandbox", ["x"], {}, "") for i in range(SANDBOXES)]
    for i in range(cells):
        made.append(Plan(f"c{i}-train", "train", ["x"], {}, f"ipc:///run/gyre/train/c{i}", f"c{i}"))
        made.append(Plan(f"c{i}-rollout", "rollout", ["x"], {}, f"ipc:///run/gyre/rollout/c{i}", f"c{i}", SLOTS))
    return made


def setup_of(run_dir: Path) -> Setup:
    resolved = configuration.load(None, ["system.groups_per_step=64", "run.stall_s=3600", "run.start_timeout_s=3600"])
    return Setup(
        run_dir=run_dir, config=resolved.config, resolved=resolved, buffer="", train="", rollouts=[], coord=None, bind=None, name=""
    )  # fmt: skip


class Elsewhere:
    """Hosts where all live already (`coord.launcher.Launcher`)."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    async def find(self, plan: Plan) -> int | None:
        return self._pids[plan.name]

    async def follow(self, plan: Plan) -> int:
        await asyncio.Event().wait()
        return 0

    async def signal(self, plan: Plan, number: int) -> bool:
        return True


# --- the workers' side ---


def counters(at_s: float, cells: int) -> Counters:
    """A burst every BURST_S: executions end for 12 s, the step is committed after 16."""
    burst, t = divmod(at_s, BURST_S)
    b = int(burst)
    level = round(cells * SLOTS * max(0.0, 1.0 - t / 12.0))
    return Counters(
        id=mint(), seq=int(at_s * 5), admitted=cells * SLOTS * (b + 1), states={"running": level}, water_level=level, step=b + (t > 16.0),
        total_steps=1 << 30, published=Version(1, b), term=1, groups_open=level, eval_outstanding=0, finished=False, failure="",
        ready_groups=round(64 * t / BURST_S), taken_groups=0, publications=b + 1,
    )  # fmt: skip


async def serve_counters(run_dir: Path, cells: int) -> None:
    server = Server.bind(endpoint(run_dir, "buffer"), ToBuffer, kind="buffer", name="buffer", run_id=run_dir.name)
    listeners: dict[str, tuple[Peer, str]] = {}
    began = time.monotonic()

    def hear(peer: Peer, message: Any, _: Any) -> None:
        if isinstance(message, Subscribe):
            listeners[peer.name] = peer, message.id
            server.send(peer, _count(began, cells, message.id))
        elif isinstance(message, Note):
            server.send(peer, Ack(id=mint(), cause=message.id))

    serving = asyncio.create_task(server.serve(hear))
    while not serving.done():
        await asyncio.sleep(0.2)
        for peer, cause in listeners.values():
            server.send(peer, _count(began, cells, cause))


def _count(began: float, cells: int, cause: str) -> Counters:
    return msgspec.structs.replace(counters(time.monotonic() - began, cells), cause=cause)


class Workers:
    """Those of one simulator, and what they were told."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.orders = self.routes = 0
        self._rng = random.Random(7)
        self._loop = asyncio.get_running_loop()

    def begin(self, plan: Plan) -> None:
        worker = Worker(None, kind=plan.kind, name=plan.name, run_id=self.run_dir.name)
        worker.stop, worker.cell, worker.address = asyncio.Event(), plan.cell, plan.address
        worker.role = {"rollout": "asleep", "train": "idle"}.get(plan.kind, "")
        worker.status("ready")

        def obey(order: SetRole) -> None:
            self.orders += 1
            role = {("rollout", "train"): "asleep", ("rollout", "rollout"): "serving", ("train", "train"): "training"}.get(
                (plan.kind, order.role), "idle"
            )
            self._loop.call_later(0.5 + self._rng.random(), worker.set_role, role)

        def follow(routes: Routes) -> None:
            self.routes += 1

        worker.on_role, worker.on_routes = obey, follow
        worker.attach(
            Client.connect(
                endpoint(self.run_dir, "coord"), FromCoord, kind=plan.kind, name=plan.name, incarnation=worker.incarnation,
                run_id=self.run_dir.name, on_push=worker.on_push,
            )
        )  # fmt: skip


async def simulate(run_dir: Path, cells: int, number: int) -> None:
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 20_000)
    mine = [p for i, p in enumerate(plans(run_dir, cells)) if (i // 2) % SIMULATORS == number]
    workers, stop = Workers(run_dir), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    buffer = asyncio.create_task(serve_counters(run_dir, cells)) if number == 0 else None
    for i, plan in enumerate(mine):
        workers.begin(plan)
        if i % 10 == 0:
            await asyncio.sleep(0.01)
    await stop.wait()
    if buffer is not None:
        buffer.cancel()
    print(json.dumps({"orders": workers.orders, "routes": workers.routes}), flush=True)
    os._exit(0)


async def coordinate(run_dir: Path, cells: int, pids: list[int]) -> None:
    made = plans(run_dir, cells)
    coordinator = Coordinator(setup_of(run_dir), made, endpoint(run_dir, "coord"), "elastic", adopt=True)
    coordinator.launcher = cast(Launcher, Elsewhere({p.name: pids[(i // 2) % SIMULATORS] for i, p in enumerate(made)}))
    await coordinator.run()


# --- measuring ---


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds so far, and resident MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(cells: int, seconds: float, settle_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        (run_dir / "logs").mkdir(parents=True)
        command = [sys.executable, __file__, "--cells", str(cells), "--run", str(run_dir)]
        simulators = [subprocess.Popen([*command, "--simulate", str(n)], stdout=subprocess.PIPE, text=True) for n in range(SIMULATORS)]
        with (run_dir / "coord.log").open("w") as log:
            coordinator = subprocess.Popen([*command, "--pids", ",".join(str(s.pid) for s in simulators)], stderr=log)
        try:
            time.sleep(settle_s)
            cpu, first_mib = usage(coordinator.pid)
            began = time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - began
            after, last_mib = usage(coordinator.pid)
        finally:
            for s in simulators:
                s.terminate()
            told = [json.loads(s.communicate(timeout=60)[0]) for s in simulators]
            coordinator.kill()
            coordinator.wait()
        return {
            "cells": cells, "workers": 2 * cells + SANDBOXES, "core_share": (after - cpu) / took, "mib": [first_mib, last_mib],
            "orders": sum(t["orders"] for t in told), "routes_per_sandbox": sum(t["routes"] for t in told) / SANDBOXES,
        }  # fmt: skip


def hours(cells: int, of: float) -> dict[str, Any]:
    """The coordinator without sockets or time: each virtual second all workers beat and obey, counters come and five ticks pass."""

    class Silent:
        def send(self, peer: Peer, message: Any) -> None:
            if isinstance(message, SetRole):
                done = {("rollout", "train"): "asleep", ("rollout", "rollout"): "serving", ("train", "train"): "training"}
                kind = peer.kind
                said[peer.name] = done.get((kind, message.role), "idle"), message.epoch

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        (run_dir / "logs").mkdir(parents=True)
        now, made = [0.0], plans(run_dir, cells)
        coordinator = Coordinator(setup_of(run_dir), made, "", "elastic", adopt=True, clock=lambda: now[0])
        coordinator.server = cast(Server, Silent())
        said: dict[str, tuple[str, int]] = {p.name: ("asleep" if p.kind == "rollout" else "idle" if p.kind == "train" else "", 0) for p in made}
        peers = {p.name: Peer(p.name.encode(), p.kind, p.name, "i", 1) for p in made}
        coordinator.children = {p.name: Child(1) for p in made}
        resident = []
        began = time.process_time()
        for second in range(int(3600 * of)):
            now[0] = float(second)
            coordinator.on_buffer(counters(now[0], cells), {})
            for plan in made:
                role, epoch = said[plan.name]
                status = WorkerStatus(id=mint(), phase="ready", role=role, epoch=epoch, cell=plan.cell, gauges={"tokens_s": 1.0 * second})
                coordinator.on_worker(peers[plan.name], status, {})
            for _ in range(5):
                coordinator._feed(m.Tick())
                coordinator._feed_roles(r.Tick())
            if second % 60 == 59:
                resident.append(usage(os.getpid())[1])
        return {
            "cells": cells, "virtual_s": int(3600 * of), "core_share_without_sockets": (time.process_time() - began) / (3600 * of),
            "mib_by_minute": [round(x, 1) for x in resident],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What one coordinator costs as the run grows.")
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before measuring: all register, engines wake")
    parser.add_argument("--hour", type=float, help="hours of virtual time, without sockets")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--simulate", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pids", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulate is not None:
        asyncio.run(simulate(options.run, options.cells, options.simulate))
    elif options.pids is not None:
        asyncio.run(coordinate(options.run, options.cells, [int(p) for p in options.pids.split(",")]))
    elif options.hour is not None:
        print(json.dumps(hours(options.cells, options.hour)))
    else:
        print(json.dumps(measure(options.cells, options.seconds, options.settle)))


if __name__ == "__main__":
    main()
