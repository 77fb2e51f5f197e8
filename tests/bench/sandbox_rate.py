"""How fast a backend is, in a process of its own: python tests/bench/sandbox_rate.py [bubblewrap|docker]; prints one JSON object.

rate: workspace, `true`, drop, one at a time, per second. Medians of milliseconds: setup (a workspace), exec (`true` in a sandbox of its own),
teardown (the workspace dropped). at_once_s: seconds from nothing to nothing for 32 of them at the same time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import time

from gyre.config import Sandbox
from gyre.sandbox.backends.base import Backend, Limits, Spec
from gyre.sandbox.backends.choose import choose

N = {"bubblewrap": 60, "docker": 10}


async def one(backend: Backend) -> list[float]:
    """Seconds of set-up, exec and tear-down."""
    marks = [time.perf_counter()]
    workspace = await backend.workspace(None, 16)
    marks.append(time.perf_counter())
    done = await backend.run(Spec(workspace=workspace, argv=["true"], limits=Limits()))
    marks.append(time.perf_counter())
    assert done.status == 0, done
    await backend.drop(workspace)
    marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)]


async def main(name: str) -> None:
    backend = choose(name, unsafe=True, table=Sandbox(image=os.environ.get("GYRE_IMAGE", ""), starts_per_s=1000.0))
    await backend.start()
    try:
        phases = [await one(backend) for _ in range(N[name])]
        started = time.perf_counter()
        await asyncio.gather(*(one(backend) for _ in range(32)))
        at_once_s = time.perf_counter() - started
    finally:
        await backend.close()
    medians = {key: round(1000 * statistics.median(p[i] for p in phases), 1) for i, key in enumerate(("setup_ms", "exec_ms", "teardown_ms"))}
    print(json.dumps({"rate": len(phases) / sum(map(sum, phases)), **medians, "at_once_s": round(at_once_s, 2)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "bubblewrap"))
