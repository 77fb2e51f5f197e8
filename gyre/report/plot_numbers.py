"""Drawings of distributions and comparisons: staleness both ways, speed-up, durations. Each draws into a (sub)figure of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gyre.report import timeline
from gyre.report.figures import BLUE, GREY, INK, ORANGE, RED, SERIES, SKY, edges, moving_average, unit
from gyre.report.plot_times import axes, name
from gyre.report.timeline import Sample, Timeline
from gyre.rules.staleness import summarize


def _percent(part: float, _: object) -> str:
    return f"{100 * part:.3g}%"


def staleness(f: FigureBase, t: Timeline) -> None:
    left, middle, right = f.subplots(1, 3, width_ratios=[1, 1, 1.3])
    used, at_publication = timeline.trained(t), timeline.offered(t)
    top = max(s.discrete for s in (*used, *at_publication)) + 1
    for ax, samples, title in (
        (left, used, "trained: groups when a step took them"),
        (middle, at_publication, "offered: groups ready at publications"),
    ):
        _distribution(ax, samples, top, title)
    left.set_ylabel("groups")
    for samples, colour, label in ((used, BLUE, "trained"), (at_publication, ORANGE, "offered")):
        for way, line in (("discrete", "-"), ("interpolated", ":")):
            points = _by_burst(t, samples, way)
            dot = "." if len(t.bursts) <= 40 else ""
            style: dict[str, Any] = {"color": colour, "marker": dot, "markersize": 4, "linewidth": 1.2, "label": f"{label}, {way}"}
            right.plot([b for b, _ in points], [v for _, v in points], line, **style)
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
        quarters = [-0.125 + 0.25 * i for i in range(4 * top + 2)]
        ax.hist(between, quarters, weights=[1 / len(between)] * len(between), histtype="step", color=RED, linewidth=1.2)
    lines = [title]
    for way, x in (("discrete", summarize(whole)), ("interpolated", summarize(between))):
        if x.mean is not None:
            lines.append(f"{way}: mean {x.mean:.2f}, p95 {x.p95:.3g}, max {x.max:.3g}")
    ax.set_title("\n".join(lines), fontsize=8)
    ax.yaxis.set_major_formatter(_percent)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("optimizer steps")


def _by_burst(t: Timeline, samples: Sequence[Sample], way: str) -> list[tuple[int, float]]:
    points = []
    for b in t.bursts:
        values = [v for s in samples if b.start <= s.at < b.end and (v := getattr(s, way)) is not None]
        if values and b.end > b.start:
            points.append((b.number, sum(values) / len(values)))
    return points


def speedup(f: FigureBase, run: Timeline, others: Sequence[Timeline]) -> None:
    left, right = f.subplots(1, 2)
    everyone = [run, *others]
    scale, word = unit(max(max(timeline.time_to_step(t).values()) for t in everyone))
    for t, colour in zip(everyone, [INK, *SERIES * len(others)], strict=False):
        reached = sorted(timeline.time_to_step(t).items())
        left.plot([0, *(at / scale for _, at in reached)], [0, *(step for step, _ in reached)], color=colour, label=name(t), linewidth=1.4)
    for t, colour in zip(others, SERIES * len(others), strict=False):
        ratios = timeline.speedup(run, t)
        right.plot([s for s, _ in ratios], [r for _, r in ratios], color=colour, linewidth=1.4, marker=".", markersize=4)
        right.annotate(f"{ratios[-1][1]:.2f}×", ratios[-1], (4, 0), textcoords="offset points", va="center", fontsize=8, color=colour,
                       annotation_clip=False)  # fmt: skip
    right.axhline(1.0, color=GREY, linewidth=0.8)
    left.set(xlabel=f"{word} since the first publication", ylabel="steps committed", title="time to reach each step")
    right.set(xlabel="step", ylabel="time of the other ÷ time of this", title=f"speed-up of {name(run)}, from the start to each step")
    for axis in (left.yaxis, right.xaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    f.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)


def budgeted(t: Timeline) -> str:
    return name(t) if t.budget is None else f"{name(t)} (J_max {t.budget})"


def _decades(runs: Sequence[Timeline]) -> float:
    norms = [s.grad_norm for t in runs for s in t.steps if s.grad_norm] or [1.0]
    return math.log10(max(norms) / min(norms))


def learning(f: FigureBase, runs: Sequence[Timeline]) -> None:
    """Gradient norm and score by step, and how long forward and backward passes take beside those of the widest budget."""
    left, middle, right = f.subplots(1, 3, width_ratios=[1.3, 1.3, 1])
    colours = dict(zip((t.name for t in runs), SERIES * len(runs), strict=False))
    for t in runs:
        look: dict[str, Any] = {"color": colours[t.name], "linewidth": 1.4}
        norms = [(s.step, s.grad_norm) for s in t.steps if s.grad_norm]  # a step without a gradient has no place on a logarithmic axis
        left.plot([n for n, _ in norms], [v for _, v in norms], label=budgeted(t), **look)
        scores = [(s.step, s.score) for s in t.steps if s.score is not None]
        middle.plot([n for n, _ in scores], [v for _, v in scores], color=colours[t.name], linewidth=0.6, alpha=0.5)
        middle.plot([n for n, _ in scores], moving_average([v for _, v in scores], 5), **look)
    if not any(line.get_xdata().size for line in left.lines):
        left.set_axis_off()
        left.text(0, 0.5, "no step had a gradient", fontsize=8, transform=left.transAxes)
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}" if _decades(runs) < 1 else "")
    left.set(xlabel="step", title="gradient norm before clipping")
    middle.set(xlabel="step", title="mean score (bold: of five steps)")
    middle.set_ylim(bottom=0)
    widest = timeline.widest(runs)
    whole = timeline.compute_per_step(widest)
    timed = [(t, c) for t in runs if (c := timeline.compute_per_step(t)) is not None]
    for i, (t, compute) in enumerate(timed):
        right.barh(i, compute, color=colours[t.name], height=0.6)
        words = f"{compute:.3g} s" + (f", {compute / whole:.0%}" if whole else "")
        right.annotate(words, (compute, i), (3, 0), textcoords="offset points", va="center", fontsize=8)
    right.set_ylim(max(len(timed), 4) - 0.5, -0.5)
    right.set_yticks([])
    right.margins(x=0.45)
    right.set(xlabel=f"seconds a step; {name(widest)} is 100%", title="forward and backward")
    for ax in (left, middle):
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    f.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4)


def durations(f: FigureBase, runs: Sequence[Timeline]) -> None:
    found = [timeline.durations(t) for t in runs]
    values = [v for both in found for v in both[0] + both[1]]
    scale, word = unit(max(values))
    sides, logarithmic = edges(values, [x for t in runs for x in (t.harness_timeout_s, t.overall_timeout_s) if x is not None], 60)
    sides = [x / scale for x in sides]
    for ax, t, (queries, rollouts) in zip(axes(f, len(runs), sharex=True), runs, found, strict=True):
        _histogram(ax, rollouts, sides, scale, "rollouts", "stepfilled", (SKY, BLUE))
        _histogram(ax, queries, sides, scale, "queries (longest rollout)", "step", (RED, RED))
        if logarithmic:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        for limit, label in ((t.harness_timeout_s, "harness\ntime-out"), (t.overall_timeout_s, "overall\ntime-out")):
            if limit is not None:
                ax.axvline(limit / scale, color=INK, linewidth=1)
                ax.annotate(label, (limit / scale, 1), (-3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7,
                            ha="right", va="top")  # fmt: skip
        ax.set_ylabel("of all")
        ax.yaxis.set_major_formatter(_percent)
        ax.set_xlim(sides[0], sides[-1])
        if len(runs) > 1:
            ax.set_title(name(t))
    ax.set_xlabel(word)
    f.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=4)


def _histogram(ax: Axes, values: Sequence[float], sides: Sequence[float], scale: float, label: str, kind: Literal["step", "stepfilled"],
               colours: tuple[str, str]) -> None:  # fmt: skip
    """Parts of all, with a dotted line at the mean."""
    if not values:
        return
    weights = [1 / len(values)] * len(values)
    ax.hist([v / scale for v in values], sides, weights=weights, histtype=kind, color=colours[0], linewidth=1.4, label=label)
    mean = sum(values) / len(values) / scale
    ax.axvline(mean, ymax=0.82, color=colours[1], linewidth=1, linestyle=":", label=f"mean of the {label.split()[0]}")
