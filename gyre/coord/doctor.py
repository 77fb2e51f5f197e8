"""What the hosts of a run are like, before anything is started on them: reach, versions, what contains an execution, files, clocks.

Each host is asked once by each interpreter that runs there, and answers with what it has; whether that is enough is judged here. The clock's offset
is what the host's clock says minus this host's at the arrival of the answer: right but for the way back.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence

import msgspec
from rich.table import Table

from gyre.config import Config, overlaid
from gyre.coord.hosts import Host, Kind, Line
from gyre.coord.launcher import Launcher
from gyre.coord.machine import UNREACHED

MAX_SKEW_S = 2.0  # wall clocks are in events and reports; leases go by monotonic time
_TOOLS = ("flock", "setsid", "tar")
_PROBE = """
import importlib.metadata as have, json, os, shutil, socket, sys, time
def version(name):
    try: return have.version(name)
    except have.PackageNotFoundError: return ""
tools, paths = json.loads(sys.argv[1])
print(json.dumps({"python": ".".join(map(str, sys.version_info[:3])), "gyre": version("gyre"), "torch": version("torch"),
    "tools": [t for t in tools if shutil.which(t)], "absent": [p for p in paths if not os.path.exists(p)], "clock": time.time()}))
"""


class Health(msgspec.Struct, kw_only=True):
    """A host by one interpreter. `problems` is empty if the run can start there."""

    host: Host
    wants: set[Kind]
    reached: bool = False
    answer_s: float = 0.0
    python: str = ""
    gyre: str = ""
    torch: str = ""
    tools: list[str] = []
    absent: list[str] = []
    clock: float = 0.0
    offset_s: float = 0.0
    problems: list[str] = []

    @property
    def name(self) -> str:
        """With all that tells it from others of the file."""
        name = f"{self.host.user}@{self.host.host}" if self.host.user else self.host.host
        return f"{name}:{self.host.ssh_port}" if self.host.ssh_port else name


async def examine(lines: Sequence[Line], launcher: Launcher, config: Config) -> list[Health]:
    """Ask every host of these lines."""
    wants: dict[tuple[str, str, int, str], tuple[Host, set[Kind]]] = {}
    for line in lines:
        for host in line.hosts:
            key = (host.host, host.user, host.ssh_port, line.python or sys.executable)
            wants.setdefault(key, (host, set()))[1].add(line.kind)
    return await asyncio.gather(*(_ask(host, kinds, key[3], launcher, config) for key, (host, kinds) in wants.items()))


def unset(lines: Sequence[Line], config: Config) -> str:
    """Keys without which processes of these lines would end at once, all together and who needs them; "" if none is missing. Raises `UsageError`."""
    missing: dict[str, dict[str, None]] = {}
    for line in lines:
        for key in _unset(line.kind, overlaid(config, line.sets, line.where)):
            missing.setdefault(key, {})[line.kind] = None
    if not (config.net.keys or config.net.insecure) and not all(host.local for line in lines for host in line.hosts):
        missing["net.keys"] = {"hosts that talk over a network; gyre-keys makes them": None}
    return "; ".join(f"{key} ({', '.join(kinds)})" for key, kinds in missing.items())


def _unset(kind: Kind, c: Config) -> list[str]:
    plays: list[str] = []  # how the parts of such a process come by what they do
    if kind in (Kind.CELL, Kind.ROLLOUT_CELL):
        plays.append(c.rollout.engine)
    if kind in (Kind.CELL, Kind.TRAIN_CELL):
        plays.append(c.train.engine)
    if kind is Kind.SANDBOX:
        plays.append(c.sandbox.backend)
    needed = [
        ("model.path", c.model.path, bool(set(plays) - {"paced", "scripted"})),
        ("tasks.train", c.tasks.train, kind is Kind.BUFFER),
        ("rollout.script", c.rollout.script, "scripted" in plays),
        ("run.workload", c.run.workload, "paced" in plays),
    ]
    return [key for key, value, wanted in needed if wanted and not value]


async def _ask(host: Host, kinds: set[Kind], python: str, launcher: Launcher, config: Config) -> Health:
    found = Health(host=host, wants=kinds, problems=[])
    program = {"bubblewrap": "bwrap", "docker": "docker"}.get(config.sandbox.backend, "")
    tools = [*_TOOLS, *([program] if program and Kind.SANDBOX in kinds else [])]
    sent, began = json.dumps([tools, _paths(kinds, config)]), time.monotonic()
    code, out, error = await launcher.call(host, python, "-c", _PROBE, sent)
    arrived, found.answer_s = time.time(), time.monotonic() - began
    if code == UNREACHED:
        found.problems.append(f"not reached: {error}")
        return found
    found.reached = True
    try:
        answer = msgspec.json.decode(out.splitlines()[-1], type=dict[str, object])
    except (IndexError, msgspec.DecodeError):
        found.problems.append(f"{python} does not run: {error or f'exit code {code}'}; mend python= of its line")
        return found
    found = msgspec.convert({**msgspec.to_builtins(found), **answer}, Health)
    found.offset_s = found.clock - arrived
    found.problems = _judge(found, tools, config)
    return found


def _paths(kinds: set[Kind], config: Config) -> list[str]:
    """Files of the configuration that processes of these kinds read."""
    cells, boxes = bool(kinds - {Kind.BUFFER, Kind.SANDBOX}), Kind.SANDBOX in kinds
    wanted = [(config.model.path, cells or boxes), (config.rollout.script, cells and config.rollout.engine == "scripted")]
    wanted += [(config.tasks.train, boxes or Kind.BUFFER in kinds), (config.tasks.heldout, boxes or Kind.BUFFER in kinds)]
    wanted += [(config.sandbox.harness_dir, boxes)]
    return [path for path, needed in wanted if path and needed]


def _judge(h: Health, tools: Sequence[str], config: Config) -> list[str]:
    ours, problems = importlib.metadata.version("gyre"), []
    if tuple(map(int, h.python.split(".")[:2])) < (3, 11):
        problems.append(f"Python {h.python} is older than 3.11")
    if h.gyre != ours:
        problems.append(f"has gyre {h.gyre}, here is {ours}" if h.gyre else "gyre is not installed in this Python")
    trains = bool(h.wants & {Kind.CELL, Kind.TRAIN_CELL}) and bool(config.model.path)
    if not h.torch and (trains or (Kind.ROLLOUT_CELL in h.wants and config.rollout.engine == "torch")):
        problems.append("torch is not installed: pip install 'gyre[train]'")
    problems += [f"lacks {tool}" for tool in tools if tool not in h.tools]
    problems += [f"lacks {path}" for path in h.absent]
    if abs(h.offset_s) > max(MAX_SKEW_S, h.answer_s):
        problems.append(f"its clock is {abs(h.offset_s):.1f} s {'ahead' if h.offset_s > 0 else 'behind'}: synchronise it (NTP)")
    return problems


def table(found: Sequence[Health]) -> Table:
    """One row a host; how many problems it has, which are told below. Names are never cut: rows must not look alike."""
    out = Table(box=None, pad_edge=False)
    for title in ("host", "for", "answer", "Python", "gyre", "torch", "tools", "clock", "problems"):
        out.add_column(title, overflow="fold")
    for h in found:
        seen = (
            f"{h.answer_s:.2f} s",
            h.python,
            h.gyre,
            h.torch or "-",
            " ".join(t for t in h.tools if t not in _TOOLS) or "-",
            f"{h.offset_s:+.2f} s",
        )
        cells = seen if h.python else ("-",) * 6
        out.add_row(h.name, " ".join(sorted(h.wants)), *cells, str(len(h.problems) or "none"))
    return out


def problems(found: Sequence[Health]) -> list[tuple[str, bool]]:
    """`HOST: PROBLEM` for each, once however many interpreters of the host have it; and whether the host was reached."""
    return list({f"{h.name}: {problem}": h.reached for h in found for problem in h.problems}.items())


def local_lines() -> list[Line]:
    """A file of this host alone, with all that a run has."""
    return [Line(kind=kind, name=str(kind), hosts=[Host("localhost")], where="this host") for kind in (Kind.BUFFER, Kind.CELL, Kind.SANDBOX)]
