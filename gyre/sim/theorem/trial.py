"""Play the world of a seed and judge it.

python -m gyre.sim.theorem.trial 17          play one world; print its plan, what befell it, and what is wrong with it
python -m gyre.sim.theorem.trial 17 --log    and what its processes logged, in virtual time
python -m gyre.sim.theorem.trial 17 --said   and every message
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import traceback
from dataclasses import dataclass

from gyre.sim.theorem import clock
from gyre.sim.theorem.checkers import judge
from gyre.sim.theorem.chronicle import Chronicle
from gyre.sim.theorem.clock import Stuck, VirtualLoop
from gyre.sim.theorem.learner import Tables
from gyre.sim.theorem.operator import Operator
from gyre.sim.theorem.plan import Plan, draw
from gyre.sim.theorem.world import END_S, END_TURNS, Kind, World


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
        clock.run(main, end_s=END_S, end_turns=END_TURNS)
    except (Stuck, AssertionError, Exception) as e:
        findings.append("".join(traceback.format_exception(e)) if isinstance(e, BaseExceptionGroup) else f"{type(e).__name__}: {e}")
    world = worlds[0]
    findings += judge(world.chronicle)
    return Verdict(plan, world.chronicle, world.struck, findings, world.loop.time(), world.loop.turns)


def trial(seed: int) -> Verdict:
    """Play the world of a seed."""
    return play(draw(seed))


def command(seed: int) -> str:
    """What plays this world again."""
    return f"python -m gyre.sim.theorem.trial {seed} --log"


class _Formatter(logging.Formatter):
    """Virtual time and process before each line."""

    def format(self, record: logging.LogRecord) -> str:
        process = clock.current()
        at = f"{process.now:9.3f} {process.name}" if process is not None else ""
        return f"{at}: {record.name}: {record.getMessage()}"


def main(arguments: list[str]) -> int:
    """See the module. Returns 1 if something is wrong with the world."""
    parser = argparse.ArgumentParser(prog="python -m gyre.sim.theorem.trial", description="Play the world of a seed and judge it.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--log", action="store_true", help="print what processes log, in virtual time")
    parser.add_argument("--said", action="store_true", help="print every message")
    options = parser.parse_args(arguments)
    if options.log:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    verdict = trial(options.seed)
    print(verdict.plan)
    for s in verdict.chronicle.said if options.said else ():
        print(f"{s.at_s:9.3f} {s.sender} -> {s.to}: {s.message}")
    print(f"{verdict.seconds:.3f} s of virtual time, {verdict.turns} turns, digest {verdict.chronicle.digest()}")
    print("\n".join(verdict.struck or ["no fault struck"]))
    print("\n".join(verdict.findings or ["one cell alone, to the last bit that floating point allows"]))
    return bool(verdict.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
