"""Who starts cells, tells them what to be, and replaces those that are lost: a coordinator that sees only who runs, who is stopped and who ended.

A core that is dead, or stopped for longer than the plan's patience, is followed by a new life of its cell or by another cell, from the last
checkpoint and under a new term; the one that was stopped wakes later as a zombie. What ends with the error that a newer core exists is started
again as a satellite.
"""

from __future__ import annotations

import asyncio
import random

from gyre.errors import DeadlineExceeded, WorkFailed
from theorem.cells import Cell, Directions, Told, address_of, core_life, satellite_life
from theorem.clock import Life, Process
from theorem.world import World

EVERY_S = 0.5


def told_it_is_over(error: BaseException | None) -> bool:
    """Did a trainer end with an error that a process may end with: it was replaced, or nobody answered?"""
    if isinstance(error, BaseExceptionGroup):
        return all(told_it_is_over(e) for e in error.exceptions)
    return isinstance(error, WorkFailed | DeadlineExceeded)


class Post:
    """A cell of the plan: its current life, and since when it is lost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trains = False
        self.duty = Told(False)  # of its current life
        self.directions = Directions("")
        self.process: Process | None = None
        self.task: asyncio.Task[None] | None = None
        self.lost_at_s: float | None = None


class Operator:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world, self._plan = world, world.plan
        self._rng = random.Random(f"{world.plan.seed}/operator")
        self._posts = {f"c{i}": Post(f"c{i}") for i in range(world.plan.satellites + 1)}
        self._core = "c0"
        self._address = ""
        self._over = False

    async def run(self) -> None:
        """Until a core has come to the end of the run. Raises what a cell must not end with."""
        self._start_core("c0", fresh=True)
        for post in self._posts.values():
            if post.name != self._core:
                self._start_satellite(post)
        for move in self._plan.moves:
            self._world.later(move.at_s, lambda m=move: self._tell(self._posts[m.cell], m.trains))  # type: ignore[misc]
        while not self._ended(self._posts[self._core]):
            for post in self._posts.values():
                if self._lost(post):
                    self._replace(post)
            await asyncio.sleep(EVERY_S)

    async def finish(self) -> None:
        """The run is over: every cell that was told to train hears of it or ends with an error that it may end with."""
        for post in self._posts.values():
            self._tell(post, True)
        self._over = True
        while not all(self._ended(p) or self._lost(p) for p in self._posts.values()):  # noqa: ASYNC110
            await asyncio.sleep(EVERY_S)

    def _ended(self, post: Post) -> bool:
        """Has its trainer come to the end of the run? Raises what it must not end with."""
        if post.task is None or not post.task.done():
            return False
        error: BaseException | None = post.task.exception()
        if error is None:
            return True
        if not told_it_is_over(error):
            raise error
        return False

    def _lost(self, post: Post) -> bool:
        """Dead or failed for longer than a restart takes, or stopped for longer than one waits."""
        assert post.process is not None
        life = post.process.life
        if self._ended(post) or (life is Life.RUNNING and not (post.task is not None and post.task.done())):
            post.lost_at_s = None
            return False
        now = self._world.loop.time()
        post.lost_at_s = now if post.lost_at_s is None else post.lost_at_s
        return now - post.lost_at_s >= (self._plan.patience_s if life is Life.STOPPED else self._plan.restart_s)

    def _replace(self, post: Post) -> None:
        if post.name != self._core:
            self._start_satellite(post)
            return
        others = [n for n in self._posts if n != post.name]
        follows = self._rng.choice(others) if others and self._rng.random() < self._plan.promote else post.name
        self._core = follows
        self._start_core(follows, fresh=False)
        if follows != post.name:
            self._start_satellite(post)
        for other in self._posts.values():
            if other.name != follows and other.process is not None:  # each hears of it some time
                process, tell = other.process, other.directions.tell
                self._world.later(5.0 * self._rng.random(), lambda p=process, t=tell, a=self._address: p.call(t, a))  # type: ignore[misc]

    def _tell(self, post: Post, trains: bool) -> None:
        post.trains = trains
        if post.name != self._core and post.process is not None and not self._over:
            post.process.call(post.duty.tell, trains)

    def _start_core(self, name: str, *, fresh: bool) -> None:
        post = self._posts[name]
        process, life = self._life(post, "core")
        post.duty = Told(True)
        self._address = address_of(process)
        post.task = process.spawn(core_life(Cell(self._world, process, name, life, post.duty, ""), fresh=fresh))

    def _start_satellite(self, post: Post) -> None:
        process, life = self._life(post, "satellite")
        duty, post.directions = Told(post.trains), Directions(self._address)
        post.duty = duty

        def make(core: str) -> Cell:
            return Cell(self._world, process, post.name, life, duty, core)

        post.task = process.spawn(satellite_life(make, post.directions))

    def _life(self, post: Post, kind: str) -> tuple[Process, int]:
        """A new life. The one before is ended, unless it is stopped: then nobody can, and it will wake as a zombie."""
        if post.process is not None and post.process.life is not Life.STOPPED:
            post.process.kill()
        life = self._world.life(post.name)
        post.process, post.lost_at_s = self._world.process(kind, f"{post.name}/{life}"), None
        return post.process, life
