"""From the run's events to what `lookahead` is shown beside the counters: how old the executions in flight are, how long others lasted, and what
training, moves, updates and publications cost. Pure: events and wall-clock seconds in, `Known` out.

An execution's age is the time since it was leased: where it waited for an engine, that counts too. Costs are means over what was measured, so there
is nothing to show before the first step is committed. Nothing of it is kept: a coordinator that starts again sees only what is admitted from then on,
and shows nothing until it has seen every group that is out.
"""

from __future__ import annotations

from bisect import insort
from typing import Any, Final

from gyre.rules.roles import GroupView, Known

KEPT: Final = 2000  # durations, the newest


class _Mean:
    def __init__(self) -> None:
        self.n, self.total = 0, 0.0

    def add(self, seconds: float) -> None:
        self.n += 1
        self.total += seconds

    @property
    def value(self) -> float:
        return self.total / self.n if self.n else 0.0


class _Ages:
    """The newest `KEPT` durations, sorted."""

    def __init__(self) -> None:
        self._order: list[float] = []
        self.sorted: list[float] = []

    def add(self, seconds: float) -> None:
        self._order.append(seconds)
        insort(self.sorted, seconds)
        if len(self._order) > KEPT:
            self.sorted.remove(self._order.pop(0))


class _Group:
    def __init__(self, n: int) -> None:
        self.waiting = n  # not leased yet
        self.leased: dict[str, float] = {}  # in flight: when each was leased
        self.longest = 0.0


class Knowledge:
    """Fed with every event of the run's log."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._executions, self._whole = _Ages(), _Ages()
        self._train, self._to_train, self._update, self._publish = _Mean(), _Mean(), _Mean(), _Mean()
        self._core = ""
        self._turning: dict[str, float] = {}

    def hear(self, kind: str, at: float, f: dict[str, Any]) -> None:
        """One event: its kind, wall-clock time and fields."""
        match kind:
            case "admitted":
                self._groups[f["group"]] = _Group(f["rollouts"])
            case "leased":
                for rollout in f["rollouts"]:
                    self._leased(rollout, at)
            case "reissued":
                group = self._groups.get(f["rollout"].rpartition(".")[0])
                if group is not None and group.leased.pop(f["rollout"], None) is not None:
                    group.waiting += 1
            case "rollout_ended":
                self._ended(f["rollout"], f["group"], at)
            case "group_ready" | "group_discarded":
                self._groups.pop(f["group"], None)
            case "term":
                self._core = f["cell"]
            case "step":
                self._step(f)
            case "update" | "reduced" | "broadcast":
                self._update.total += f["seconds"]  # a step has one of each at most; counted at the step
            case "publication":
                if f["step"]:  # the first one waits for whatever starts
                    self._publish.add(f["seconds"])
            case "role" if f["phase"] == "to_train":
                self._turning[f["cell"]] = at
            case "role" if f["phase"] == "train" and f["cell"] in self._turning:
                self._to_train.add(at - self._turning.pop(f["cell"]))
            case _:
                pass

    def _leased(self, rollout: str, at: float) -> None:
        group = self._groups.get(rollout.rpartition(".")[0])
        if group is not None and rollout not in group.leased:
            group.waiting -= 1
            group.leased[rollout] = at

    def _ended(self, rollout: str, group_id: str, at: float) -> None:
        group = self._groups.get(group_id)
        since = group.leased.pop(rollout, None) if group is not None else None
        if group is None or since is None:
            return
        self._executions.add(at - since)
        group.longest = max(group.longest, at - since)
        if not group.leased and not group.waiting:
            self._whole.add(group.longest)

    def _step(self, f: dict[str, Any]) -> None:
        """What one cell needs for one group, from what the core measured of its own micro-steps."""
        self._update.n += 1
        own = sum(len(e["micro_steps"]) for e in f["entries"] if e["cell"] == self._core)
        seconds, groups = f["metrics"].get("seconds_compute"), f["stats"]["groups"]
        if own and seconds and groups:
            self._train.add(seconds / own * f["micro_steps"] / groups)

    def known(self, now: float, groups_open: int, trained: float) -> Known | None:
        """What is known at `now`; None while something that is out has not been seen, or a cost not been measured. `groups_open`: those whose
        executions are out; `trained`: groups of the open step whose training is done."""
        out = [g for g in self._groups.values() if g.leased or g.waiting]
        if len(out) < groups_open or not self._train.n:
            return None
        views = []
        for g in out:
            n = len(g.leased) + g.waiting
            views.append(GroupView(n, sum(now - t for t in g.leased.values()) / n))
        return Known(
            tuple(views), tuple(self._executions.sorted), tuple(self._whole.sorted), self._train.value, self._to_train.value, self._update.value,
            self._publish.value, trained,
        )  # fmt: skip
