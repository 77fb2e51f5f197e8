"""A workload's times, compressed: what paced engines, sandboxes and trainers sleep. Pure but for reading the file once.

Everything is in real seconds: the workload's, divided by `compress`. A token stands for `TICK_S` of an execution (`slots`), or for `UNIT` tokens
(`shared`), so that thousands of executions stay small on the wire.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

TICK_S: Final = 10.0
UNIT: Final = 16


class Turn(NamedTuple):
    """A model call of so many tokens, then a tool for so long."""

    tokens: int
    tool_s: float = 0.0


class Paced(NamedTuple):
    """An execution. `cut`: its length is the time-out's; `timeout_s`: the time-out that its own clock must watch."""

    turns: tuple[Turn, ...]
    cut: bool = False
    timeout_s: float | None = None


class Pace:
    """The times of one workload."""

    def __init__(self, data: dict[str, Any], compress: float) -> None:
        self._w, self._system, self._compress = data["workload"], data["system"], compress
        system = self._system
        self.slots: int = system["slots_per_cell"]
        self.to_train_s: float = system["to_train_s"] / compress
        self.to_rollout_s: float = system["to_rollout_s"] / compress
        self.update_s: float = system["update_s"] / compress
        self.publish_s: float = system["publish_s"] / compress
        self.execution_s: float = self._w["train_cell_h_per_group"] * 3600 / system["rollouts_per_group"] / compress

    def token_s(self, active: int) -> float:
        """Seconds of a token when `active` requests share the engine."""
        if self._w["model"] == "slots":
            return TICK_S / self._compress
        s = self._w["shared"]
        return float(s["t0_s"] + s["t1_s"] * active) * UNIT / self._compress

    def execution(self, seed: int, query: int, index: int) -> Paced:
        """What rollout `index` of query `query` does."""
        e = self._w["execution_h"]
        rho = e["correlation"]
        z = rho**0.5 * Random(f"{seed}/{query}").gauss(0, 1) + (1 - rho) ** 0.5 * Random(f"{seed}/{query}/{index}").gauss(0, 1)
        hours = e["median"] * 2.718281828459045 ** (e["sigma"] * z)
        cut = hours > e["harness_timeout_h"]
        hours = min(hours, e["harness_timeout_h"])
        return Paced((Turn(max(1, round(hours * 3600 / TICK_S))),), cut)


def open_pace(file: str, compress: float) -> Pace:
    return Pace(tomllib.loads(Path(file).read_text()), compress)
