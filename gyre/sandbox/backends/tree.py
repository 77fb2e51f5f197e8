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


def others_can_read(path: str) -> bool:
    """Whether a sandbox's uid can read what is bound. A socket cannot be copied: its owner sees to its mode."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return True  # whoever mounts it will say that it is missing
    need = 0o005 if stat.S_ISDIR(mode) else 0o004
    return stat.S_ISSOCK(mode) or mode & need == need


def open_copy(source: Path, target: Path) -> None:
    """A copy that everyone can read."""
    copy_tree(source, target, None)
    for path in [target, *target.rglob("*")]:
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(stat.S_IMODE(mode) | (0o555 if mode & 0o100 else 0o444))


def check_tree(source: Path) -> None:
    """`TreeError` if there is something that `copy_tree` would not copy."""
    try:
        kinds = [source.lstat().st_mode, *(Path(folder, name).lstat().st_mode for folder, below, files in os.walk(source) for name in below + files)]
    except OSError as e:
        raise TreeError(f"cannot read {e.filename}: {e.strerror}", task_at_fault=True) from None
    if not stat.S_ISDIR(kinds[0]) or not all(stat.S_ISREG(k) or stat.S_ISDIR(k) or stat.S_ISLNK(k) for k in kinds):
        raise TreeError(f"{source} must be a directory of files, directories and links alone", task_at_fault=True)
