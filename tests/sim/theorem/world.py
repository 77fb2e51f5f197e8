"""One deterministic world: a buffer, sandboxes and cells, the faults of its plan, and the chronicle of what happened.

Invariants
- Everything random is in the plan or drawn from a seed of its own that derives from the plan's; so a seed is a history.
- Faults are the world's: no process knows of them. Moments at which they strike are messages that a process says and things its learner does.

Not here: what a cell runs (cells), who starts and replaces cells (operator), whether it was right (checkers).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from gyre.buffer.queries import Task, TaskSet
from gyre.errors import WorkFailed
from gyre.types import RolloutState
from gyre.wire.messages import Counters, Message
from theorem.buffer import Buffer, Disk
from theorem.chronicle import Chronicle, Said, Snapshot
from theorem.clock import Life, Process, VirtualLoop, current
from theorem.collective import Meetings
from theorem.feeder import Sandbox
from theorem.network import Network
from theorem.plan import Fault, Plan

END_TURNS = 400_000
END_S = 3000.0  # a world that takes longer is stuck: the plans' own times add up to some hundreds


class Kind(Protocol):
    """Which learners the cells of a world have, what they start from, and one cell alone with such a learner."""

    tolerance: float
    start: Any
    alone: Any

    def learner(self, observe: Any, stepped: Any) -> Any: ...


class World:
    """What the processes of one world share, seen from outside."""

    def __init__(self, loop: VirtualLoop, plan: Plan, kind: Kind) -> None:
        self.loop, self.plan, self.kind = loop, plan, kind
        self.disk = Disk()
        self.chronicle = Chronicle(plan.seed, plan.trouble, plan.rewards, kind.alone, kind.tolerance, self.disk)
        self.network = Network(loop, plan.weather, plan.seed, self._listen)
        self.meetings = Meetings(loop, plan.seed, trouble=plan.collective_trouble, seconds=plan.collective_s)
        self.checkpoints: dict[int, tuple[int, Any]] = {}  # step → (term, state)
        self.buffer: Buffer | None = None
        self.struck: list[str] = []  # faults that happened, for people
        self._kinds: dict[Process, str] = {}
        self._moments: Counter[tuple[str, str]] = Counter()
        self._faults: list[Fault] = list(plan.faults)
        self._lives: Counter[str] = Counter()
        self._minted: Counter[Process] = Counter()
        self._outside = Process(loop, "world")

    # --- processes and what befalls them ---

    def process(self, kind: str, name: str) -> Process:
        """A new process of a kind that faults know: core, satellite, buffer or sandbox."""
        process = Process(self.loop, name)
        self._kinds[process] = kind
        return process

    def life(self, name: str) -> int:
        """The number of this life of a name, from 0."""
        self._lives[name] += 1
        return self._lives[name] - 1

    def mint(self, process: Process) -> str:
        """A message id that no other life, and no other part of this one, ever had."""
        self._minted[process] += 1
        return f"{process.name}-{self._minted[process]}"

    def _listen(self, sender: str, to: str, message: Message) -> None:
        self.chronicle.said.append(Said(self.loop.time(), sender, to, message))
        self.moment(type(message).__name__)

    def moment(self, what: str) -> None:
        """The process whose turn it is says or does something: a fault may strike it."""
        process = current()
        kind = self._kinds.get(process, "") if process is not None else ""
        if process is None or not kind:
            return
        self._moments[kind, what] += 1
        for fault in self._faults:
            if (fault.kind, fault.moment) == (kind, what) and self._moments[kind, what] >= fault.nth and not process.armed:
                self._faults.remove(fault)
                process.at_turn(fault.turns, self._strike(fault, process))
                return

    def _strike(self, fault: Fault, process: Process) -> Callable[[], None]:
        def strike() -> None:
            self.struck.append(f"{self.loop.time():.3f} s: {fault.what} {process.name} after {fault.moment}, {fault.seconds} s")
            match fault.what:
                case "kill":
                    process.kill()
                case "stop":
                    process.stop()
                    self.later(fault.seconds, process.wake)
                case _:
                    self.network.cut(process.name.partition("/")[0], self.loop.time() + fault.seconds, fault.other)

        return strike

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Do something whoever is stopped or dead by then."""
        self.loop.call_at(self.loop.time() + seconds, function, context=self._outside.context)

    # --- the buffer and the sandboxes ---

    def start_buffer(self) -> None:
        life = self.life("buffer")
        process = self.process("buffer", f"buffer/{life}")
        process.spawn(self.new_buffer(process, life).serve())

    def new_buffer(self, process: Process, life: int) -> Buffer:
        """Another life of the buffer, from what is on the disk."""
        tasks = TaskSet(tuple(Task(f"/t/{i}") for i in range(5)))
        self.buffer = Buffer(self.network, process, self.disk, self.plan.config, tasks, f"{self.plan.seed}/buffer/{life}", self._snapshot)
        return self.buffer

    def _snapshot(self, counters: Counters) -> None:
        rows = Counter(dict.fromkeys(RolloutState, 0))
        rows.update(self.disk.states.values())
        self.chronicle.snapshots.append(Snapshot(self.loop.time(), counters, rows))

    def start_sandbox(self, name: str) -> Process:
        p = self.plan
        process = self.process("sandbox", f"{name}/{self.life(name)}")
        sandbox = Sandbox(
            self.network, process, p.config, p.seed, slots=p.slots, seconds=p.rollout_s, trouble=p.trouble, rewards=p.rewards
        )  # fmt: skip
        process.spawn(sandbox.serve())
        return process

    async def keep_going(self) -> None:
        """Start the buffer and the sandboxes again, some time after they died. For ever."""
        names = [f"sandbox{i}" for i in range(self.plan.sandboxes)]
        self.start_buffer()
        sandboxes = {n: self.start_sandbox(n) for n in names}
        while True:
            await asyncio.sleep(self.plan.restart_s)
            if self.buffer is not None and self.buffer.process.life is Life.DEAD:
                self.start_buffer()
            for name, process in sandboxes.items():
                if process.life is Life.DEAD:
                    sandboxes[name] = self.start_sandbox(name)

    def save(self, term: int, step: int, state: Any) -> None:
        """As `train.checkpoint.save` does it."""
        if any(t > term for t, _ in self.checkpoints.values()):
            raise WorkFailed("a newer core exists")
        self.checkpoints[step] = (term, state)
        kept = sorted(n for n in self.checkpoints if n <= step)[-self.plan.config.train.keep_checkpoints :]
        self.checkpoints = {n: self.checkpoints[n] for n in kept}

    def last_checkpoint(self, before: int | None) -> tuple[int, int, Any]:
        """The newest (of a step below `before`) as (step, term, state); where the run starts if there is none."""
        steps = [n for n in self.checkpoints if before is None or n < before]
        return (max(steps), *self.checkpoints[max(steps)]) if steps else (0, 0, self.kind.start)
