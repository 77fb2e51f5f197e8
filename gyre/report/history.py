"""A run's `Timeline` from its event log.

Invariants
- One pass over the events, in their order; unknown kinds are let be, and an event that lacks what its kind needs is left out with a message, so logs
  of other versions are readable.
- What a restarted core took back (steps above the one that a new term began from) is taken back here too.
- A run with fixed roles has no `role` events: its core is the cell that was granted the term, its rollout cells are those that acknowledged
  publications, and each keeps its role.

Not here: the ledger, numbers drawn from a timeline (timeline.py).
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gyre.events import Event, EventReader
from gyre.report.figures import plain
from gyre.report.timeline import Burst, Execution, Group, Mark, MarkKind, RoleSpan, Step, Timeline
from gyre.rules.roles import CellPhase

_MARKS: Final = {
    "joined": MarkKind.JOIN,
    "left": MarkKind.LEAVE,
    "reduced": MarkKind.REDUCE,
    "update": MarkKind.UPDATE,
    "broadcast": MarkKind.BROADCAST,
    "voided": MarkKind.VOID,
}
_SUFFIXES: Final = ("-train", "-rollout")


class History:
    """Takes events, gives a `Timeline`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._zero: float | None = None
        self._now = 0.0
        self._begun: dict[str, Any] = {}
        self._failure = ""
        self._finished = False
        self._core = ""
        self._trainers: dict[str, None] = {}  # in order of appearance
        self._engines: dict[str, None] = {}
        self._turns: list[tuple[float, str, str, str, str]] = []  # time, cell, from, phase, reason
        self._bursts: list[Burst] = []
        self._steps: dict[int, Step] = {}
        self._closed: dict[int, float] = {}
        self._groups: dict[str, Group] = {}
        self._evaluations: set[str] = set()
        self._open: dict[str, Execution] = {}
        self._executions: list[Execution] = []
        self._unfinished: dict[str, set[str]] = {}
        self._level = 0
        self._water: list[tuple[float, int]] = []
        self._marks: list[Mark] = []
        self._teller = ""  # the coordinator that told of the last turn
        self._halt: tuple[float, float] | None = None  # before the buffer was last started; a stop of the run if another coordinator tells of turns
        self._stops: list[tuple[float, float]] = []

    def take(self, e: Event) -> None:
        """The next event."""
        if self._zero is None:
            self._zero = e.t_wall
        silent_since = self._now
        self._now = max(self._now, e.t_wall - self._zero)  # a clock that was set back stands still
        f = e.fields
        match e.kind:
            case "buffer_started":
                self._begun, self._finished = f, False
                self._halt = silent_since, self._now
            case "finished":
                self._finished = True
            case "failure":
                self._failure = plain(str(f.get("reason", "")))
            case "term":
                self._term(f)
            case "publication":
                self._engines.update(dict.fromkeys(map(str, f.get("cells", ()))))
                predicted, seconds = f.get("staleness_predicted"), float(f.get("seconds") or 0.0)
                self._bursts.append(Burst(len(self._bursts) + 1, self._now, self._now, int(f["step"]), (), predicted, seconds))
            case "role":
                cell, before, phase, reason = (plain(str(f.get(k, ""))) for k in ("cell", "from", "phase", "reason"))
                if self._halt is not None and self._teller not in ("", e.proc):
                    self._stops.append(self._halt)
                self._teller, self._halt = e.proc, None
                self._turns.append((self._now, cell, before, phase, reason))
            case "step" | "step_closed":
                self._step(e.kind, f)
            case "eval_issued":
                self._evaluations.add(str(f.get("eval")))
            case "admitted" | "group_ready" | "group_discarded":
                self._group(e.kind, f)
            case "leased" | "rollout_ended" | "lease_lost" | "reissued":
                self._execution(e.kind, f)
            case kind if kind in _MARKS:
                cells = tuple(map(str, f.get("cells") or [f.get("cell") or self._core]))
                seconds, attempt = float(f.get("seconds") or 0.0), int(f.get("attempt") or 1)
                self._marks.append(Mark(_MARKS[kind], self._now, cells, f.get("step"), seconds, attempt))
            case _:
                pass

    def _term(self, f: dict[str, Any]) -> None:
        self._core = str(f.get("cell", ""))
        self._trainers[self._core] = None
        for step in [s for s in self._steps if s > f.get("step", 0)]:
            del self._steps[step]
        for g in self._groups.values():
            if g.step is not None and g.step > f.get("step", 0):
                self._groups[g.group] = replace(g, step=None)

    def _step(self, kind: str, f: dict[str, Any]) -> None:
        step = int(f["step"])
        if kind == "step_closed":
            self._closed[step] = self._now
            return
        counts = [(str(e["cell"]), len(e.get("micro_steps", ()))) for e in f.get("entries", ())]
        self._trainers.update(dict.fromkeys(cell for cell, _ in counts))
        metrics = f.get("metrics") or {}
        self._steps[step] = Step(
            step, self._at(f.get("opened_at")) or self._now, self._now, self._closed.get(step), self._at(f.get("sealed_at")), tuple(counts),
            _real((f.get("stats") or {}).get("reward_mean")), _real(metrics.get("grad_norm")), _real(metrics.get("seconds_compute")),
        )  # fmt: skip
        for group in f.get("groups", ()):
            if group in self._groups:
                self._groups[group] = replace(self._groups[group], step=step)

    def _at(self, wall: float | None) -> float | None:
        return None if wall is None or self._zero is None else min(self._now, max(0.0, wall - self._zero))

    def _group(self, kind: str, f: dict[str, Any]) -> None:
        name = str(f["group"])
        if kind == "admitted":
            self._groups[name] = Group(name, self._now, int(f["version"]), len(self._bursts))
            self._unfinished[name] = {f"{name}.{i}" for i in range(int(f.get("rollouts", 0)))}
            self._moved(len(self._unfinished[name]))
        elif name in self._groups and kind == "group_ready":
            self._groups[name] = replace(self._groups[name], ready=self._now)
        elif name in self._groups:
            self._groups[name] = replace(self._groups[name], discarded=self._now)
            for rollout in sorted(self._unfinished.get(name, ())):
                self._ended(rollout, "", kept=False)

    def _execution(self, kind: str, f: dict[str, Any]) -> None:
        if kind == "leased":
            for rollout in map(str, f.get("rollouts", ())):
                self._close(rollout, "", kept=True)
                group = rollout.rpartition(".")[0]
                holder, evaluation = str(f.get("holder", "")), group in self._evaluations
                self._open[rollout] = Execution(rollout, group, holder, self._now, evaluation=evaluation)
        elif kind == "rollout_ended":
            self._ended(str(f["rollout"]), str(f.get("ending") or ""), kept=f.get("state") != "discarded")
        else:
            self._close(str(f["rollout"]), "", kept=False)

    def _ended(self, rollout: str, ending: str, *, kept: bool) -> None:
        """An execution is terminal."""
        self._close(rollout, ending, kept=kept)
        siblings = self._unfinished.get(rollout.rpartition(".")[0], set())
        if rollout in siblings:
            siblings.remove(rollout)
            self._moved(-1)

    def _close(self, rollout: str, ending: str, *, kept: bool) -> None:
        held = self._open.pop(rollout, None)
        if held is not None:
            self._executions.append(replace(held, end=self._now, ending=ending, kept=kept))

    def _moved(self, by: int) -> None:
        self._level += by
        if self._water and self._water[-1][0] == self._now:
            self._water.pop()
        self._water.append((self._now, self._level))

    # --- what became of it ---

    def timeline(self, *, harness_timeout_s: float | None = None, overall_timeout_s: float | None = None) -> Timeline:
        """All that was taken. The time-outs are the configuration's."""
        end = self._now
        start = self._bursts[0].start if self._bursts else 0.0
        cells, spans, messages = self._roles(start, end)
        edges = [b.start for b in self._bursts[1:]] + [end]
        if self._bursts and (self._finished or self._bursts[-1].version >= (_real(self._begun.get("total_steps")) or math.inf)):
            edges[-1] = self._bursts[-1].start  # the last policy: no step comes after it
        steps = sorted(self._steps.values(), key=lambda s: s.step)
        bursts = [
            replace(b, end=edge, steps=tuple(s.step for s in steps if b.start < s.committed <= edge))
            for b, edge in zip(self._bursts, edges, strict=False)
        ]
        if not self._bursts:
            messages.append("nothing was published: no burst, no step")
        executions = sorted([*self._executions, *self._open.values()], key=lambda e: e.start)
        marks = [replace(m, cells=tuple(self._cell(c) for c in m.cells)) for m in self._marks]
        micro = [replace(s, micro_steps=tuple((self._cell(c), n) for c, n in s.micro_steps)) for s in steps]
        return Timeline(
            self._name, start, end, cells, spans, tuple(bursts), tuple(micro), tuple(self._groups.values()), tuple(executions), tuple(marks),
            tuple(self._water), str(self._begun.get("dispatch", "")), harness_timeout_s, overall_timeout_s, self._failure, tuple(messages),
            begun=self._begun,
        )  # fmt: skip

    def _cell(self, process: str) -> str:
        """The cell of a process: where cells turn, its trainer and its engine are NAME-train and NAME-rollout."""
        if self._turns:
            for suffix in _SUFFIXES:
                if process.endswith(suffix):
                    return process.removesuffix(suffix)
        return process

    def _roles(self, start: float, end: float) -> tuple[tuple[str, ...], tuple[RoleSpan, ...], list[str]]:
        """Cells, the core first, the others by name (its numbers as numbers), and their spans."""
        named = {self._cell(n) for n in (*(cell for _, cell, _, _, _ in self._turns), *self._trainers, *self._engines) if n}
        core = self._cell(self._core)
        cells = tuple(sorted(named, key=lambda c: (c != core, [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", c)])))
        spans: list[RoleSpan] = []
        for cell in cells:
            mine = [t for t in self._turns if t[1] == cell]
            if mine:  # cells begin by waking, and are told of when they serve
                wakes = mine[0][3] in (CellPhase.TO_ROLLOUT, CellPhase.ROLLOUT)
                first = CellPhase.TO_ROLLOUT if wakes else _phase(mine[0][2], CellPhase.ROLLOUT)
            else:
                first = CellPhase.TRAIN if cell in {self._cell(c) for c in self._trainers} else CellPhase.ROLLOUT
            edges = [(0.0, first, "")] + [(at, _phase(phase, CellPhase.LOST), reason) for at, _, _, phase, reason in mine]
            if mine:
                stops = [(e, p, r) for a, b in self._stops for e, p, r in ((a, CellPhase.LOST, "the run was stopped"), (b, CellPhase.TO_ROLLOUT, ""))]
                edges = sorted(edges + stops, key=lambda edge: edge[0])
            for (at, phase, reason), (until, _, _) in zip(edges, [*edges[1:], (end, first, "")], strict=True):
                begun = max(at, start)
                if until > begun:
                    if spans and (spans[-1].cell, spans[-1].phase, spans[-1].end) == (cell, phase, begun):
                        spans[-1] = replace(spans[-1], end=until)
                    else:
                        spans.append(RoleSpan(cell, phase, begun, until, reason))
        if not cells:
            return cells, (), ["the event log names no cell: no roles"]
        return cells, tuple(spans), [] if self._turns else ["roles are fixed: no cell turned"]


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _phase(name: str, otherwise: CellPhase) -> CellPhase:
    return CellPhase(name) if name in set(CellPhase) else otherwise


def from_events(name: str, events: Iterable[Event], **timeouts: float | None) -> Timeline:
    """The timeline of a run called `name`. `timeouts`: see `History.timeline`."""
    history = History(name)
    left_out: list[str] = []
    for e in events:
        try:
            history.take(e)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            left_out.append(f"{plain(e.kind)} ({type(error).__name__} {error})")
    t = history.timeline(**timeouts)
    if left_out:
        said = f"{len(left_out)} event{'s' if len(left_out) > 1 else ''} left out: {left_out[0]}"
        t = replace(t, messages=(*t.messages, said))
    return t


def read(run_dir: Path, name: str | None = None) -> Timeline:
    """The timeline of a run directory, live or finished. Its `events.jsonl` is enough; `run.toml` as resolved gives time-outs and budget. `name`: its
    directory's, by default."""
    try:
        tables = tomllib.loads((run_dir / "run.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tables = {}
    table, budget = tables.get("sandbox", {}), tables.get("trajectory", {}).get("max_per_execution")
    found = {k: float(v) for k in ("harness_timeout_s", "overall_timeout_s") if isinstance(v := table.get(k), int | float)}
    t = from_events(plain(name or run_dir.resolve().name), EventReader(run_dir / "events.jsonl").events(), **found)
    return replace(t, budget=budget if isinstance(budget, int) else None)
