"""Where a simulated cell computes: one thing after the other, in the order of asking, each taking its virtual time.

Invariant: what was asked is done although the asker was cancelled, as in a thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from theorem.clock import Process, VirtualLoop


class Compute:
    """`train.protocols.Compute` in virtual time; `seconds` is the most that a call takes."""

    def __init__(self, loop: VirtualLoop, process: Process, seed: str, seconds: float) -> None:
        self._loop, self._process, self._seconds = loop, process, seconds
        self._rng = random.Random(seed)
        self._last: asyncio.Task[Any] | None = None
        self._count = 0

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self.long(lambda: self._short(function, args))

    async def _short(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        await asyncio.sleep(self._seconds * self._rng.random())
        return function(*args)

    async def long(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Do what waits for others meanwhile."""
        before = self._last
        self._count += 1
        self._last = self._process.spawn(self._after(before, work), f"compute {self._count}")
        self._last.add_done_callback(_heard)
        return await asyncio.shield(self._last)

    @staticmethod
    async def _after(before: asyncio.Task[Any] | None, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if before is not None and not before.done():
            await asyncio.wait((before,))
        return await work()


def _heard(task: asyncio.Task[Any]) -> None:
    """An error is its asker's, if there still is one."""
    if not task.cancelled():
        task.exception()
