"""The coordinator's doing: start processes, listen, tell cells what they are, show, stop in order.

Soft state only: whatever it knows comes from the workers' statuses and the buffer's counters; what an earlier coordinator left is taken over as it
is. What is said to workers is said again until a status shows that it was heard.

Not here: decisions (machine.py about processes, roles.py about cells).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, assert_never

import click

from gyre.cli import Setup
from gyre.coord import cells as r
from gyre.coord import machine as m
from gyre.coord.known import Knowledge
from gyre.coord.launch import Plan, cells
from gyre.coord.launcher import Child, Launcher
from gyre.coord.level import level
from gyre.coord.roles import Roles
from gyre.coord.stacks import stacks
from gyre.coord.window import Window
from gyre.errors import DeadlineExceeded, GyreError, UsageError
from gyre.events import decode
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.rules.named import make_rule, parse_rule
from gyre.wire.codec import Arrays
from gyre.wire.messages import Ack, AskStatus, Counters, Events, FromBuffer, Message, Note, Routes, SetRole, Stop, Subscribe, ToCoord, WorkerStatus

log = logging.getLogger(__name__)

_TICK_S: Final = 0.2
RELOADED: Final = "coord.reloaded"  # in the run directory: what came of the last one
_ROUTES_AT_ONCE: Final = 1024  # sandboxes times engines
_BEATS: Final = 400.0
_SUBSCRIBE_S: Final = 2.0  # a buffer that was started again knows no subscribers


class Coordinator:
    """One run from launch to the last exit."""

    def __init__(
        self, setup: Setup, plans: list[Plan], bind: str, rule: str = "async",
        reread: Callable[[], Awaitable[list[Plan]]] | None = None, adopt: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`rule` as `gyre.rules.named` reads it; `reread` gives the plans of the hosts file as it is now, for SIGHUP; `adopt`: take over what
        lives of an earlier coordinator's. Raises `UsageError`."""
        config = setup.config
        self.setup = setup
        self._clock = clock
        self.plans = {p.name: p for p in plans}
        self.bind = bind
        self.logs = setup.run_dir / "logs"
        self.window = Window(setup.run_id)
        self.launcher = Launcher(setup.run_dir, config.net.ssh, config.net.keys)
        self.children: dict[str, Child] = {}
        self.peers: dict[str, Peer] = {}
        self._strangers: set[int] = set()
        self.end: m.End | None = None
        self.machine = m.Machine(
            [m.Process(name=p.name, kind=p.kind) for p in plans], now=self._clock(), start_timeout_s=config.run.start_timeout_s,
            silent_s=config.net.engine_timeout_s, stall_s=config.run.stall_s,
        )  # fmt: skip
        self.knowledge = Knowledge(config.system.groups_per_step) if parse_rule(rule).kind == "lookahead" else None
        self.roles = Roles(
            cells(plans), make_rule(rule), rule_name=rule, now=self._clock(), groups_per_step=config.system.groups_per_step,
            steps_per_burst=config.system.steps_per_burst, deadline_s=config.run.start_timeout_s,
            rollouts_per_group=config.system.rollouts_per_group, known=self.knowledge.known if self.knowledge is not None else None,
        )  # fmt: skip
        self.routes: r.SendRoutes | None = None
        self._reread = reread
        self._buffer: Client | None = None
        self._adopt = adopt
        self._loose: set[asyncio.Task[None]] = set()
        self._progress: tuple[object, ...] = ()

    async def run(self) -> m.End:
        """Start everything, and return when everything is gone. Raises `UsageError`."""
        self.server = Server.bind(
            self.bind, ToCoord, kind="coord", name="coord", run_id=self.setup.run_id, insecure=self.setup.config.net.insecure, keys=self.setup.keys
        )
        (self.setup.run_dir / "run.toml").write_text(self.setup.resolved.toml(), encoding="utf-8")  # not before the run is ours alone
        if self.setup.metrics_port is not None:
            self.window.serve(self.setup.metrics_port, self.server)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._aside(self._take_up()))
        serving = asyncio.create_task(self.server.serve(self.on_worker))
        buffer = next(p.address for p in self.plans.values() if p.kind == "buffer")
        client = Client.connect(
            buffer, FromBuffer, kind="coord", name="coord", incarnation=os.urandom(6).hex(), on_push=self.on_buffer, keys=self.setup.keys
        )
        if not sys.stderr.isatty():
            click.echo(f"{len(self.plans)} processes are started; their logs are in {self.logs}", err=True)
        try:
            return await self.conduct(client, serving)
        finally:
            serving.cancel()
            client.close()
            await self._kill_all()  # only after a bug: whatever still lives must not be left behind
            self.server.close()

    async def conduct(self, buffer: Client, *serving: asyncio.Task[None]) -> m.End:
        """The run, once there are sockets. `serving`: tasks that end only by a bug."""
        self._buffer = buffer
        for name in self.plans:
            self._start(name, False)
        watching = asyncio.create_task(self._subscribe(buffer))
        self._feed_roles(r.Tick())
        await self._until_gone(watching, *serving)
        watching.cancel()
        for loose in self._loose:
            loose.cancel()
        assert self.end is not None
        return self.end

    async def _until_gone(self, *tasks: asyncio.Task[None]) -> None:
        try:
            while self.end is None:
                for task in (*tasks, *(child.task for child in self.children.values())):
                    if task.done() and not task.cancelled():
                        task.result()  # a bug there must not go unseen
                self._feed(m.Tick())
                self._feed_roles(r.Tick())
                self.window.draw()
                await asyncio.sleep(max(_TICK_S, len(self.plans) / 2000))  # a tick looks at each process
        finally:
            self.window.draw(last=True)

    async def _see(self, child: Child, plan: Plan, again: bool) -> None:
        """A process from its start, or its adoption, to its end."""
        code = m.UNREACHED
        try:
            if self._adopt and not again:
                child.pid = await self.launcher.find(plan) or 0
            if child.pid:
                log.warning("%s lives, as process %d of %s: taken over", plan.name, child.pid, plan.host.host)
            else:
                child.pid = await self.launcher.start(plan, replace=again) or 0
            if child.pid:
                code = await self.launcher.follow(plan)
        except GyreError as e:
            code = e.exit_code
            with contextlib.suppress(OSError), (self.logs / f"{plan.name}.log").open("a") as file:  # the disk may be full
                file.write(f"error: {e}\n")
        self._exited(plan.name, code)

    def _exited(self, name: str, code: int) -> None:
        self.peers.pop(name, None)
        self.window.show(self.plans[name], "ended", "not reached" if code == m.UNREACHED else f"exit code {code}")
        self._feed(m.Exited(name, code))
        if self.plans[name].kind == "train" and self.machine.processes[name].health is m.Health.GONE and code == 0:
            self._feed_roles(r.Done(name))

    async def _subscribe(self, client: Client) -> None:
        """Again and again: a subscription does not outlive the buffer's process."""
        heard = False
        while True:
            request = Subscribe(id=mint(), events=True)
            try:
                reply, _ = await client.request(request, deadline_s=self.setup.config.run.start_timeout_s, what="the buffer's counters")
            except DeadlineExceeded as e:
                if not heard:
                    self._feed(m.RunFailed(str(e)))
                    return
                log.warning("%s", e)
            else:
                heard = True
                self.on_buffer(reply, {})
            await asyncio.sleep(_SUBSCRIBE_S)

    def on_worker(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        if isinstance(message, AskStatus):
            self.server.send(peer, self.window.status(message, {c.name: c.phase.value for c in self.roles.cells.values()}))
        if not isinstance(message, WorkerStatus):
            return
        self.server.send(peer, Ack(id=mint(), cause=message.id, beat_s=self._beat_s()))
        plan, child = self.plans.get(peer.name), self.children.get(peer.name)
        if plan is None or child is None or not child.pid:
            return
        if peer.pid != child.pid:  # left by an earlier coordinator; what it does is no word of ours
            if peer.pid not in self._strangers:
                self._strangers.add(peer.pid)
                log.warning(
                    "process %d works as %s for an earlier coordinator: end it, or wait run.coord_grace_s, then --resume", peer.pid, peer.name
                )
            return
        first = peer.name not in self.peers
        self.peers[peer.name] = peer
        self.window.show(plan, message.phase, message.detail, role=message.role, gauges=message.gauges, version=message.version)
        if message.gauges.get("tokens_s"):
            self._feed(m.Progress())  # an execution may take hours
        if (back := self.machine.processes[peer.name]).health is m.Health.RESTARTING and back.deaths:
            log.warning("%s is back", peer.name)
        self._feed(m.HelloSeen(peer.name, message.phase in ("ready", "working")))
        if self.machine.processes[peer.name].health is m.Health.STOPPING:
            self._tell_stop(peer.name)  # again: the first may have been lost
        elif plan.cell:
            self._feed_roles(r.Heard(peer.name, message.role, message.epoch))
        elif plan.kind == "sandbox":
            self._feed_roles(r.Followed(message.epoch, first))
            if self.routes is not None and message.epoch < self.routes.epoch:
                self._tell_routes(peer)

    def _beat_s(self) -> float:
        """However many workers there are, about `_BEATS` statuses come a second; but four of each before it would be taken for silent."""
        seconds = min(len(self.plans) / _BEATS, self.setup.config.net.engine_timeout_s / 4)
        return seconds if seconds > 1.0 else 0.0

    def on_buffer(self, message: Message, arrays: Arrays) -> None:
        if isinstance(message, Counters):
            self._on_counters(message)
        elif isinstance(message, Events):
            for text in message.lines:
                event = decode(text)
                if self.knowledge is not None:
                    self.knowledge.take(self._clock(), event.kind, event.fields)
                self.window.take(event)

    def _on_counters(self, c: Counters) -> None:
        self.window.view.counters = c
        progress = (c.term, c.step, c.published, c.states, c.taken_groups, c.eval_outstanding)
        self._feed(m.Progress(progress != self._progress))
        self._progress = progress
        if c.total_steps and c.step >= c.total_steps:
            self._feed(m.StepsDone())
        if c.failure:
            self._feed(m.RunFailed(c.failure))
        elif c.finished and self._core_gone():
            self._feed(m.RunFinished())
        self._feed_roles(r.Counted(level(c, self.setup.config.system)))

    def _core_gone(self) -> bool:
        """The last step is saved, or will never be."""
        core = self.roles.cells.get(self.roles.core)
        return core is None or core.trainer is None or self.machine.processes[core.trainer].health is m.Health.GONE

    def _on_signal(self, number: int) -> None:
        if self.machine.ending is not None:
            self._aside(self._kill_all(128 + number))
            return
        self.window.say("stopping in order; once more to stop at once")
        self._feed(m.StopAsked(128 + number))

    async def _kill_all(self, code: int | None = None) -> None:
        """With a code: and end at once."""
        lives = [self.plans[name] for name, child in self.children.items() if not child.task.done()]
        await asyncio.gather(*(self.launcher.signal(plan, signal.SIGKILL) for plan in lives))
        if code is not None:
            self.window.draw(last=True)  # gives the terminal back as it was
            os._exit(code)

    async def _take_up(self) -> None:
        """The answer to whoever sent the signal is left in the run directory."""
        try:
            answer = self._reload(await self._reread() if self._reread is not None else list(self.plans.values()))
            log.info("hosts file: %s", answer)
        except GyreError as e:
            log.warning("the hosts file is not taken up: %s", e)
            answer = f"error: {e}"
        part = self.setup.run_dir / f"{RELOADED}.part"
        part.write_text(answer, encoding="utf-8")
        part.rename(self.setup.run_dir / RELOADED)

    def _reload(self, wanted: list[Plan]) -> str:
        """Take up the hosts file as it is now: start what is new in it, let go what is not in it any more. What it says of others changes nothing.

        Returns what was done. Raises `UsageError` if nothing was.
        """
        plans = {p.name: p for p in wanted}
        here = {name for name, p in self.machine.processes.items() if not p.expected}
        core = self.roles.cells.get(self.roles.core)
        kept = {core.trainer if core is not None else None} | {p.name for p in self.plans.values() if p.kind == "buffer"}
        if missing := sorted(name for name in here - plans.keys() if name in kept):
            raise UsageError("the hosts file", f"lacks {missing[0]}", "keep its line: without it the run cannot go on")
        new = [p for p in plans.values() if p.name not in here]
        for plan in new:
            self.plans[plan.name] = plan
            self._feed(m.Added(m.Process(name=plan.name, kind=plan.kind)))
        for cell in cells(new):
            self._feed_roles(r.Joined(cell))
        for name in here - plans.keys():
            if not (cell_name := self.plans[name].cell):
                self._feed(m.Removed(name))
            elif cell_name in self.roles.cells:
                self._feed_roles(r.Retired(cell_name))
        return f"{len(new)} processes more, {len(here - plans.keys())} fewer"

    def _feed(self, event: m.Event) -> None:
        for effect in self.machine.handle(self._clock(), event):
            match effect:
                case m.Start(name, again):
                    self._start(name, again)
                case m.TellStop(name):
                    self._tell_stop(name)
                case m.Terminate(name):
                    self._signal(name, signal.SIGTERM)
                case m.Kill(name):
                    log.warning("%s did not end, or was silent for too long: killed", name)
                    self._signal(name, signal.SIGKILL)
                case m.Missing(name, reason):
                    log.warning("%s %s", name, reason)
                    if self.plans[name].cell:
                        self._feed_roles(r.Lost(name, reason))
                case m.GiveUp(name):
                    log.warning("%s is given up after %d deaths in a row", name, self.machine.processes[name].deaths)
                    if self.plans[name].cell:
                        self._feed_roles(r.GivenUp(name))
                case m.Dump(names, idle_s):
                    self._aside(self._tell_stall(names, idle_s))
                case m.End():
                    self.end = effect
                case _:
                    assert_never(effect)
        self.roles.ending = self.machine.ending is not None

    def _feed_roles(self, event: r.Event) -> None:
        for effect in self.roles.handle(self._clock(), event):
            match effect:
                case r.SendRole(name, role, epoch, core, core_cell):
                    if name in self.peers:
                        self.server.send(self.peers[name], SetRole(id=mint(), role=role, epoch=epoch, core=core, core_cell=core_cell))
                case r.SendRoutes():
                    self.routes = effect
                    sandboxes = [peer for name, peer in self.peers.items() if self.plans[name].kind == "sandbox"]
                    if len(sandboxes) * len(effect.engines) <= _ROUTES_AT_ONCE:  # else each is told when it beats
                        for peer in sandboxes:
                            self._tell_routes(peer)
                case r.Report(fields):
                    self._note("role", fields)
                case r.Complain(text):
                    log.warning("%s", text)
                case r.Retire(names):
                    for name in names:
                        self._feed(m.Removed(name))
                case _:
                    assert_never(effect)

    def _start(self, name: str, again: bool) -> None:
        plan = self.plans[name].again() if again else self.plans[name]
        self.peers.pop(name, None)
        if again:
            log.warning("%s is started again", name)
        child = self.children[name] = Child()
        child.task = asyncio.create_task(self._see(child, plan, again))
        self.window.show(plan, "follows" if plan.kind == "rank" else "starting", "again" if again else "")

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        """An event for the run's log, repeated until the buffer has it."""
        client = self._buffer
        if client is None:
            return

        async def send() -> None:
            try:
                await client.request(Note(id=mint(), event=kind, fields=fields), deadline_s=self.setup.config.net.request_timeout_s, what="a note")
            except GyreError as e:
                log.warning("event %s was not logged: %s", kind, e)

        self._aside(send())

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)

    async def _tell_stall(self, names: tuple[str, ...], idle_s: float) -> None:
        """The run's one event of it: the buffer adds its counters and who waits for whom there."""
        said, waits = self.window.said(), self.roles.waits(time.monotonic())
        log.warning("nothing has progressed for %.0f s: gyre-top --stall %s tells who waits for whom", idle_s, self.setup.run_dir)
        for text in (*waits, *(f"{name}: {words}" for name, words in said.items())):  # should the buffer not answer
            log.warning("%s", text)
        found = await stacks(self.logs, names, lambda name: self._signal(name, signal.SIGUSR1))
        self._note("stall", {"cells": waits, "processes": said, "stacks": found})

    def _tell_routes(self, peer: Peer) -> None:
        if self.routes is not None:
            self.server.send(peer, Routes(id=mint(), epoch=self.routes.epoch, engines=list(self.routes.engines)))

    def _tell_stop(self, name: str) -> None:
        if name in self.peers:
            reason = self.machine.ending.reason if self.machine.ending is not None else "taken out of the hosts file"
            self.server.send(self.peers[name], Stop(id=mint(), reason=reason))

    def _signal(self, name: str, number: signal.Signals) -> None:
        child, plan = self.children.get(name), self.plans[name]

        async def send(child: Child) -> None:
            if not await self.launcher.signal(plan, number) and number == signal.SIGKILL and not child.task.done():
                log.warning("%s cannot be killed, %s is not reached: taken for dead; alone, it ends by itself", name, plan.host.host)
                child.task.cancel()
                self._exited(name, m.UNREACHED)

        if child is not None and not child.task.done():
            self._aside(send(child))
