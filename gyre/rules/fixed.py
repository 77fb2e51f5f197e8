"""The two rules to compare with: `async` (a fixed split) and `colocate` (all cells turn together).

Neither looks at capacities. `colocate` leaves live executions standing still for as long as no cell serves, unless a step waits for them: then all
go back.
"""

from __future__ import annotations

from gyre.rules.elastic import SERVES, TRAINS
from gyre.rules.roles import CellPhase, Decision, Move, Rule, Stay, View


def fixed_split(trainers: int) -> Rule:
    """The first `trainers` cells that are not lost train, the others roll out, always."""

    def rule(view: View) -> Decision:
        alive = [c for c in view.cells if c.phase is not CellPhase.LOST]
        split = f"{trainers} of {len(view.cells)} cells train"
        for i, c in enumerate(alive):
            if c.fixed:
                continue
            if i < trainers and c.phase is CellPhase.ROLLOUT:
                return Move(c.name, CellPhase.TRAIN, split)
            if i >= trainers and c.phase is CellPhase.TRAIN:
                return Move(c.name, CellPhase.ROLLOUT, split)
        return Stay(split, -1)

    return rule


def colocate(view: View) -> Decision:
    """All cells turn when the groups of the burst's remaining steps are ready, or nothing runs that could make more ready; all return after it."""
    wanted = view.steps_left * view.groups_per_step
    over = view.steps_left == 0
    starving = view.water_level > 0 and view.ready < view.groups_per_step and not any(c.fixed and c.phase in SERVES for c in view.cells)
    for c in view.cells:
        if not c.fixed and c.phase in TRAINS and (over or c.burst < view.burst):
            return Move(c.name, CellPhase.ROLLOUT, "the burst is over")
        if not c.fixed and c.phase is CellPhase.TRAIN and starving:
            return Move(c.name, CellPhase.ROLLOUT, f"no cell serves the {view.water_level} executions that the step waits for")
    if over:
        return Stay("the burst's steps are committed", -1)
    begun = any(c.phase in TRAINS for c in view.cells)
    if (not begun or starving) and view.ready < wanted and view.water_level:
        return Stay(f"{view.ready} of the burst's {wanted} groups are ready")
    for c in view.cells:
        if c.phase is CellPhase.ROLLOUT and not c.fixed:
            return Move(c.name, CellPhase.TRAIN, f"all turn together: {view.ready} groups are ready")
    return Stay("all cells train", -1)
