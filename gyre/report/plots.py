"""The figures of runs as SVG or PNG: the only importer of matplotlib, which the extra `report` brings.

Each drawing takes a (sub)figure and timelines and draws; `drawings` says which there are, `save` makes one file of them. Colours are Okabe and Ito's
(told apart by colour-blind eyes), of different lightness where they lie next to each other. Same timelines, same bytes.

Not here: numbers (timeline.py), text (sketch.py), pages (page.py).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from gyre.report import timeline
from gyre.report.figures import unit
from gyre.report.timeline import Burst, Mark, MarkKind, RoleSpan, Sample, Timeline
from gyre.rules.roles import CellPhase
from gyre.rules.staleness import summarize

BLUE, ORANGE, GREEN, PINK, SKY, RED, INK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222", "#8A8A8A"
SERIES: Final = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
PHASES: Final = {
    CellPhase.ROLLOUT: ("#C6E2F5", "rollout"),
    CellPhase.TO_TRAIN: (ORANGE, "turning to training"),
    CellPhase.TRAIN: (BLUE, "training"),
    CellPhase.TO_ROLLOUT: (PINK, "turning to rollout"),
    CellPhase.LOST: ("#3A3A3A", "lost"),
}
_STYLE: Final[dict[str, Any]] = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": GREY, "axes.titlelocation": "left", "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.labelcolor": INK,
    "figure.facecolor": "#FFFFFF", "savefig.facecolor": "#FFFFFF", "svg.fonttype": "none", "svg.hashsalt": "gyre", "text.parse_math": False,
    "legend.frameon": False, "legend.fontsize": 8, "figure.constrained_layout.h_pad": 0.06,
}  # fmt: skip
_WIDTH_IN: Final = 10.0
_MANY: Final = 1500  # shapes above which an SVG holds them as an image
_ROWS_NAMED: Final = 40


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
        height = 1.0 + sum(0.55 + 0.24 * min(_ROWS_NAMED, len(t.cells)) for t in with_cells)
        found.append(Drawing("roles", "Roles of the cells", height, lambda f: _roles(f, with_cells)))
    for t in runs:
        chosen = timeline.bursts_to_show(t, 1, burst)
        if chosen and t.cells:
            height = 3.0 + 0.3 * min(_ROWS_NAMED, len(t.cells))
            title = f"Burst {chosen[0].number} of {_name(t)}"
            found.append(Drawing("burst", title, height, lambda f, t=t, b=chosen[0]: _burst(f, t, b)))  # type: ignore[misc]
    leased = [t for t in runs if t.executions and t.bursts]
    if leased:
        found.append(Drawing("slots", "Which execution held which slot", 0.9 + 2.4 * len(leased), lambda f: _slots(f, leased, burst)))
    for t in runs:
        if timeline.trained(t):
            found.append(Drawing("staleness", f"Staleness in {_name(t)}", 3.4, lambda f, t=t: _staleness(f, t)))  # type: ignore[misc]
    others = [t for t in runs[1:] if timeline.speedup(runs[0], t)]
    if others:
        found.append(Drawing("speedup", f"{_name(runs[0])} over other runs", 3.4, lambda f: _speedup(f, runs[0], others)))
    ended = [t for t in runs if timeline.durations(t)[1]]
    if ended:
        found.append(Drawing("durations", "How long queries and rollouts take", 0.9 + 1.9 * len(ended), lambda f: _durations(f, ended)))
    return found


def save(chosen: Sequence[Drawing], form: str) -> bytes:
    """One file ("svg" or "png") with the drawings below each other. At least one."""
    with matplotlib.rc_context(_STYLE):
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


def _name(t: Timeline) -> str:
    return t.name if len(t.name) <= 40 else f"{t.name[:39]}…"


def _axes(f: FigureBase, n: int, **kw: Any) -> list[Axes]:
    grid = f.subplots(n, 1, squeeze=False, **kw)
    return [row[0] for row in grid]


def _phases(ax: Axes, spans: Sequence[RoleSpan], rows: dict[str, int], zero: float, scale: float, height: float = 0.8) -> None:
    for phase, (colour, _) in PHASES.items():
        for row in sorted({rows[s.cell] for s in spans if s.phase is phase}):
            bars = [((s.start - zero) / scale, (s.end - s.start) / scale) for s in spans if s.phase is phase and rows[s.cell] == row]
            ax.broken_barh(bars, (row - height / 2, height), facecolor=colour, linewidth=0)


def _lanes(ax: Axes, cells: Sequence[str]) -> None:
    """A row for each cell, the core at the top; names where there is room."""
    every = -(-len(cells) // _ROWS_NAMED)
    shown = range(0, len(cells), every)
    ax.set_yticks(list(shown), [cells[i] if len(cells[i]) <= 16 else f"{cells[i][:15]}…" for i in shown])
    ax.set_ylim(len(cells) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _publications(ax: Axes, bursts: Sequence[Burst], zero: float, scale: float, *, named: bool = True) -> None:
    """A line at every publication; bursts named above where there is room."""
    every = -(-len(bursts) // 16)
    for i, b in enumerate(bursts):
        ax.axvline((b.start - zero) / scale, color=INK, linewidth=0.8 if len(bursts) <= 40 else 0.3, zorder=3)
        if named and i % every == 0 and b.end > b.start:
            word = "burst " if i == 0 else ""
            ax.annotate(f"{word}{b.number}", ((b.start - zero) / scale, 1), (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                        fontsize=8, color=INK, va="bottom", annotation_clip=False)  # fmt: skip


def _phase_legend(f: FigureBase, used: set[CellPhase], *more: Any) -> None:
    handles = [Patch(color=colour, label=label) for phase, (colour, label) in PHASES.items() if phase in used]
    f.legend(handles=[*handles, *more], loc="outside lower left", ncols=5)


def _roles(f: FigureBase, runs: Sequence[Timeline]) -> None:
    scale, word = unit(max(t.end - t.start for t in runs))
    for ax, t in zip(_axes(f, len(runs), sharex=True, height_ratios=[len(t.cells) + 1 for t in runs]), runs, strict=True):
        _phases(ax, t.spans, {c: i for i, c in enumerate(t.cells)}, t.start, scale)
        _lanes(ax, t.cells)
        _publications(ax, t.bursts, t.start, scale)
        ax.set_xlim(0, max(t.end - t.start for t in runs) / scale)
        fractions = timeline.train_fraction(t)
        for i, cell in enumerate(t.cells):
            if i % -(-len(t.cells) // _ROWS_NAMED) == 0:
                ax.annotate(f"{fractions[cell]:.0%}", (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8, annotation_clip=False)
        whole = sum(fractions.values()) / len(fractions)
        ax.annotate(f"training\n{whole:.0%} in all", (1.01, -0.6), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=7,
                    va="bottom", annotation_clip=False)  # fmt: skip
        if len(runs) > 1:
            ax.set_title(_name(t), pad=16)
        if t is runs[-1]:
            ax.set_xlabel(f"{word} since the first publication")
    line = Line2D([], [], color=INK, linewidth=0.8, label="publication")
    _phase_legend(f, {s.phase for t in runs for s in t.spans}, line)


_SIGNS: Final = {MarkKind.JOIN: (">", "#FFFFFF", "joins the step"), MarkKind.LEAVE: ("<", "#FFFFFF", "leaves"), MarkKind.VOID: ("X", RED, "given up")}
_WORK: Final = {MarkKind.REDUCE: (RED, "reduction"), MarkKind.UPDATE: (INK, "update"), MarkKind.BROADCAST: (GREEN, "broadcast")}


def _burst(f: FigureBase, t: Timeline, b: Burst) -> None:
    scale, word = unit(b.end - b.start)
    rows = {c: i for i, c in enumerate(t.cells)}
    spans = list(timeline.within(t.spans, b.start, b.end))
    inside = [m for m in t.marks if b.start <= m.at <= b.end]
    ends = [m for m in inside if m.kind in _WORK]
    grid = f.add_gridspec(2, 2 if ends else 1, height_ratios=[0.3 * len(t.cells) + 0.6, 1.1], width_ratios=[3.2, 1] if ends else [1])
    top = f.add_subplot(grid[0, 0])
    below = f.add_subplot(grid[1, 0], sharex=top)
    _phases(top, spans, rows, b.start, scale)
    _lanes(top, t.cells)
    used = {}
    for m in (m for m in inside if m.kind in _SIGNS):
        sign, colour, label = _SIGNS[m.kind]
        for cell in (c for c in m.cells if c in rows):
            used[m.kind] = top.plot((m.at - b.start) / scale, rows[cell], sign, color=colour, markeredgecolor=INK, markersize=6, label=label, ls="")[0]
    steps = [s for s in t.steps if s.step in b.steps]
    for s in steps:
        top.axvline((s.committed - b.start) / scale, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
        top.annotate(f"step {s.step}", ((s.committed - b.start) / scale, 1), (-2, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                     fontsize=8, ha="right", va="bottom", annotation_clip=False)  # fmt: skip
        for cell, n in s.micro_steps:
            mine = [x for x in timeline.within(spans, s.opened, s.committed) if x.cell == cell and x.phase is CellPhase.TRAIN]
            wide = max(mine, key=lambda x: x.end - x.start, default=None)
            if wide is not None and (wide.end - wide.start) / (b.end - b.start) > 0.03:
                top.text(((wide.start + wide.end) / 2 - b.start) / scale, rows[cell], str(n), ha="center", va="center", fontsize=7, color="#FFFFFF")
    top.tick_params(axis="x", labelbottom=False)
    _level(below, t, b, scale)
    below.set_xlabel(f"{word} since the publication of version {b.version}")
    line = Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (3, 2)), label="commit")
    work = [Patch(color=_WORK[k][0], label=_WORK[k][1]) for k in _WORK if any(m.kind is k for m in ends)]
    number = [Line2D([], [], ls="", label="numbers: micro-steps accumulated")] if any(s.micro_steps for s in steps) else []
    _phase_legend(f, {s.phase for s in spans}, *used.values(), line, *number, *work)
    if ends:
        _step_end(f.add_subplot(grid[0, 1], sharey=top), ends, rows)


def _level(ax: Axes, t: Timeline, b: Burst, scale: float) -> None:
    """Water level over the burst."""
    before = next((w for at, w in reversed(t.water_level) if at <= b.start), 0)
    points = [(b.start, before), *((at, w) for at, w in t.water_level if b.start < at <= b.end)]
    points.append((b.end, points[-1][1]))
    x = [(at - b.start) / scale for at, _ in points]
    ax.fill_between(x, [w for _, w in points], step="post", color=SKY, alpha=0.35, linewidth=0)
    ax.step(x, [w for _, w in points], where="post", color=BLUE, linewidth=1)
    ax.set_xlim(-0.008 * (b.end - b.start) / scale, 1.008 * (b.end - b.start) / scale)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_ylabel("water level\n(executions)")


def _step_end(ax: Axes, ends: Sequence[Mark], rows: dict[str, int]) -> None:
    """From the first reduction to the broadcast of one step: the one with the most cells, the last such."""
    last = max({m.step for m in ends}, key=lambda step: (max(len(m.cells) for m in ends if m.step == step), step or 0))
    mine = [m for m in ends if m.step == last]
    zero = min(m.at - m.seconds for m in mine)
    length = max(m.at for m in mine) - zero or 1.0
    scale, word = (1.0, "seconds") if length >= 1 else (1e-3, "milliseconds")
    for m in mine:
        colour = _WORK[m.kind][0]
        for cell in (c for c in m.cells if c in rows):
            width = max(m.seconds, length / 80)
            ax.broken_barh([((m.at - width - zero) / scale, width / scale)], (rows[cell] - 0.4, 0.8), facecolor=colour, edgecolor="#FFFFFF", linewidth=0.5)
    ax.tick_params(axis="y", labelleft=False, length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlim(-0.02 * length / scale, 1.02 * length / scale)
    attempts = max(m.attempt for m in mine)
    ax.set_title(f"end of step {last}" + (f", {attempts} attempts" if attempts > 1 else ""))
    ax.set_xlabel(f"{word} since its reduction began")


def _slots(f: FigureBase, runs: Sequence[Timeline], burst: int | None) -> None:
    shown = [timeline.bursts_to_show(t, 3, burst) or [Burst(1, t.start, t.end, 0)] for t in runs]
    scale, word = unit(max(b[-1].end - b[0].start for b in shown))
    labels: dict[str, Patch] = {}
    for ax, t, bursts in zip(_axes(f, len(runs)), runs, shown, strict=True):
        start, end = bursts[0].start, bursts[-1].end
        admitted = {g.group: g.burst for g in t.groups}
        placed = [(slot, e) for slot, e in timeline.in_slots(t.executions, t.end) if e.start < end and (t.end if e.end is None else e.end) > start]
        rows = {slot: i for i, slot in enumerate(sorted({slot for slot, _ in placed}))}
        by_colour: dict[str, list[tuple[int, float, float]]] = {}
        for slot, e in placed:
            relative = admitted.get(e.group, 0) - bursts[0].number
            colour, label = (SERIES[relative % 6], f"burst {admitted[e.group]}") if e.group in admitted else (GREY, "evaluation")
            if len(runs) > 1 and e.group in admitted:
                label = "the burst before" if relative == -1 else "earlier" if relative < -1 else f"burst {('one', 'two', 'three')[relative]} shown"
                colour = GREY if relative < -1 else colour
            if not e.kept:
                colour, label = INK, "discarded or lost"
            labels.setdefault(label, Patch(color=colour, label=label))
            x0, x1 = max(start, e.start), min(end, t.end if e.end is None else e.end)
            by_colour.setdefault(colour, []).append((rows[slot], (x0 - start) / scale, (x1 - x0) / scale))
        for colour, bars in by_colour.items():
            left, width, y = [x for _, x, _ in bars], [w for _, _, w in bars], [i for i, _, _ in bars]
            thin = len(rows) > 120
            ax.barh(y, width, left=left, height=1.0, color=colour, edgecolor="#FFFFFF", linewidth=0 if thin else 0.3, rasterized=len(placed) > _MANY)
        _publications(ax, bursts, start, scale)
        ax.set_xlim(0, max(b[-1].end - b[0].start for b in shown) / scale)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_ylabel("slot")
        ax.set_title(f"{t.dispatch or 'unknown'} dispatch: {_name(t)}", pad=16)
    ax.set_xlabel(f"{word} since the publication of the first burst shown")
    handles = [labels[k] for k in sorted(labels, key=lambda k: (k[:5] != "burst", len(k), k))]
    f.legend(handles=handles, loc="outside lower left", ncols=6, title="admitted in", title_fontsize=8, alignment="left")


def _staleness(f: FigureBase, t: Timeline) -> None:
    left, middle, right = f.subplots(1, 3, width_ratios=[1, 1, 1.3])
    used, at_publication = timeline.trained(t), timeline.offered(t)
    top = max(s.discrete for s in (*used, *at_publication)) + 1
    for ax, samples, title in ((left, used, "trained: groups when a step took them"), (middle, at_publication, "offered: groups ready at publications")):
        _distribution(ax, samples, top, title)
    left.set_ylabel("groups")
    for samples, colour, label in ((used, BLUE, "trained"), (at_publication, ORANGE, "offered")):
        for way, line in (("discrete", "-"), ("interpolated", ":")):
            points = _by_burst(t, samples, way)
            right.plot([b for b, _ in points], [v for _, v in points], line, color=colour, marker=".", markersize=4, linewidth=1.2, label=f"{label}, {way}")
    predicted = [(b.number, b.predicted) for b in t.bursts if b.predicted is not None and b.end > b.start]
    if predicted:
        right.plot([n for n, _ in predicted], [p for _, p in predicted], color=INK, linewidth=1, linestyle="--", label="predicted by the quota")
    right.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    right.set(xlabel="burst", title="mean of each burst, in optimizer steps")
    right.title.set_fontsize(8)
    right.set_ylim(bottom=0)
    handles, labels = right.get_legend_handles_labels()
    bars = [Patch(color=SKY, label="discrete"), Line2D([], [], color=RED, label="interpolated")]
    f.legend(handles=[*bars, *handles], labels=["discrete", "interpolated", *labels], loc="outside lower left", ncols=4)


def _distribution(ax: Axes, samples: Sequence[Sample], top: int, title: str) -> None:
    """Discrete as bars, interpolated by quarters of a step as an outline."""
    whole, between = [s.discrete for s in samples], [s.interpolated for s in samples if s.interpolated is not None]
    if samples:
        counts = [sum(d == k for d in whole) / len(whole) for k in range(top + 1)]
        ax.bar(range(top + 1), counts, width=0.8, color=SKY)
    if between:
        edges = [-0.125 + 0.25 * i for i in range(4 * top + 2)]
        ax.hist(between, edges, weights=[1 / len(between)] * len(between), histtype="step", color=RED, linewidth=1.2)
    lines = [title]
    for name, x in (("discrete", summarize(whole)), ("interpolated", summarize(between))):
        if x.mean is not None:
            lines.append(f"{name}: mean {x.mean:.2f}, p95 {x.p95:.3g}, max {x.max:.3g}")
    ax.set_title("\n".join(lines), fontsize=8)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("optimizer steps")


def _by_burst(t: Timeline, samples: Sequence[Sample], way: str) -> list[tuple[int, float]]:
    points = []
    for b in t.bursts:
        values = [v for s in samples if b.start <= s.at < b.end or s.at == b.start if (v := getattr(s, way)) is not None]
        if values and b.end > b.start:
            points.append((b.number, sum(values) / len(values)))
    return points


def _speedup(f: FigureBase, run: Timeline, others: Sequence[Timeline]) -> None:
    left, right = f.subplots(1, 2)
    everyone = [run, *others]
    scale, word = unit(max(max(timeline.time_to_step(t).values()) for t in everyone))
    for t, colour in zip(everyone, [INK, *SERIES * len(others)], strict=False):
        reached = sorted(timeline.time_to_step(t).items())
        left.plot([0, *(at / scale for _, at in reached)], [0, *(step for step, _ in reached)], color=colour, label=_name(t), linewidth=1.4)
    for t, colour in zip(others, SERIES * len(others), strict=False):
        ratios = timeline.speedup(run, t)
        right.plot([s for s, _ in ratios], [r for _, r in ratios], color=colour, linewidth=1.4, marker=".", markersize=4)
        right.annotate(f"{ratios[-1][1]:.2f}×", ratios[-1], (4, 0), textcoords="offset points", va="center", fontsize=8, color=colour,
                       annotation_clip=False)  # fmt: skip
    right.axhline(1.0, color=GREY, linewidth=0.8)
    left.set(xlabel=f"{word} since the first publication", ylabel="steps committed", title="time to reach each step")
    right.set(xlabel="step", ylabel="time of the other ÷ time of this", title=f"speed-up of {_name(run)}, from the start to each step")
    for axis in (left.yaxis, right.xaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    f.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)


def _durations(f: FigureBase, runs: Sequence[Timeline]) -> None:
    found = [timeline.durations(t) for t in runs]
    limits = [x for t in runs for x in (t.harness_timeout_s, t.overall_timeout_s) if x is not None]
    shortest, longest = min(min(r) for _, r in found), max(max(r) for _, r in found)
    far = max([longest, *limits])
    logarithmic = shortest > 0 and far > 15 * sorted(r for _, rs in found for r in rs)[len([r for _, rs in found for r in rs]) // 2]
    scale, word = unit(longest)
    if logarithmic:
        low, high = shortest / scale * 0.9, far / scale * 1.2
        edges = [low * (high / low) ** (i / 60) for i in range(61)]
    else:
        edges = [far * 1.03 / scale * i / 60 for i in range(61)]
    for ax, t, (queries, rollouts) in zip(_axes(f, len(runs), sharex=True), runs, found, strict=True):
        for values, colour, label in ((rollouts, SKY, "rollouts"), (queries, RED, "queries (longest rollout)")):
            if values:
                kind = "stepfilled" if colour == SKY else "step"
                ax.hist([v / scale for v in values], edges, weights=[1 / len(values)] * len(values), histtype=kind, color=colour, linewidth=1.4, label=label)
                mean = sum(values) / len(values) / scale
                ax.axvline(mean, ymax=0.82, color=BLUE if colour == SKY else colour, linewidth=1, linestyle=":", label=f"mean of the {label.split()[0]}")
        if logarithmic:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        for limit, label in ((t.harness_timeout_s, "harness\ntime-out"), (t.overall_timeout_s, "overall\ntime-out")):
            if limit is not None:
                ax.axvline(limit / scale, color=INK, linewidth=1)
                ax.annotate(label, (limit / scale, 1), (-3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7, ha="right", va="top")
        ax.set_ylabel("of all")
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.set_xlim(edges[0], edges[-1])
        if len(runs) > 1:
            ax.set_title(_name(t))
    ax.set_xlabel(word)
    f.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=4)
