"""The figures of runs as SVG or PNG: which there are (`drawings`) and one file of some of them (`save`).

matplotlib, which the extra `report` brings, is imported here and in plot_times.py and plot_numbers.py alone. Same timelines, same bytes.

Not here: the drawings themselves (plot_times.py: along a run's time; plot_numbers.py: distributions and comparisons), numbers (timeline.py), text
(sketch.py), pages (page.py).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure, FigureBase

from gyre.report import plot_numbers, plot_times, timeline
from gyre.report.figures import GREY, INK
from gyre.report.plot_times import ROWS_NAMED, name
from gyre.report.timeline import Timeline

_STYLE: Final[dict[str, Any]] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"], "font.size": 9, "axes.titlesize": 9,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": GREY, "axes.titlelocation": "left", "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.labelcolor": INK,
    "figure.facecolor": "#FFFFFF", "savefig.facecolor": "#FFFFFF", "svg.fonttype": "none", "text.parse_math": False,
    "legend.frameon": False, "legend.fontsize": 8, "figure.constrained_layout.h_pad": 0.06,
}  # fmt: skip
_WIDTH_IN: Final = 10.0


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn: its name on the command line, its title, its height in inches."""

    name: str
    title: str
    height: float
    draw: Callable[[FigureBase], None]


def drawings(runs: Sequence[Timeline], burst: int | None = None) -> list[Drawing]:
    """Those that the timelines have the facts for. The first run is the one that others are compared with."""
    found = []
    with_cells = [t for t in runs if t.spans]
    if with_cells:
        height = 1.0 + sum(0.75 + 0.24 * min(ROWS_NAMED, len(t.cells)) for t in with_cells)
        found.append(Drawing("roles", "Roles of the cells", height, partial(plot_times.roles, runs=with_cells)))
    unfinished = [t for t in runs if t.water_level]
    if unfinished:
        found.append(Drawing("water", "Water level", 0.5 + 1.3 * len(unfinished), partial(plot_times.water, runs=unfinished)))
    for t in runs:
        chosen = timeline.bursts_to_show(t, 1, burst)
        if chosen and t.cells:
            height = 3.0 + 0.3 * min(ROWS_NAMED, len(t.cells))
            title = f"Burst {chosen[0].number} of {name(t)}"
            found.append(Drawing("burst", title, height, partial(plot_times.burst, t=t, b=chosen[0])))
    leased = [t for t in runs if t.executions and t.bursts]
    if leased:
        height = 0.9 + 2.6 * len(leased)
        found.append(Drawing("slots", "Which execution held which slot", height, partial(plot_times.slots, runs=leased, burst=burst)))
    for t in runs:
        if timeline.trained(t):
            found.append(Drawing("staleness", f"Staleness in {name(t)}", 3.4, partial(plot_numbers.staleness, t=t)))
    others = [t for t in runs[1:] if timeline.speedup(runs[0], t)]
    if others:
        found.append(Drawing("speedup", f"{name(runs[0])} over other runs", 3.4, partial(plot_numbers.speedup, run=runs[0], others=others)))
    learned = [t for t in runs if any(s.grad_norm is not None for s in t.steps)]
    if learned:
        found.append(Drawing("learning", "Gradient norm, score and time of the steps", 3.4, partial(plot_numbers.learning, runs=learned)))
    ended = [t for t in runs if timeline.durations(t)[1]]
    if ended:
        found.append(Drawing("durations", "How long queries and rollouts take", 0.9 + 1.9 * len(ended), partial(plot_numbers.durations, runs=ended)))
    return found


def save(chosen: Sequence[Drawing], form: str, salt: str = "gyre") -> bytes:
    """One file ("svg" or "png") with the drawings below each other, at least one. `salt` tells the names inside an SVG from those inside
    another on the same page."""
    style: Any = {**_STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style):
        heights = [d.height for d in chosen]
        figure = Figure(figsize=(_WIDTH_IN, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(chosen), 1, height_ratios=heights, squeeze=False)
        for part, drawing in zip(parts[:, 0], chosen, strict=True):
            part.suptitle(drawing.title, x=0.012, ha="left", fontsize=11, fontweight="bold")
            drawing.draw(part)
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": "gyre-report"} if form == "svg" else {"Software": "gyre-report"}
        figure.savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()
