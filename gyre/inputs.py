"""What people wrote: files, `--set` flags and sets of tasks, read once, with the errors that name file and remedy.

Nothing here knows what a file means, but that a directory with a task.toml is a task. Files are small: whatever is longer than `MOST_BYTES`
(a device, a dump given by mistake) is refused.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Final

from gyre.errors import UsageError

MOST_BYTES: Final = 64 << 20


def text(file: Path, remedy: str, key: str | None = None) -> str:
    """The UTF-8 text of a file. `remedy` says what to give instead. Raises `UsageError`."""
    try:
        with file.open("rb") as f:
            data = f.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UsageError(str(file), f"longer than {MOST_BYTES >> 20} MiB", remedy, key)
        return data.decode("utf-8")
    except FileNotFoundError:
        raise UsageError(str(file), "no such file", remedy, key) from None
    except (OSError, ValueError) as e:
        raise UsageError(str(file), f"cannot be read ({e})", remedy, key) from None


def toml(file: Path, remedy: str) -> dict[str, Any]:
    """The content of a TOML file. Raises `UsageError`."""
    content = text(file, remedy)
    try:
        return tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise UsageError(str(file), f"not TOML: {e}", "mend that line") from None


def assignment(item: str, example: str) -> tuple[str, Any]:
    """`table.key=value` as the dotted key and the value: TOML, or else the bare words. Raises `UsageError` that shows the example."""
    dotted, eq, value = item.partition("=")
    if not eq:
        raise UsageError(f"--set {item}", "not of the form table.key=value", f"write for example --set {example}")
    try:
        return dotted.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return dotted.strip(), value


def task_dirs(path: Path, key: str | None = None) -> list[Path]:
    """The task directories of a set: the directory itself, those in it in the order of their names, or those that a list names, in its order.

    A list is a file of JSON lines, objects whose `path` is relative to the list; what else is in them is not looked at. Raises `UsageError`.
    """
    remedy = (
        f"{f'set {key} to' if key else 'give'} a Harbor task directory (with a task.toml), a directory of them, or a list (JSON lines with a path)"
    )
    if path.is_file():
        lines = text(path, remedy, key).splitlines()
        found = [path.parent / _listed(f"{path}:{n}", line, key) for n, line in enumerate(lines, 1) if line.strip()]
        if missing := [task for task in found if not (task / "task.toml").is_file()]:
            raise UsageError(str(path), f"{missing[0]} is no task directory", "paths are relative to the list", key)
    else:
        found = [path] if (path / "task.toml").exists() else sorted(p.parent for p in path.glob("*/task.toml"))
    if not found:
        raise UsageError(str(path), "holds no task directories" if path.exists() else "no such task directory", remedy, key)
    return found


def _listed(where: str, line: str, key: str | None) -> str:
    try:
        return str(json.loads(line)["path"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(where, "no JSON object with a path", 'write {"path": "a-task"} on each line', key) from None
