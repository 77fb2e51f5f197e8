"""What the coordinator wants of this cell's trainer, and what the trainer says it is.

Invariants
- The newest order counts, whatever was done about older ones; repeated orders change nothing.
- Without a coordinator, or before its first order, a core or a satellite trains, and an `auto` trainer has no part yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gyre.net.worker import Worker
from gyre.wire.messages import SetRole


class Orders:
    """The `protocols.Duty` of a process. `on_turn` is called when the cell is to do something else."""

    def __init__(self, worker: Worker, *, trains: bool) -> None:
        self.on_turn: Callable[[], None] = lambda: None
        self._worker = worker
        self._trains = trains
        self._changed = asyncio.Event()
        worker.on_role = self._on_role
        if worker.order is not None:
            self._on_role(worker.order)

    def _on_role(self, order: SetRole) -> None:
        before, self._trains = self._trains, order.role == "train"
        self._changed.set()
        if before != self._trains:
            self.on_turn()

    @property
    def trains(self) -> bool:
        """Is this cell to train now?"""
        return self._trains

    @property
    def core(self) -> tuple[str, str]:
        """(cell, address) of the core, ("", "") before the first order."""
        order = self._worker.order
        return (order.core_cell, order.core) if order is not None else ("", "")

    async def to_train(self) -> None:
        """Wait until it is to train."""
        await self._until(lambda: self._trains)

    async def core_other_than(self, core: tuple[str, str]) -> tuple[str, str]:
        """Wait until the core is another. Returns it."""
        await self._until(lambda: self.core not in (core, ("", "")))
        return self.core

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def phase(self, role: str) -> None:
        """Report idle | joining | training | leaving."""
        if role != self._worker.role:
            self._worker.set_role(role)
