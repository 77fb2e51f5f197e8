"""A workload from a real run: the durations and costs that its event log tells, to be asked "what if" with other cells and rules.

Measured: durations of executions by group (lease to end, so waiting for an engine is part of them), training time per group and cell, update,
publication, turns of cells. The model is `slots`, with as many slots per cell as the run's engines had. What the run never did (no cell turned,
say) costs nothing until `--set` says otherwise; every key of a workload file can be set.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gyre.errors import UsageError
from gyre.inputs import toml
from gyre.report import history
from gyre.report.timeline import MarkKind, Timeline
from gyre.rules.roles import CellPhase
from gyre.rules.workload import Workload, apply_sets, build

BURSTS: Final = 16
_SAID: Final = {
    "groups_per_step": "groups_per_step", "rollouts_per_group": "rollouts_per_group", "steps_per_burst": "steps_per_burst",
    "dispatch": "dispatch", "staleness_target": "target_staleness",
}  # fmt: skip
"""Of the buffer's first event: the keys of [system]."""


def from_run(run_dir: Path, sets: Sequence[str] = ()) -> Workload:
    """The workload of a run, with `--set` values over it. Raises `UsageError` when the directory has no run, or one too short to measure."""
    path = run_dir / "events.jsonl"
    if not path.is_file():
        raise UsageError("--replay", f"{run_dir} has no events.jsonl", "give the directory of a run")
    t = history.read(run_dir)
    durations: dict[str, list[float]] = defaultdict(list)
    for e in t.executions:
        if e.end is not None and e.ending and e.kept and not e.evaluation:
            durations[e.group].append(max(1e-3, e.end - e.start))
    groups = Counter(g.step for g in t.groups)
    # the cells of a step compute for about as long
    train_s = [s.compute_s * max(1, len(s.micro_steps)) / groups[s.step] for s in t.steps if s.compute_s and groups[s.step]]
    if not durations or not train_s:
        raise UsageError(str(path), "no execution ended, or no step was committed", "give a run that has made at least one step")
    if unsaid := [key for key in _SAID if key not in t.begun]:
        raise UsageError(str(path), f"does not say the run's {unsaid[0]}", "give a run whose buffer wrote it")
    system: dict[str, Any] = {
        "cells": max(2, len(t.cells)),
        **{key: t.begun[said] for said, key in _SAID.items()},
        **_slots(run_dir, sets),
        "to_train_s": _mean(_turns(t, CellPhase.TO_TRAIN, CellPhase.TRAIN)),
        "to_rollout_s": _mean(_turns(t, CellPhase.TO_ROLLOUT, CellPhase.ROLLOUT)),
        "update_s": _mean([m.seconds for m in t.marks if m.kind is MarkKind.UPDATE]),
        "publish_s": _mean([b.seconds for b in t.bursts[1:]]),
    }
    workload = {"model": "slots", "train_cell_h_per_group": statistics.fmean(train_s) / 3600, "bursts": BURSTS, "seeds": [0]}
    data: dict[str, Any] = {"system": system, "workload": workload}
    apply_sets(data, sets)
    data["workload"]["replayed_s"] = tuple(tuple(d) for d in durations.values())
    return build("replay", data)


def _turns(t: Timeline, turning: CellPhase, then: CellPhase) -> list[float]:
    """Seconds of the turns that ended well; how cells came up before the first publication is none."""
    return [a.end - a.start for a, b in itertools.pairwise(t.spans) if (b.cell, a.phase, b.phase) == (a.cell, turning, then) and a.start > t.start]


def _mean(seconds: Sequence[float]) -> float:
    return statistics.fmean(seconds) if seconds else 0.0


def _slots(run_dir: Path, sets: Sequence[str]) -> dict[str, int]:
    """Slots of one engine, from the run's configuration, unless `sets` says. Raises `UsageError`."""
    file = run_dir / "run.toml"
    if not file.is_file() and any(item.startswith("system.slots_per_cell=") for item in sets):
        return {}
    try:
        return {"slots_per_cell": int(toml(file, "give --set system.slots_per_cell=N")["rollout"]["slots"])}
    except (KeyError, ValueError, TypeError):
        raise UsageError(str(file), "says no rollout.slots", "give --set system.slots_per_cell=N") from None
