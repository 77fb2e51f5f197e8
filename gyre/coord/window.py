"""What the coordinator lets others see of a run: on its own terminal, as lines in a pipe, and to whoever asks (gyre-top, Prometheus)."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, TextIO

import click
from rich.console import Console
from rich.live import Live

from gyre.coord.launch import Plan
from gyre.events import Event, encode
from gyre.net.sockets import Server, mint
from gyre.report.live import RunView
from gyre.wire.messages import AskStatus, ProcessStatus, RunStatus

_DRAW_S: Final = 1.0
_KEPT: Final = 500  # events, for views that come later
_ALSO_KEPT: Final = ("buffer_started", "role", "eval_issued")  # beside those that have a line


class Window:
    """A `RunView` that is fed and shown."""

    def __init__(self, run_id: str) -> None:
        self.view = RunView(run_id)
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=False) if sys.stderr.isatty() else None
        self._drawn = 0.0

    def show(self, plan: Plan, phase: str, detail: str = "", **more: Any) -> None:
        """What a process does now; `more` are fields of `ProcessStatus`."""
        self.view.processes[plan.name] = ProcessStatus(name=plan.name, kind=plan.kind, cell=plan.cell, phase=phase, detail=detail, **more)

    def take(self, event: Event) -> None:
        line = self.view.event(event)
        if line or event.kind in _ALSO_KEPT:
            self._kept.append(event)
        if line and self._live is None:
            click.echo(line, err=True)

    def say(self, line: str) -> None:
        """Beside the view: above it on a terminal, since what is written past it would be drawn over."""
        if self._live is not None and self._live.is_started:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            click.echo(line, err=True)

    def status(self, asked: AskStatus, phases: dict[str, str]) -> RunStatus:
        """The answer to an observer."""
        view, lines = self.view, [encode(e) for e in self._kept if e.seq > asked.after]
        processes = list(view.processes.values())
        return RunStatus(id=mint(), cause=asked.id, run_id=view.title, processes=processes, cells=phases, counters=view.counters, lines=lines)

    def said(self) -> dict[str, str]:
        """What each process last said of itself."""
        return {name: f"{p.phase} {p.role} {p.detail}".strip() for name, p in self.view.processes.items()}

    def serve(self, port: int, server: Server) -> None:
        """Metrics of all processes and of the run. Raises `UsageError`."""
        from gyre.report import metrics

        def read() -> Iterable[metrics.Sample]:
            view, gauges = self.view, server.refusals.gauges()
            own = ProcessStatus(name="coord", kind="coord", phase="working", gauges=gauges)
            for process in [own, *view.processes.values()]:
                yield from metrics.of_process(process)
            yield from metrics.of_run(view.counters, view.steps[-1] if view.steps else {})

        metrics.serve(port, read)

    def draw(self, *, last: bool = False) -> None:
        if self._live is None:
            return
        if not self._live.is_started:
            self._live.start()  # sys.stderr leads through it from here on
            _log_to(sys.stderr)
        if last or time.monotonic() >= self._drawn + _DRAW_S:
            self._drawn = time.monotonic()
            self._live.update(self.view, refresh=True)
        if last:
            self._live.stop()
            _log_to(sys.stderr)


def _log_to(stream: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(stream)
