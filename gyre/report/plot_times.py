"""Drawings along a run's time: roles of the cells, one burst, slots.

Colours are of different lightness where they lie next to each other. Each function draws
into a (sub)figure of its own; what is too small or too much for a line of text is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gyre.report import timeline
from gyre.report.figures import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SERIES, SKY, unit
from gyre.report.timeline import Burst, Mark, MarkKind, RoleSpan, Timeline
from gyre.rules.roles import CellPhase

PHASES: Final = {
    CellPhase.ROLLOUT: ("#C6E2F5", "rollout"),
    CellPhase.TO_TRAIN: (ORANGE, "turning to training"),
    CellPhase.TRAIN: (BLUE, "training"),
    CellPhase.TO_ROLLOUT: (PINK, "turning to rollout"),
    CellPhase.LOST: ("#3A3A3A", "lost"),
}
ROWS_NAMED: Final = 40
_MANY: Final = 1500  # shapes above which an SVG holds them as an image


def name(t: Timeline) -> str:
    return t.name if len(t.name) <= 40 else f"{t.name[:39]}…"


def axes(f: FigureBase, n: int, **kw: Any) -> list[Axes]:
    grid = f.subplots(n, 1, squeeze=False, **kw)
    return [row[0] for row in grid]


def _phases(ax: Axes, spans: Sequence[RoleSpan], rows: dict[str, int], zero: float, scale: float, height: float = 0.8) -> None:
    for phase, (colour, _) in PHASES.items():
        for row in sorted({rows[s.cell] for s in spans if s.phase is phase}):
            bars = [((s.start - zero) / scale, (s.end - s.start) / scale) for s in spans if s.phase is phase and rows[s.cell] == row]
            ax.broken_barh(bars, (row - height / 2, height), facecolor=colour, linewidth=0)


def _lanes(ax: Axes, cells: Sequence[str]) -> None:
    """A row for each cell, the core at the top; names where there is room."""
    every = -(-len(cells) // ROWS_NAMED)
    shown = range(0, len(cells), every)
    ax.set_yticks(list(shown), [cells[i] if len(cells[i]) <= 16 else f"{cells[i][:15]}…" for i in shown])
    ax.set_ylim(len(cells) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _publications(ax: Axes, bursts: Sequence[Burst], zero: float, scale: float) -> None:
    """A line at every publication; bursts named above where there is room. The limits of x are set."""
    low, high = ax.get_xlim()
    free = low
    for b in bursts:
        x = (b.start - zero) / scale
        ax.axvline(x, color=INK, linewidth=0.8 if len(bursts) <= 40 else 0.3, zorder=3)
        if x >= free and b.end > b.start:
            word = f"burst {b.number}" if free == low else str(b.number)
            free = x + (0.012 * len(word) + 0.02) * (high - low)
            ax.annotate(word, (x, 1), (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8, color=INK, va="bottom",
                        annotation_clip=False)  # fmt: skip


def _longest(lengths: Sequence[float]) -> list[float]:
    """How long each axis is: as the longest run, so that they can be compared, unless that would leave a short run no room."""
    return [max(lengths) if max(lengths) <= 5 * x else x for x in lengths]


def _phase_legend(f: FigureBase, used: set[CellPhase], *more: Any) -> None:
    handles = [Patch(color=colour, label=label) for phase, (colour, label) in PHASES.items() if phase in used]
    f.legend(handles=[*handles, *more], loc="outside lower left", ncols=5)


def roles(f: FigureBase, runs: Sequence[Timeline]) -> None:
    lengths = _longest([t.end - t.start or 1.0 for t in runs])
    for ax, t, length in zip(axes(f, len(runs), height_ratios=[len(t.cells) + 1 for t in runs]), runs, lengths, strict=True):
        scale, word = unit(length)
        _phases(ax, t.spans, {c: i for i, c in enumerate(t.cells)}, t.start, scale)
        _lanes(ax, t.cells)
        ax.set_xlim(0, length / scale)
        _publications(ax, t.bursts, t.start, scale)
        fractions = timeline.train_fraction(t)
        for i, cell in enumerate(t.cells):
            if i % -(-len(t.cells) // ROWS_NAMED) == 0:
                ax.annotate(f"{fractions[cell]:.0%}", (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8, annotation_clip=False)
        whole = sum(fractions.values()) / len(fractions)
        ax.annotate(f"training\n{whole:.0%} in all", (1.01, -0.6), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=7,
                    va="bottom", annotation_clip=False)  # fmt: skip
        if len(runs) > 1:
            ax.set_title(name(t), pad=16)
        ax.set_xlabel(f"{word} since the first publication")
    line = Line2D([], [], color=INK, linewidth=0.8, label="publication")
    _phase_legend(f, {s.phase for t in runs for s in t.spans}, line)


def water(f: FigureBase, runs: Sequence[Timeline]) -> None:
    """Executions without an outcome, over the whole run."""
    lengths = _longest([t.end - t.start or 1.0 for t in runs])
    for ax, t, length in zip(axes(f, len(runs)), runs, lengths, strict=True):
        scale, word = unit(length)
        _level(ax, t, t.start, t.end, scale)
        ax.set_xlim(0, length / scale)
        _publications(ax, t.bursts, t.start, scale)
        if len(runs) > 1:
            ax.set_title(name(t), pad=16)
        ax.set_xlabel(f"{word} since the first publication")


_SIGNS: Final = {MarkKind.JOIN: (">", "#FFFFFF", "joins the step"), MarkKind.LEAVE: ("<", "#FFFFFF", "leaves"), MarkKind.VOID: ("X", RED, "given up")}
_WORK: Final = {MarkKind.REDUCE: (RED, "reduction"), MarkKind.UPDATE: (INK, "update"), MarkKind.BROADCAST: (GREEN, "broadcast")}


def burst(f: FigureBase, t: Timeline, b: Burst) -> None:
    scale, word = unit(b.end - b.start)
    rows = {c: i for i, c in enumerate(t.cells)}
    spans = list(timeline.within(t.spans, b.start, b.end))
    inside = [m for m in t.marks if b.start <= m.at <= b.end]
    ends = [m for m in inside if m.kind in _WORK]
    grid = f.add_gridspec(2, 2 if ends else 1, height_ratios=[0.3 * min(ROWS_NAMED, len(t.cells)) + 0.6, 1.1], width_ratios=[3.2, 1] if ends else [1])
    top = f.add_subplot(grid[0, 0])
    below = f.add_subplot(grid[1, 0], sharex=top)
    _phases(top, spans, rows, b.start, scale)
    _lanes(top, t.cells)
    used = {}
    for m in (m for m in inside if m.kind in _SIGNS):
        sign, colour, label = _SIGNS[m.kind]
        for cell in (c for c in m.cells if c in rows):
            look: dict[str, Any] = {"color": colour, "markeredgecolor": INK, "markersize": 6, "label": label, "linestyle": ""}
            used[m.kind] = top.plot((m.at - b.start) / scale, rows[cell], sign, **look)[0]
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
    _level(below, t, b.start, b.end, scale)
    below.set_xlabel(f"{word} since the publication of version {b.version}")
    line = Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (3, 2)), label="commit")
    work = [Patch(color=_WORK[k][0], label=_WORK[k][1]) for k in _WORK if any(m.kind is k for m in ends)]
    number = [Line2D([], [], ls="", label="numbers: micro-steps accumulated")] if any(s.micro_steps for s in steps) else []
    _phase_legend(f, {s.phase for s in spans}, *used.values(), line, *number, *work)
    if ends:
        _step_end(f.add_subplot(grid[0, 1], sharey=top), ends, rows)


def _level(ax: Axes, t: Timeline, start: float, end: float, scale: float) -> None:
    """Water level from `start` to `end`."""
    points = timeline.water(t, start, end)
    x = [(at - start) / scale for at, _ in points]
    ax.fill_between(x, [w for _, w in points], step="post", color=SKY, alpha=0.35, linewidth=0)
    ax.step(x, [w for _, w in points], where="post", color=BLUE, linewidth=1)
    ax.set_xlim(-0.008 * (end - start) / scale, 1.008 * (end - start) / scale)
    ax.set_ylim(0, max(1.0, 1.05 * max(w for _, w in points)))
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_ylabel("water level\n(executions)")


def _step_end(ax: Axes, ends: Sequence[Mark], rows: dict[str, int]) -> None:
    """From the first reduction to the broadcast of one step: one that was broadcast, with the most cells, the last such."""
    of = {step: [m for m in ends if m.step == step] for step in {m.step for m in ends}}
    last = max(of, key=lambda s: (any(m.kind is MarkKind.BROADCAST for m in of[s]), max(len(m.cells) for m in of[s]), s or 0))
    mine = of[last]
    zero = min(m.at - m.seconds for m in mine)
    length = max(m.at for m in mine) - zero or 1.0
    scale, word = (1.0, "seconds") if length >= 1 else (1e-3, "milliseconds")
    for m in mine:
        colour = _WORK[m.kind][0]
        for cell in (c for c in m.cells if c in rows):
            width = max(m.seconds, length / 80)
            place = [((m.at - width - zero) / scale, width / scale)]
            ax.broken_barh(place, (rows[cell] - 0.4, 0.8), facecolor=colour, edgecolor="#FFFFFF", linewidth=0.5)
    ax.tick_params(axis="y", labelleft=False, length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlim(-0.02 * length / scale, 1.02 * length / scale)
    attempts = max(m.attempt for m in mine)
    ax.set_title(f"end of step {last}" + (f", {attempts} attempts" if attempts > 1 else ""))
    ax.set_xlabel(word)


_ADMITTED: Final = {-1: "the burst before", 0: "the first burst shown", 1: "the second", 2: "the third"}


def slots(f: FigureBase, runs: Sequence[Timeline], burst: int | None) -> None:
    shown = [timeline.bursts_to_show(t, 3, burst) or [Burst(1, t.start, t.end, 0)] for t in runs]
    lengths = _longest([b[-1].end - b[0].start or 1.0 for b in shown])
    used: dict[tuple[int, str], str] = {}  # (order, label) → colour
    for ax, t, bursts, length in zip(axes(f, len(runs)), runs, shown, lengths, strict=True):
        scale, word = unit(length)
        start, end = bursts[0].start, bursts[-1].end
        admitted = {g.group: g.burst for g in t.groups}
        placed = [(slot, e) for slot, e in timeline.in_slots(t.executions, t.end) if e.start < end and (t.end if e.end is None else e.end) > start]
        rows = {slot: i for i, slot in enumerate(sorted({slot for slot, _ in placed}))}
        by_colour: dict[str, list[tuple[int, float, float]]] = {}
        for slot, e in placed:
            relative = admitted[e.group] - bursts[0].number if e.group in admitted else 0
            if not e.kept:
                key, colour = (101, "discarded or lost"), INK
            elif e.group not in admitted:
                key, colour = (100, "evaluation"), GREY
            elif len(runs) == 1:
                key, colour = (relative, f"burst {admitted[e.group]}"), SERIES[relative % len(SERIES)]
            else:
                key, colour = (max(-2, relative), _ADMITTED.get(relative, "earlier bursts")), SERIES[max(-2, relative) % len(SERIES)]
            used[key] = colour
            x0, x1 = max(start, e.start), min(end, t.end if e.end is None else e.end)
            by_colour.setdefault(colour, []).append((rows[slot], (x0 - start) / scale, (x1 - x0) / scale))
        for colour, bars in by_colour.items():
            boxes = [[(x, y - 0.5), (x + w, y - 0.5), (x + w, y + 0.5), (x, y + 0.5)] for y, x, w in bars]
            edge = 0.0 if len(rows) > 64 else 0.3
            held = PolyCollection(boxes, facecolor=colour, edgecolor="#FFFFFF" if edge else "none", linewidth=edge, rasterized=len(placed) > _MANY)
            ax.add_collection(held)
        ax.set_xlim(0, length / scale)
        _publications(ax, bursts, start, scale)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_ylabel("slot")
        ax.set_title(f"{t.dispatch or 'unknown'} dispatch: {name(t)}", pad=16)
        ax.set_xlabel(f"{word} since burst {bursts[0].number} began")
    handles = [Patch(color=used[key], label=key[1]) for key in sorted(used)]
    f.legend(handles=handles, loc="outside lower left", ncols=6, title="admitted in", title_fontsize=8, alignment="left")
