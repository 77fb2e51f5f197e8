"""How bubblewrap is called: which of its options exist here, and the arguments for one sandbox.

What an agent sees: /usr and its links read-only, a minimal /etc, its workspace (a sized tmpfs), sized /tmp and /dev/shm, no network but its own
loopback, nothing of the host's environment, and what `Spec.binds` names. The root directory itself is read-only.

`probe` looks at programs and their help, never at a version; `arguments` is pure but for looking whether /lib and its like are links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from gyre.errors import UsageError
from gyre.sandbox.backends import interpreter
from gyre.sandbox.backends.base import LOGS, PLACES, Spec

FIRST_UID: Final = 61000
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED: Final = ("--args", "--seccomp", "--json-status-fd", "--perms", "--cap-drop", "--remount-ro", "--unshare-cgroup-try")


class Features(msgspec.Struct, frozen=True):
    """What this machine offers."""

    bwrap: str
    wrapper: str  # setpriv as root, else prlimit
    root: bool
    sized_tmpfs: bool
    disable_userns: bool
    python: interpreter.Interpreter


def probe() -> Features:
    """Look for the programs. `UsageError` with the remedy if one is missing or too old."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UsageError("--backend bubblewrap", "bwrap is not installed", "run: apt-get install bubblewrap (or accept --backend process --unsafe)")
    root = os.geteuid() == 0
    tool = "setpriv" if root else "prlimit"
    wrapper = shutil.which(tool, path=PATH)
    if wrapper is None:
        raise UsageError("--backend bubblewrap", f"{tool} is not installed", "run: apt-get install util-linux")
    text = subprocess.run([bwrap, "--help"], capture_output=True, text=True, env={}, timeout=30, check=False).stdout
    options = set(text.split())
    if missing := [option for option in NEEDED if option not in options]:
        raise UsageError(bwrap, f"too old, it lacks {missing[0]}", "install bubblewrap 0.5 or newer")
    return Features(bwrap, wrapper, root, "--size" in options, "--disable-userns" in options, interpreter.find())


def arguments(features: Features, scratch: str, spec: Spec, binds: Sequence[tuple[str, str, bool]], logs: str) -> list[str]:
    """bwrap's arguments before the command. `binds` are (source, target, readonly), `logs` the run's own directory or ""."""
    args = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    args += ["--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    if features.root:
        args += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        args += ["--unshare-user", "--uid", str(FIRST_UID), "--gid", str(FIRST_UID)]
        args += ["--disable-userns"] if features.disable_userns else []
    args += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if Path(path).is_symlink():
            args += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).is_dir():
            args += ["--ro-bind", path, path]
    args += ["--ro-bind", f"{scratch}/etc", "/etc", "--proc", "/proc", "--dev", "/dev"]
    for path, size_mb in (("/tmp", spec.limits.tmp_mb), ("/dev/shm", spec.limits.tmp_mb)):
        args += ["--size", str(size_mb << 20)] if features.sized_tmpfs else []
        args += ["--perms", "1777", "--tmpfs", path]
    targets = [spec.workspace.place, *(target for _, target, _ in binds), *([LOGS] if logs else [])]
    path = PATH
    if features.python.links:
        path = f"{interpreter.PLACE}/bin:{PATH}"
        targets += [interpreter.PLACE, features.python.home or interpreter.PLACE]
    for parent in sorted({str(parent) for target in targets for parent in PurePosixPath(target).parents} - {"/"}):
        args += ["--perms", "0755", "--dir", parent]  # those that bwrap makes by itself are for root alone
    if features.python.links:
        args += ["--ro-bind", f"{scratch}/python", interpreter.PLACE]
    if features.python.home:
        args += ["--ro-bind", features.python.home, features.python.home]
    args += ["--bind", f"{spec.workspace.path}/work", spec.workspace.place]
    for source, target, readonly in binds:
        args += ["--ro-bind" if readonly else "--bind", source, target]
    for hidden in features.python.hidden:
        args += ["--perms", "0755", "--tmpfs", hidden, "--remount-ro", hidden]
    if logs:
        args += ["--bind", logs, LOGS]
    env = {"PATH": path, "HOME": "/tmp", "TMPDIR": "/tmp", "USER": "agent", "LANG": "C.UTF-8", "GYRE_WORK": spec.workspace.place}
    env |= {PLACES[target]: target for target in targets if target in PLACES}
    for name, value in (env | dict(spec.env)).items():
        args += ["--setenv", name, value]
    return [*args, "--chdir", spec.workspace.place, "--remount-ro", "/"]
