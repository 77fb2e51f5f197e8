"""Sandboxes per second of the bubblewrap backend, one at a time: printed as one number, by a process of its own."""

from __future__ import annotations

import asyncio
import time

from gyre.sandbox.backends.base import Limits, Spec
from gyre.sandbox.backends.choose import choose

N = 60


async def main() -> None:
    backend = choose("bubblewrap", unsafe=True)
    await backend.start()
    try:
        started = time.perf_counter()
        for _ in range(N):
            workspace = await backend.workspace(None, 16)
            done = await backend.run(Spec(workspace=workspace, argv=["true"], limits=Limits()))
            assert done.status == 0, done
            await backend.drop(workspace)
        print(N / (time.perf_counter() - started))
    finally:
        await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
