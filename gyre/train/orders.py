"""What the coordinator wants of this cell's trainer, and what the trainer says it is.

Invariants
- The newest order counts, whatever was done about older ones; repeated orders change nothing.
- Without a coordinator, or before its first order, a core or a satellite trains, and an `auto` trainer has no part yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from gyre.errors import WorkFailed
from gyre.net.worker import Worker
from gyre.wire.messages import SetRole

log = logging.getLogger(__name__)

Part = Callable[[bool], Coroutine[Any, Any, None]]
"""What a cell does as the core; told whether there is a run to go on with."""


class Orders:
    """The `protocols.Duty` of a process. `on_turn` is called when the cell is to do something else."""

    def __init__(self, worker: Worker, *, trains: bool) -> None:
        self.on_turn: Callable[[], None] = lambda: None
        self._worker = worker
        self._trains = trains
        self._at: tuple[str, str] | None = None  # auto: the core of the part it has; ("", "") before it has one
        if not trains:
            self._at = "", ""
            self.phase("idle")
        self._changed = asyncio.Event()
        worker.on_role = self._on_role
        if worker.order is not None:
            self._on_role(worker.order)

    def _on_role(self, order: SetRole) -> None:
        before, self._trains = self._trains, order.role == "train"
        if self._at not in (None, self.core):
            self.phase("leaving")  # it loads a model for that core before it can say that it holds nothing
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

    async def be_told(self, name: str, core: Part, satellite: Callable[[str], Coroutine[Any, Any, None]], resume: bool) -> None:
        """Be the core when the cell `name` is to be it, else a satellite of whoever is, until that part ends. Raises `WorkFailed` if the core was
        replaced."""
        told = await self.core_other_than(("", ""))
        while True:
            self._at = told
            part = asyncio.ensure_future(core(resume) if told[0] == name else satellite(told[1]))
            other = asyncio.ensure_future(self.core_other_than(told))
            try:
                await asyncio.wait([part, other], return_when=asyncio.FIRST_COMPLETED)
                if part.done():
                    part.result()
                    return
                if told[0] == name:
                    raise WorkFailed(f"cell {other.result()[0]} is the core now; this one ends")
                told, resume = other.result(), True  # from here on there is a run to go on with
            finally:
                for task in (part, other):
                    task.cancel()
                await asyncio.wait([part, other])
            log.info("the core is now %s at %s", *told)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def phase(self, role: str) -> None:
        """Report idle | joining | training | leaving."""
        if role != self._worker.role:
            self._worker.set_role(role)
