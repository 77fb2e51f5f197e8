"""The figures as numbers, for scripts: the `figures` object of gyre-report's JSON (docs/commands/gyre-report.md).

Keys are an interface: they are only added. Times are seconds since the first publication, lengths seconds, staleness optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gyre.report import timeline
from gyre.report.timeline import Sample, Timeline
from gyre.rules.roles import CellPhase
from gyre.rules.staleness import summarize


def as_json(t: Timeline, others: Sequence[Timeline] = ()) -> dict[str, Any]:
    """All figures of one run; `others` are those it is compared with."""
    seconds, fractions = timeline.phase_seconds(t), timeline.train_fraction(t)
    queries, rollouts = timeline.durations(t)
    slots = timeline.in_slots(t.executions, t.end)
    return {
        "seconds": t.end - t.start,
        "dispatch": t.dispatch or None,
        "cells": [
            {
                "cell": cell, "train_fraction": fractions[cell], "seconds": {p.value: s for p, s in seconds[cell].items()},
                "spans": [{"phase": s.phase.value, "start": s.start - t.start, "end": s.end - t.start, "reason": s.reason}
                          for s in t.spans if s.cell == cell],
            }
            for cell in t.cells
        ],
        "bursts": [
            {
                "number": b.number, "start": b.start - t.start, "end": b.end - t.start, "version": b.version, "steps": list(b.steps),
                "turned_to_train": sum(s.phase is CellPhase.TO_TRAIN and b.start <= s.start < b.end for s in t.spans),
            }
            for b in t.bursts if b.end > b.start
        ],
        "steps": [
            {"step": s.step, "opened": s.opened - t.start, "closed": _since(t, s.closed), "sealed": _since(t, s.sealed),
             "committed": s.committed - t.start, "micro_steps": dict(s.micro_steps)}
            for s in t.steps
        ],
        "marks": [
            {"kind": m.kind.value, "at": m.at - t.start, "seconds": m.seconds, "cells": list(m.cells), "step": m.step, "attempt": m.attempt}
            for m in t.marks
        ],
        "slots": {"leases": len(slots), "held_at_most": len({slot for slot, _ in slots})},
        "staleness": {"trained": _both(timeline.trained(t)), "offered": _both(timeline.offered(t))},
        "durations": {
            "rollouts": msgspec.to_builtins(summarize(rollouts)), "queries": msgspec.to_builtins(summarize(queries)),
            "harness_timeout_s": t.harness_timeout_s, "overall_timeout_s": t.overall_timeout_s,
        },
        "speedup": [{"over": o.name, "steps": [list(x) for x in timeline.speedup(t, o)]} for o in others],
        "learning": {
            "budget": t.budget, "compute_s": timeline.compute_per_step(t), "relative": _relative(t, others),
            "steps": [[s.step, s.score, s.grad_norm, s.compute_s] for s in t.steps if s.score is not None or s.grad_norm is not None],
        },
        "failure": t.failure or None,
        "messages": list(t.messages),
    }  # fmt: skip


def _relative(t: Timeline, others: Sequence[Timeline]) -> dict[str, Any] | None:
    to = timeline.widest([t, *others])
    mine, theirs = timeline.compute_per_step(t), timeline.compute_per_step(to)
    return {"to": to.name, "compute": mine / theirs} if mine is not None and theirs else None


def _since(t: Timeline, at: float | None) -> float | None:
    return None if at is None else at - t.start


def _both(samples: Sequence[Sample]) -> dict[str, Any]:
    between = [s.interpolated for s in samples if s.interpolated is not None]
    return {"discrete": msgspec.to_builtins(summarize([s.discrete for s in samples])), "interpolated": msgspec.to_builtins(summarize(between))}
