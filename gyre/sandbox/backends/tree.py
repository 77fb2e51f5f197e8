"""Copying a task's files into a workspace, for a given owner.

Regular files, directories and links as such; anything else is the task's fault. Nothing is followed, set-id bits are dropped, times are kept
(build tools look at them).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

CHUNK: Final = 1 << 20


class TreeError(Exception):
    """Something that cannot be copied."""

    def __init__(self, text: str, task_at_fault: bool) -> None:
        super().__init__(text)
        self.task_at_fault = task_at_fault


def copy_tree(source: Path, target: Path, uid: int | None) -> None:
    """Copy `source`, a directory or a file, to `target`, which must not exist. The copy belongs to `uid` (None: to the caller)."""
    try:
        info = source.lstat()
    except OSError as e:
        raise TreeError(f"cannot read {source}: {e.strerror}", task_at_fault=True) from None
    if stat.S_ISLNK(info.st_mode):
        target.symlink_to(source.readlink())
        if uid is not None:
            os.lchown(target, uid, uid)
        return
    if stat.S_ISDIR(info.st_mode):
        target.mkdir(mode=0o700)
        for entry in source.iterdir():
            copy_tree(entry, target / entry.name, uid)
    elif stat.S_ISREG(info.st_mode):
        _copy_file(source, target)
    else:
        raise TreeError(f"{source} is neither a file, a directory nor a link", task_at_fault=True)
    if uid is not None:
        os.chown(target, uid, uid)
    target.chmod(stat.S_IMODE(info.st_mode) & 0o777 | (0o700 if stat.S_ISDIR(info.st_mode) else 0o400))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as src, target.open("xb", buffering=0) as dst:
        while data := src.read(CHUNK):
            view = memoryview(data)
            while view:
                view = view[dst.write(view) :]
