"""The default backend: each sandbox is a bubblewrap with its own namespaces, uid, seccomp filter and control group.

This is the side of the event loop. It never enters a namespace itself: a separate process, the warden, does (orders.py says why nothing survives).
Features are probed, never assumed from a version: bwrap's options from its help, all else by starting a sandbox at `start`.

What an agent sees is in command.py, what it may call in seccomp.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gyre.errors import DeadlineExceeded, UsageError
from gyre.sandbox.backends import lifeline, orders, seccomp
from gyre.sandbox.backends.base import (
    WORK,
    Exit,
    Image,
    InfraSetupFailed,
    Limits,
    SandboxLost,
    Spec,
    TaskSetupFailed,
    Workspace,
)
from gyre.sandbox.backends.cgroup import reap, remove_groups
from gyre.sandbox.backends.command import FIRST_UID, PATH, arguments, probe
from gyre.sandbox.backends.output import Reader
from gyre.sandbox.backends.tree import others_can_read

WARDEN: Final = "gyre.sandbox.backends.warden"
GRACE_S: Final = 15.0  # beyond a run's own deadline, for the warden to kill it and say so
START_S: Final = 30.0
MAX_WORD: Final = 1 << 17  # Linux takes no longer argument
_Report = TypeVar("_Report")


class Bubblewrap:
    """See the module; the protocol is `base.Backend`."""

    name = "bubblewrap"

    def __init__(self, *, unsafe: bool = False) -> None:
        self.notes: list[str] = []
        self._unsafe = unsafe
        self._decoder = msgspec.msgpack.Decoder(orders.Report)
        self._next_id = 0
        self._slots: dict[int, str] = {}  # slot -> key of its workspace
        self._busy: set[str] = set()
        self._runs: dict[int, asyncio.Future[orders.Exited]] = {}
        self._jobs: dict[int, asyncio.Future[orders.Done]] = {}
        self._dead = ""
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._features = features = probe()
        if features.python.note:
            self.notes.append(features.python.note)
        if not features.sized_tmpfs:
            self.notes.append("this bwrap cannot limit the size of /tmp: only the memory limit bounds it")
        reap()
        for left in lifeline.orphaned_homes():
            with suppress(OSError):
                left.rmdir()
        self._scratch = str(lifeline.make_home())  # for the warden to mount on
        self._loop = asyncio.get_running_loop()
        program = self._filter()
        await self._start_warden(program)
        await self._trial()

    def _filter(self) -> bytes:
        try:
            return seccomp.program()
        except (ImportError, OSError) as e:
            self._lacking(f"no seccomp filter can be made ({e})", "run: pip install pyseccomp; apt-get install libseccomp2")
            return b""

    def _lacking(self, what: str, remedy: str) -> None:
        """Containment that cannot be had: said, and refused unless unsafe."""
        if not self._unsafe:
            raise UsageError("--backend bubblewrap", what, f"{remedy} (or accept it with --unsafe)")
        self.notes.append(what)

    async def _start_warden(self, program: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        self._channel = ours
        self._process = process = _spawn(theirs.fileno())
        theirs.close()
        unshared = await self._expect(orders.Unshared)
        if unshared.own_users:
            _write_maps(process.pid)
            await self._send(orders.Mapped())
        python = self._features.python
        name = Path(self._scratch).name
        root, users = self._features.root, unshared.own_users
        setup = orders.Setup(self._scratch, name, self._features.bwrap, program, python.packages, python.links, python.config, root, users)
        await self._send(setup)
        ready = await self._expect(orders.Ready)
        for note in ready.notes:
            if "memory" in note:
                self._lacking(note, "run as root, or in a session with delegated cgroups: systemd-run --user --scope")
            else:
                self.notes.append(note)
        self._loop.add_reader(ours.fileno(), self._receive)

    async def _expect(self, kind: type[_Report]) -> _Report:
        """The next report, which must be of that kind."""
        try:
            data = await asyncio.wait_for(self._loop.sock_recv(self._channel, orders.MAX_MESSAGE * 2), START_S)
        except TimeoutError:
            raise DeadlineExceeded("the sandbox warden to start", START_S) from None
        if not data:
            raise SandboxLost("the sandbox warden ended while it started")
        report = self._decoder.decode(data)
        if isinstance(report, orders.Failed):
            raise UsageError(
                "--backend bubblewrap",
                f"this machine does not allow it ({report.reason})",
                "run as root or allow user namespaces (or accept --backend process --unsafe)",
            )
        if not isinstance(report, kind):
            raise SandboxLost(f"the sandbox warden answered {report}")
        return report

    async def _trial(self) -> None:
        """One sandbox, to know that sandboxes can be had at all."""
        workspace = await self.workspace(None, 1)
        try:
            ended = await self.run(Spec(workspace=workspace, argv=["true"], limits=Limits(timeout_s=START_S), collect=["none"]))
            if ended.status != 0:
                raise InfraSetupFailed(ended.output.decode(errors="replace").strip() or f"exit status {ended.status}")
        except InfraSetupFailed as e:
            await self.close()
            remedy = "allow namespaces on this machine (or accept --backend process --unsafe)"
            raise UsageError("--backend bubblewrap", f"a sandbox cannot be started ({e})", remedy) from None
        await self.drop(workspace)

    # --- the protocol -----------------------------------------------------------------------------------------------------------------

    async def workspace(self, source: str | None, size_mb: int, *, place: str = "", image: Image | None = None, timeout_s: float = 60.0) -> Workspace:
        slot = next(n for n in range(len(self._slots) + 1) if n not in self._slots)
        id = self._new_id()
        workspace = Workspace(key=str(id), place=place or WORK, path=f"{self._scratch}/w{id}", slot=slot)
        self._slots[slot] = workspace.key
        order = orders.MakeWorkspace(id, workspace.path, self._uid(slot), size_mb, _real(source) if source else None)
        try:
            done = await asyncio.wait_for(self._job(order), timeout_s)
        except TimeoutError:
            await self.drop(workspace)
            raise DeadlineExceeded("a workspace to be made", timeout_s) from None
        except BaseException:
            with suppress(SandboxLost):
                await self.drop(workspace)
            raise
        if done.error:
            await self.drop(workspace)
            raise (TaskSetupFailed if done.task_at_fault else InfraSetupFailed)(done.error)
        return workspace

    async def drop(self, workspace: Workspace) -> None:
        if self._slots.get(workspace.slot) == workspace.key:
            assert workspace.key not in self._busy, "a sandbox still uses this workspace"
            await self._job(orders.DropWorkspace(self._new_id(), workspace.path))
            del self._slots[workspace.slot]

    async def run(self, spec: Spec) -> Exit:
        if spec.workspace.key in self._busy:
            raise AssertionError("one sandbox at a time in a workspace")
        id = self._new_id()
        order = self._order(id, spec)
        out, into = os.pipe()
        reader = Reader(self._loop, out, spec.limits.output_kb << 10)
        self._runs[id] = exited = self._loop.create_future()
        self._busy.add(spec.workspace.key)
        try:
            await self._send(order, into)
            os.close(into)
            into = -1
            ended = await asyncio.wait_for(asyncio.shield(exited), spec.limits.timeout_s + GRACE_S)
        except TimeoutError:
            raise SandboxLost(f"a sandbox did not end {GRACE_S:.0f} s after its deadline") from None
        except asyncio.CancelledError:
            with suppress(SandboxLost, TimeoutError):
                await self._send(orders.Kill(id))
                await asyncio.wait_for(asyncio.shield(exited), GRACE_S)
            raise
        finally:
            if into >= 0:
                os.close(into)
            output = reader.finish()
            del self._runs[id]
            self._busy.discard(spec.workspace.key)
        if ended.status is None:
            raise InfraSetupFailed(ended.error or output.decode(errors="replace").strip() or "bwrap ended before it started the command")
        return Exit(
            status=ended.status,
            timed_out=ended.timed_out,
            oom=ended.oom,
            output=output,
            output_bytes=reader.output.total,
            seconds=ended.seconds,
            files=ended.files,
        )

    async def close(self) -> None:
        if self._process is None:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._lost("the backend was closed")
        self._channel.close()  # the warden's sign to end
        process, self._process = self._process, None
        if not await asyncio.to_thread(_wait, process, self._scratch):
            raise DeadlineExceeded("the sandbox warden to end", GRACE_S)

    # --- the warden ---------------------------------------------------------------------------------------------------------------------

    def _order(self, id: int, spec: Spec) -> orders.Launch:
        uid = self._uid(spec.workspace.slot)
        own = f"{self._scratch}/r{id}"
        binds: list[tuple[str, str, bool]] = []
        copies: list[tuple[str, str]] = []
        for n, bind in enumerate(spec.binds):
            source = _real(bind.source)
            if bind.readonly and self._features.root and not others_can_read(source):
                copies.append((source, f"{own}/{n}"))
                source = f"{own}/{n}"
            binds.append((source, bind.target, bind.readonly))
        logs = f"{own}/logs" if spec.collect else ""
        limits = spec.limits
        if self._features.root:
            command = [self._features.wrapper, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--"]
        else:
            command = [self._features.wrapper, f"--nproc={limits.pids}", "--"]
        args, command = arguments(self._features, self._scratch, spec, binds, logs), [*command, *spec.argv]
        assert not any("\0" in word for word in args), "an argument of bwrap's holds another"
        if any(len(word.encode()) >= MAX_WORD for word in command):
            raise TaskSetupFailed(f"the command has a word of more than {MAX_WORD} bytes: use a file")
        return orders.Launch(
            id=id,
            slot=spec.workspace.slot,
            uid=uid,
            args=args,
            command=command,
            work=f"{spec.workspace.path}/work",
            path=own if spec.collect or copies else "",
            copies=copies,
            collect=list(spec.collect),
            timeout_s=limits.timeout_s,
            memory_mb=limits.memory_mb + limits.workspace_mb + 2 * limits.tmp_mb,  # files on tmpfs count as memory of the group
            pids=limits.pids,
        )

    def _uid(self, slot: int) -> int:
        return FIRST_UID + slot if self._features.root else 0

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _job(self, order: orders.MakeWorkspace | orders.DropWorkspace) -> orders.Done:
        future: asyncio.Future[orders.Done] = self._loop.create_future()
        self._jobs[order.id] = future
        try:
            await self._send(order)
            return await future
        finally:
            del self._jobs[order.id]

    async def _send(self, order: orders.Order, fd: int | None = None) -> None:
        data = msgspec.msgpack.encode(order)
        if len(data) > orders.MAX_MESSAGE:
            raise TaskSetupFailed(f"command and environment take {len(data)} bytes; at most {orders.MAX_MESSAGE} are possible: use a file")
        for _ in range(int(GRACE_S / 0.01)):
            if self._dead:
                raise SandboxLost(self._dead)
            try:
                socket.send_fds(self._channel, [data], [] if fd is None else [fd])
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError as e:
                raise SandboxLost(f"the sandbox warden is gone ({e.strerror})") from None
        raise SandboxLost(f"the sandbox warden took no order for {GRACE_S:.0f} s")

    def _receive(self) -> None:
        try:
            data = self._channel.recv(orders.MAX_MESSAGE * 2)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._channel.fileno())
            self._lost("the sandbox warden died")
            return
        report = self._decoder.decode(data)
        if isinstance(report, orders.Exited):
            exited = self._runs.get(report.id)
            if exited is not None and not exited.done():
                exited.set_result(report)
        elif isinstance(report, orders.Done):
            job = self._jobs.get(report.id)
            if job is not None and not job.done():
                job.set_result(report)

    def _lost(self, reason: str) -> None:
        self._dead = reason
        for exited in self._runs.values():
            if not exited.done():
                exited.set_exception(SandboxLost(reason))
        for job in self._jobs.values():
            if not job.done():
                job.set_exception(SandboxLost(reason))


def _real(path: str) -> str:
    return os.path.realpath(path)


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    modules = [str(Path(__file__).parents[3]), *(path for path in sys.path if path)]
    env = {"PATH": PATH, "PYTHONPATH": os.pathsep.join(modules)}
    return subprocess.Popen([sys.executable, "-P", "-m", WARDEN, str(fd)], stdin=subprocess.DEVNULL, env=env, pass_fds=[fd])


def _wait(process: subprocess.Popen[bytes], scratch: str) -> bool:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return False
    remove_groups(Path(scratch).name)  # these are there still if the warden was killed
    with suppress(OSError):
        Path(scratch).rmdir()
    return True


def _write_maps(pid: int) -> None:
    """Map the ids of this process's user namespace to themselves; or, without privileges, only our own, to 0."""
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        if os.geteuid() == 0:
            lines = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
            text = "".join(f"{inside} {inside} {count}\n" for inside, _, count in lines)
        else:
            if kind == "gid":
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            text = f"0 {own} 1\n"
        Path(f"/proc/{pid}/{kind}_map").write_text(text)
