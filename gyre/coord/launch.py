"""From hosts.txt to processes: the command line of each, and starting it here.

Only localhost for now; the argument lists are built apart from the starting so that another launcher can quote them for ssh.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gyre.coord.hosts import Kind, Line
from gyre.errors import UsageError
from gyre.net.endpoints import endpoint


class Plan(msgspec.Struct, frozen=True):
    """One process to start."""

    name: str
    kind: str  # buffer | sandbox | rollout | train
    argv: list[str]
    env: dict[str, str]
    address: str  # what it listens on, "" for nothing


def plans(lines: Sequence[Line], run_dir: Path, *, resume: bool, log_level: str, coord: str) -> list[Plan]:
    """Fixed roles (the Async rule): the first cell that may trains, all the others roll out. Raises `UsageError`."""
    for line in lines:
        if not all(h.local for h in line.hosts) or len(line.hosts) != 1:
            raise UsageError(line.where, "only localhost can be launched so far", "start that process by hand (examples/by_hand.sh)")
    trainers = [x for x in lines if x.kind is Kind.TRAIN_CELL] or [next(x for x in lines if x.kind is Kind.CELL)]
    if len(trainers) > 1:
        raise UsageError(trainers[1].where, "a second training cell", "one cell trains so far: write rollout-cell")
    engines = [x for x in lines if x.kind in (Kind.CELL, Kind.ROLLOUT_CELL) and x not in trainers]
    if not engines:
        raise UsageError(trainers[0].where, "no cell is left to roll out", "add a line: rollout-cell localhost")
    kinds = {Kind.BUFFER: "buffer", Kind.SANDBOX: "sandbox"}
    addresses = {x.name: _address(x, run_dir, "train" if x in trainers else kinds.get(x.kind, "rollout")) for x in lines}
    buffer = next(addresses[x.name] for x in lines if x.kind is Kind.BUFFER)
    made: list[Plan] = []
    for line in lines:
        kind = "train" if line in trainers else kinds.get(line.kind, "rollout")
        argv = [line.python or sys.executable, "-m", f"gyre_commands.{kind}", "--run", str(run_dir), "--config", str(run_dir / "run.toml")]
        argv += ["--name", line.name, "--coord", coord, "--log-level", log_level]
        if kind in ("buffer", "train", "rollout"):
            argv += ["--bind", addresses[line.name]]
        if kind in ("sandbox", "train"):
            argv += ["--buffer", buffer]
        if kind == "rollout":
            argv += ["--train", addresses[trainers[0].name]]
        if kind == "sandbox":
            argv += [word for e in engines for word in ("--rollout", addresses[e.name])]
            argv += ["--slots", str(line.slots)] if line.slots else []
        if kind in ("buffer", "train") and resume:
            argv.append("--resume")
        argv += [word for s in line.sets for word in ("--set", s)]
        env = dict(line.env)
        if line.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, line.gpus))
        made.append(Plan(line.name, kind, argv, env, addresses[line.name]))
    return made


def _address(line: Line, run_dir: Path, kind: str) -> str:
    if kind == "sandbox":
        return ""
    return line.bind or endpoint(run_dir, kind, "" if kind == "buffer" else line.name)


def start(plan: Plan, logs: Path) -> subprocess.Popen[bytes]:
    """Start a process of the plan with its log in `logs`, out of the reach of the terminal's Ctrl-C. Raises `UsageError`."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{plan.name}.log").open("ab") as log:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **plan.env}
        try:
            return subprocess.Popen(plan.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True)
        except OSError as e:
            raise UsageError("--cells", f"{plan.argv[0]} cannot be run ({e.strerror})", "mend python= of that line", plan.name) from None
