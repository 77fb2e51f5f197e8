"""The stacks of a run's processes, out of their logs: each writes them there when it gets SIGUSR1 (gyre/net/worker.py), on whatever host it is.

A process that says nothing in time has no stack, which says something too: it is stopped, or out of reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

_ANSWER_S: Final = 3.0  # for a signal and a log over ssh
_MOST_BYTES: Final = 1 << 20  # of all together: an event is one message


async def stacks(logs: Path, names: Iterable[str], ask: Callable[[str], None]) -> dict[str, str]:
    """Have each of them asked, and wait for what its log grows by."""
    files = {name: logs / f"{name}.log" for name in names}
    before = {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}
    for name in files:
        ask(name)
    await asyncio.sleep(_ANSWER_S)
    each = min(16 << 10, _MOST_BYTES // max(1, len(files)))
    return {name: _dumped(file, before[name], each) for name, file in files.items()}


def _dumped(file: Path, start: int, most: int) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as log:
        log.seek(start)
        text = log.read(4 * most).decode(errors="replace")
    return "\n".join(line for line in text.splitlines() if line.startswith(("Thread 0x", "Current thread 0x", "Task ", '  File "')))[:most]
