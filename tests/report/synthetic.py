"""An event log of an elastic run, made up: 8 cells, 3 bursts, one cell lost; the same numbers each time. Valid, not real.

`python tests/report/synthetic.py DIR` writes DIR/events.jsonl and DIR/run.toml, from which gyre-report draws every figure.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gyre.events import Event, encode

CELLS = [f"c{i}" for i in range(8)]
SLOTS, B, N, MU, BURSTS, QUOTA = 16, 8, 8, 2, 3, 20
GROUP_S, TO_TRAIN_S, TO_ROLLOUT_S, UPDATE_S, PUBLISH_S = 50, 9, 4, 6, 12
HARNESS_S, OVERALL_S = 1500.0, 2400.0
EPOCH = 1_767_225_600.0
TOML = f"[sandbox]\nharness_timeout_s = {HARNESS_S}\noverall_timeout_s = {OVERALL_S}\n"
BUDGET = "[trajectory]\nmax_per_execution = {}\n"


class Made:
    """A second at a time: executions end, cells turn by the water level, training cells work off the groups taken."""

    def __init__(self, dispatch: str = "boundary", rate: float = 1.0) -> None:
        self.now, self.seq, self.rate = 0.0, 0, rate
        self.random = random.Random(7)
        self.phase = dict.fromkeys(CELLS, "rollout")
        self.due: dict[str, float] = {}  # end of a turn
        self.done_by: dict[str, float] = {}
        self.burst, self.step, self.published, self.admitted = 0, 0, -1, 0
        self.queue: list[tuple[str, float]] = []
        self.running: dict[str, tuple[float, float]] = {}
        self.left: dict[str, int] = {}
        self.ready: list[str] = []
        self.taken: list[str] = []
        self.work = 0.0
        self.opened = 0.0
        self.until = PUBLISH_S  # the core is busy publishing
        self.dispatch = dispatch
        self.lost_at: float | None = None
        self.back = False  # the burst is over: cells turn to rollout until none trains

    def event(self, kind: str, **fields: Any) -> Event:
        self.seq += 1
        return Event(seq=self.seq - 1, t_wall=EPOCH + self.now, t_mono=self.now, proc="buffer", cause="", kind=kind, fields=fields)

    @property
    def level(self) -> int:
        return len(self.queue) + len(self.running)

    def cells(self, *phases: str) -> list[str]:
        return [c for c in CELLS if self.phase[c] in phases]

    def events(self) -> Iterator[Event]:
        yield self.event("buffer_started", dispatch=self.dispatch, groups_per_step=B, rollouts_per_group=N, steps_per_burst=MU)
        yield self.event("term", term=1, cell="c0-train", step=0)
        while True:
            self.now += 1.0
            if self.published < self.step and self.step % MU == 0 and self.now >= self.until:
                yield from self.publish()
            if self.step == BURSTS * MU and self.published == self.step:
                yield self.event("finished", step=self.step, counts={})
                return
            yield from self.executions()
            yield from self.turns()
            yield from self.train()

    def publish(self) -> Iterator[Event]:
        self.burst, self.published, self.back = self.burst + 1, self.step, True
        cells = [f"{c}-rollout" for c in self.cells("rollout")]
        yield self.event("publication", number=self.burst - 1, term=1, step=self.step, cells=cells, seconds=PUBLISH_S, staleness_predicted=1.0)
        if self.dispatch == "boundary":
            yield from self.admit(min(QUOTA if self.burst == 1 else MU * B, BURSTS * MU * B - self.admitted))

    def admit(self, n: int) -> Iterator[Event]:
        for _ in range(n):
            g = f"g{self.admitted:06d}"
            self.admitted, self.left[g] = self.admitted + 1, N
            yield self.event("admitted", group=g, query=g.replace("g", "q"), version=self.published, term=1, rollouts=N)
            query = self.random.gauss(0, 0.4)
            self.queue += [(f"{g}.{i}", min(HARNESS_S, 480 * 2.718 ** (query + self.random.gauss(0, 0.35)))) for i in range(N)]

    def executions(self) -> Iterator[Event]:
        if self.dispatch == "continuous" and self.burst:
            room = QUOTA - MU * B // 2 - len({r.rpartition(".")[0] for r, _ in self.queue} | {r.rpartition(".")[0] for r in self.running})
            yield from self.admit(min(max(0, room - len(self.ready)), BURSTS * MU * B - self.admitted))
        for rollout, (end, length) in sorted(self.running.items()):
            if end <= self.now:
                del self.running[rollout]
                ending = "harness_timeout" if length >= HARNESS_S else "finished"
                group = rollout.rpartition(".")[0]
                yield self.event("rollout_ended", rollout=rollout, group=group, purpose="train", ending=ending, state="waiting")
                self.left[group] -= 1
                if not self.left[group]:
                    self.ready.append(group)
                    yield self.event("group_ready", group=group, graded=N, discarded=0)
        room = SLOTS * len(self.cells("rollout")) - len(self.running)
        leased, self.queue = self.queue[: max(0, room)], self.queue[max(0, room) :]
        for i, (rollout, length) in enumerate(leased):
            self.running[rollout] = (self.now + length / self.rate, length)
            yield self.event("leased", holder=f"box{i % 2}/a1", rollouts=[rollout])

    def turn(self, cell: str, to: str, seconds: float, reason: str) -> Event:
        before, self.phase[cell] = self.phase[cell], f"to_{to}"
        self.due[cell] = self.now + seconds
        return self.role(cell, before, to, f"to_{to}", reason)

    def role(self, cell: str, before: str, to: str, phase: str, reason: str) -> Event:
        fields = {"from": before, "to": to, "phase": phase, "reason": reason, "water_level": self.level, "rule": "elastic", "burst": self.burst}
        return self.event("role", cell=cell, **fields)

    def turns(self) -> Iterator[Event]:
        for cell in [c for c, at in self.due.items() if at <= self.now]:
            del self.due[cell]
            to = self.phase[cell].removeprefix("to_") if self.phase[cell] != "lost" else "rollout"
            yield self.role(cell, self.phase[cell], to, to, "")
            self.phase[cell] = to
            if to == "train" and cell != "c0":
                yield self.event("joined", cell=cell, step=self.step + 1, seconds=5.0)
        if self.burst == 2 and self.phase["c3"] == "train" and self.lost_at is None and self.done_by.get("c3", 0.0) > 60 and not self.due:
            self.phase["c3"], self.due["c3"], self.lost_at = "lost", self.now + 200.0, self.now
            self.work += self.done_by.pop("c3", 0.0)
            yield self.event("voided", cell="c3-train", incarnation="i1", reason="its lease expired", micro_steps=["m1", "m2"])
            yield self.role("c3", "train", "lost", "lost", "no answer for 10 s")
        if self.due or self.burst == 0 or (self.published < self.step and self.step % MU == 0):
            return
        rollout, behind = self.cells("rollout"), self.cells("train")
        self.back = self.back and bool(behind)
        if self.back:
            cell = behind[-1]
            if cell != "c0":
                yield self.event("left", cell=cell, step=self.step)
            yield self.turn(cell, "rollout", TO_ROLLOUT_S, "the burst is over")
        elif rollout and self.level <= SLOTS * (len(rollout) - 1) and (self.ready or self.taken):
            yield self.turn(rollout[0], "train", TO_TRAIN_S, f"w = {self.level} <= {SLOTS * (len(rollout) - 1)}")

    def train(self) -> Iterator[Event]:
        cells = self.cells("train")
        if self.back or "c0" not in cells or self.step >= self.burst * MU or self.now < self.until:
            return
        if not self.taken:
            self.opened = self.now
        room = B - len(self.taken)
        new, self.ready = self.ready[:room], self.ready[room:]
        self.taken += new
        self.work += GROUP_S * len(new)
        if new and len(self.taken) == B:
            yield self.event("step_closed", step=self.step + 1, groups=B, short=0)
        for c in cells if self.work > 0 else ():
            self.work -= 1.0
            self.done_by[c] = self.done_by.get(c, 0.0) + 1.0
        if len(self.taken) == B and self.work <= 0:
            self.step += 1
            sealed, cells = self.now, [c for c in CELLS if c in self.done_by]
            self.now += 2.0
            yield self.event("reduced", step=self.step, attempt=1, cells=cells, seconds=2.0)
            self.now += UPDATE_S
            yield self.event("update", step=self.step, seconds=float(UPDATE_S))
            entries = [{"cell": f"{c}-train", "incarnation": "i1", "micro_steps": [f"m{c}.{i}" for i in range(max(1, round(s / 15)))]} for c, s in
                       self.done_by.items()]  # fmt: skip
            yield self.event("step", term=1, step=self.step, groups=list(self.taken), entries=entries, opened_at=EPOCH + self.opened,
                             sealed_at=EPOCH + sealed, stats={"reward_mean": 0.1 * self.rate * self.step},
                             metrics={"grad_norm": self.rate * 10.0**-self.step, "seconds_compute": 40 / self.rate})  # fmt: skip
            if len(cells) > 1:
                self.now += 3.0
                yield self.event("broadcast", step=self.step, cells=cells, seconds=3.0)
            self.taken, self.work, self.done_by = [], 0.0, {}
            self.until = self.now + (PUBLISH_S if self.step % MU == 0 else 0)


def write(folder: Path, dispatch: str = "boundary", rate: float = 1.0) -> Path:
    """A directory that gyre-report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(encode(e) + "\n" for e in Made(dispatch, rate).events()))
    (folder / "run.toml").write_text(TOML + BUDGET.format(5 if dispatch == "continuous" or rate == 1.0 else 1))
    return folder


class Page(HTMLParser):
    """Collects what would be loaded or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action") or k.startswith("on")]


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:3])
