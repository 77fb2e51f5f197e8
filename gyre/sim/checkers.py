"""What must hold of a simulated run, looked at in its trace alone. Shares no code with the rules or the world: it counts again, in its own way.

`check` raises `Violation`, which names the instant and the law. The trace's entries are (seconds, kind, …):
admit(group, version) end(execution) ready(group) take(group, steps) micro(cell, group, since) void(cell, group) commit(step, groups)
publish(burst, version) role(cell, from, to, burst).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

SLACK_S: Final = 1e-6


class Violation(AssertionError):
    """A law of the world was broken. A bug."""


class Law(msgspec.Struct, frozen=True):
    """The numbers of the run to look at. `paper`: its moves must be those of the paper's rule."""

    cells: int
    slots: int
    groups_per_step: int
    rollouts_per_group: int
    steps_per_burst: int
    bursts: int
    quota: int
    continuous: bool
    to_train_s: float
    to_rollout_s: float
    micro_s: float
    paper: bool
    least_s: Callable[[int], float] | None = None  # the least time from admission to end of an execution


class _Seen:
    """All that the checker counts."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.t = 0.0
        self.admitted: dict[int, float] = {}
        self.ended: Counter[int] = Counter()
        self.executions: set[int] = set()
        self.ready: set[int] = set()
        self.taken: set[int] = set()
        self.micro: Counter[int] = Counter()
        self.held: Counter[tuple[int, int]] = Counter()
        self.consumed: set[int] = set()
        self.steps = self.published = self.publications = 0
        self.opened = 0.0  # when the present step could begin
        self.phase = ["rollout"] * law.cells
        self.since = [0.0] * law.cells
        self.free = [0.0] * law.cells  # until then the cell's last micro-step lasted

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"at {self.t:.3f} s, step {self.steps}: {what}")

    def admit(self, group: int, version: int) -> None:
        self.must(group == len(self.admitted), f"group {group} admitted out of order")
        self.admitted[group] = self.t
        self.must(version == self.published, f"group {group} at version {version}, published is {self.published}")
        out = len(self.admitted) - (len(self.taken) if self.law.continuous else len(self.consumed))
        self.must(out <= self.law.quota, f"{out} groups outstanding, the quota is {self.law.quota}")

    def end(self, execution: int) -> None:
        group = execution // self.law.rollouts_per_group
        self.must(group in self.admitted, f"execution {execution} ended and was not admitted")
        self.must(execution not in self.executions, f"execution {execution} ended twice")
        self.executions.add(execution)
        self.ended[group] += 1
        if self.law.least_s is not None:
            least, took = self.law.least_s(execution), self.t - self.admitted[group]
            self.must(took >= least - SLACK_S, f"execution {execution} took {took:.3f} s, less than its {least:.3f} s")

    def make_ready(self, group: int) -> None:
        self.must(self.ended[group] == self.law.rollouts_per_group and group not in self.ready, f"group {group} is not whole, or was ready before")
        self.ready.add(group)

    def take(self, group: int, steps: int) -> None:
        self.must(group in self.ready and group not in self.taken, f"group {group} taken twice or before it was ready")
        self.taken.add(group)
        self.must(steps == self.steps, f"group {group} taken at step {steps}")
        self.must(len(self.taken - self.consumed) <= self.law.groups_per_step, "a step took more than B groups")
        self.must(self.phase[0] == "train", "a step took a group while the core did not train")

    def micro_step(self, cell: int, group: int, since: float) -> None:
        self.must(group in self.taken and group not in self.consumed, f"a micro-step of group {group}, which no open step has")
        self.must(abs(self.t - since - self.law.micro_s) < SLACK_S, "a micro-step took another time than it should")
        self.must(self.phase[cell] == "train" and since >= self.since[cell] - SLACK_S, f"cell {cell} computed and did not train")
        self.must(
            since >= self.free[cell] - SLACK_S and since >= self.opened - SLACK_S, f"cell {cell} computed two at once, or before the step was open"
        )
        self.free[cell] = self.t
        self.micro[group] += 1
        self.held[cell, group] += 1
        self.must(self.micro[group] <= self.law.rollouts_per_group, f"a micro-step of group {group} was counted twice")

    def void(self, cell: int, group: int) -> None:
        self.must(self.held[cell, group] > 0, f"cell {cell} lost a micro-step of group {group} that it did not hold")
        self.held[cell, group] -= 1
        self.micro[group] -= 1

    def commit(self, step: int, groups: Sequence[int]) -> None:
        self.must(step == self.steps + 1, f"step {step} committed")
        self.must(len(set(groups)) == self.law.groups_per_step, f"a step of {len(set(groups))} groups")
        for g in groups:
            self.must(g not in self.consumed and g in self.taken, f"group {g} consumed twice, or never taken")
            self.must(self.micro[g] == self.law.rollouts_per_group, f"group {g}: {self.micro[g]} micro-steps counted")
        self.consumed.update(groups)
        self.held.clear()
        self.steps, self.opened = step, self.t

    def publish(self, burst: int, version: int) -> None:
        self.must(burst == self.publications, f"publication {burst} out of order")
        self.must(version == self.steps == burst * self.law.steps_per_burst, f"publication {burst} of version {version}")
        self.publications, self.published, self.opened = burst + 1, version, self.t

    def role(self, cell: int, before: str, after: str, _burst: int) -> None:
        self.must(self.phase[cell] == before, f"cell {cell} was {self.phase[cell]}, not {before}")
        stayed = self.t - self.since[cell]
        if (before, after) == ("to_train", "train"):
            self.must(stayed >= self.law.to_train_s - SLACK_S, f"cell {cell} turned in {stayed:.3f} s")
        if (before, after) == ("to_rollout", "rollout"):
            self.must(stayed >= self.law.to_rollout_s - SLACK_S, f"cell {cell} came back in {stayed:.3f} s")
        if self.law.paper and after == "to_train":
            self.paper_move(cell)
        self.phase[cell], self.since[cell] = after, self.t

    def paper_move(self, cell: int) -> None:
        """The paper's rule: what stays in rollout holds w, one at a time, a prefix of the order."""
        level = len(self.admitted) * self.law.rollouts_per_group - len(self.executions)
        stay = sum(p == "rollout" for p in self.phase) - 1
        self.must(level <= stay * self.law.slots, f"cell {cell} left rollout at w = {level}, and {stay} cells of {self.law.slots} slots stay")
        self.must("to_train" not in self.phase, f"cell {cell} turned while another did")
        self.must(all(p != "rollout" for p in self.phase[:cell]), f"cell {cell} turned before one that comes first")

    def finish(self) -> None:
        total = self.law.bursts * self.law.steps_per_burst
        self.must(self.steps == total and self.publications == self.law.bursts + 1, f"the run ended at step {self.steps} of {total}")
        self.must(len(self.consumed) == total * self.law.groups_per_step == len(self.admitted), "groups are left over")


def check(trace: Sequence[tuple[Any, ...]], law: Law) -> None:
    """Raises `Violation` at the first entry that breaks a law."""
    seen = _Seen(law)
    doors: dict[str, Callable[..., None]] = {
        "admit": seen.admit, "end": seen.end, "ready": seen.make_ready, "take": seen.take, "micro": seen.micro_step, "void": seen.void,
        "commit": seen.commit, "publish": seen.publish, "role": seen.role,
    }  # fmt: skip
    for entry in trace:
        seen.must(entry[0] >= seen.t - SLACK_S, f"time went back to {entry[0]:.3f} s")
        seen.t = entry[0]
        doors[entry[1]](*entry[2:])
    seen.finish()
