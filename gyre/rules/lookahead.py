"""Ours: of the moves open now, the one from which the fluid model predicts the burst to end soonest. Pure (docs/scheduling.md).

The plans that it looks at are the paper's rule with other capacities (`filling`) and with the demand that there be work to train (`backlog`); the
paper's rule itself is one of them. The best plan's first move is made. Another plan must promise to save more than `MARGIN` of the time, so that
where nothing is to be gained the paper's rule decides; until enough executions have ended to know their lengths it decides alone, with shared
engines only when there is work to train.
Going back is the paper's.
"""

from __future__ import annotations

import math
from typing import Final

from gyre.rules.elastic import capacity, elastic, homeward, next_cell, stranded
from gyre.rules.fluid import Fluid, Plan
from gyre.rules.roles import CellPhase, CellView, Decision, Move, Stay, View

PAPER: Final = Plan(((1.0, 0.0),))
EARLIER: Final = tuple(Plan(((1.0, 0.0), (f, b))) for f, b in ((1.15, 0.5), (1.4, 1.0), (2.0, 2.0), (math.inf, 2.0)))
LATER: Final = tuple(Plan(((f, b),)) for f, b in ((0.5, 0.0), (0.75, 0.0), (0.5, 0.5), (0.75, 0.5), (1.0, 0.5), (1.0, 1.5)))
OTHER: Final = tuple(Plan(((f, b),)) for f, b in ((1.4, 0.0), (2.0, 0.0), (2.0, 0.5), (2.0, 1.5), (math.inf, 0.5), (math.inf, 1.5)))
SHARED: Final = (*LATER, *EARLIER, *OTHER)
COLD: Final = Plan(((1.0, 0.5),))  # while the lengths of executions are not known: the paper's rule, when there is work
MARGIN: Final = 0.003
ENOUGH: Final = 32  # executions, and groups a quarter of it
TICKS: Final = 40  # questions per longest execution


def lookahead(view: View) -> Decision:
    """See the module."""
    back = homeward(view) or stranded(view)
    if back is not None:
        return back
    cell = next_cell(view)
    if isinstance(cell, Stay):
        return cell
    known = view.known
    if known is None or len(known.durations_s) < ENOUGH or len(known.group_durations_s) < ENOUGH // 4:
        return elastic(view) if known is None or known.pace is None else _follow(COLD, view, cell, known.trained, "too few have ended to look ahead")
    if view.water_level == 0:
        return Move(cell.name, CellPhase.TRAIN, "nothing is left to serve")
    fluid = Fluid(view, known)
    needed = view.steps_left * view.groups_per_step
    beyond = not view.quota and view.ready + len(known.groups) > needed
    paper = fluid.burst_end(PAPER, beyond)
    best, ends = PAPER, paper * (1 - MARGIN)
    for plan in EARLIER if known.pace is None else SHARED:
        end = fluid.burst_end(plan, beyond, ends)
        if end < ends:
            best, ends = plan, end
    gain = f"the burst ends in {ends:.0f} s, by the paper's rule in {paper:.0f} s" if best is not PAPER else "the paper's rule ends the burst soonest"
    return _follow(best, view, cell, known.trained, gain, view.now + known.durations_s[-1] / TICKS)


def _follow(plan: Plan, view: View, cell: CellView, trained: float, why: str, until: float | None = None) -> Decision:
    """What a plan says now; when staying, until which water level, or time."""
    remaining = capacity(view, CellPhase.ROLLOUT) - cell.capacity
    waiting = min(view.ready, view.steps_left * view.groups_per_step) - trained
    trainers = sum(c.phase is CellPhase.TRAIN for c in view.cells)
    if plan.turns(view.water_level, remaining, waiting, trainers):
        return Move(cell.name, CellPhase.TRAIN, f"w = {view.water_level}: {why}")
    level = max((filling * remaining for filling, backlog in plan.terms if waiting >= backlog * (trainers + 1)), default=0.0)
    return Stay(f"w = {view.water_level}: {why}", int(level) if until else None, until)
