"""Calls that wait for an engine: in a line for each version wanted, first come first served, those that an engine gave back before all others.

Only the head of a line looks for an engine, so thousands of waiting calls cost nothing while engines come, go and answer.

Invariants: each call in a line is let go once, as its head, or when it leaves by itself; when a head leaves, the next is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gyre.types import Version


class _Line:
    def __init__(self, able_at: float) -> None:
        self.able_at = able_at  # when an engine that could serve was last seen
        self.waiting: list[asyncio.Future[None]] = []  # the head first
        self.returned = 0  # of those behind the head, the first so many were given back by an engine


class Lines:
    """The lines of one router."""

    def __init__(self) -> None:
        self._lines: dict[Version, _Line] = {}

    @asynccontextmanager
    async def turn(self, wanted: Version, left: asyncio.Future[None], deadline: float, *, returned: bool = False) -> AsyncIterator[_Line]:
        """Wait to be the head of the line for `wanted`, until `left` is done or `deadline` (of the loop's clock) has passed: then whoever asked is in
        here without being the head, and goes."""
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(wanted, _Line(loop.time()))
        me: asyncio.Future[None] = loop.create_future()
        line.waiting.insert(1 + line.returned if returned else len(line.waiting), me)
        line.returned += returned and line.waiting[0] is not me
        try:
            if line.waiting[0] is not me:
                await asyncio.wait((me, left), timeout=max(0.0, deadline - loop.time()), return_when=asyncio.FIRST_COMPLETED)
            yield line
        finally:
            at = line.waiting.index(me)
            del line.waiting[at]
            line.returned -= at <= line.returned and line.returned > 0  # this one, or the new head, was among them
            if at == 0 and line.waiting:
                line.waiting[0].set_result(None)
            elif not line.waiting:
                del self._lines[wanted]
