"""A workload's times, compressed: what paced engines, sandboxes and trainers sleep. Pure.

Everything is in real seconds: the workload's, divided by `compress`. A token stands for `TICK_S` of an execution (`slots`), or for `UNIT` tokens
(`shared`), so that thousands of executions stay small on the wire; rounding to whole tokens is without bias.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from gyre.errors import UsageError
from gyre.rules import workload
from gyre.rules.workload import Workload

TICK_S: Final = 10.0
UNIT: Final = 16


class Turn(NamedTuple):
    """A model call of so many tokens, then a tool for so long."""

    tokens: int
    tool_s: float = 0.0


class Paced(NamedTuple):
    """An execution. `cut`: its length is the time-out's; `timeout_s`: the time-out that its own clock must watch."""

    turns: list[Turn]
    cut: bool = False
    timeout_s: float | None = None


class Pace:
    """The times of one workload. `compress` > 0."""

    def __init__(self, w: Workload, compress: float) -> None:
        self._workload, self._compress = w.workload, compress
        system = w.system
        self.soft = system.cells if w.workload.model == "shared" else 1  # an engine takes so many times what the rules call its capacity
        self.to_train_s = system.to_train_s / compress
        self.to_rollout_s = system.to_rollout_s / compress
        self.update_s = system.update_s / compress
        self.publish_s = system.publish_s / compress
        self.execution_train_s = w.workload.train_cell_h_per_group * 3600 / system.rollouts_per_group / compress

    def token_s(self, active: int) -> float:
        """Seconds of a token when `active` requests share the engine."""
        shared = self._workload.shared
        if self._workload.model == "slots" or shared is None:
            return TICK_S / self._compress
        return (shared.t0_s + shared.t1_s * active) * UNIT / self._compress

    def execution(self, seed: int, query: int, index: int) -> Paced:
        """What rollout `index` of query number `query` does: the same draw as the simulator's."""
        e, shared = self._workload.execution_h, self._workload.shared
        if self._workload.model == "slots" or shared is None:
            seconds = self._workload.duration_s(seed, query, index)
            cut = e is not None and seconds >= 3600 * e.harness_timeout_h
            return Paced([Turn(max(1, round(seconds / TICK_S)))], cut)
        turns = [Turn(max(1, round(n / UNIT)), tool_s / self._compress) for n, tool_s in self._workload.turns(seed, query, index)]
        turns[-1] = Turn(turns[-1].tokens)
        return Paced(turns, timeout_s=3600 * shared.harness_timeout_h / self._compress)


def open_pace(file: str, compress: float) -> Pace:
    """The pace of a workload file (`run.workload`, `run.compress`). Raises `UsageError`."""
    if not file:
        raise UsageError("run.toml", "not set, and paced parts play it", "name a workload file (examples/workloads has some)", "run.workload")
    return Pace(workload.load(Path(file)), compress)
