"""A workload from a real run's `events.jsonl`: the durations and costs that were measured there, to be asked "what if" with other cells and rules.

Measured: durations of executions by group (lease to end, so waiting for an engine is part of them), training time per group and cell, update,
publication, turns of cells. The model is `slots`, with as many slots per cell as the run's engines had. What the run never did (no cell turned,
say) costs nothing until `--set` says otherwise; every key of a workload file can be set.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre.errors import UsageError
from gyre.events import Event, EventReader
from gyre.inputs import toml
from gyre.rules.workload import Workload, apply_sets, build

BURSTS = 16


class _Run:
    """What the events of a run say."""

    def __init__(self) -> None:
        self.durations: dict[str, list[float]] = defaultdict(list)
        self.started: dict[str, Any] = {}
        self.train_s: list[float] = []
        self.costs: dict[str, list[float]] = defaultdict(list)
        self.cells: set[str] = set()
        self.began: dict[str, tuple[str, float]] = {}

    def take(self, e: Event) -> None:
        f = e.fields
        match e.kind:
            case "buffer_started":
                self.started = f
            case "rollout_ended" if f.get("purpose") == "train" and f.get("leased_at") and f.get("state") != "discarded":
                self.durations[f["group"]].append(max(1e-3, e.t_wall - f["leased_at"]))
            case "step":
                self._step(f)
            case "update":
                self.costs["update_s"].append(f["seconds"])
            case "publication":
                self.cells.update(f["cells"])
                if f["number"]:
                    self.costs["publish_s"].append(f["seconds"])
            case "role":
                self._role(f, e.t_mono)

    def _step(self, f: dict[str, Any]) -> None:
        entries = f.get("entries") or []
        self.cells.update(x["cell"] for x in entries)
        compute, update = f["metrics"].get("seconds_compute"), f["metrics"].get("seconds_update")
        if compute and f["groups"]:
            self.train_s.append(compute * max(1, len(entries)) / len(f["groups"]))  # the cells of a step compute for about as long
        if update is not None:
            self.costs["core_update_s"].append(update)

    def _role(self, f: dict[str, Any], now: float) -> None:
        cell, phase = f["cell"], f["phase"]
        self.cells.add(cell)
        if phase in ("to_train", "to_rollout"):
            self.began[cell] = (phase, now)
        elif cell in self.began and phase in ("train", "rollout"):
            begun, since = self.began.pop(cell)
            if begun == f"to_{phase}":
                self.costs[f"{begun}_s"].append(now - since)

    def mean(self, *names: str) -> float:
        """Of the first that was measured; 0 if none was."""
        return next((statistics.fmean(self.costs[n]) for n in names if self.costs[n]), 0.0)


def _read(events: Iterable[Event]) -> _Run:
    run = _Run()
    for e in events:
        run.take(e)
    return run


def from_run(run_dir: Path, sets: Sequence[str] = ()) -> Workload:
    """The workload of a run, with `--set` values over it. Raises `UsageError` when the directory has no run, or one too short to measure."""
    path = run_dir / "events.jsonl"
    if not path.is_file():
        raise UsageError("--replay", f"{run_dir} has no events.jsonl", "give the directory of a run")
    try:
        run = _read(EventReader(path).events())
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(str(path), f"is no event log of gyre ({type(e).__name__}: {e})", "give the directory of a run") from None
    if not run.durations or not run.train_s or not run.started:
        raise UsageError(str(path), "no execution ended, or no step was committed", "give a run that has made at least one step")
    s = run.started
    system: dict[str, Any] = {
        "cells": max(2, len(run.cells)),
        "groups_per_step": s["groups_per_step"],
        "rollouts_per_group": s["rollouts_per_group"],
        "steps_per_burst": s["steps_per_burst"],
        "target_staleness": s["staleness_target"],
        "dispatch": s["dispatch"],
        **_slots(run_dir, sets),
        "to_train_s": run.mean("to_train_s"),
        "to_rollout_s": run.mean("to_rollout_s"),
        "update_s": run.mean("update_s", "core_update_s"),
        "publish_s": run.mean("publish_s"),
    }
    workload = {"model": "slots", "train_cell_h_per_group": statistics.fmean(run.train_s) / 3600, "bursts": BURSTS, "seeds": [0]}
    data: dict[str, Any] = {"system": system, "workload": workload}
    apply_sets(data, sets)
    data["workload"]["replayed_s"] = tuple(tuple(d) for d in run.durations.values())
    return build("replay", data)


def _slots(run_dir: Path, sets: Sequence[str]) -> dict[str, int]:
    """Slots of one engine, from the run's configuration, unless `sets` says. Raises `UsageError`."""
    file = run_dir / "run.toml"
    if not file.is_file() and any(item.startswith("system.slots_per_cell=") for item in sets):
        return {}
    try:
        return {"slots_per_cell": int(toml(file, "give --set system.slots_per_cell=N")["rollout"]["slots"])}
    except (KeyError, ValueError, TypeError):
        raise UsageError(str(file), "says no rollout.slots", "give --set system.slots_per_cell=N") from None
