"""What `lookahead` wants to know beside the counters, gathered from the run's events as they come. Pure.

Ages are seconds since the lease: that executions slow each other is not known here (`Known.pace` is None). Costs are means of the last few
measurements; before a step has been measured nothing is known, and the rule does as `elastic` does.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from gyre.rules.roles import CellPhase, GroupView, Known

DURATIONS_KEPT: Final = 2048
COSTS_KEPT: Final = 8


class Lengths:
    """The last so many durations, also sorted."""

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self.sorted: list[float] = []

    def add(self, seconds: float) -> None:
        self._order.append(seconds)
        bisect.insort(self.sorted, seconds)
        if len(self._order) > DURATIONS_KEPT:
            self.sorted.pop(bisect.bisect_left(self.sorted, self._order.popleft()))


class Knowledge:
    """Takes events in; `now` is the coordinator's clock at both `take` and `known`."""

    def __init__(self, groups_per_step: int) -> None:
        self._b = groups_per_step
        self._groups: dict[str, dict[str, float | None]] = {}  # group → unfinished rollout → leased at
        self._longest: dict[str, float] = {}
        self._durations, self._group_durations = Lengths(), Lengths()
        self._costs = {name: deque[float](maxlen=COSTS_KEPT) for name in ("train", "to_train", "update", "publish")}
        self._turning: dict[str, float] = {}
        self._cells = 1  # that took part in the last reduction

    def take(self, now: float, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "admitted":
                group = fields["group"]
                self._groups[group] = {f"{group}.{i}": None for i in range(fields["rollouts"])}
            case "leased":
                self._start(fields["rollouts"], now)
            case "reissued":
                self._start([fields["rollout"]], None)
            case "rollout_ended":
                self._ended(now, fields["group"], fields["rollout"], discarded=fields["state"] == "discarded")
            case "group_discarded":
                self._groups.pop(fields["group"], None)
                self._longest.pop(fields["group"], None)
            case "reduced":
                self._cells = len(fields["cells"])
            case "step":
                if (seconds := fields.get("metrics", {}).get("seconds_compute")) is not None:
                    self._costs["train"].append(seconds * self._cells / self._b)
                self._cells = 1
            case "update":
                self._costs["update"].append(fields["seconds"])
            case "publication":
                self._costs["publish"].append(fields["seconds"])
            case "role" if fields["phase"] == CellPhase.TO_TRAIN:
                self._turning[fields["cell"]] = now
            case "role":
                began = self._turning.pop(fields["cell"], None)
                if began is not None and fields["phase"] == CellPhase.TRAIN:
                    self._costs["to_train"].append(now - began)
            case _:
                pass

    def _start(self, rollouts: Iterable[str], at: float | None) -> None:
        for rollout in rollouts:
            members = self._groups.get(rollout.rpartition(".")[0])
            if members is not None and rollout in members:
                members[rollout] = at

    def _ended(self, now: float, group: str, rollout: str, *, discarded: bool) -> None:
        members = self._groups.get(group)
        if members is None or rollout not in members:
            return
        leased_at = members.pop(rollout)
        if leased_at is not None and not discarded:
            self._durations.add(now - leased_at)
            self._longest[group] = max(self._longest.get(group, 0.0), now - leased_at)
        if not members:
            del self._groups[group]
            if (longest := self._longest.pop(group, None)) is not None:
                self._group_durations.add(longest)

    def known(self, now: float) -> Known | None:
        """None before the first step with a gradient."""
        views = [
            GroupView(len(members), sum(0.0 if at is None else now - at for at in members.values()) / len(members))
            for members in self._groups.values()
            if members
        ]
        train, to_train, update, publish = (sum(c) / len(c) if c else 0.0 for c in self._costs.values())
        if train <= 0:
            return None
        return Known(tuple(views), tuple(self._durations.sorted), tuple(self._group_durations.sorted), train, to_train, update, publish)
