"""The figures of runs as text: for terminals, pipes and files. Lanes of letters along the time, tables where plots.py draws distributions.

What colours say, letters say too, so that NO_COLOR and pipes lose nothing. Everything fits the given width.

Not here: numbers (timeline.py), where the text goes (show.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from gyre.report import timeline
from gyre.report.figures import brief, chart, mean, ordinal, packed, table, unit
from gyre.report.timeline import MarkKind, RoleSpan, Timeline
from gyre.rules.roles import CellPhase
from gyre.rules.staleness import Summary, summarize

_PHASES: Final = {
    CellPhase.ROLLOUT: ("░", "cyan", "rollout"),
    CellPhase.TO_TRAIN: (">", "yellow", "turning to training"),
    CellPhase.TRAIN: ("█", "blue", "training"),
    CellPhase.TO_ROLLOUT: ("<", "magenta", "turning to rollout"),
    CellPhase.LOST: ("×", "red", "lost"),
}
_SIGNS: Final = {MarkKind.JOIN: "J", MarkKind.LEAVE: "L", MarkKind.VOID: "X"}
_ROWS: Final = 24


def sketches(runs: Sequence[Timeline], width: int, only: Sequence[str] = (), burst: int | None = None) -> list[RenderableType]:
    """The figures that there are facts for, in the order of plots.drawings; `only` names those wanted (none: all)."""
    width = max(24, min(width, 120))
    lanes: dict[str, Callable[[Timeline], Text | None]] = {
        "roles": lambda t: _roles(t, width),
        "water": lambda t: _water(t, width),
        "burst": lambda t: _burst(t, width, burst),
        "slots": lambda t: _slots(t, width, burst),
    }
    tables: dict[str, Callable[[Sequence[Timeline], int], RenderableType | None]] = {
        "staleness": _staleness, "speedup": _speedup, "learning": _learning, "durations": _durations,
    }  # fmt: skip
    drawn: list[RenderableType | None] = [draw(t) for name, draw in lanes.items() if not only or name in only for t in runs]
    drawn += [draw(runs, width) for name, draw in tables.items() if not only or name in only]
    return [d for d in drawn if d is not None]


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


def _legend(text: Text, phases: set[CellPhase], more: Sequence[str], indent: int, width: int) -> None:
    entries = [Text.assemble((glyph, colour), f" {word}") for phase, (glyph, colour, word) in _PHASES.items() if phase in phases]
    _entries(text, [*entries, *map(Text, more)], indent, width)


def _entries(text: Text, entries: Sequence[Text], indent: int, width: int) -> None:
    """A legend, on as many lines as it needs."""
    _line(text, " " * indent)
    for i, line in enumerate(packed(entries, width - indent).split("\n")):
        text.append("\n" + " " * indent if i else "")
        text.append_text(line)


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
    _legend(text, {s.phase for s in t.spans}, ["|n burst n begins with a publication"], name + 1, width)
    return text


def _water(t: Timeline, width: int) -> Text | None:
    if not t.water_level:
        return None
    points = timeline.water(t, t.start, t.end)
    most, room = max(1, *(w for _, w in points)), width - 6
    text = _title("water level", t, f", executions without an outcome; at most {most}")
    at, values = 0, []
    for i in range(room):
        while at + 1 < len(points) and points[at + 1][0] <= t.start + (t.end - t.start) * i / room:
            at += 1
        values.append(float(points[at][1]))
    for i, row in enumerate(chart(values, room, 3, 0.0, float(most))):
        _line(text, f"{(most, '', 0)[i]!s:>4} │", (row, "cyan"))
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
    signs = [f"{_SIGNS[k]} {word}" for k, word in words.items() if any(m.kind is k for m in marks)]
    _legend(text, {s.phase for s in spans}, [*signs, "|n commit of step n"], name + 1, width)
    for s in steps:
        done = ", ".join(f"{c} {n}" for c, n in s.micro_steps)
        ends = [f"{m.kind} {m.seconds:.3g} s" + (f" ({len(m.cells)} cells)" if len(m.cells) > 1 else "") for m in marks if m.step == s.step
                and m.kind in (MarkKind.REDUCE, MarkKind.UPDATE, MarkKind.BROADCAST)]  # fmt: skip
        line = f"step {s.step}, committed at {(s.committed - b.start) / scale:.1f} {word}" + (f": micro-steps {done}" if done else "")
        _line(text)
        text.append_text(packed(Text("; ".join([line, *ends])).split(" "), width, gap=" ", indent=2))
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
    legend = ["digit: last digit of the burst that admitted the execution", "e evaluation", "x discarded or lost"]
    _entries(text, [Text(entry) for entry in [*legend, *([f"every {ordinal(every)} slot"] if every > 1 else [])]], 5, width)
    return text


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], width: int, labels: int = 1) -> RenderableType | None:
    return Group(packed(Text(title, style="bold").split(" "), width, gap=" ", indent=2), table(head, rows, width, labels)) if rows else None


def _numbers(s: Summary, scale: float = 1.0) -> list[str]:
    return [str(s.n), *(brief(None if x is None else x / scale, ".3g") for x in (s.mean, s.p95, s.max))]


def _staleness(runs: Sequence[Timeline], width: int) -> RenderableType | None:
    rows = []
    for t in runs:
        for kind, samples in (("trained", timeline.trained(t)), ("offered", timeline.offered(t))):
            between = [s.interpolated for s in samples if s.interpolated is not None]
            rows.append([t.name, f"{kind}, discrete", *_numbers(summarize([s.discrete for s in samples]))])
            rows.append([t.name, f"{kind}, interpolated", *_numbers(summarize(between))])
    return _table("staleness, optimizer steps", ("run", "", "groups", "mean", "p95", "max"), [r for r in rows if r[2] != "0"], width, 2)


def _durations(runs: Sequence[Timeline], width: int) -> RenderableType | None:
    found = [(t, *timeline.durations(t)) for t in runs]
    scale, word = unit(max((s for _, queries, rollouts in found for s in queries + rollouts), default=0.0))
    rows = []
    for t, queries, rollouts in found:
        limits = []
        for ending, limit in (("harness_timeout", t.harness_timeout_s), ("overall_timeout", t.overall_timeout_s)):
            over = sum(e.ending == ending and not e.evaluation for e in t.executions)
            limits.append("–" if limit is None else f"{limit / scale:.3g}, ended {over}")
        rows.append([t.name, "rollouts", *_numbers(summarize(rollouts), scale), *limits])
        rows.append([t.name, "queries", *_numbers(summarize(queries), scale), "", ""])
    columns = ("run", "", "n", "mean", "p95", "max", "harness time-out", "overall time-out")
    return _table(f"durations, {word}", columns, [r for r in rows if r[2] != "0"], width, 2)


def _learning(runs: Sequence[Timeline], width: int) -> RenderableType | None:
    """Of the first steps and as many last ones, at most five and never the same; seconds of forward and backward passes a step."""
    if not any(s.grad_norm is not None for t in runs for s in t.steps):
        return None
    widest = timeline.widest(runs)
    whole, rows = timeline.compute_per_step(widest), []
    for t in runs:
        norms, scores = [s.grad_norm for s in t.steps if s.grad_norm is not None], [s.score for s in t.steps if s.score is not None]
        compute = timeline.compute_per_step(t)
        n = max(1, min(5, len(norms) // 2))
        change = [f"{brief(mean(x[:n]), '.3g')} → {brief(mean(x[-n:]), '.3g')}" for x in (norms, scores)]
        part = f"{compute / whole:.0%}" if compute is not None and whole else "–"
        rows.append([t.name, str(t.budget or "–"), f"{n} → {n}", *change, brief(compute, ".3g"), part])
    columns = ("run", "J_max", "steps", "gradient norm", "score", "compute, s", f"of {widest.name}'s")
    return _table("learning, means of the first → of the last steps", columns, rows, width)


def _speedup(runs: Sequence[Timeline], width: int) -> RenderableType | None:
    rows = []
    for other in runs[1:]:
        if ratios := timeline.speedup(runs[0], other):
            rows.append([other.name, *(f"{r:.2f}× at step {s}" for s, r in (ratios[0], ratios[len(ratios) // 2], ratios[-1]))])
    return _table(f"speed-up of {runs[0].name}, from the start to each step", ("over", "first", "middle", "last"), rows, width)
