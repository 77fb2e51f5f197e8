"""Play the world of a seed and judge it."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass

from theorem import clock
from theorem.checkers import CHECKERS, judge
from theorem.chronicle import Chronicle
from theorem.clock import Stuck, VirtualLoop
from theorem.fleet import Fleet, FleetPlan, fleet
from theorem.fleet_checkers import FLEET
from theorem.learner import Tables
from theorem.operator import Operator
from theorem.plan import Plan, draw
from theorem.world import END_S, END_TURNS, Kind, World


@dataclass(frozen=True)
class Verdict:
    """What became of a world. `findings` is empty if the theorem held."""

    plan: Plan
    chronicle: Chronicle
    struck: list[str]
    findings: list[str]
    seconds: float
    turns: int


def play(plan: Plan, kind: Kind | None = None) -> Verdict:
    """Run a plan to its end and judge it. `kind`: tables, if it is not told."""
    worlds: list[World] = []

    async def fleet_main(loop: VirtualLoop) -> None:
        assert isinstance(plan, FleetPlan)
        world = Fleet(loop, plan)
        worlds.append(world)
        try:
            await world.run()
        finally:
            world.tell()
        world.network.over = True

    async def main(loop: VirtualLoop) -> None:
        world = World(loop, plan, kind or Tables(plan))
        worlds.append(world)
        going = loop.create_task(world.keep_going(), name="world")
        operator = Operator(world)
        await operator.run()
        await operator.finish()
        while world.buffer is None or not world.buffer.machine.finished:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        world.network.over = True
        going.cancel()

    findings = []
    try:
        clock.run(fleet_main if isinstance(plan, FleetPlan) else main, end_s=END_S, end_turns=END_TURNS)
    except (Stuck, AssertionError, Exception) as e:
        findings.append("".join(traceback.format_exception(e)) if isinstance(e, BaseExceptionGroup) else f"{type(e).__name__}: {e}")
    world = worlds[0]
    findings += judge(world.chronicle, CHECKERS + FLEET if isinstance(plan, FleetPlan) else CHECKERS)
    return Verdict(plan, world.chronicle, world.struck, findings, world.loop.time(), world.loop.turns)


def trial(seed: int) -> Verdict:
    """Play the world of a seed."""
    return play(draw(seed))


def fleet_trial(seed: int) -> Verdict:
    """Play the world with a coordinator of a seed."""
    return play(fleet(seed))


def command(seed: int) -> str:
    """What plays this world again."""
    return f"python tests/sim/play.py {seed} --log"


def fleet_command(seed: int) -> str:
    """The same for a world with a coordinator."""
    return f"python tests/sim/play.py {seed} --fleet --log"
