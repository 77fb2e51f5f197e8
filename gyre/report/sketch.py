"""The figures of runs as text: for terminals, pipes and files. The same facts as plots.py draws, as far as letters go.

What colours say, letters say too, so that NO_COLOR and pipes lose nothing. Everything fits the given width.

Not here: numbers (timeline.py), where the text goes (show.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final

from rich.text import Text

from gyre.report import timeline
from gyre.report.figures import chart, edges, moving_average, unit
from gyre.report.timeline import MarkKind, RoleSpan, Sample, Timeline
from gyre.rules.roles import CellPhase
from gyre.rules.staleness import summarize

_PHASES: Final = {
    CellPhase.ROLLOUT: ("░", "cyan", "rollout"),
    CellPhase.TO_TRAIN: (">", "yellow", "turning to training"),
    CellPhase.TRAIN: ("█", "blue", "training"),
    CellPhase.TO_ROLLOUT: ("<", "magenta", "turning to rollout"),
    CellPhase.LOST: ("×", "red", "lost"),
}
_SIGNS: Final = {MarkKind.JOIN: "J", MarkKind.LEAVE: "L", MarkKind.VOID: "X"}
_ROWS: Final = 24


def sketches(runs: Sequence[Timeline], width: int, only: Sequence[str] = (), burst: int | None = None) -> list[Text]:
    """The figures that there are facts for, in the order of plots.drawings; `only` names those wanted (none: all)."""
    width = max(24, min(width, 120))
    drawn: dict[str, Callable[[Timeline], Text | None]] = {
        "roles": lambda t: _roles(t, width),
        "burst": lambda t: _burst(t, width, burst),
        "slots": lambda t: _slots(t, width, burst),
        "staleness": lambda t: _staleness(t, width),
        "durations": lambda t: _durations(t, width),
    }
    found = [text for name, draw in drawn.items() if not only or name in only for t in runs if (text := draw(t)) is not None]
    if len(runs) > 1 and (not only or "speedup" in only):
        found.append(_speedup(runs[0], runs[1:], width))
    if (not only or "learning" in only) and any(s.grad_norm is not None for t in runs for s in t.steps):
        found.append(_learning(runs, width))
    return found


def _title(name: str, t: Timeline, more: str = "") -> Text:
    return Text.assemble((name, "bold"), " of ", (t.name, "bold cyan"), more, overflow="ellipsis", no_wrap=True)


def _line(text: Text, *parts: str | tuple[str, str]) -> None:
    text.append("\n")
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text.append(part[0], style=part[1])


def _lane(spans: Sequence[RoleSpan], start: float, end: float, width: int) -> list[tuple[str, str]]:
    """One character for each `width`-th of [start, end]: the phase that fills most of it."""
    lane = []
    for i in range(width):
        lo, hi = start + (end - start) * i / width, start + (end - start) * (i + 1) / width
        held = {s.phase: 0.0 for s in spans}
        for s in timeline.within(spans, lo, hi):
            held[s.phase] += s.end - s.start
        phase = max(held, key=lambda p: held[p], default=None)
        glyph, colour, _ = _PHASES[phase] if phase is not None and held[phase] > 0 else (" ", "", "")
        lane.append((glyph, colour))
    return lane


def _ruler(marks: Sequence[tuple[float, str]], width: int) -> str:
    """Words at places (0 to 1), left out where they would touch."""
    line = [" "] * width
    free = 0
    for place, word in marks:
        at = min(int(place * width), width - len(word))
        if at >= free:
            line[at : at + len(word)] = word
            free = at + len(word) + 1
    return "".join(line)


def _legend(text: Text, phases: set[CellPhase], more: str, indent: int) -> None:
    _line(text, " " * indent)
    for phase, (glyph, colour, word) in _PHASES.items():
        if phase in phases:
            text.append(glyph, style=colour)
            text.append(f" {word}   ")
    text.append(more)


def _names(t: Timeline) -> tuple[list[str], int]:
    every = -(-len(t.cells) // (2 * _ROWS))
    shown = list(t.cells[::every])
    return shown, min(12, max((len(c) for c in shown), default=1))


def _roles(t: Timeline, width: int) -> Text | None:
    if not t.spans:
        return None
    shown, name = _names(t)
    room = width - name - 7
    fractions = timeline.train_fraction(t)
    scale, word = unit(t.end - t.start)
    whole = t.end - t.start or 1.0
    text = _title("roles of the cells", t, f", {whole / scale:.1f} {word}; training {sum(fractions.values()) / len(fractions):.0%} in all")
    bursts = [((b.start - t.start) / whole, f"|{b.number}") for b in t.bursts if b.end > b.start]
    _line(text, " " * (name + 1), (_ruler(bursts, room), "bold"), " train")
    for cell in shown:
        lane = _lane([s for s in t.spans if s.cell == cell], t.start, t.end, room)
        _line(text, f"{cell[:name]:{name}} ", *lane, f" {fractions[cell]:4.0%}")
    _legend(text, {s.phase for s in t.spans}, "|n burst n begins with a publication", name + 1)
    return text


def _burst(t: Timeline, width: int, number: int | None) -> Text | None:
    chosen = timeline.bursts_to_show(t, 1, number)
    if not chosen or not t.cells:
        return None
    (b,) = chosen
    shown, name = _names(t)
    room = width - name - 1
    scale, word = unit(b.end - b.start)
    spans = list(timeline.within(t.spans, b.start, b.end))
    marks = [m for m in t.marks if b.start <= m.at <= b.end]
    text = _title(f"burst {b.number}", t, f", {(b.end - b.start) / scale:.1f} {word} from the publication of version {b.version}")
    steps = [s for s in t.steps if s.step in b.steps]
    _line(text, " " * (name + 1), (_ruler([((s.committed - b.start) / (b.end - b.start), f"|{s.step}") for s in steps], room), "bold"))
    for cell in shown:
        lane = _lane([s for s in spans if s.cell == cell], b.start, b.end, room)
        for m in (m for m in marks if m.kind in _SIGNS and cell in m.cells):
            lane[min(room - 1, int((m.at - b.start) / (b.end - b.start) * room))] = (_SIGNS[m.kind], "bold")
        _line(text, f"{cell[:name]:{name}} ", *lane)
    words = {MarkKind.JOIN: "joins", MarkKind.LEAVE: "leaves", MarkKind.VOID: "given up"}
    signs = [f"{_SIGNS[k]} {word}   " for k, word in words.items() if any(m.kind is k for m in marks)]
    _legend(text, {s.phase for s in spans}, "".join(signs) + "|n commit of step n", name + 1)
    for s in steps:
        done = ", ".join(f"{c} {n}" for c, n in s.micro_steps)
        ends = [f"{m.kind} {m.seconds:.3g} s" + (f" ({len(m.cells)} cells)" if len(m.cells) > 1 else "") for m in marks if m.step == s.step
                and m.kind in (MarkKind.REDUCE, MarkKind.UPDATE, MarkKind.BROADCAST)]  # fmt: skip
        line = f"step {s.step}, committed at {(s.committed - b.start) / scale:.1f} {word}" + (f": micro-steps {done}" if done else "")
        _line(text, "; ".join([line, *ends]))
    return text


def _slots(t: Timeline, width: int, number: int | None) -> Text | None:
    bursts = timeline.bursts_to_show(t, 3, number)
    if not t.executions or not bursts:
        return None
    start, end = bursts[0].start, bursts[-1].end
    placed = [(s, e) for s, e in timeline.in_slots(t.executions, t.end) if e.start < end and (t.end if e.end is None else e.end) > start]
    slots = sorted({s for s, _ in placed})
    every = max(1, -(-len(slots) // _ROWS))
    room, admitted = width - 5, {g.group: g.burst for g in t.groups}
    scale, word = unit(end - start)
    text = _title(f"slots under {t.dispatch or 'unknown'} dispatch", t, f", {(end - start) / scale:.1f} {word}; {len(slots)} slots")
    _line(text, " " * 5, (_ruler([((b.start - start) / (end - start), f"|{b.number}") for b in bursts], room), "bold"))
    for slot in slots[::every]:
        lane: list[tuple[str, str]] = [(" ", "")] * room
        for e in (e for s, e in placed if s == slot):
            first, last = ((x - start) / (end - start) * room for x in (max(e.start, start), min(end, t.end if e.end is None else e.end)))
            glyph = "x" if not e.kept else "e" if e.group not in admitted else str(admitted[e.group] % 10)
            colour = "red" if glyph == "x" else "grey50" if glyph == "e" else ("blue", "yellow", "green", "magenta", "cyan", "white")[int(glyph) % 6]
            for i in range(int(first), min(room, max(int(first) + 1, round(last)))):
                lane[i] = (glyph, colour)
        _line(text, f"{slots.index(slot):4d} ", *lane)
    _line(text, "     digit: last digit of the burst that admitted the execution   e evaluation   x discarded or lost")
    if every > 1:
        text.append(f"   every {every}th slot")
    return text


def _staleness(t: Timeline, width: int) -> Text | None:
    kinds: dict[str, list[Sample]] = {"trained": timeline.trained(t), "offered": timeline.offered(t)}
    if not kinds["trained"]:
        return None
    text = _title("staleness", t, ", optimizer steps")
    for name, samples in kinds.items():
        between = [s.interpolated for s in samples if s.interpolated is not None]
        for way, s in (("discrete", summarize([s.discrete for s in samples])), ("interpolated", summarize(between))):
            if s.mean is not None:
                _line(text, f"{name}, {way:<12} ", (f"mean {s.mean:.2f}", "bold"), f", p95 {s.p95:.3g}, max {s.max:.3g}, {s.n} groups")
    top = max(s.discrete for samples in kinds.values() for s in samples)
    room = max(4, (width - 8 - 2 * 6) // 2)
    _line(text, f"{'steps':>5}  {'trained':<{room + 6}}offered")
    for d in range(min(top, 20) + 1):
        _line(text, f"{d:>5}  ")
        for samples in kinds.values():
            part = sum(s.discrete == d for s in samples) / len(samples) if samples else 0.0
            text.append(f"{'█' * round(part * room):<{room}}", style="cyan")
            text.append(f"{part:5.0%} ")
    return text


def _durations(t: Timeline, width: int) -> Text | None:
    queries, rollouts = timeline.durations(t)
    if not rollouts:
        return None
    limits = {"H": t.harness_timeout_s, "O": t.overall_timeout_s}
    room = width - 11
    sides, logarithmic = edges(rollouts + queries, [x for x in limits.values() if x is not None], room)
    scale, word = unit(max(rollouts))
    text = _title("durations", t, f", {word}, {'logarithmic' if logarithmic else 'linear'}")
    for name, values in (("rollouts", rollouts), ("queries", queries)):
        if not values:
            continue
        counts = [float(sum(lo <= v < hi for v in values)) for lo, hi in itertools.pairwise(sides)]
        for i, row in enumerate(chart(counts, room, 3, 0.0, max(counts))):
            _line(text, f"{name if i == 2 else '':>9} │", (row, "cyan"))
        s = summarize(values)
        _line(text, " " * 10, f"mean {(s.mean or 0) / scale:.3g}, p95 {(s.p95 or 0) / scale:.3g}, max {(s.max or 0) / scale:.3g}, {s.n} {name}")
    places = [(sum(x >= side for side in sides[1:]) / room, f"{sign} {x / scale:.3g}") for sign, x in limits.items() if x is not None]
    _line(text, " " * 11, (_ruler(places, room), "bold"))
    ended = [sum(e.ending == ending and not e.evaluation for e in t.executions) for ending in ("harness_timeout", "overall_timeout")]
    _line(text, " " * 11, f"H harness time-out ({ended[0]} ended by it)   O overall time-out ({ended[1]})")
    return text


def _learning(runs: Sequence[Timeline], width: int) -> Text:
    """A line of blocks for each run's gradient norm, logarithmic, and score; runs have the same scale."""
    whole, to = timeline.compute_per_step(timeline.widest(runs)), timeline.widest(runs).name
    norms = {t.name: [math.log10(s.grad_norm) for s in t.steps if s.grad_norm] for t in runs}
    scores = {t.name: [s.score for s in t.steps if s.score is not None] for t in runs}
    text = Text.assemble(("learning", "bold"), ", step by step", overflow="ellipsis", no_wrap=True)
    every = [v for t in runs for v in norms[t.name]] or [0.0]
    low, high = min(every), max(max(every), min(every) + 0.1)
    room = max(8, min(60, width - 28))
    for t in runs:
        _line(text, (t.name, "bold cyan"), "" if t.budget is None else f", J_max {t.budget}")
        compute = timeline.compute_per_step(t)
        if compute is not None and whole:
            text.append(f", forward and backward {compute:.3g} s a step, {compute / whole:.0%} of {to}'s")
        for word, values, lo, hi in (("log norm", norms[t.name], low, high), ("score", moving_average(scores[t.name], 5), 0.0, 1.0)):
            if values:
                ends = (10**lo, 10**hi) if word == "log norm" else (lo, hi)
                (row,) = chart(values, room, 1, lo, hi)
                _line(text, f"{word:>9} │", (row, "cyan"), f"│ {ends[0]:.2g} to {ends[1]:.2g}")
    return text


def _speedup(run: Timeline, others: Sequence[Timeline], width: int) -> Text:
    text = Text.assemble(("speed-up", "bold"), " of ", (run.name, "bold cyan"), ", from the start to each step", overflow="ellipsis", no_wrap=True)
    for other in others:
        ratios = timeline.speedup(run, other)
        if not ratios:
            _line(text, f"over {other.name}: no step that both reached")
            continue
        n = max(1, min(6, (width - 30) // 14))
        picked = [ratios[i * (len(ratios) - 1) // max(1, n - 1)] for i in range(n)] if n > 1 else ratios[-1:]
        _line(text, f"over {other.name}: ", (f"{ratios[-1][1]:.2f}×", "bold"), f" at step {ratios[-1][0]}")
        _line(text, "     " + "   ".join(f"step {s} {r:.2f}×" for s, r in dict.fromkeys(picked)))
    return text
