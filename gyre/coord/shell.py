"""The coordinator's doing: start processes, listen, show, stop in order.

Soft state only: whatever it knows comes from the workers' statuses and the buffer's counters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, TextIO, assert_never

import click
from rich.console import Console
from rich.live import Live

from gyre.cli import Setup
from gyre.coord import machine as m
from gyre.coord.launch import Plan, start
from gyre.errors import DeadlineExceeded
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.report.figures import plain
from gyre.report.live import RunView
from gyre.wire.codec import Arrays
from gyre.wire.messages import Ack, Counters, Events, FromBuffer, Message, Stop, Subscribe, ToCoord, WorkerStatus

log = logging.getLogger(__name__)

_TICK_S: Final = 0.2
_DRAW_S: Final = 1.0
_LOG_TAIL_LINES: Final = 40


class Coordinator:
    """One run from launch to the last exit."""

    def __init__(self, setup: Setup, plans: list[Plan], bind: str) -> None:
        self.setup = setup
        self.plans = {p.name: p for p in plans}
        self.bind = bind
        self.logs = setup.run_dir / "logs"
        self.view = RunView(setup.run_id)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.peers: dict[str, Peer] = {}
        self.end: m.End | None = None
        self.machine = m.Machine(
            [m.Process(name=p.name, kind=p.kind) for p in plans], now=time.monotonic(), start_timeout_s=setup.config.run.start_timeout_s
        )

    async def run(self) -> m.End:
        """Start everything, and return when everything is gone."""
        self.server = Server.bind(self.bind, ToCoord, kind="coord", name="coord", run_id=self.setup.run_id, insecure=self.setup.config.net.insecure)
        (self.setup.run_dir / "run.toml").write_text(self.setup.resolved.toml(), encoding="utf-8")  # not before the run is ours alone
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self.server.serve(self._on_worker))
        try:
            for plan in self.plans.values():
                self.children[plan.name] = start(plan, self.logs)
                self.view.worker(plan.name, plan.kind, "starting", "", {})
            buffer = next(p.address for p in self.plans.values() if p.kind == "buffer")
            client = Client.connect(buffer, FromBuffer, kind="observer", name="coord", incarnation=os.urandom(6).hex(), on_push=self._on_buffer)
            watching = asyncio.create_task(self._subscribe(client))
            await self._until_gone(serving, watching)
            watching.cancel()
            client.close()
        finally:
            serving.cancel()
            for child in self.children.values():  # only after a bug: whatever still lives must not be left behind
                if child.poll() is None:
                    child.kill()
            self.server.close()
        assert self.end is not None
        return self.end

    async def _until_gone(self, serving: asyncio.Task[None], watching: asyncio.Task[None]) -> None:
        terminal = sys.stderr.isatty()
        console = Console(stderr=True)
        live = Live(console=console, auto_refresh=False, transient=False) if terminal else None
        if live:
            live.start()
        drawn = 0.0
        try:
            while self.end is None:
                for task in (serving, watching):
                    if task.done():
                        task.result()  # a bug there must not go unseen
                for name, child in self.children.items():
                    if child.poll() is not None and self.machine.processes[name].phase is not m.Phase.GONE:
                        self.view.worker(name, self.plans[name].kind, "ended", f"exit code {child.returncode}", {})
                        self._feed(m.Exited(name, child.returncode))
                self._feed(m.Tick())
                if live and time.monotonic() >= drawn + _DRAW_S:
                    drawn = time.monotonic()
                    live.update(self.view.render(), refresh=True)
                await asyncio.sleep(_TICK_S)
        finally:
            if live:
                live.update(self.view.render(), refresh=True)
                live.stop()

    async def _subscribe(self, client: Client) -> None:
        request = Subscribe(id=mint(), events=True)
        try:
            reply, _ = await client.request(request, deadline_s=self.setup.config.run.start_timeout_s, what="the buffer's counters")
        except DeadlineExceeded as e:
            self._feed(m.RunFailed(str(e)))
        else:
            self._on_buffer(reply, {})

    def _on_worker(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        if isinstance(message, WorkerStatus):
            self.server.send(peer, Ack(id=mint(), cause=message.id))
            if peer.name in self.plans:
                self.peers[peer.name] = peer
                self.view.worker(peer.name, peer.kind, message.phase, message.detail, message.gauges)
                self._feed(m.HelloSeen(peer.name))
                if self.machine.processes[peer.name].phase is m.Phase.STOPPING:
                    self._tell_stop(peer.name)  # again: the first may have been lost

    def _on_buffer(self, message: Message, arrays: Arrays) -> None:
        if isinstance(message, Counters):
            self.view.counters = message
            if message.total_steps and message.step >= message.total_steps:
                self._feed(m.StepsDone())
            if message.failure:
                self._feed(m.RunFailed(message.failure))
            elif message.finished and self._trainers_gone():
                self._feed(m.RunFinished())
        elif isinstance(message, Events):
            for text in message.lines:
                event = json.loads(text)
                line = self.view.event(event["kind"], event["fields"])
                if line and not sys.stderr.isatty():
                    click.echo(line, err=True)

    def _trainers_gone(self) -> bool:
        return all(self.machine.processes[p.name].phase is m.Phase.GONE for p in self.plans.values() if p.kind == "train")

    def _on_signal(self, number: int) -> None:
        if self.machine.ending is not None:
            for child in self.children.values():
                if child.poll() is None:
                    child.kill()
            os._exit(128 + number)
        click.echo("stopping in order; once more to stop at once", err=True)
        self._feed(m.StopAsked(128 + number))

    def _feed(self, event: m.Event) -> None:
        for effect in self.machine.handle(time.monotonic(), event):
            match effect:
                case m.TellStop(name):
                    self._tell_stop(name)
                case m.Terminate(name):
                    self._signal(name, signal.SIGTERM)
                case m.Kill(name):
                    log.warning("%s did not end: killed", name)
                    self._signal(name, signal.SIGKILL)
                case m.End():
                    self.end = effect
                case _:
                    assert_never(effect)

    def _tell_stop(self, name: str) -> None:
        if name in self.peers and self.machine.ending is not None:
            self.server.send(self.peers[name], Stop(id=mint(), reason=self.machine.ending.reason))

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self.children.get(name)
        if child is not None and child.poll() is None:
            child.send_signal(number)


def explain(end: m.End, logs: Path, out: TextIO) -> None:
    """Say why a run failed: the culprit's own error line if it had one, else the reason and the end of its log, from its last traceback on."""
    path = logs / f"{end.culprit}.log"
    lines = path.read_text(errors="replace").splitlines() if end.culprit is not None and path.exists() else []
    if lines and lines[-1].startswith("error: "):
        click.echo(f"error: {end.culprit}: {plain(lines[-1].removeprefix('error: '))}", file=out)
        return
    first = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=len(lines) - _LOG_TAIL_LINES)
    for line in lines[max(0, first) :][-2 * _LOG_TAIL_LINES :]:
        click.echo(f"  {end.culprit} | {plain(line)}", file=out)
    click.echo(f"error: {end.reason}", file=out)
