"""Rules against each other on the same executions: what `gyre-sim` prints."""

from __future__ import annotations

import hashlib
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from gyre.errors import UsageError
from gyre.report.figures import brief
from gyre.rules import staleness
from gyre.rules.admission import quota
from gyre.rules.named import RuleName, make_rule, parse_rule
from gyre.rules.workload import Workload
from gyre.sim.checkers import Law, Violation, check
from gyre.sim.measure import Measured, measure
from gyre.sim.world import World

DEFAULT_RULES: Final = ("elastic", "lookahead", "async", "colocate")
_STALENESS: Final = (("mean", ".2f"), ("p95", ".0f"), ("max", ".0f"))
_GAP: Final = "  "


class Staleness(msgspec.Struct, frozen=True):
    """In optimizer steps, of consumed groups, all seeds together."""

    predicted: float
    mean: float | None
    p95: float | None
    max: float | None
    interpolated_mean: float | None


class Idle(msgspec.Struct, frozen=True):
    """Fraction of a role's cell time (of its slots' time, for rollout) in which nothing ran."""

    rollout: float
    train: float


class Row(msgspec.Struct, frozen=True):
    """One rule at one target, mean over seeds. `speedup`: the other rule's hours over this one's. `split`: the cells that train, of `async`."""

    rule: str
    target_staleness: float
    hours: float
    staleness: Staleness
    train_fraction: list[float]
    idle_fraction: Idle
    bound_ratio: float | None
    speedup: dict[str, float]
    split: int | None
    digest: str


def law_of(world: World, kind: str) -> Law:
    """What the checker must be told of a world."""
    s, n = world.system, world.N
    undisturbed = world.work.model == "slots"
    return Law(
        s.cells, s.slots_per_cell, world.B, n, world.mu, world.work.bursts, world.quota.groups, s.dispatch == "continuous",
        s.to_train_s, s.to_rollout_s, world.micro_s, kind == "elastic" and world.work.faults is None,
        (lambda e: world.work.duration_s(world.seed, e // n, e % n)) if undisturbed else None,
    )  # fmt: skip


def simulate(workload: Workload, name: RuleName, target: float, seed: int) -> World:
    """One checked run. A `Violation` comes with the seed and what repeats it."""
    text = name.text if name.kind != "async" else f"async:{name.trainers}{'+stream' if name.stream else ''}"
    world = World(workload, make_rule(text), target, seed, stream=name.stream, ask_known=name.kind == "lookahead")
    try:
        world.run()
        check(world.trace, law_of(world, name.kind))
    except Exception as e:
        again = f"--rule {text} --set workload.seeds=[{seed}] --set system.target_staleness={target:g}"
        e.add_note(f"seed {seed}; to repeat it, the same gyre-sim command with: {again}")
        raise
    return world


def _runs(workload: Workload, name: RuleName, target: float) -> tuple[list[Measured], str]:
    measured, digests = [], []
    for seed in workload.workload.seeds:
        world = simulate(workload, name, target, seed)
        measured.append(measure(world))
        digests.append(world.digest())
    return measured, digests[0] if len(digests) == 1 else hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()


def _row(name: RuleName, target: float, predicted: float, runs: Sequence[Measured], digest: str) -> Row:
    d = staleness.summarize([x for r in runs for x in r.discrete])
    i = staleness.summarize([x for r in runs for x in r.interpolated])
    hours = statistics.fmean(r.hours for r in runs)
    bounds = [r.bound_hours for r in runs if r.bound_hours is not None]
    return Row(
        name.text,
        target,
        hours,
        Staleness(predicted, d.mean, d.p95, d.max, i.mean),
        [statistics.fmean(t) for t in zip(*(r.train_fraction for r in runs), strict=True)],
        Idle(statistics.fmean(r.idle_rollout for r in runs), statistics.fmean(r.idle_train for r in runs)),
        hours / statistics.fmean(bounds) if bounds else None,
        {},
        name.trainers if name.kind == "async" else None,
        digest,
    )


def evaluate(workload: Workload, name: RuleName, target: float) -> Row:
    """A rule at a target; `async` without a number is its best split."""
    s = workload.system
    predicted = quota(s.dispatch, target, s.groups_per_step, s.steps_per_burst).predicted
    if name.kind != "async" or name.trainers is not None:
        return _row(name, target, predicted, *_runs(workload, name, target))
    splits = [msgspec.structs.replace(name, trainers=n) for n in range(1, s.cells)]
    rows = [_row(n, target, predicted, *_runs(workload, n, target)) for n in splits]
    return min(rows, key=lambda r: r.hours)


def names_for(workload: Workload, rules: Sequence[str]) -> list[RuleName]:
    """Parse rule names and refuse what the workload cannot run. Raises `UsageError`."""
    s = workload.system
    names = [parse_rule(r) for r in rules]
    for n in names:
        if n.trainers is not None and n.trainers >= s.cells:
            raise UsageError("--rule", f"{n.text} leaves no cell of {s.cells} in rollout", f"give at most async:{s.cells - 1}")
    if len({n.text for n in names}) < len(names):
        raise UsageError("--rule", "a rule stands there twice", "name each once")
    for target in s.targets:
        admitted = quota(s.dispatch, target, s.groups_per_step, s.steps_per_burst).groups
        least = s.groups_per_step * s.steps_per_burst
        if s.dispatch == "continuous" and admitted < least and any(n.kind == "colocate" for n in names):
            raise UsageError(
                "--rule", f"colocate needs {least} groups in the system, a target of {target:g} admits {admitted}", "dispatch at the boundary"
            )
        if s.dispatch == "continuous" and admitted < s.groups_per_step and any(not n.stream for n in names):
            raise UsageError("--rule", f"async takes {s.groups_per_step} groups at once, a target of {target:g} admits {admitted}", "add +stream")
    return names


def compare(workload: Workload, rules: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Every rule at every target; `progress` is told which is next. Raises `UsageError`."""
    names = names_for(workload, rules)
    out: list[Row] = []
    for target in workload.system.targets:
        rows = []
        for n in names:
            progress(f"{n.text} at target {target:g}")
            rows.append(evaluate(workload, n, target))
        out += [msgspec.structs.replace(r, speedup={o.rule: o.hours / r.hours for o in rows if o is not r}) for r in rows]
    return out


def table(rows: Sequence[Row], width: int) -> str:
    """For people: a line for each rule and target, in as many blocks as the width takes; then how many times as fast each is as the others."""
    targets = [f"{r.target_staleness:g}" for r in rows]
    names = [r.rule if r.split is None or ":" in r.rule else f"{r.rule} ({r.split})" for r in rows]
    stale = [(r.staleness.mean, r.staleness.p95, r.staleness.max) for r in rows]
    first = _columns("target,", ["steps", *targets]) + _columns("", ["rule", *names], left=True)
    groups = [
        _columns("", ["hours", *(f"{r.hours:.2f}" for r in rows)]),
        _columns("staleness, steps", *([title, *(brief(s[i], form) for s in stale)] for i, (title, form) in enumerate(_STALENESS))),
        *([_columns("over", ["bound", *(brief(r.bound_ratio, ".3f") for r in rows)])] if any(r.bound_ratio is not None for r in rows) else []),
        _columns("idle", ["train", *(f"{r.idle_fraction.train:.0%}" for r in rows)], ["rollout", *(f"{r.idle_fraction.rollout:.0%}" for r in rows)]),
        _columns("cells train,", ["of the time", *(f"{min(r.train_fraction):.0%} to {max(r.train_fraction):.0%}" for r in rows)]),
    ]
    blocks = [first]
    for group in groups:
        if len(blocks[-1]) > len(first) and _width(blocks[-1] + group) > width:
            blocks.append(first)
        blocks[-1] = blocks[-1] + group
    lines = [line for block in blocks for line in ["", *(_GAP.join(parts).rstrip() for parts in zip(*block, strict=True))]][1:]
    lines.append("")
    for r, target in zip(rows, targets, strict=True):
        if r.speedup:
            at = f"at target {target}: " if len(set(targets)) > 1 else ""
            said = f"{at}{r.rule} is " + ", ".join(f"{v:.2f} times as fast as {k}" for k, v in r.speedup.items())
            lines += textwrap.wrap(said, max(20, width), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _columns(head: str, *columns: Sequence[str], left: bool = False) -> list[list[str]]:
    """Columns below a heading that they share, as one column of whole cells."""
    wide = [max(map(len, column)) for column in columns]
    wide[0] += max(0, len(head) - sum(wide) - len(_GAP) * (len(wide) - 1))
    cells = [_GAP.join(cell.ljust(n) if left else cell.rjust(n) for cell, n in zip(row, wide, strict=True)) for row in zip(*columns, strict=True)]
    return [[head.ljust(len(cells[0])) if left or len(columns) > 1 else head.rjust(len(cells[0])), *cells]]


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(len(column[0]) for column in columns) + len(_GAP) * (len(columns) - 1)


__all__ = ["DEFAULT_RULES", "Row", "Violation", "compare", "evaluate", "simulate", "table"]
