"""The live view of a run: a picture on a terminal, plain lines in a pipe.

It only listens (counters and events of the buffer, statuses of workers); it decides nothing. Unknown kinds of event are shown by name.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre.report.figures import clock, moving_average, plain, score_chart
from gyre.types import RolloutState
from gyre.wire.messages import Counters

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
_SHOWN: Final = ("stall", "reissued", "group_discarded", "voided", "failure", "term", "checkpoint", "logprob_alarm", "step_without_update")
_STEP: Final = (
    ("reward_mean", "reward"),
    ("loss", "loss"),
    ("grad_norm", "grad"),
    ("entropy", "entropy"),
    ("clip_fraction", "clipped"),
    ("staleness_mean", "staleness"),
    ("logprob_diff_current_mean", "Δ log-prob"),
    ("trainable_tokens", "tokens"),
)
_CHART_WIDTH: Final = 64
_CHART_HEIGHT: Final = 5


class RunView:
    """What is known of a run, and how it looks."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.started = time.monotonic()
        self.counters: Counters | None = None
        self.workers: dict[str, tuple[str, str, str, dict[str, float]]] = {}
        self.rewards: list[float] = []
        self.evals: list[tuple[int, float]] = []
        self.last_step: dict[str, Any] = {}
        self.recent: deque[str] = deque(maxlen=5)

    def worker(self, name: str, kind: str, phase: str, detail: str, gauges: dict[str, float]) -> None:
        self.workers[name] = (kind, phase, plain(detail), gauges)

    def event(self, kind: str, fields: dict[str, Any]) -> str | None:
        """Take in an event; returns its line for a pipe, None for what is not worth one."""
        line: str | None = None
        if kind == "step":
            self.last_step = {"step": fields["step"], **fields.get("metrics", {}), **fields.get("stats", {})}
            if self.last_step.get("reward_mean") is not None:
                self.rewards.append(self.last_step["reward_mean"])
            shown = [f"{label} {_short(self.last_step[name])}" for name, label in _STEP if self.last_step.get(name) is not None]
            line = f"step {fields['step']}: {', '.join(shown)}"
        elif kind == "eval":
            if fields.get("reward_mean") is not None:
                self.evals.append((fields["version"], fields["reward_mean"]))
            line = f"eval: held-out at version {fields.get('version')}: reward {_short(fields.get('reward_mean'))} over {fields.get('graded')} tasks"
        elif kind == "finished":
            line = "finished: " + ", ".join(f"{n} {state}" for state, n in fields.get("counts", {}).items() if n)
        elif kind in _SHOWN:
            line = f"{kind}: " + ", ".join(f"{k} {_short(v)}" for k, v in fields.items() if v not in (None, "", [], {}))
        if line is not None and kind != "step":
            self.recent.append(f"{clock(time.monotonic() - self.started)}  {line}")
        return line

    def render(self) -> RenderableType:
        c = self.counters
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        head.add_row(Text.assemble(("gyre ", "bold"), (self.title, "bold cyan")), clock(time.monotonic() - self.started))
        parts: list[RenderableType] = [head]
        if c is not None:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(f"step {c.step}/{c.total_steps}", ProgressBar(total=max(1, c.total_steps), completed=c.step, width=_CHART_WIDTH))
            parts += [bar, Text(), self._reward(), Text(), self._executions(c)]
        parts += [Text(), self._processes()]
        if self.recent:
            parts += [Text(), *(Text(line, style="grey62", no_wrap=True, overflow="ellipsis") for line in self.recent)]
        return Padding(Group(*parts), (0, 1))

    def _reward(self) -> RenderableType:
        smooth = moving_average(self.rewards, 5)
        text = Text("reward of the steps, mean of five" if smooth else "no step yet", style="bold")
        if smooth:
            text.append(f"   now {smooth[-1]:.2f}", style="bold green")
        for version, reward in (self.evals[:1] + self.evals[-1:]) if len(self.evals) > 1 else self.evals:
            text.append(f"   held-out at {version}: {reward:.2f}", style="magenta")
        score_chart(text, smooth, _CHART_WIDTH, _CHART_HEIGHT)
        shown = [(label, self.last_step[name]) for name, label in _STEP[1:] if self.last_step.get(name) is not None]
        text.append("\n    ")
        for label, value in shown:
            text.append(f" {label} ", style="grey50")
            text.append(_short(value))
        return text

    def _executions(self, c: Counters) -> RenderableType:
        text = Text(f"executions {c.admitted}", style="bold")
        text.append(f"   water level {c.water_level}   policy {c.published.step}", style="not bold")
        text.append("\n    ")
        width, total = _CHART_WIDTH, max(1, c.admitted)
        for state in RolloutState:
            n = c.states.get(state, 0)
            text.append("█" * (round(n / total * width) or (1 if n else 0)), style=_COLOURS[state])
        text.append("\n    ")
        for state in RolloutState:
            if c.states.get(state, 0):
                text.append(f"■ {state} {c.states[state]}  ", style=_COLOURS[state])
        return text

    def _processes(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, (kind, phase, detail, gauges) in self.workers.items():
            shown = "  ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in gauges.items())
            table.add_row(f"[bold]{escape(name)}[/]", f"gyre-{kind}", f"[{_PHASES.get(phase, 'white')}]{escape(phase)}[/]", escape(shown or detail))
        return table


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = plain(str(value))
    return text if len(text) <= 120 else text[:117] + "…"
