"""Processes on hosts, this one or others over ssh: start them detached, find them again, follow and signal them.

Invariants
- Everything is a line of shell, run here or by the user's own `ssh`. A process's folder, RUN/node/NAME on its host, has what it was started with:
  `start`, on other hosts also run.toml and the keys of its kind. Secrets travel through ssh's standard input, never in a command.
- There are also `pid`, `lock`, its `log` (here in RUN/logs), and at last `exit`. A process lives as long as the lock is held, whatever became of
  pids, hosts and coordinators.
- A process is nobody's child: it outlives the coordinator and the connection. What only watches (`follow`) dies with the coordinator.
- Every call can be repeated. Starting what lives already is refused, or replaces it.

Not here: when to start and stop (machine.py), what to start (launch.py). Hosts need a POSIX shell, tar, coreutils and util-linux (flock, setsid).
"""

from __future__ import annotations

import asyncio
import io
import logging
import shlex
import shutil
import tarfile
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Final

from gyre.coord.hosts import Host
from gyre.coord.launch import Plan, folder_of
from gyre.coord.machine import UNREACHED
from gyre.errors import Busy, UsageError, WorkFailed

log = logging.getLogger(__name__)

CALL_S: Final = 60.0
FOLLOW_AGAIN_S: Final = (1.0, 15.0)
AT_ONCE: Final = 16  # calls
_OPTIONS: Final = ("ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL")

# $1: the process's folder
_START: Final = (  # $2: its log; $3: not empty if whoever holds the folder is to be replaced. In: a tar of the folder. Out: the pid
    "command -v flock >/dev/null && command -v setsid >/dev/null || { echo needs flock and setsid of util-linux >&2; exit 72; }; "
    'd=$1; mkdir -p -m 700 "$d" && exec 9>>"$d/lock" || exit 73; '
    'flock -w 1 9 || { [ -n "$3" ] && kill -9 "$(cat "$d/pid")" && flock -w 10 9; } || exit 75; '
    'rm -f "$d/pid"; tar -xof - -C "$d" && printf "%-4s\\n" "" >"$d/exit" || exit 73; '  # room for the code, should the disk be full then
    """setsid sh -c 'sh "$0/start" </dev/null >>"$1" 2>&1; printf "%-4s\\n" $? 1<>"$0/exit"' "$d" "$2" >/dev/null 2>&1 & """
    'until [ -s "$d/pid" ]; do sleep 0.05; done; cat "$d/pid"'
)
_FIND: Final = '[ -e "$1/lock" ] || exit 1; flock -n "$1/lock" true && exit 1; cat "$1/pid"'
_SIGNAL: Final = '[ -e "$1/lock" ] || exit 0; flock -n "$1/lock" true || kill "-$2" "$(cat "$1/pid")"'
_FOLLOW: Final = (  # $2: the first byte wanted of its log, if any. Ends with the process's exit code
    'f=; [ -z "$2" ] || { flock -n "$1/lock" true || f="-f --pid=$(cat "$1/pid")"; tail -c "+$2" -s 0.2 $f "$1/log"; }; '
    """exec flock "$1/lock" sh -c 'c=; read -r c <"$0/exit"; [ "$c" != 255 ] || c=1; exit ${c:-137}' "$1\""""
)


class Child:
    """A life of a process, of which `task` sees the end; `pid` 0 until it is known."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.task: asyncio.Task[None]


class Launcher:
    """The hosts of a run, as its coordinator reaches them."""

    def __init__(self, run_dir: Path, ssh: str = "ssh", keys: str = "") -> None:
        """`ssh`: the command with its options, shell-quoted; `keys`: the run's directory of keys. Raises `UsageError`."""
        self.run_dir = run_dir
        try:
            self._ssh = shlex.split(ssh)
        except ValueError as e:
            raise UsageError("net.ssh", f"quoting: {e}", "close the quote") from None
        if not self._ssh:
            raise UsageError("net.ssh", "is empty", "write for example: ssh -i ~/.ssh/cluster")
        if not shutil.which(_WITH_US[0]):
            raise UsageError("PATH", f"{_WITH_US[0]} is not there", "install util-linux")
        self._keys = Path(keys) if keys else None
        self._calls = asyncio.Semaphore(AT_ONCE)

    def argv(self, host: Host, *words: str) -> list[str]:
        """The command that runs `words` on a host."""
        if host.local:
            return list(words)
        program, *options = self._ssh
        ours = [word for option in _OPTIONS for word in ("-o", option)]
        port = ["-p", str(host.ssh_port)] if host.ssh_port else []
        user = ["-l", host.user] if host.user else []
        return [program, "-o", "BatchMode=yes", *options, *ours, *port, *user, "--", host.host, shlex.join(words)]

    async def call(self, host: Host, *words: str, stdin: bytes = b"", deadline_s: float = CALL_S) -> tuple[int, bytes, str]:
        """Run `words` on a host: exit code (`UNREACHED` also when it did not answer in time), output, last line of the errors."""
        async with self._calls:
            argv = self.argv(host, *words)
            try:
                child = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)
            except OSError as e:
                return 127 if host.local else UNREACHED, b"", f"{argv[0]} cannot be run ({e.strerror})"
            try:
                out, err = await asyncio.wait_for(child.communicate(stdin), deadline_s)
            except TimeoutError:
                return UNREACHED, b"", f"no answer within {deadline_s:.0f} s"
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
            lines = err.decode(errors="replace").strip().splitlines()
            return child.returncode or 0, out, lines[-1] if lines else ""

    async def start(self, plan: Plan, *, replace: bool = False) -> int | None:
        """Start a process; its pid, None if its host is not reached. Raises `Busy` if it runs there already and is not to be
        replaced, `WorkFailed`."""
        here = plan.host.local
        where = self.run_dir / "logs" / f"{plan.name}.log" if here else folder_of(self.run_dir, plan) / "log"
        if here:
            where.parent.mkdir(parents=True, exist_ok=True)
        words = ("sh", "-c", _START, "gyre", str(folder_of(self.run_dir, plan)), str(where), "1" if replace else "")
        code, out, err = await self.call(plan.host, *words, stdin=self._luggage(plan))
        match code:
            case 0:
                return int(out)
            case 75:
                raise Busy(f"{plan.name} runs on {plan.host.host} already, started by another coordinator; end it there, or give --resume")
            case _ if code == UNREACHED:
                log.warning("%s: %s is not reached: %s", plan.name, plan.host.host, err)
                return None
            case _:
                raise WorkFailed(f"{plan.name} cannot be started on {plan.host.host}: {err or f'exit code {code}'}")

    async def find(self, plan: Plan) -> int | None:
        """The pid of this process if it lives."""
        code, out, _ = await self.call(plan.host, "sh", "-c", _FIND, "gyre", str(folder_of(self.run_dir, plan)))
        return int(out) if code == 0 and out.strip() else None

    async def signal(self, plan: Plan, number: int) -> bool:
        """Send a signal, if it lives. False if its host is not reached."""
        code, _, _ = await self.call(plan.host, "sh", "-c", _SIGNAL, "gyre", str(folder_of(self.run_dir, plan)), str(number), deadline_s=15.0)
        return code != UNREACHED

    async def follow(self, plan: Plan) -> int:
        """Wait for a process's end while its log comes to RUN/logs. Its exit code; negative for a signal that killed it."""
        file = self.run_dir / "logs" / f"{plan.name}.log"
        pause_s, said = FOLLOW_AGAIN_S[0], False
        while True:
            with file.open("ab") as copy:
                first = "" if plan.host.local else str(copy.tell() + 1)
                argv = self.argv(plan.host, "sh", "-c", _FOLLOW, "gyre", str(folder_of(self.run_dir, plan)), first)
                child = await asyncio.create_subprocess_exec(
                    *_WITH_US, *argv, stdin=DEVNULL, stdout=copy, stderr=DEVNULL, start_new_session=True
                )  # fmt: skip
                try:
                    code = await child.wait()
                finally:
                    if child.returncode is None:
                        child.kill()
            if code != UNREACHED and code >= 0:
                return code if code <= 128 or code in (130, 143) else 128 - code
            if not said:
                log.warning("%s: the connection to %s is lost; what happens there is seen when it is back", plan.name, plan.host.host)
            said, pause_s = True, min(pause_s * 2, FOLLOW_AGAIN_S[1])
            await asyncio.sleep(pause_s)

    def _luggage(self, plan: Plan) -> bytes:
        """What goes into a process's folder before it starts: a tar."""
        files = {"start": _script(plan, folder_of(self.run_dir, plan)).encode()}
        if not plan.host.local:
            files["run.toml"] = (self.run_dir / "run.toml").read_bytes()
            if self._keys is not None and plan.kind != "rank":
                for file in [*self._keys.glob("*.key"), self._keys / f"{plan.kind}.key_secret"]:
                    files[f"keys/{file.name}"] = file.read_bytes()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o600
                tar.addfile(info, io.BytesIO(data))
        return packed.getvalue()


def _script(plan: Plan, folder: Path) -> str:
    """What starts a process in its folder: its environment may hold secrets, so it is in this file alone."""
    python, pid = shlex.quote(plan.argv[0]), shlex.quote(str(folder / "pid"))
    missing = shlex.quote(f"error: --cells: {plan.argv[0]} cannot be run; mend python= of that line")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in {"PYTHONUNBUFFERED": "1", **plan.env}.items()]
    lines += [f"echo $$ >{pid}.new; mv {pid}.new {pid}", f"command -v {python} >/dev/null || {{ echo {missing}; exit 2; }}"]
    return "\n".join([*lines, f"exec {shlex.join(plan.argv)}", ""])
