"""From hosts.txt to processes: the command line of each, and where it listens.

When all are on this host they meet at sockets of the run directory. When one is not, all listen at tcp addresses: the host's number (or `bind=`),
since sockets are bound to it too, and a port that follows from the names of run and process, so that it is the same after every start.

Not here: starting them (launcher.py).
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre.coord.cells import Cell
from gyre.coord.hosts import Host, Kind, Line
from gyre.errors import UsageError
from gyre.net.endpoints import endpoint
from gyre.rules.named import RuleName, parse_rule

OURS: Final = ("CUDA_VISIBLE_DEVICES", "GYRE_RANK")  # in the environment of a process, and no secrets
_PORTS: Final = range(20_000, 30_000)  # below those that systems give away by themselves


class Plan(msgspec.Struct, frozen=True):
    """One process to start."""

    name: str
    kind: str  # buffer | sandbox | rollout | train | rank (on a further host of a trainer's)
    argv: list[str]
    env: dict[str, str]
    address: str  # what it listens on, "" for nothing
    cell: str = ""  # engines and trainers: theirs
    capacity: int = 0  # engines: executions that the cell holds
    host: Host = Host("localhost")

    def again(self) -> Plan:
        """As it is started after a death: it goes on with what it left on disk."""
        resume = self.kind in ("buffer", "train") and "--resume" not in self.argv
        return msgspec.structs.replace(self, argv=[*self.argv, "--resume"]) if resume else self


def default_rule(lines: Sequence[Line]) -> str:
    """`elastic` where there are cells that can turn, else the fixed roles of the file."""
    return "elastic" if any(x.kind is Kind.CELL for x in lines) else "async"


def plans(
    lines: Sequence[Line], run_dir: Path, *, resume: bool, log_level: str, coord: str, rule: str = "async", slots: int = 1, here: str = "",
    keys: bool = False,
) -> list[Plan]:  # fmt: skip
    """The processes of all lines. Under `async` the first cells that may train do, for good; else a `cell` line makes an engine and a trainer that
    take turns. `slots`: rollout.slots, unless a line sets it; `here`: as `this_host` says; `keys`: is there net.keys? Raises `UsageError`."""
    trainers, engines = _split(lines, parse_rule(rule))
    addresses = {f"train {x.name}": _address(x, run_dir, "train", here) for x in trainers}
    addresses |= {f"rollout {x.name}": _address(x, run_dir, "rollout", here) for x in engines}
    core = addresses[f"train {trainers[0].name}"]
    buffer = next(_address(x, run_dir, "buffer", here) for x in lines if x.kind is Kind.BUFFER)
    made: list[Plan] = []
    for line in lines:
        both = line in trainers and line in engines
        if both and "://" in (line.bind or ""):
            raise UsageError(line.where, "a cell that turns listens at two addresses", "leave it out, or give the host's address alone", "bind")
        common: dict[str, Any] = {"line": line, "run_dir": run_dir, "coord": coord, "log_level": log_level, "resume": resume, "keys": keys}
        if line.kind is Kind.BUFFER:
            made.append(_plan("buffer", line.name, buffer, **common))
        if line.kind is Kind.SANDBOX:
            words = [word for e in engines for word in ("--rollout", addresses[f"rollout {e.name}"])]
            words += ["--slots", str(line.slots)] if line.slots else []
            made.append(_plan("sandbox", line.name, "", "--buffer", buffer, *words, **common))
        if line in trainers:
            role = ["--role", "auto"] if both else [] if line is trainers[0] else ["--role", "satellite", "--train", core]
            role += ["--ranks", str(line.ranks)] if line.ranks else []
            name = f"{line.name}-train" if both else line.name
            plan = _plan("train", name, addresses[f"train {line.name}"], "--buffer", buffer, "--cell", line.name, *role, **common)
            made += _on_all(plan, line, run_dir, here)
        if line in engines:
            name, role = (f"{line.name}-rollout", ["--role", "auto"]) if both else (line.name, [])
            plan = _plan("rollout", name, addresses[f"rollout {line.name}"], "--train", core, "--cell", line.name, *role, **common)
            made.append(msgspec.structs.replace(plan, capacity=_capacity(line, slots)))
    names, places = [p.name for p in made], [p.address for p in made if p.address]
    for plan in made:
        if names.count(plan.name) > 1:
            raise UsageError("--cells", f"two processes would be called {plan.name}", "give one of their lines another name=", "name")
        if places.count(plan.address) > 1:
            raise UsageError("--cells", f"{plan.name} would listen at {plan.address}, as another does", "give its line another name=", "name")
    return made


def _on_all(plan: Plan, line: Line, run_dir: Path, here: str) -> list[Plan]:
    """A trainer, and the first rank of each further host of its cell: they meet where the first one is."""
    if len(line.hosts) == 1:
        return [plan]
    share = (line.ranks or 1) // len(line.hosts)
    meet = at(_where(line, here) or "127.0.0.1", run_dir.name, "ranks", line.name)
    made = [msgspec.structs.replace(plan, env={**plan.env, "GYRE_RANK": f"0/{line.ranks}/{share}@{meet}"})]
    for n, host in enumerate(line.hosts[1:], 1):
        env = {**plan.env, "GYRE_RANK": f"{n * share}/{line.ranks}/{share}@{meet}"}
        rank = Plan(f"{plan.name}.{n}", "rank", [], env, "", host=host)
        folder = run_dir if host.local else folder_of(run_dir, rank)
        argv = [plan.argv[0], "-m", "gyre_commands.train", "--run", str(run_dir), "--config", str(folder / "run.toml"), "--ranks", str(line.ranks)]
        made.append(msgspec.structs.replace(rank, argv=[*argv, *(word for s in line.sets for word in ("--set", s))]))
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


def _plan(
    kind: str, name: str, address: str, *words: str, line: Line, run_dir: Path, coord: str, log_level: str, resume: bool, keys: bool
) -> Plan:  # fmt: skip
    plan = Plan(name, kind, [], dict(line.env), address, line.name if kind in ("train", "rollout") else "", host=line.hosts[0])
    folder = run_dir if plan.host.local else folder_of(run_dir, plan)
    argv = [line.python or sys.executable, "-m", f"gyre_commands.{kind}", "--run", str(run_dir), "--config", str(folder / "run.toml")]
    argv += ["--name", name, "--coord", coord, "--log-level", log_level]
    argv += [*(["--bind", address] if address else []), *words]
    if kind in ("buffer", "train") and resume:
        argv.append("--resume")
    if keys and not plan.host.local:
        argv += ["--set", f"net.keys={folder / 'keys'}"]
    argv += [word for s in line.sets for word in ("--set", s)]
    if line.gpus:
        plan.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, line.gpus))
    return msgspec.structs.replace(plan, argv=argv)


def folder_of(run_dir: Path, plan: Plan) -> Path:
    """Where its host keeps what belongs to a process."""
    return run_dir / "node" / plan.name


def this_host(lines: Sequence[Line]) -> str:
    """The address of this host that the others of the file reach, "" if there are none. Raises `UsageError`."""
    far = next((msgspec.structs.replace(x, hosts=[h]) for x in lines for h in x.hosts if not h.local), None)
    if far is None:
        return ""
    there = _numeric(far)
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))  # sends nothing
        except OSError as e:
            raise UsageError(far.where, f"no way leads to {there} ({e.strerror})", "mend the network, or name another host") from None
        return str(probe.getsockname()[0])


def at(host: str, *names: str) -> str:
    """The tcp address of a process of a run on a host, from their names."""
    port = _PORTS[int.from_bytes(hashlib.blake2b("/".join(names).encode(), digest_size=4).digest(), "big") % len(_PORTS)]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _numeric(line: Line) -> str:
    """The address of a line's host as others reach it. Raises `UsageError`."""
    name = line.bind or line.hosts[0].host
    if name.startswith("tcp://"):
        name = name.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    usable = [a for a in found if not ipaddress.ip_address(a.partition("%")[0]).is_loopback]
    if not usable:
        why = f"resolves to {found[0]} here" if found else "does not resolve here"
        raise UsageError(line.where, f"{name} {why}", "give the address where others reach it, bind=10.0.0.5", "bind")
    return min(usable, key=lambda a: ":" in a)


def _where(line: Line, here: str) -> str:
    """The address of a line's first host, when some are on others than `here`; else ""."""
    return "" if not here else here if line.hosts[0].local and not line.bind else _numeric(line)


def _address(line: Line, run_dir: Path, kind: str, here: str) -> str:
    """Where a process listens; `here` is not empty when some are on other hosts."""
    name = "" if kind == "buffer" else line.name
    if line.bind and "://" in line.bind:
        return line.bind
    if here:
        return at(_where(line, here), run_dir.name, kind, name)
    return at(line.bind, run_dir.name, kind, name) if line.bind else endpoint(run_dir, kind, name)


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
