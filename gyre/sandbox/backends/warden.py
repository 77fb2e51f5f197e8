"""The warden: the process that owns a backend's namespaces, and starts sandboxes in them.

    gyre-sandbox ──socket──▶ outer (cleans up) ──▶ inner, pid 1 of its own pid namespace ──▶ bwrap, one per sandbox

Invariants
- Everything it mounts is in its own mount namespace and everything it starts in its own pid namespace. When the socket closes (its owner was
  killed, say) the inner one exits, and the kernel kills all sandboxes and drops all mounts. Then the outer one removes the cgroups and the mount
  point. So `kill -9` of the owner leaves nothing behind.
- It runs in a user namespace: its root is not the machine's. As root all ids are mapped, so that each slot has a uid of its own, and no further user
  namespaces can be made. Otherwise the one id there is is mapped to 0, and each sandbox makes one more user namespace.
- It forks before anything that may take long, so its loop never waits.
- A sandbox has ended only when bwrap and the sandbox's own pid 1 have been reaped: then nothing of it lives.

Errors of a child before it executes bwrap go down the status pipe as `!text`, and a leading `!!` says that the task is at fault.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from gyre.sandbox.backends.base import MAX_COLLECT_BYTES
from gyre.sandbox.backends.cgroup import Cgroups, current_hierarchies, kill_and_remove
from gyre.sandbox.backends.mounts import (
    die_with_parent,
    enter_namespaces,
    make_etc,
    make_workspace,
    mount_proc,
    mount_tmpfs,
    stop_propagation,
    unmount,
)
from gyre.sandbox.backends.orders import (
    MAX_MESSAGE,
    Done,
    DropWorkspace,
    Exited,
    Failed,
    Kill,
    Launch,
    MakeWorkspace,
    Mapped,
    Order,
    Ready,
    Report,
    Setup,
    Unshared,
)
from gyre.sandbox.backends.tree import TreeError, copy_tree

SCRATCH_MB: Final = 256  # what sandboxes share: the filter, /etc, a virtual environment
RUN_MB: Final = 16  # a run's own tmpfs: /logs/verifier, copies of binds
IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # its owner decides; it ends when the socket closes
ARGS_FD, SECCOMP_FD, STATUS_FD = 3, 4, 5


class _Run:
    """A sandbox between `Launch` and `Exited`."""

    def __init__(self, order: Launch, pid: int, status_fd: int) -> None:
        self.order = order
        self.started = time.monotonic()
        self.deadline = self.started + order.timeout_s
        self.waiting = {pid}
        self.pid = pid
        self.status_fd = status_fd
        self.killed = False
        self.timed_out = False


class Inner:
    """Pid 1 of the namespaces."""

    def __init__(self, channel: socket.socket, setup: Setup) -> None:
        self.channel = channel
        self.setup = setup
        self.decoder = msgspec.msgpack.Decoder(Order)
        self.cgroups = Cgroups(setup.name, current_hierarchies())
        self.runs: dict[int, _Run] = {}
        self.workers: dict[int, tuple[int, int]] = {}  # pid -> order's id, pipe with its error
        self.seccomp = f"{setup.scratch}/seccomp"

    def prepare(self) -> list[str]:
        """Mounts and files that all sandboxes share; returns the notes."""
        mount_proc()
        if self.setup.root and self.setup.own_users:  # the limit is this user namespace's own
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
        mount_tmpfs(self.setup.scratch, SCRATCH_MB)
        Path(self.seccomp).write_bytes(self.setup.seccomp)
        make_etc(Path(self.setup.scratch, "etc"))
        python = Path(self.setup.scratch, "python")
        python.mkdir()
        for source, target in self.setup.python:
            place = python / target
            place.parent.mkdir(parents=True, exist_ok=True)
            if Path(source).is_dir():
                shutil.copytree(source, place)
            else:
                shutil.copy2(source, place)
        for link, target in self.setup.python_links:
            (python / link).parent.mkdir(parents=True, exist_ok=True)
            (python / link).symlink_to(target)
        if self.setup.python_cfg:
            (python / "pyvenv.cfg").write_text(self.setup.python_cfg)
        return self.cgroups.notes

    def serve(self) -> None:
        """Until the socket closes."""
        wake, wake_in = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_in, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_in)
        gc.freeze()  # collections would touch, and so copy, the pages that children share
        gc.disable()  # and there is nothing cyclic here
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            deadlines = [run.deadline for run in self.runs.values() if not run.killed]
            wait_ms = max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None
            ready = {fd for fd, _ in poll.poll(wait_ms)}
            if wake in ready:
                os.read(wake, 4096)
            self._reap()
            if self.channel.fileno() in ready and not self._receive():
                return
            now = time.monotonic()
            for run in list(self.runs.values()):
                if not run.killed and now >= run.deadline:
                    run.timed_out = True
                    self._kill(run)

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.channel, MAX_MESSAGE * 2, 4)
        if not data:
            return False
        order = self.decoder.decode(data)
        if isinstance(order, Launch):
            self._launch(order, fds[0])
        elif isinstance(order, MakeWorkspace):
            self._work(order.id, lambda: make_workspace(order))
        elif isinstance(order, DropWorkspace):
            unmount(order.path)
            self._report(Done(order.id))
        elif isinstance(order, Kill) and order.id in self.runs and not self.runs[order.id].killed:
            self._kill(self.runs[order.id])
        for fd in fds:
            os.close(fd)
        return True

    def _report(self, report: Report) -> None:
        send(self.channel, report)

    def _work(self, id: int, job: Callable[[], None]) -> None:
        """Do something lengthy in a child; its end is reported as `Done`."""
        out, into = os.pipe()
        try:
            pid = os.fork()
        except OSError as e:
            os.close(out)
            self._report(Done(id, str(e)))
        else:
            if pid == 0:
                _child(into, job, then_exit=True)
            self.workers[pid] = (id, out)
        os.close(into)

    def _launch(self, order: Launch, output: int) -> None:
        out, into = os.pipe()
        try:
            join = self.cgroups.join_files(order.slot, memory_bytes=order.memory_mb << 20, pids=order.pids + 4)  # bwrap's own processes
            pid = os.fork()
        except OSError as e:  # too many processes, or the slot's cgroup does not take its limits
            os.close(out)
            self._report(Exited(order.id, None, False, False, 0.0, str(e), {}))
        else:
            if pid == 0:
                _child(into, lambda: self._become_sandbox(order, output, into, join))
            self.runs[order.id] = _Run(order, pid, out)
        os.close(into)

    def _become_sandbox(self, order: Launch, output: int, status: int, join: list[str]) -> None:
        """In the child: limits, own mounts, then bwrap, which gets no environment and its arguments unseen."""
        for file in join:
            _write(file, b"0")
        _write("/proc/self/oom_score_adj", b"500")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.setup.root:
            resource.setrlimit(resource.RLIMIT_NPROC, (order.pids, order.pids))
        if not self.cgroups.has("memory"):
            resource.setrlimit(resource.RLIMIT_AS, (order.memory_mb << 20, order.memory_mb << 20))
        Path(order.work).chmod(0o755)
        if order.path:
            mount_tmpfs(order.path, RUN_MB)
            logs = Path(order.path, "logs")
            logs.mkdir()
            os.chown(logs, order.uid, order.uid)
            for source, target in order.copies:
                copy_tree(Path(source), Path(target), order.uid)
        args = os.memfd_create("args")
        os.write(args, b"".join(a.encode() + b"\0" for a in order.args))
        os.lseek(args, 0, os.SEEK_SET)
        # First out of the way of the numbers below, then into place; dup2 makes them inheritable.
        high = [os.dup(fd) for fd in (output, args, os.open(self.seccomp, os.O_RDONLY), status)]
        high = [_above(fd, 16) for fd in high]
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, number in zip([null, high[0], high[0], *high[1:]], range(6), strict=True):
            os.dup2(fd, number)
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, *IGNORED):  # ignored by Python or by us, and that would be inherited
            signal.signal(number, signal.SIG_DFL)
        argv = [self.setup.bwrap, "--args", str(ARGS_FD), "--seccomp", str(SECCOMP_FD), "--json-status-fd", str(STATUS_FD)]
        if not self.setup.seccomp:
            del argv[3:5]
        os.execve(self.setup.bwrap, [*argv, "--", *order.command], {})

    def _kill(self, run: _Run) -> None:
        """Kill bwrap and what it started. An orphan appears here as a child of ours: see `_reap`."""
        run.killed = True
        for pid in [*_children(run.pid), run.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.workers:
                id, pipe = self.workers.pop(pid)
                text = _drain(pipe)
                error = text.lstrip("!") if text else "" if status == 0 else f"a helper process died (status {status})"
                self._report(Done(id, error, text.startswith("!!")))
                continue
            for run in [r for r in self.runs.values() if pid in r.waiting]:
                run.waiting.discard(pid)
                if pid == run.pid:
                    run.waiting |= self._kill_orphans()
                if not run.waiting:
                    self._finish(run)

    def _kill_orphans(self) -> set[int]:
        """Children of ours that we did not start: first processes of sandboxes whose bwrap is dead, this run's among them.

        bwrap ends as soon as it is told the command's exit status; then its sandbox's pid namespace is still being emptied.
        """
        orphans = set(_children(os.getpid())) - {*self.workers, *(run.pid for run in self.runs.values())}
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        return orphans

    def _finish(self, run: _Run) -> None:
        del self.runs[run.order.id]
        status, error = _parse_status(_drain(run.status_fd))
        if run.killed:
            status, error = 137, ""
        files = _collect(run.order) if run.order.path else {}
        if run.order.path:
            unmount(run.order.path)
        oom = self.cgroups.new_oom_kills(run.order.slot) > 0
        if oom and status is None and not error:  # bwrap itself was the victim
            status = 137
        self._report(Exited(run.order.id, status, run.timed_out, oom, time.monotonic() - run.started, error, files))


def _above(fd: int, low: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)


def _child(errors: int, job: Callable[[], None], then_exit: bool = False) -> NoReturn:
    """The rest of a forked child's life: errors become text for the parent."""
    try:
        job()
        os._exit(0 if then_exit else 1)
    except TreeError as e:
        _say(errors, f"{'!!' if e.task_at_fault else '!'}{e}")
    except OSError as e:
        _say(errors, f"!{e}")
    except BaseException:
        _say(errors, "!" + traceback.format_exc(limit=3).replace("\n", " "))
    finally:
        os._exit(1)


def _say(fd: int, text: str) -> None:
    os.write(fd, text.encode()[:4000])


def _write(file: str, data: bytes) -> None:
    fd = os.open(file, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _drain(pipe: int) -> str:
    """What is in a pipe whose writers are gone."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 65536).decode(errors="replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(pipe)


def _parse_status(text: str) -> tuple[int | None, str]:
    """bwrap's JSON lines, the last of which has the exit code if the command was started; or an error of ours."""
    if text.startswith("!"):
        return None, text.lstrip("!")
    for line in reversed(text.splitlines()):
        try:
            code = msgspec.json.decode(line, type=dict[str, int]).get("exit-code")
        except msgspec.DecodeError:
            continue
        if code is not None:
            return code, ""
    return None, ""


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _collect(order: Launch) -> dict[str, bytes]:
    """The files asked for, if they are regular and small. Nothing is followed: the directory was the sandbox's to write."""
    files: dict[str, bytes] = {}
    try:
        logs = os.open(f"{order.path}/logs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return files  # the child failed before it was made
    for name in order.collect:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=logs)
        except OSError:
            continue
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_size <= MAX_COLLECT_BYTES:
            files[name] = os.read(fd, MAX_COLLECT_BYTES)
        os.close(fd)
    os.close(logs)
    return files


def send(channel: socket.socket, report: Report) -> None:
    channel.sendall(msgspec.msgpack.encode(report))


def receive(channel: socket.socket) -> Order:
    return msgspec.msgpack.decode(channel.recv(MAX_MESSAGE * 8), type=Order)


def _inner(channel: socket.socket, setup: Setup) -> None:
    die_with_parent()
    inner = Inner(channel, setup)
    try:
        notes = inner.prepare()
    except OSError as e:
        send(channel, Failed(str(e)))
        return
    send(channel, Ready(notes))
    inner.serve()


def main() -> None:
    """Run with the number of the socket's descriptor as the only argument."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        send(channel, Unshared(enter_namespaces()))
        setup = receive(channel)
        if isinstance(setup, Mapped):
            setup = receive(channel)
        stop_propagation()
    except OSError as e:
        send(channel, Failed(str(e)))
        return
    assert isinstance(setup, Setup)
    groups = [parent / setup.name for h in current_hierarchies().values() for parent in h.parents]  # now: /proc will be the inner one's
    pid = os.fork()
    if pid == 0:
        try:
            _inner(channel, setup)
        except BrokenPipeError:  # the owner is gone
            pass
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    channel.close()
    os.waitpid(pid, 0)
    for group in groups:
        kill_and_remove(group)
    unmount(setup.scratch)


if __name__ == "__main__":
    main()
