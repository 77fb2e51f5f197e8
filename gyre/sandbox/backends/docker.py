"""Sandboxes as containers of a Docker Engine, or of Podman behind the same API: whatever DOCKER_HOST's Unix socket leads to.

A workspace is a *keeper*, an idle container that holds two sized tmpfs volumes (such a volume is empty once nobody mounts it), the workspace itself
and /logs/verifier, and that alone touches them as root of the container. A sandbox is one more container, made for one command and removed after it.

Invariants
- A sandbox has no network, a read-only root, an unprivileged uid, no capability, no new privilege, the system-call filter of seccomp.py, and limits
  of memory, processes and time. All that it can write is sized: its workspace, /tmp, /dev/shm, /logs/verifier. Its output is never logged to disk.
- Everything bears labels; what a dead owner left is removed by them (reaper.py): at its death, and at the start of the next.
- Names are ours: whatever a call in a thread had made when its waiter was cancelled is found by its name, and removed.

The SDK blocks: calls are made in threads of our own. Output is read by the event loop, from the socket of the attached container; its end is the
container's.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, TypeVar

from docker.errors import DockerException, NotFound

from gyre.config import Sandbox
from gyre.errors import DeadlineExceeded, UsageError
from gyre.sandbox.backends import lifeline, reaper, seccomp
from gyre.sandbox.backends.base import LOGS, MAX_COLLECT_BYTES, Exit, Image, InfraSetupFailed, SandboxLost, Spec, TaskSetupFailed, Workspace
from gyre.sandbox.backends.container import KEPT_LOGS, LOGS_MB, READY, REFRESH, Recipe, Space, bound, volume, volume_options
from gyre.sandbox.backends.images import Images
from gyre.sandbox.backends.output import THROTTLE_S, Capped, Frames
from gyre.sandbox.backends.tree import TreeError, check_tree, open_copy, others_can_read

THREADS: Final = 16
GRACE_S: Final = 15.0
CLOSE_S: Final = 60.0
CHUNK: Final = 1 << 18
MAX_WORD: Final = 1 << 17  # Linux takes no longer argument
_T = TypeVar("_T")


class Docker:
    """See the module; the protocol is `base.Backend`."""

    name = "docker"

    def __init__(self, table: Sandbox, *, run: str, unsafe: bool) -> None:
        self.notes: list[str] = []
        self._table, self._run, self._unsafe = table, run, unsafe
        self._numbers = itertools.count()
        self._spaces: dict[str, Space] = {}
        self._next_start = 0.0
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for left in lifeline.orphaned_homes():
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        try:
            self._client = await asyncio.to_thread(reaper.connect, THREADS)
            info, version = await asyncio.to_thread(lambda: (self._client.api.info(), self._client.api.version()))
        except (DockerException, OSError) as e:
            remedy = "start one, name its socket in DOCKER_HOST, or use --backend bubblewrap"
            raise UsageError("--backend docker", f"no Docker daemon answers ({e})", remedy) from None
        self._api = self._client.api
        self._images = Images(self._client, self._table.image)
        self._home = lifeline.make_home()
        self._threads = ThreadPoolExecutor(THREADS, "docker")
        self._check(info)
        self._adapt(version)
        await self._call(reaper.reap, self._api)
        self._watch = reaper.watch(self._home.name)

    def _check(self, info: Mapping[str, Any]) -> None:
        """What the daemon says that it can do. `UsageError` if that is too little."""
        if not self._api.base_url.startswith("http+docker://localhost"):
            raise UsageError(
                "DOCKER_HOST", "not a Unix socket", "run gyre-sandbox on the daemon's machine: it shares files and sockets with containers"
            )
        options = " ".join(info.get("SecurityOptions") or [])
        if not info.get("MemoryLimit") or ("name=rootless" in options and str(info.get("CgroupVersion")) == "1"):
            self._lacking("this daemon cannot limit memory", "run it as root, or on cgroup version 2")
        if "name=seccomp" not in options:
            self._lacking("this daemon cannot filter system calls", "use one with seccomp")
        for key, what in (("SwapLimit", "swap: memory_mb holds without it"), ("PidsLimit", "processes"), ("CpuCfsQuota", "processor time")):
            if info.get(key) is False:
                self.notes.append(f"this daemon cannot limit {what}")
        runtimes = info.get("Runtimes") or {}
        if self._table.runtime and runtimes and self._table.runtime not in runtimes:
            known = ", ".join(sorted(runtimes))
            raise UsageError("run.toml", f"the daemon has no runtime {self._table.runtime!r}", f"give one of {known}", "sandbox.runtime")

    def _lacking(self, what: str, remedy: str) -> None:
        if not self._unsafe:
            raise UsageError("--backend docker", what, f"{remedy} (or accept it with --unsafe)")
        self.notes.append(what)

    def _adapt(self, version: Mapping[str, Any]) -> None:
        """The filter, and the options of /tmp, as this kind of daemon wants them."""
        profile, tmp = seccomp.profile(), "nr_inodes=16384,mode=1777,exec"
        if any("podman" in part["Name"].lower() for part in version.get("Components") or []):
            file = self._home / "seccomp.json"
            file.write_text(profile)
            profile, tmp = str(file), "mode=1777,exec"
            self.notes.append("Podman does not bound the number of files in /tmp: only their size, and the memory limit, do")
        security = ["no-new-privileges:true", f"seccomp={profile}"]
        self._recipe = Recipe(labels=reaper.labels(self._home.name, self._run), security=security, runtime=self._table.runtime, tmp=tmp)

    # --- the protocol -----------------------------------------------------------------------------------------------------------------

    async def workspace(self, source: str | None, size_mb: int, *, place: str = "", image: Image | None = None, timeout_s: float = 60.0) -> Workspace:
        found = await self._images.get(image or Image())
        space = Space(self._new_name(), found, place or found.place)
        workspace = Workspace(key=space.name, place=space.place, path=space.name, slot=0)
        self._spaces[space.name] = space
        try:
            async with asyncio.timeout(timeout_s):
                with _faults(InfraSetupFailed):
                    await self._make(space, source, size_mb)
        except BaseException as e:
            with suppress(SandboxLost):
                await self.drop(workspace)
            if isinstance(e, TimeoutError):
                raise DeadlineExceeded("a workspace to be made", timeout_s) from None
            raise
        return workspace

    async def drop(self, workspace: Workspace) -> None:
        space = self._spaces.get(workspace.key)
        if space is None:
            return
        assert not space.busy, "a sandbox still uses this workspace"
        if space.removals:
            await asyncio.wait(space.removals)
        with _faults(SandboxLost):
            await self._call(self._remove, space.name, space.volumes)
        del self._spaces[workspace.key]

    async def run(self, spec: Spec) -> Exit:
        space = self._spaces[spec.workspace.key]
        if space.busy:
            raise AssertionError("one sandbox at a time in a workspace")
        if any(len(word.encode()) >= MAX_WORD for word in (*spec.argv, *(f"{k}={v}" for k, v in spec.env.items()))):
            raise TaskSetupFailed(f"the command or its environment has a word of more than {MAX_WORD} bytes: use a file")
        name, out = self._new_name(), Capped(spec.limits.output_kb << 10)
        sockets: list[socket.socket] = []
        space.busy, ended = True, False
        try:
            with _faults(InfraSetupFailed):
                mounts = await self._call(self._mounts, spec, space, self._home / name)
                fresh = asyncio.ensure_future(self._refresh(space))
                try:
                    await self._call(self._create, name, self._recipe.sandbox(space, spec, mounts))
                finally:
                    await fresh
                await self._start(name, sockets)
            started, space.used = time.monotonic(), True
            with _faults(SandboxLost):
                timed_out = await self._until_end(name, sockets[0], out, spec.limits.timeout_s)
                seconds = time.monotonic() - started
                state = await self._call(self._state, name)
                ended = True
                files = {f: data for f in spec.collect if (data := await self._call(self._collect, space, f)) is not None}
        finally:
            space.busy = False
            for opened in sockets:
                opened.close()
            removal = asyncio.ensure_future(self._clear(name))
            space.removals.add(removal)
            removal.add_done_callback(space.removals.discard)
            if not ended:
                await asyncio.wait({removal})
        status, oom = (137 if timed_out else state["ExitCode"]), bool(state["OOMKilled"])
        return Exit(status=status, timed_out=timed_out, oom=oom, output=out.value(), output_bytes=out.total, seconds=seconds, files=files)

    async def close(self) -> None:
        if self._client is None:
            return
        if self._watch is not None:
            if await self._all_removed():
                await asyncio.to_thread(self._watch.communicate, b"\n", GRACE_S)
            else:  # it goes on removing without us
                Thread(target=self._watch.communicate, daemon=True).start()
            self._watch = None
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)
            shutil.rmtree(self._home, ignore_errors=True)
        self._client.close()
        self._client = None

    async def _all_removed(self) -> bool:
        """Whether nothing of ours is left, after a while; a daemon may be gone, or stuck."""
        with suppress(DockerException, OSError):
            async with asyncio.timeout(CLOSE_S):
                while await asyncio.to_thread(reaper.reap, self._api, self._home.name.__eq__):
                    pass
                return True
        return False

    # --- containers -------------------------------------------------------------------------------------------------------------------

    async def _make(self, space: Space, source: str | None, size_mb: int) -> None:
        """Volumes, and the keeper that fills them."""
        sockets: list[socket.socket] = []
        try:
            await self._call(self._create_keeper, space, source, size_mb)
            await self._start(space.name, sockets)
            said = Capped(4096)
            with suppress(OSError):
                frames = Frames()
                while not said.value().endswith(READY) and (data := await self._loop.sock_recv(sockets[0], CHUNK)):
                    for piece in frames.undo(data):
                        said.add(piece)
        finally:
            for opened in sockets:
                opened.close()
        text = said.value().decode(errors="replace").strip()
        if not text.endswith("ready"):
            if "No space left" in text:
                raise TaskSetupFailed(f"the task's files do not fit into a workspace of {size_mb} MB")
            raise InfraSetupFailed(text or "the container that keeps a workspace ended at once")

    def _create_keeper(self, space: Space, source: str | None, size_mb: int) -> None:
        if source is not None:
            source = os.path.realpath(source)
            try:
                check_tree(Path(source))
            except TreeError as e:
                raise TaskSetupFailed(str(e)) from None
        for name, mb in zip(space.volumes, (size_mb, LOGS_MB), strict=True):
            self._api.create_volume(name, "local", volume_options(mb), self._recipe.labels)
        self._create(space.name, self._recipe.keeper(space, source, size_mb))

    def _mounts(self, spec: Spec, space: Space, copies: Path) -> list[dict[str, Any]]:
        """Of a sandbox. What its uid could not read is copied first."""
        mounts = [volume(space.volumes[0], space.place)]
        mounts += [volume(space.volumes[1], LOGS)] if spec.collect else []
        for n, bind in enumerate(spec.binds):
            source = os.path.realpath(bind.source)
            if not Path(source).exists():  # Podman would make it
                raise InfraSetupFailed(f"{source} is to be mounted, and does not exist")
            if bind.readonly and not others_can_read(source):
                copies.mkdir(exist_ok=True)
                try:
                    open_copy(Path(source), copies / str(n))
                except TreeError as e:
                    raise (TaskSetupFailed if e.task_at_fault else InfraSetupFailed)(str(e)) from None
                source = str(copies / str(n))
            mounts.append(bound(source, bind.target, readonly=bind.readonly))
        return mounts

    def _create(self, name: str, config: dict[str, Any]) -> None:
        self._api.create_container_from_config(config, name)

    async def _start(self, name: str, sockets: list[socket.socket]) -> None:
        """Attach to its output, then start it, not faster than the rate."""
        now, apart = self._loop.time(), 1 / self._table.starts_per_s
        self._next_start = max(now, self._next_start + apart)
        await asyncio.sleep(self._next_start - now)
        await self._call(self._attach_and_start, name, sockets)

    def _attach_and_start(self, name: str, sockets: list[socket.socket]) -> None:
        attached = self._api.attach_socket(name, {"stdout": 1, "stderr": 1, "stream": 1})
        opened: socket.socket = attached._sock  # what is around it blocks
        sockets.append(opened)
        attached.close()
        opened.setblocking(False)
        self._api.start(name)

    async def _until_end(self, name: str, opened: socket.socket, out: Capped, timeout_s: float) -> bool:
        """Read until the container ends, by itself or at its deadline: then True. `SandboxLost`."""
        reading = asyncio.ensure_future(self._read(opened, out))
        try:
            if (await asyncio.wait({reading}, timeout=timeout_s))[0]:
                return False
            await self._call(self._kill, name)
            if not (await asyncio.wait({reading}, timeout=GRACE_S))[0]:
                raise SandboxLost(f"a sandbox did not end {GRACE_S:.0f} s after its deadline")
            return True
        finally:
            if reading.cancel():
                await asyncio.wait({reading})

    async def _read(self, opened: socket.socket, out: Capped) -> None:
        frames = Frames()
        with suppress(OSError):
            while data := await self._loop.sock_recv(opened, CHUNK):
                for piece in frames.undo(data):
                    out.add(piece)
                if out.full:
                    await asyncio.sleep(THROTTLE_S)

    def _kill(self, name: str) -> None:
        with suppress(DockerException):  # it has ended
            self._api.kill(name)

    def _state(self, name: str) -> dict[str, Any]:
        """Of a container whose output has ended: it is dead, or the daemon is. `SandboxLost`."""
        try:
            self._api.wait(name, timeout=GRACE_S)
            state: dict[str, Any] = self._api.inspect_container(name)["State"]
        except NotFound:
            state = {"Status": "removing"}
        if state["Status"] == "removing":
            raise SandboxLost("somebody removed the sandbox's container")
        return state

    def _collect(self, space: Space, file: str) -> bytes | None:
        """A small regular file of /logs/verifier, as an archive with one member; never what a link points to."""
        try:
            chunks, found = self._api.get_archive(space.name, f"{KEPT_LOGS}/{file}")
        except NotFound:
            return None
        if found["linkTarget"] not in ("", f"{KEPT_LOGS}/{file}"):  # Docker would send the link, Podman what it points to in the keeper
            return None
        data = b""
        for chunk in chunks:
            if len(data) <= 2 * MAX_COLLECT_BYTES:
                data += chunk
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.next()
            if member is None or not member.isreg() or member.size > MAX_COLLECT_BYTES:
                return None
            content = archive.extractfile(member)
            return content.read() if content else None

    async def _refresh(self, space: Space) -> None:
        """A used workspace can be entered again, and /logs/verifier is empty."""
        if space.used:
            with _faults(SandboxLost):
                await self._call(self._exec, space.name, REFRESH)

    def _exec(self, name: str, script: str) -> None:
        made = self._api.exec_create(name, ["sh", "-c", script], user="0:0")["Id"]
        attached = self._api.exec_start(made, socket=True)  # the SDK itself reads without a deadline
        opened: socket.socket = attached._sock
        opened.settimeout(reaper.CALL_S)
        said, frames = Capped(4096), Frames()
        try:
            while data := opened.recv(CHUNK):
                for piece in frames.undo(data):
                    said.add(piece)
        finally:
            attached.close()
            opened.close()
        if self._api.exec_inspect(made)["ExitCode"] != 0:
            raise SandboxLost(f"a workspace cannot be prepared again: {said.value().decode(errors='replace').strip()}")

    async def _clear(self, name: str) -> None:
        """Remove a sandbox's container and copies; what resists is left to the reaper."""
        with suppress(DockerException, OSError):
            await self._call(self._remove, name, ())
        await self._call(partial(shutil.rmtree, ignore_errors=True), self._home / name)

    def _remove(self, name: str, volumes: tuple[str, ...]) -> None:
        with suppress(NotFound):
            self._api.remove_container(name, force=True, v=True)
        for each in volumes:
            with suppress(NotFound):
                self._api.remove_volume(each)

    def _new_name(self) -> str:
        return f"{self._home.name}.{next(self._numbers)}"

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """In a thread. Cancelled, it waits for the call's end first: what that made can then be removed."""
        future = self._loop.run_in_executor(self._threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            future.cancelled() or future.exception()  # nobody asks for it any more
            raise


@contextmanager
def _faults(kind: type[Exception]) -> Iterator[None]:
    """What the daemon refuses is of that kind; a daemon that is gone loses the sandbox."""
    try:
        yield
    except DockerException as e:
        raise kind(getattr(e, "explanation", None) or str(e)) from None
    except OSError as e:
        raise SandboxLost(f"the daemon does not answer ({e})") from None
