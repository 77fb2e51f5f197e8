"""A whole run in the deterministic world: a coordinator that launches, and everything it launches, with faults in each of them, itself included.

The coordinator, the machines of the buffer, the worker's part of every process, engines' desks, sandboxes with their routers, trainers: production
code (parts.py). Here are what stands in memory below the coordinator (hosts that start, find, follow and signal processes), who starts the
coordinator again, and the plan.

Invariant: as in world.py. Who dies is found by asking the hosts, never by asking the world.
"""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from gyre.cli import Setup
from gyre.coord.launch import Plan as Launched
from gyre.coord.launcher import Launcher
from gyre.coord.machine import End
from gyre.coord.shell import Coordinator
from gyre.errors import Busy, GyreError
from gyre.net.sockets import Client as RealClient
from gyre.net.sockets import Server as RealServer
from gyre.types import Version
from gyre.wire.messages import FromBuffer, ToCoord
from theorem.chronicle import Drawn, Held
from theorem.clock import Life as Running
from theorem.clock import Process, VirtualLoop
from theorem.learner import Observe, Stepped, Tables
from theorem.network import Client, Server
from theorem.parts import Life, OnDevice, gives_up
from theorem.plan import BUFFER_MOMENTS, CORE_MOMENTS, SATELLITE_MOMENTS, Fault, Plan, draw
from theorem.world import World

COORD_MOMENTS: Final = ("SetRole", "Routes", "Note", "Ack", "start", "Stop")
ENGINE_MOMENTS: Final = ("WorkerStatus", "WatchPolicy", "PolicyLoaded", "Generated", "EngineRefuse", "Pong", "hold")
SANDBOX_MOMENTS: Final = ("LeaseTickets", "RolloutEnded", "RenewLeases", "Generate", "GradingStarted", "WorkerStatus")
MOMENTS: Final = {
    "coord": COORD_MOMENTS, "buffer": BUFFER_MOMENTS, "rollout": ENGINE_MOMENTS, "sandbox": SANDBOX_MOMENTS,
    "train": (*CORE_MOMENTS, *SATELLITE_MOMENTS, "WorkerStatus", "hold"),
}  # fmt: skip
DOOM_S: Final = 2.0  # how long each life of a doomed process is
QUIET_S: Final = 600.0  # after the last fault a run has ended by then


@dataclass(frozen=True)
class FleetPlan(Plan):
    """One world with a coordinator. `cells` are (name, has a trainer, has an engine)."""

    rule: str
    cells: tuple[tuple[str, bool, bool], ...]

    @property
    def launched(self) -> list[Launched]:
        """The processes, as `coord.launch.plans` has them."""
        made = [Launched("buffer", "buffer", ["buffer"], {}, "buffer")]
        made += [Launched(f"box{i}", "sandbox", ["sandbox"], {}, "") for i in range(self.sandboxes)]
        for name, trains, rolls in self.cells:
            made += [Launched(f"{name}-train", "train", ["train"], {}, f"train/{name}", name)] * trains
            made += [Launched(f"{name}-rollout", "rollout", ["rollout"], {}, f"rollout/{name}", name, self.slots)] * rolls
        return made


def fleet(seed: int) -> FleetPlan:
    """The world of a seed; in one of six nothing goes wrong."""
    base, rng = draw(seed), random.Random(f"fleet/{seed}")
    rule = rng.choice(("elastic", "elastic", "colocate", "async:1"))
    n = rng.choice((1, 2, 2, 3))
    if rule == "async:1":
        cells = (("c0", True, False), *((f"c{i}", False, True) for i in range(1, max(2, n))))
    else:
        cells = tuple((f"c{i}", True, True) for i in range(n)) + ((("r0", False, True),) if rng.random() < 0.3 else ())
    faults = () if seed % 6 == 0 else tuple(_fault(rng, cells) for _ in range(rng.choice((1, 2, 2, 3, 4))))
    tables: dict[str, Any] = msgspec.to_builtins(base.config)
    tables["run"] |= {"stall_s": 20.0, "start_timeout_s": 120.0}
    tables["net"] |= {"engine_timeout_s": 5.0}
    tables["train"] |= {"steps": rng.choice((1, 2, 3))}
    values = {f: getattr(base, f) for f in Plan.__dataclass_fields__}
    values |= {"config": msgspec.convert(tables, type(base.config)), "faults": faults, "moves": ()}
    values |= {"rollout_s": rng.choice((0.5, 2.0)), "compute_s": rng.choice((0.1, 0.4)), "collective_trouble": 0.0}
    return FleetPlan(**values, rule=rule, cells=cells)


def _fault(rng: random.Random, cells: tuple[tuple[str, bool, bool], ...]) -> Fault:
    kind = rng.choice(("coord", "coord", "buffer", "buffer", "train", "train", "train", "rollout", "rollout", "sandbox"))
    what = rng.choice(("kill", "kill", "kill", "stop", "stop", "cut", "all"))
    other = ""
    if what == "cut" and rng.random() < 0.6:
        other = rng.choice([n for n in ("coord", "buffer", "box0", *(f"{c[0]}-rollout" for c in cells if c[2])) if n != kind])
    if (
        what == "kill"
        and kind in ("train", "rollout")
        and len(cells) > 1
        and rng.random() < 0.15
        and sum(trains if kind == "train" else rolls for _, trains, rolls in cells) > 1
    ):
        what = "doom"
    return Fault(what, kind, rng.choice(MOMENTS[kind]), rng.randint(1, 6), rng.choice((0, 1, 1, 2, 5, 13)), rng.choice((1.0, 4.0, 12.0, 30.0)), other)


class Devices(Tables):
    """Learners that say when they hold a device."""

    def learner(self, observe: Observe, stepped: Stepped) -> OnDevice:
        n = self._plan.config.system.rollouts_per_group
        return OnDevice(self.start, self._train.lr, self._train.clip_norm, self._plan.groups, n, observe=observe, stepped=stepped)


@dataclass
class _Node:
    """A launched process on its host. `code` when it came to an end by itself."""

    process: Process
    life: Life
    code: int | None = None

    @property
    def exit(self) -> int | None:
        return self.code if self.code is not None else -signal.SIGKILL if self.process.life is Running.DEAD else None


class Hosts:
    """Where processes run: what `coord.launcher.Launcher` is to the coordinator."""

    def __init__(self, world: Fleet) -> None:
        self._world = world
        self._rng = random.Random(f"{world.plan.seed}/hosts")
        self.nodes: dict[str, _Node] = {}
        self.doomed: dict[str, int] = {}  # lives that end soon
        self._pids = 100

    async def find(self, plan: Launched) -> int | None:
        await asyncio.sleep(0.3 * self._rng.random())
        node = self.nodes.get(plan.name)
        return node.life.pid if node is not None and node.exit is None else None

    async def start(self, plan: Launched, *, replace: bool = False) -> int | None:
        await asyncio.sleep(0.3 * self._rng.random())
        self._world.moment("start")
        node = self.nodes.get(plan.name)
        if node is not None and node.exit is None:
            if not replace:
                raise Busy(f"{plan.name} runs already")
            node.process.kill()
        number, self._pids = self._world.life(plan.name), self._pids + 1
        process = self._world.process(plan.kind, f"{plan.name}/{number}")
        node = self.nodes[plan.name] = _Node(process, Life(self._world, process, plan, number, self._pids))
        process.spawn(self._run(node))
        if self.doomed.get(plan.name, 0) > 0:
            self.doomed[plan.name] -= 1
            self._world.later(DOOM_S * self._rng.random(), process.kill)
        return self._pids

    async def _run(self, node: _Node) -> None:
        try:
            await node.life.main()
            node.code = 0
        except Exception as e:
            node.code = 1
            if not gives_up(e):
                self._world.loop.errors.append(f"{node.process.name}: {e!r}")
        node.process.kill()  # what it left running

    async def follow(self, plan: Launched) -> int:
        node = self.nodes[plan.name]
        while node.exit is None:  # noqa: ASYNC110 - a process elsewhere has no event here
            await asyncio.sleep(0.2)
        return node.exit

    async def signal(self, plan: Launched, number: int) -> bool:
        node = self.nodes.get(plan.name)
        if node is not None and node.exit is None:
            match number:
                case signal.SIGKILL:
                    node.process.kill()
                case signal.SIGTERM:
                    node.process.call(node.life.worker.stop.set)
        return True


class Fleet(World):
    """The world of a plan with a coordinator."""

    plan: FleetPlan

    def __init__(self, loop: VirtualLoop, plan: FleetPlan) -> None:
        super().__init__(loop, plan, Devices(plan))
        self.hosts = Hosts(self)
        self.end: End | None = None
        self.quiet_at_s = 0.0  # the last fault is over
        self._coord: Process | None = None

    # --- seen by processes ---

    def hold(self, life: Life, held: bool) -> None:
        self.chronicle.held.append(Held(self.loop.time(), life.plan.cell, life.process.name, held))
        self.moment("hold")

    def sampled(self, process: Process, request: str, draw: int, version: Version) -> None:
        self.chronicle.drawn.append(Drawn(self.loop.time(), process.name, request, draw, version.term, version.step))

    def tell(self) -> None:
        """To the chronicle: how it ended."""
        c = self.chronicle
        c.ends = {p.name: p.ended_at_s for p in self.loop.processes if p.ended_at_s is not None}
        c.quiet_at_s = self.quiet_at_s
        if self.end is not None:
            c.verdict = self.loop.time(), self.end.code, self.end.reason

    # --- faults ---

    def _strike(self, fault: Fault, process: Process) -> Any:
        strike = super()._strike(fault, process)
        name = process.name.partition("/")[0]

        def all_at_once() -> None:
            self.struck.append(f"{self.loop.time():.3f} s: all are killed after {fault.moment} of {process.name}")
            for node in self.hosts.nodes.values():
                node.process.kill()
            if self._coord is not None:
                self._coord.kill()

        def befall() -> None:
            self.quiet_at_s = max(self.quiet_at_s, self.loop.time() + (0.0 if fault.what in ("kill", "all") else fault.seconds))
            if fault.what == "all":
                all_at_once()
                return
            if fault.what == "doom":
                self.hosts.doomed[name] = 6
            (strike if fault.what != "doom" else super(Fleet, self)._strike(replace(fault, what="kill"), process))()

        return befall

    # --- the coordinator, and who starts it ---

    async def run(self) -> None:
        """Until a coordinator has seen the run to its end."""
        lives = 0
        while self.end is None:
            if self._coord is None or self._coord.life is Running.DEAD:
                self._coord = self.process("coord", f"coord/{lives}")
                self._coord.spawn(self._coordinate(self._coord, adopt=lives > 0))
                lives += 1
            await asyncio.sleep(self.plan.restart_s)

    async def _coordinate(self, process: Process, *, adopt: bool) -> None:
        config = self.plan.config
        setup = Setup(
            run_dir=Path("/nonexistent/run"), config=config, buffer="buffer", train="", rollouts=[], coord=None, bind="coord", name="coord",
            resolved=cast(Any, None),
        )  # fmt: skip
        plans = [p.again() for p in self.plan.launched] if adopt else self.plan.launched
        coordinator = Coordinator(setup, plans, "coord", self.plan.rule, adopt=adopt, clock=self.loop.time)
        coordinator.launcher = cast(Launcher, self.hosts)
        coordinator.server = cast(RealServer, Server(self.network, process, "coord", ToCoord, coordinator.on_worker))
        client = Client(
            self.network, process, "buffer", FromBuffer, kind="coord", name="coord", incarnation=process.name, resend_s=config.net.resend_s,
            on_push=coordinator.on_buffer,
        )  # fmt: skip
        try:
            self.end = await coordinator.conduct(cast(RealClient, client))
        except GyreError as e:
            self.end = End(e.exit_code, str(e), None)
