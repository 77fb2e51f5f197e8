"""From hosts.txt to processes: the command line of each, and starting it here.

Only localhost for now; the argument lists are built apart from the starting so that another launcher can quote them for ssh.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre.coord.cells import Cell
from gyre.coord.hosts import Kind, Line
from gyre.errors import UsageError
from gyre.net.endpoints import endpoint
from gyre.rules.named import RuleName, parse_rule


class Plan(msgspec.Struct, frozen=True):
    """One process to start."""

    name: str
    kind: str  # buffer | sandbox | rollout | train
    argv: list[str]
    env: dict[str, str]
    address: str  # what it listens on, "" for nothing
    cell: str = ""  # engines and trainers: theirs
    capacity: int = 0  # engines: executions that the cell holds

    def again(self) -> Plan:
        """As it is started after a death: it goes on with what it left on disk."""
        resume = self.kind in ("buffer", "train") and "--resume" not in self.argv
        return msgspec.structs.replace(self, argv=[*self.argv, "--resume"]) if resume else self


def default_rule(lines: Sequence[Line]) -> str:
    """`elastic` where there are cells that can turn, else the fixed roles of the file."""
    return "elastic" if any(x.kind is Kind.CELL for x in lines) else "async"


def plans(lines: Sequence[Line], run_dir: Path, *, resume: bool, log_level: str, coord: str, rule: str = "async", slots: int = 1) -> list[Plan]:
    """The processes of all lines. Under `async` the first cells that may train do, for good; else a `cell` line makes an engine and a trainer that
    take turns. `slots`: rollout.slots, unless a line sets it. Raises `UsageError`."""
    for line in lines:
        if not all(h.local for h in line.hosts) or len(line.hosts) != 1:
            raise UsageError(line.where, "only localhost can be launched so far", "start that process by hand (examples/by_hand.sh)")
    trainers, engines = _split(lines, parse_rule(rule))
    addresses = {f"train {x.name}": _address(x, run_dir, "train") for x in trainers}
    addresses |= {f"rollout {x.name}": _address(x, run_dir, "rollout") for x in engines}
    core = addresses[f"train {trainers[0].name}"]
    buffer = next(_address(x, run_dir, "buffer") for x in lines if x.kind is Kind.BUFFER)
    made: list[Plan] = []
    for line in lines:
        both = line in trainers and line in engines
        if both and line.bind:
            raise UsageError(line.where, "a cell that turns listens at two addresses", "leave it out", "bind")
        common: dict[str, Any] = {"line": line, "run_dir": run_dir, "coord": coord, "log_level": log_level, "resume": resume}
        if line.kind is Kind.BUFFER:
            made.append(_plan("buffer", line.name, buffer, **common))
        if line.kind is Kind.SANDBOX:
            words = [word for e in engines for word in ("--rollout", addresses[f"rollout {e.name}"])]
            words += ["--slots", str(line.slots)] if line.slots else []
            made.append(_plan("sandbox", line.name, "", "--buffer", buffer, *words, **common))
        if line in trainers:
            role = ["--role", "auto"] if both else [] if line is trainers[0] else ["--role", "satellite", "--train", core]
            name = f"{line.name}-train" if both else line.name
            made.append(_plan("train", name, addresses[f"train {line.name}"], "--buffer", buffer, "--cell", line.name, *role, **common))
        if line in engines:
            name, role = (f"{line.name}-rollout", ["--role", "auto"]) if both else (line.name, [])
            plan = _plan("rollout", name, addresses[f"rollout {line.name}"], "--train", core, "--cell", line.name, *role, **common)
            made.append(msgspec.structs.replace(plan, capacity=_capacity(line, slots)))
    names = [p.name for p in made]
    for plan in made:
        if names.count(plan.name) > 1:
            raise UsageError("--cells", f"two processes would be called {plan.name}", "give one of their lines another name=", "name")
    return made


def _split(lines: Sequence[Line], rule: RuleName) -> tuple[list[Line], list[Line]]:
    """Lines that get a trainer, in the order of the file, and lines that get an engine."""
    turning = [x for x in lines if x.kind is Kind.CELL]
    if rule.kind == "async":
        fixed = sum(x.kind is Kind.TRAIN_CELL for x in lines)
        n = (rule.trainers if rule.trainers is not None else max(1, fixed)) - fixed
        if not 0 <= n <= len(turning):
            raise UsageError("--rule", f"{rule.text} with {fixed} train-cell and {len(turning)} cell lines", "give as many as can train")
        trainers = [x for x in lines if x.kind is Kind.TRAIN_CELL or x in turning[:n]]
        engines = [x for x in lines if x.kind is Kind.ROLLOUT_CELL or x in turning[n:]]
    else:
        if not turning:
            raise UsageError("--rule", f"{rule.text} turns cells, and there are none", "write cell lines, or give async")
        trainers = [x for x in lines if x.kind in (Kind.CELL, Kind.TRAIN_CELL)]
        engines = [x for x in lines if x.kind in (Kind.CELL, Kind.ROLLOUT_CELL)]
    if not engines:
        raise UsageError(trainers[0].where, "no cell is left to roll out", "add a line: rollout-cell localhost")
    return trainers, engines


def _plan(kind: str, name: str, address: str, *words: str, line: Line, run_dir: Path, coord: str, log_level: str, resume: bool) -> Plan:
    argv = [line.python or sys.executable, "-m", f"gyre_commands.{kind}", "--run", str(run_dir), "--config", str(run_dir / "run.toml")]
    argv += ["--name", name, "--coord", coord, "--log-level", log_level]
    argv += [*(["--bind", address] if address else []), *words]
    if kind in ("buffer", "train") and resume:
        argv.append("--resume")
    argv += [word for s in line.sets for word in ("--set", s)]
    env = dict(line.env)
    if line.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, line.gpus))
    return Plan(name, kind, argv, env, address, line.name if kind in ("train", "rollout") else "")


def _address(line: Line, run_dir: Path, kind: str) -> str:
    return line.bind or endpoint(run_dir, kind, "" if kind == "buffer" else line.name)


def _capacity(line: Line, slots: int) -> int:
    given = [s.partition("=")[2].strip() for s in line.sets if s.partition("=")[0].strip() == "rollout.slots"]
    return int(given[-1]) if given and given[-1].isdigit() else slots


def cells(plans: Sequence[Plan]) -> list[Cell]:
    """The cells of these processes, in the order of the file."""
    made: dict[str, Cell] = {}
    for plan in plans:
        if plan.cell:
            cell = made.setdefault(plan.cell, Cell(name=plan.cell, trainer=None, engine=None))
            if plan.kind == "train":
                cell.trainer, cell.core_address = plan.name, plan.address
            else:
                cell.engine, cell.address, cell.capacity = plan.name, plan.address, plan.capacity
    return list(made.values())


def start(plan: Plan, logs: Path) -> subprocess.Popen[bytes]:
    """Start a process of the plan with its log in `logs`, out of the reach of the terminal's Ctrl-C. Raises `UsageError`."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{plan.name}.log").open("ab") as log:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **plan.env}
        try:
            return subprocess.Popen(plan.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True)
        except OSError as e:
            raise UsageError("--cells", f"{plan.argv[0]} cannot be run ({e.strerror})", "mend python= of that line", plan.name) from None
