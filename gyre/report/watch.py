"""Where gyre-top's view comes from: the run's coordinator, its directory, or both.

Invariants
- It asks and reads, and changes nothing. The coordinator is asked as an observer, with an observer's key where the run has keys.
- What runs is shown as the coordinator knows it; without one, what the run directory says: its events, and its ledger where the counters are.
- A directory on this host has all events, so those of the coordinator, which keeps the last ones only, are left alone then.

Not here: how it looks (live.py, stall.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live

from gyre.errors import DeadlineExceeded, UsageError
from gyre.events import EventReader, decode
from gyre.net.keys import Keys
from gyre.net.sockets import Client, mint
from gyre.report.live import RunView
from gyre.report.read import RunReader
from gyre.types import UNFINISHED, Version
from gyre.wire.messages import AskStatus, Counters, FromCoord, RunStatus
from gyre.wire.rows import GroupState

_EVERY_S: Final = 1.0
_ANSWER_S: Final = (10.0, 2.0)  # how long a coordinator is waited for: with nothing else to show, and where there is a run directory
_SHARE: Final = 0.05  # of the time may go into reading the ledger


class Watch:
    """Keeps a `RunView` up to date. At least one of `run_dir` and `coord`, an address, is given."""

    def __init__(self, run_dir: Path | None, coord: str | None, keys: Keys | None = None) -> None:
        self.view = RunView(run_dir.resolve().name if run_dir is not None else "")
        self._dir, self._coord, self._keys = run_dir, coord, keys
        self._events = EventReader(run_dir / "events.jsonl") if run_dir is not None and (run_dir / "events.jsonl").is_file() else None
        if coord is None and self._events is None:
            raise UsageError(str(run_dir), "holds no run", "give the directory of one, or the address of its coordinator by --coord")
        self._client: Client | None = None
        self._seq = -1
        self._read_at = 0.0

    async def look(self) -> None:
        """See what is new. Raises `DeadlineExceeded` if there is nothing but a coordinator and it does not answer."""
        if self._events is not None:
            for event in self._events.events():
                self.view.event(event)
        self.view.note = ""
        if self._coord is not None and await self._ask(self._coord):
            return
        self.view.processes = {}
        self.view.note = self.view.note or "no coordinator runs: seen is what the run directory says"
        if self._dir is not None and (self._dir / "ledger.db").exists() and time.monotonic() >= self._read_at:
            began = time.monotonic()
            self.view.counters = _counters(self._dir)
            self._read_at = time.monotonic() + (time.monotonic() - began) / _SHARE

    async def _ask(self, address: str) -> bool:
        if self._client is None:
            self._client = Client.connect(
                address, FromCoord, kind="observer", name="top", incarnation=os.urandom(6).hex(), resend_s=_EVERY_S, keys=self._keys
            )
        ask = AskStatus(id=mint(), after=self._seq)
        try:
            reply, _ = await self._client.request(ask, deadline_s=_ANSWER_S[self._events is not None], what="the coordinator's word on the run")
        except DeadlineExceeded as e:
            if self._events is None:
                raise
            self.view.note = f"no coordinator: {e}"
            return False
        assert isinstance(reply, RunStatus)
        view = self.view
        view.title, view.counters = reply.run_id, reply.counters
        view.processes = {p.name: p for p in reply.processes}
        for event in map(decode, reply.lines):
            self._seq = event.seq
            if self._events is None:
                view.event(event)
        view.cells = reply.cells
        return True

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _counters(run_dir: Path) -> Counters:
    """As the buffer would say them, out of its ledger."""
    with RunReader(run_dir) as reader:
        meta, states, groups = reader.meta, reader.counts(), reader.group_counts()
        steps = [row.step for row in reader.step_rows()]
        left = sum(e.outstanding for e in reader.eval_rows() if e.completed_at is None)
    is_open, ready, taken = (groups.get(s, 0) for s in (GroupState.OPEN, GroupState.READY, GroupState.CLAIMED))
    return Counters(
        id="", seq=0, admitted=states.pop("admitted"), states=states, water_level=sum(states[s] for s in UNFINISHED), step=max(steps, default=0),
        total_steps=meta.total_steps, published=Version(meta.published_term or 0, meta.published_step or 0), term=meta.term,
        groups_open=is_open + ready, eval_outstanding=left, finished=False, ready_groups=ready, taken_groups=taken, publications=meta.publications,
    )  # fmt: skip


async def watch(source: Watch, console: Console) -> None:
    """On a terminal: until Ctrl-C, or nothing more can happen. Else one picture."""
    try:
        await source.look()
        if console.is_terminal and not console.is_dumb_terminal:
            with Live(source.view, console=console, auto_refresh=False, screen=True) as live:
                while not (source.view.finished and not source.view.processes):
                    live.update(source.view, refresh=True)
                    await asyncio.sleep(_EVERY_S)
                    await source.look()
    finally:
        source.close()
