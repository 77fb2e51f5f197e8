"""System calls for the warden: namespaces and mounts, and what it puts into them.

Everything here changes the calling process's own namespaces; nothing outside the warden may call it, but for the constants.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Final

from gyre.sandbox.backends.orders import MakeWorkspace
from gyre.sandbox.backends.tree import TreeError, copy_tree

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE, MNT_DETACH = 2, 4, 8, 0x4000, 0x80000, 2
PR_SET_PDEATHSIG: Final = 1


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int, what: str) -> None:
    """Enter new namespaces; `what` says in an error what is not permitted."""
    _check(_libc().unshare(flags), what)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _check(_libc().mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {kind} on {target}")


def unmount(target: str) -> None:
    """Detach a mount and remove its mount point; harmless if there is none."""
    _libc().umount2(target.encode(), MNT_DETACH)
    try:
        Path(target).rmdir()
    except OSError:
        return


def mount_tmpfs(path: str, size_mb: int) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    inodes = max(16384, size_mb * 512)
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mb}m,nr_inodes={inodes},mode=0755")


def enter_namespaces() -> bool:
    """New mount and pid namespaces, in a new user namespace (True) unless only root may have the rest (False)."""
    try:
        unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID, "unshare user, mount and pid namespaces")
    except OSError:
        if os.geteuid() != 0:
            raise
        unshare(CLONE_NEWNS | CLONE_NEWPID, "unshare mount and pid namespaces")
        return False
    return True


def make_workspace(order: MakeWorkspace) -> None:
    """In a child: mount, then copy."""
    mount_tmpfs(order.path, order.size_mb)
    try:
        if order.source is None:
            work = Path(order.path, "work")
            work.mkdir()
            os.chown(work, order.uid, order.uid)
        else:
            copy_tree(Path(order.source), Path(order.path, "work"), order.uid)
    except OSError as e:
        unmount(order.path)
        if e.errno == errno.ENOSPC:
            raise TreeError(f"the task's files do not fit into a workspace of {order.size_mb} MB", task_at_fault=True) from None
        raise


def make_etc(etc: Path) -> None:
    """An /etc without this machine's secrets: accounts of the sandbox, the linker's cache, links to alternatives."""
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:61000:61000:agent:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (etc / "group").write_text("root:x:0:\nagent:x:61000:\nnogroup:x:65534:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    for name in ("ld.so.cache", "services", "protocols", "mime.types", "debian_version", "os-release"):
        if Path("/etc", name).is_file():
            shutil.copyfile(Path("/etc", name), etc / name)
    if Path("/etc/alternatives").is_dir():
        shutil.copytree("/etc/alternatives", etc / "alternatives", symlinks=True)


def mount_proc() -> None:
    """A /proc of our own pid namespace."""
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def stop_propagation() -> None:
    """Later mounts of the host appear here, ours never there."""
    mount("none", "/", "", MS_REC | MS_SLAVE)


def die_with_parent() -> None:
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
