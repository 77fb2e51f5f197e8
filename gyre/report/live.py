"""The live view of a run: what gyre-coord and gyre-top draw on a terminal, and the plain lines of a pipe.

Invariants
- It only listens: to events, counters, and what the coordinator knows of processes. It decides nothing; unknown kinds of event are passed over.
- It fits: of what is more than the terminal's height there is the last, or the first, and a line that counts the rest.

Not here: where all that comes from (watch.py, the coordinator), and stalls in full (stall.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre.events import Event
from gyre.report.figures import brief, clock, first_columns, moving_average, packed, plain, score_chart
from gyre.types import RolloutState
from gyre.wire.messages import Counters, ProcessStatus

_COLOURS: Final = {
    "queued": "grey50",
    "running": "cyan",
    "grading": "magenta",
    "waiting": "yellow",
    "ready": "bright_green",
    "claimed": "blue",
    "consumed": "green",
    "discarded": "red",
}
_PHASES: Final = {"starting": "yellow", "ready": "green", "working": "green", "draining": "yellow", "failed": "red", "ended": "grey50"}
_ROLES: Final = {"train": "blue", "rollout": "cyan", "lost": "red"}
_SHOWN: Final = ("stall", "reissued", "group_discarded", "voided", "failure", "term", "checkpoint", "logprob_alarm", "step_without_update")
_STEP: Final = (
    ("reward_mean", "reward"),
    ("loss", "loss"),
    ("grad_norm", "grad"),
    ("entropy", "entropy"),
    ("clip_fraction", "clipped"),
    ("staleness_mean", "stale"),
    ("logprob_diff_current_mean", "Δ log-prob"),
    ("trainable_tokens", "tokens"),
)
_NUMBERS: Final = ("tokens/s", "KV", "calls", "policy")
_CHART_HEIGHT: Final = 5
_CHART_FROM: Final = 34  # lines of a terminal that has room for the chart too
_LEFT_TO_OTHERS: Final = 8  # lines that processes leave to steps and events


class RunView:
    """What is known of a run, and how it looks."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.note = ""  # what the view lacks, and why
        self.counters: Counters | None = None
        self.processes: dict[str, ProcessStatus] = {}
        self.cells: dict[str, str] = {}  # phase of each cell that can turn
        self.rewards: list[float] = []
        self.evals: list[tuple[int, float]] = []
        self.issued: dict[str, tuple[int, int]] = {}  # evaluations under way: the version of each and its number of executions
        self.steps: deque[dict[str, Any]] = deque(maxlen=20)
        self.predicted: float | None = None
        self.stall: Event | None = None
        self.finished = False
        self.recent: deque[str] = deque(maxlen=20)
        self.zero = 0.0  # seconds after the first event from which times of events are counted
        self._began = self._last = time.time()  # on the clock of the buffer's host
        self._heard = False

    def event(self, event: Event) -> str | None:
        """Take in an event; returns its line for a pipe, None for what is not worth one."""
        kind, fields, line = event.kind, event.fields, None
        self._began, self._last, self._heard = self._began if self._heard else event.t_wall, event.t_wall, True
        if kind == "step":
            row = {"step": fields["step"], **fields.get("metrics", {}), **fields.get("stats", {})}
            self.steps.append(row)
            if row.get("reward_mean") is not None:
                self.rewards.append(row["reward_mean"])
            shown = [f"{label} {_short(row[name])}" for name, label in _STEP if row.get(name) is not None]
            line = f"step {fields['step']}: {', '.join(shown)}"
        elif kind == "eval_issued":
            self.issued[fields["eval"]] = fields["version"], fields["n"]
        elif kind == "eval":
            self.issued.pop(fields.get("eval", ""), None)
            if fields.get("reward_mean") is not None:
                self.evals.append((fields["version"], fields["reward_mean"]))
            line = f"eval: held-out at version {fields.get('version')}: reward {_short(fields.get('reward_mean'))} over {fields.get('graded')} tasks"
        elif kind == "stall":
            self.stall = event
            line = f"stall: nothing progressed for {fields.get('idle_s', 0.0):.0f} s: gyre-top --stall tells who waits for whom"
        elif kind == "role":
            self.cells[fields["cell"]] = fields["phase"]
        elif kind == "buffer_started":
            self.predicted, self.finished = fields.get("staleness_predicted"), False
        elif kind == "finished":
            self.finished = True
            line = "finished: " + ", ".join(f"{n} {state}" for state, n in fields.get("counts", {}).items() if n)
        elif kind in _SHOWN:
            if kind == "term":  # what the core went back behind is evaluated anew
                self.issued = {name: (version, n) for name, (version, n) in self.issued.items() if version <= fields.get("step", version)}
            head = f"{kind} {_short(fields[kind])}" if kind in fields else kind
            said = ", ".join(f"{k} {_short(v)}" for k, v in fields.items() if v and k != kind)
            line = f"{head}: {said}" if said else head
        if line is not None and kind != "step":
            self.recent.append(f"{clock(event.t_wall - self._began - self.zero)}  {line}")
        return line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.render(options.max_width, options.max_height)

    def render(self, width: int, height: int) -> RenderableType:
        """A picture of at most `height` lines."""
        inner, c = width - 2, self.counters
        chart = self.rewards and height >= _CHART_FROM
        top = [] if c is None else [self._levels(c, inner), self._executions(c, inner), *self._evaluations(c)]
        if self.note and not self.finished:
            top.append(Text(self.note, style="yellow", no_wrap=True, overflow="ellipsis"))
        rows = list(self._processes())
        room = height - 2 - sum(text.plain.count("\n") + 1 for text in top) - (_CHART_HEIGHT + 2 if chart else 0)  # the head, the cursor's line
        room -= 2 * bool(rows) + 2 * bool(self.steps) + bool(self.recent)  # blank lines, headings
        n_rows = min(len(rows), max(2, room - min(_LEFT_TO_OTHERS, len(self.steps) + len(self.recent))))
        room -= n_rows
        n_steps = min(len(self.steps), max(1, room // 2, room - len(self.recent)))
        parts: list[RenderableType] = [self._head(inner), *top]
        if rows:
            parts += [Text(), self._cells(rows, n_rows)]
        if chart:
            parts += [Text(), self._reward(inner)]
        if n_steps:
            labels = [(k, label) for k, label in _STEP if any(s.get(k) is not None for s in self.steps)]
            shown = [[str(s["step"]), *(_short(s[k]) if s.get(k) is not None else "–" for k, _ in labels)] for s in list(self.steps)[-n_steps:]]
            parts += [Text(), first_columns(["step", *(label for _, label in labels)], shown, inner)]
        events = list(self.recent)[-max(1, room - n_steps) :]
        if events:
            parts += [Text(), *(Text(line, style="grey62", no_wrap=True, overflow="ellipsis") for line in events)]
        return Padding(Group(*parts), (0, 1))

    def _head(self, width: int) -> RenderableType:
        c = self.counters
        until = self._last if self.finished else time.time()
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        steps = f"  step {c.step}/{c.total_steps}" if c is not None else ""
        bar = ProgressBar(total=max(1, c.total_steps), completed=c.step) if c is not None else Text()
        end = f"finished after {clock(until - self._began)}" if self.finished else clock(max(0.0, until - self._began))
        head.add_row(Text.assemble(("gyre ", "bold"), (self.title, "bold cyan"), steps), bar, end)
        return head

    def _levels(self, c: Counters, width: int) -> Text:
        """Water level, policy, groups, staleness."""
        last = self.steps[-1] if self.steps else {}
        measured = (("measured", "staleness_mean", ".2f"), ("p95", "staleness_p95", ".0f"), ("max", "staleness_max", ".0f"))
        stale = [f"predicted {brief(last.get('staleness_predicted', self.predicted))}"]
        stale += [f"{label} {brief(last[k], form)}" for label, k, form in measured if last.get(k) is not None]
        groups = f"{c.groups_open - c.ready_groups} open, {c.ready_groups} ready, {c.taken_groups} in the step"
        level = Text(f"water level {c.water_level}", style="bold")
        text = packed([level, Text(f"policy {c.published.step} of term {c.term}"), Text(f"groups: {groups}")], width, indent=2)
        return text.append("\n").append_text(packed(Text(f"staleness {', '.join(stale)}").split(" "), width, gap=" ", indent=2))

    def _executions(self, c: Counters, width: int) -> Text:
        """All states, on as many lines as they need, and a bar."""
        bar, entries, total = Text(), [], max(1, c.admitted)
        for state in RolloutState:
            n = c.states.get(state, 0)
            bar.append("█" * (round(n / total * width) or (1 if n else 0)), style=_COLOURS[state])
            if n:
                entries.append(Text(f"■ {n} {state}", style=_COLOURS[state]))
        bar.truncate(width)
        legend = packed([Text.assemble(f"executions {c.admitted}: ", *entries[:1]), *entries[1:]], width, gap="  ", indent=2)
        return legend.append("\n").append_text(bar)

    def _evaluations(self, c: Counters) -> list[Text]:
        """A line while held-out tasks run: the counts of executions leave them out."""
        if self.finished or not c.eval_outstanding:
            return []
        n = sum(n for _, n in self.issued.values())
        if n < c.eval_outstanding:  # where the events that began it are not known, or not yet
            return [Text(f"evaluating: {c.eval_outstanding} to go", style="magenta")]
        versions = sorted(version for version, _ in self.issued.values())
        of = f"version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"
        return [Text(f"evaluating {of}: {n - c.eval_outstanding} of {n}", style="magenta", no_wrap=True, overflow="ellipsis")]

    def _processes(self) -> Iterable[tuple[Text, ...]]:
        """A row for each cell, then one for each other process: name, what it is, tokens/s, KV use, requests, policy, what it does."""
        of_cells: dict[str, list[ProcessStatus]] = {cell: [] for cell in self.cells}
        for p in self.processes.values():
            of_cells.setdefault(p.cell, []).append(p)
        others = of_cells.pop("", [])
        for cell, parts in sorted(of_cells.items()):
            phase = self.cells.get(cell, "")
            engine = next((p for p in parts if p.kind == "rollout"), None)
            well = [p for p in parts if p.phase in ("ready", "working")]
            ill = [
                Text.assemble((f"{p.name} {p.phase}", _PHASES.get(p.phase, "white")), f" {p.detail}" if p.detail else "")
                for p in parts
                if p not in well
            ]
            does = ill or [Text(p.detail or p.role) for p in well if (p.kind == "train") == (phase == "train") and (p.detail or p.role)]
            yield Text(cell, style="bold"), Text(phase.replace("_", " "), style=_ROLES.get(phase, "yellow")), *_numbers(engine), Text("; ").join(does)
        for p in others:
            yield Text(p.name, style="bold"), Text(p.phase, style=_PHASES.get(p.phase, "white")), *_numbers(None), Text(p.detail)

    @staticmethod
    def _cells(rows: list[tuple[Text, ...]], n: int) -> Table:
        made = Table(box=None, header_style="grey50", padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        for title in ("cell", "is", *_NUMBERS):
            made.add_column(title, justify="right" if title in _NUMBERS else "left", no_wrap=True, max_width=24)
        made.add_column("does", no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows if len(rows) <= n else rows[: n - 1]:
            made.add_row(*(Text(plain(text.plain).replace("\n", " "), style=text.style, spans=text.spans) for text in row))
        if len(rows) > n:
            made.add_row(Text("…"), Text(f"{len(rows) - n + 1} more"))
        return made

    def _reward(self, width: int) -> Text:
        smooth = moving_average(self.rewards, 5)
        text = Text("reward of the steps, mean of five", style="bold")
        text.append(f"   now {smooth[-1]:.2f}", style="bold green")
        for version, reward in (self.evals[:1] + self.evals[-1:]) if len(self.evals) > 1 else self.evals:
            text.append(f"   held-out at {version}: {reward:.2f}", style="magenta")
        score_chart(text, smooth, max(8, min(100, width - 5)), _CHART_HEIGHT)
        return text


def _numbers(engine: ProcessStatus | None) -> list[Text]:
    g = engine.gauges if engine is not None else {}
    rate, use, flight = (format(g[k], form) if k in g else "" for k, form in (("tokens_s", ".0f"), ("kv_use", ".0%"), ("in_flight", ".0f")))
    policy = str(engine.version.step) if engine is not None and engine.version is not None else ""
    return [Text(rate), Text(use), Text(flight + (f"+{g['queued']:.0f}" if g.get("queued") else "")), Text(policy)]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = plain(str(value))
    return text if len(text) <= 120 else text[:117] + "…"
