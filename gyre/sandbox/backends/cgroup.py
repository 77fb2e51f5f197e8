"""Control groups, versions 1 and 2: a limit on the memory and the number of processes of a whole sandbox.

One directory per backend below the cgroup that gyre itself is in (so outer limits keep holding), one per slot in it. Where that cannot be had the
backend falls back to per-process limits and says so: `notes`. What a dead gyre left is removed by `reap`.

Invariants
- A controller counts as available only after a limit was really written: nothing is concluded from versions or mount options.
- Only directories whose name says that their owner is dead are reaped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gyre.sandbox.backends.lifeline import PREFIX, is_orphaned

CONTROLLERS: Final = ("memory", "pids")
_LOST: Final = {
    "memory": "no memory cgroup can be made here: memory_mb holds for each process, not for all of a sandbox together",
    "pids": "no pids cgroup can be made here: pids is enforced by RLIMIT_NPROC alone",
}


class _Hierarchy:
    """A mounted hierarchy: where a new group goes, and which version it is."""

    def __init__(self, version: int, parents: list[Path]) -> None:
        self.version = version
        self.parents = parents


def _hierarchies(mountinfo: str, own: str) -> dict[str, _Hierarchy]:
    """By controller. `mountinfo` and `own` are the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in own.splitlines())}
    found: dict[str, _Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            group = _inside(mount, root, paths.get("", "/"))
            for controller in CONTROLLERS:
                found.setdefault(controller, _Hierarchy(2, [group] if group == Path(mount) else [group, group.parent]))
        elif kind == "cgroup":
            for controller in set(CONTROLLERS) & set(options.split(",")):
                path = next((p for names, p in paths.items() if controller in names.split(",")), "/")
                found[controller] = _Hierarchy(1, [_inside(mount, root, path)])  # a controller is in one version at a time
    return found


def _inside(mount: str, root: str, path: str) -> Path:
    """Where the group `path` is seen, if `root` of its hierarchy is mounted at `mount`."""
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return Path(mount) / path.lstrip("/")


def current_hierarchies() -> dict[str, _Hierarchy]:
    """Those of the calling process."""
    try:
        return _hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return {}


class Cgroups:
    """The groups of one backend."""

    def __init__(self, name: str, hierarchies: dict[str, _Hierarchy]) -> None:
        self.notes: list[str] = []
        self._version: dict[str, int] = {}
        self._base: dict[str, Path] = {}
        self._written: dict[tuple[str, int], int] = {}
        self._oom_kills: dict[int, int] = {}
        for controller in CONTROLLERS:
            parents = hierarchies[controller].parents if controller in hierarchies else []
            for n, parent in enumerate(parents):
                if self._try(parent / name, controller, hierarchies[controller].version, ours=n == 0):
                    break
            else:
                self.notes.append(_LOST[controller])

    def has(self, controller: str) -> bool:
        return controller in self._base

    def _try(self, base: Path, controller: str, version: int, *, ours: bool) -> bool:
        try:
            if version == 2:
                _enable(base.parent, controller, may_write=ours)
            base.mkdir(exist_ok=True)
            if version == 2:
                _enable(base, controller, may_write=True)
            self._version[controller], self._base[controller] = version, base
            (base / "slot-0").mkdir(exist_ok=True)
            (base / "slot-0" / self._file(controller)).write_text(str(1 << 30) if controller == "memory" else "64")
        except OSError:
            self._base.pop(controller, None)
            _remove(base)
            return False
        return True

    def _file(self, controller: str) -> str:
        if controller == "pids":
            return "pids.max"
        return "memory.limit_in_bytes" if self._version["memory"] == 1 else "memory.max"

    def join_files(self, slot: int, *, memory_bytes: int, pids: int) -> list[str]:
        """Set the limits of a slot; a process joins it by writing 0 to each of the files returned."""
        files = []
        for controller, limit in (("memory", memory_bytes), ("pids", pids)):
            if controller in self._base:
                group = self._base[controller] / f"slot-{slot}"
                if self._written.get((controller, slot)) != limit:
                    group.mkdir(exist_ok=True)
                    self._set(group, controller, limit)
                    self._written[controller, slot] = limit
                files.append(str(group / "cgroup.procs"))
        return sorted(set(files))

    def _set(self, group: Path, controller: str, limit: int) -> None:
        file = group / self._file(controller)
        if controller == "pids":
            file.write_text(str(limit))
        elif self._version["memory"] == 2:
            file.write_text(str(limit))
            _write_if_there(group / "memory.swap.max", "0")
        else:
            swap = group / "memory.memsw.limit_in_bytes"  # never below the limit without swap, so the order depends on the direction
            _write_if_there(swap, "-1")
            file.write_text(str(limit))
            _write_if_there(swap, str(limit))

    def new_oom_kills(self, slot: int) -> int:
        """Processes of that slot killed for memory since the last call."""
        if "memory" not in self._base:
            return 0
        name = "memory.oom_control" if self._version["memory"] == 1 else "memory.events"
        try:
            text = (self._base["memory"] / f"slot-{slot}" / name).read_text()
        except OSError:
            return 0
        total = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)
        new = total - self._oom_kills.get(slot, 0)
        self._oom_kills[slot] = total
        return new


def _enable(group: Path, controller: str, *, may_write: bool) -> None:
    """Let children of a version 2 group use a controller. `OSError` where that is not allowed (the group has processes of its own)."""
    control = group / "cgroup.subtree_control"
    if controller not in control.read_text().split():
        if not may_write:  # someone else's group is used as it is, not changed
            raise PermissionError(f"{control} does not have {controller}")
        control.write_text(f"+{controller}")


def _write_if_there(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError:  # swap accounting is off: there is nothing to limit
        return


def _groups(base: Path) -> Iterator[Path]:
    """`base` and the groups below it, deepest first."""
    for directory, _, _ in os.walk(base, topdown=False):
        yield Path(directory)


def _remove(base: Path) -> bool:
    """Remove a tree of groups. False while something lives in it."""
    gone = True
    for group in _groups(base):
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def kill_and_remove(base: Path, deadline_s: float = 5.0) -> bool:
    """Kill whatever lives in a tree of groups, then remove it. False if that did not succeed by the deadline."""
    until = time.monotonic() + deadline_s
    while not _remove(base):
        for group in _groups(base):
            try:
                pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
            except OSError:
                continue
            for pid in pids:
                if pid > 0:  # 0: in a pid namespace that is not ours to see
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def remove_groups(name: str) -> None:
    """Kill and remove the groups of one backend."""
    for parent in {parent for hierarchy in current_hierarchies().values() for parent in hierarchy.parents}:
        kill_and_remove(parent / name)


def reap() -> None:
    """Kill and remove the groups of dead owners."""
    for hierarchy in current_hierarchies().values():
        for parent in hierarchy.parents:
            for base in parent.glob(PREFIX + "*"):
                if is_orphaned(base.name):
                    kill_and_remove(base)
