"""What people wrote: files and `--set` flags, read once, with the errors that name file and remedy.

Nothing here knows what a file means. Files are small: whatever is longer than `MOST_BYTES` (a device, a dump given by mistake) is refused.
"""

from __future__ import annotations

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
