"""Ours: of the moves open now, the one from which the fluid model predicts the burst to end soonest. Pure (docs/scheduling.md).

The plans that it looks at are the paper's rule with other capacities (`filling`) and with the demand that there be work to train (`backlog`); the
paper's rule itself is one of them. The best plan's first move is made. Another plan must promise more than `MARGIN` of the paper's rule's time, so that
where nothing is to be gained the paper's rule decides; and until enough executions have ended to know their lengths, it decides alone.
Going back is the paper's.
"""

from __future__ import annotations

from typing import Final

from gyre.rules.elastic import capacity, elastic, homeward, next_cell, stranded
from gyre.rules.fluid import Fluid, Plan
from gyre.rules.roles import CellPhase, Decision, Move, Stay, View

PAPER: Final = Plan(1.0, 0.0)
PLANS: Final = tuple(Plan(f, b) for f in (0.5, 0.75, 1.0, 1.3, 1.7, 2.5, 1e9) for b in (0.0, 0.5, 1.5))
MARGIN: Final = 0.002
ENOUGH: Final = 32  # executions, and groups a quarter of it
TICKS: Final = 60  # questions per longest execution


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
        return elastic(view)
    if view.water_level == 0:
        return Move(cell.name, CellPhase.TRAIN, "nothing is left to serve")
    fluid = Fluid(view, known)
    needed = view.steps_left * view.groups_per_step
    beyond = view.ready + len(known.groups) > needed
    paper = fluid.burst_end(PAPER, beyond)
    best, ends = PAPER, paper * (1 - MARGIN)
    for plan in PLANS:
        end = fluid.burst_end(plan, beyond)
        if end < ends:
            best, ends = plan, end
    remaining = capacity(view, CellPhase.ROLLOUT) - cell.capacity
    waiting = min(view.ready, needed) - known.trained
    trainers = sum(c.phase is CellPhase.TRAIN for c in view.cells)
    gain = f"the burst ends in {ends:.0f} s, by the paper's rule in {paper:.0f} s" if best is not PAPER else "the paper's rule ends the burst soonest"
    if view.water_level <= best.filling * remaining + 0.5 and waiting >= best.backlog * (trainers + 1):
        return Move(cell.name, CellPhase.TRAIN, f"w = {view.water_level}: {gain}")
    return Stay(f"w = {view.water_level}: {gain}", None, view.now + known.durations_s[-1] / TICKS)
