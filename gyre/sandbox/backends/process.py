"""The unsafe backend: a plain process in a temporary directory. It contains nothing; it is for machines where nothing better can be had.

It keeps the protocol (deadline, capped output, fresh /logs/verifier, everything dead in the end), but only against programs of good will: a
process that leaves its session *and* clears its environment survives, and everything of this machine's user can be read and written.

There are no mounts: a bind's place is its source. Words of the command that name a place, or something below it, are rewritten, and the variables of
`base.PLACES` hold the true paths.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from gyre.errors import DeadlineExceeded, UsageError
from gyre.sandbox.backends import lifeline
from gyre.sandbox.backends.base import (
    LOGS,
    MAX_COLLECT_BYTES,
    PLACES,
    WORK,
    Exit,
    Image,
    InfraSetupFailed,
    Spec,
    TaskSetupFailed,
    Workspace,
)
from gyre.sandbox.backends.output import Reader
from gyre.sandbox.backends.tree import TreeError, copy_tree

MARK: Final = "GYRE_SANDBOX_RUN"
SWEEPS: Final = 100
SWEEP_S: Final = 0.02


class Process:
    """See the module; the protocol is `base.Backend`."""

    name = "process"

    def __init__(self, *, unsafe: bool = False) -> None:
        if not unsafe:
            raise UsageError("--backend process", "it contains nothing: agents can read and write all that you can", "accept that with --unsafe")
        self.notes: list[str] = []
        self._next_id = 0
        self._places: dict[str, str] = {}  # by workspace: where its task expects it
        self._own = ""

    async def start(self) -> None:
        for left in lifeline.orphaned_homes():
            await _kill_marked(left.name)
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        self._home = lifeline.make_home()
        self._own = self._home.name
        self.notes.append("nothing is contained: no limit on memory, processes or disk, the network and this machine's files are open to agents")

    async def workspace(self, source: str | None, size_mb: int, *, place: str = "", image: Image | None = None, timeout_s: float = 60.0) -> Workspace:
        self._next_id += 1
        key = str(self._next_id)
        path = self._home / f"w{key}"
        path.mkdir()
        try:
            if source is None:
                (path / "work").mkdir()
            else:
                await asyncio.wait_for(asyncio.to_thread(copy_tree, _real(source), path / "work", None), timeout_s)
        except TreeError as e:
            shutil.rmtree(path, ignore_errors=True)
            raise (TaskSetupFailed if e.task_at_fault else InfraSetupFailed)(str(e)) from None
        except TimeoutError:
            raise DeadlineExceeded("a workspace to be made", timeout_s) from None
        self._places[key] = place or WORK
        return Workspace(key=key, place=str(path / "work"), path=str(path), slot=int(key))

    async def drop(self, workspace: Workspace) -> None:
        self._places.pop(workspace.key, None)
        await asyncio.to_thread(shutil.rmtree, workspace.path, ignore_errors=True)

    async def run(self, spec: Spec) -> Exit:
        self._next_id += 1
        mark = f"{self._own}/{self._next_id}"
        own = self._home / f"r{self._next_id}"
        (own / "tmp").mkdir(parents=True)
        (own / "logs").mkdir()
        places = {bind.target: str(_real(bind.source)) for bind in spec.binds} | {self._places[spec.workspace.key]: spec.workspace.place}
        if spec.collect:
            places[LOGS] = str(own / "logs")
        env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": str(own / "tmp"), "TMPDIR": str(own / "tmp")}
        env |= {"GYRE_WORK": spec.workspace.place, MARK: mark}
        env |= {PLACES[target]: path for target, path in places.items() if target in PLACES}
        env |= spec.env
        try:
            return await self._run(spec, [_rewrite(word, places) for word in spec.argv], env, own)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    async def _run(self, spec: Spec, argv: list[str], env: Mapping[str, str], own: Path) -> Exit:
        loop = asyncio.get_running_loop()
        out, into = os.pipe()
        reader = Reader(loop, out, spec.limits.output_kb << 10)
        started = time.monotonic()
        timed_out, status = False, 137
        process = None
        try:
            os.chmod(spec.workspace.place, 0o755)  # noqa: PTH101 (whatever the last sandbox did to it)
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=into, stderr=into, cwd=spec.workspace.place, env=env, start_new_session=True
            )
            os.close(into)
            into = -1
            code = await asyncio.wait_for(process.wait(), spec.limits.timeout_s)
            status = code if code >= 0 else 128 - code
        except TimeoutError:
            timed_out = True
        except OSError as e:  # as `setpriv` does in the other backend
            status = 127 if isinstance(e, FileNotFoundError) else 126
            os.write(into, f"{argv[0]}: {e.strerror}\n".encode())
        finally:
            if into >= 0:
                os.close(into)
            if process is not None:
                await _kill(process, env[MARK])
            output = reader.finish()
        seconds = time.monotonic() - started
        files = {name: data for name in spec.collect if (data := _collect(own / "logs" / name)) is not None}
        total = reader.output.total
        return Exit(status=status, timed_out=timed_out, oom=False, output=output, output_bytes=total, seconds=seconds, files=files)

    async def close(self) -> None:
        if self._own:
            await _kill_marked(self._own)
            await asyncio.to_thread(shutil.rmtree, self._home, ignore_errors=True)


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))


def _rewrite(word: str, places: Mapping[str, str]) -> str:
    for target, path in places.items():
        if word == target or word.startswith(target + "/"):
            return path + word[len(target) :]
    return word


async def _kill(process: asyncio.subprocess.Process, mark: str) -> None:
    """Kill a run's session and all that bears its mark."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    await _kill_marked(mark)


async def _kill_marked(mark: str) -> None:
    """Kill every process whose environment says that it belongs to `mark`, a run or an owner, until there is none."""
    for _ in range(SWEEPS):
        found = _marked(mark)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        await asyncio.sleep(SWEEP_S)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            entries = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(e == f"{MARK}={mark}".encode() or e.startswith(f"{MARK}={mark}/".encode()) for e in entries):
            found.append(int(entry.name))
    return found


def _collect(path: Path) -> bytes | None:
    """A small regular file; never what a link points to."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        return os.read(fd, MAX_COLLECT_BYTES) if stat.S_ISREG(info.st_mode) and info.st_size <= MAX_COLLECT_BYTES else None
    finally:
        os.close(fd)
