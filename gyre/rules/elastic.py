"""The paper's rule: one cell after the other leaves rollout when what remains still holds every unfinished execution (docs/scheduling.md).

Invariants
- Before a cell turns, w <= C_R - C_e: the capacity of the cells that stay in rollout covers the water level. One cell turns at a time.
- The training cells are the core and a prefix of the satellites in their order; the prefix grows until the burst ends.
- No satellite turns while the core does not train: there would be no step to join.

Departure from the paper: with continuous dispatch a taken group frees a slot, so executions may be admitted while every cell trains. The last
cell of the prefix then goes back if the step cannot end without them.
"""

from __future__ import annotations

from gyre.rules.roles import CellPhase, CellView, Decision, Move, Stay, View

TRAINS = (CellPhase.TO_TRAIN, CellPhase.TRAIN)
SERVES = (CellPhase.TO_ROLLOUT, CellPhase.ROLLOUT)


def capacity(view: View, *phases: CellPhase) -> int:
    """Executions that the cells in these phases hold."""
    return sum(c.capacity for c in view.cells if c.phase in phases)


def core_stays(view: View) -> bool:
    """Whether the core goes on training after a burst: the next batch is ready, and the other cells hold all that is or will be pending."""
    others = sum(c.capacity for c in view.cells[1:] if c.phase is not CellPhase.LOST and not (c.fixed and c.phase in TRAINS))
    return view.ready >= view.groups_per_step and view.water_level + view.admitting <= others


def homeward(view: View) -> Decision | None:
    """The next cell to go back after a burst, the last of the order first; None when all that should go back are on their way."""
    over = view.steps_left == 0
    late = [c for c in view.cells if (over or c.burst < view.burst) and c.phase in TRAINS and not c.fixed]
    for c in reversed(late):
        if c is view.cells[0]:
            under_way = view.steps_left < view.steps_per_burst or view.ready >= view.groups_per_step
            if core_stays(view) or (not over and under_way):
                continue
        return Move(c.name, CellPhase.ROLLOUT, "the burst's last step is committed" if over else "its burst is over")
    return None


def stranded(view: View) -> Decision | None:
    """The last training cell goes back when no cell serves the executions without which the step cannot end."""
    if view.water_level == 0 or view.ready >= view.groups_per_step or any(c.phase in SERVES for c in reversed(view.cells)):
        return None
    for c in reversed(view.cells):
        if c.phase is CellPhase.TRAIN and not c.fixed:
            return Move(c.name, CellPhase.ROLLOUT, f"no cell serves the {view.water_level} executions that the step waits for")
    return None


def next_cell(view: View) -> CellView | Stay:
    """The cell whose turn to train it is, or why there is none."""
    if view.steps_left == 0:
        return Stay("the burst's steps are committed", -1)
    core = view.cells[0]
    if core.phase is CellPhase.ROLLOUT and not core.fixed:
        return core
    if core.phase is not CellPhase.TRAIN:
        return Stay(f"the core is in phase {core.phase}", -1)
    following: CellView | None = None
    for c in view.cells:
        if c.phase is CellPhase.TO_TRAIN:
            return Stay(f"{c.name} is turning to training", -1)
        if following is None and c.phase is CellPhase.ROLLOUT and not c.fixed:
            following = c
    return following or Stay("no cell is left in rollout", -1)


def elastic(view: View) -> Decision:
    """See the module. Pure."""
    back = homeward(view) or stranded(view)
    if back is not None:
        return back
    cell = next_cell(view)
    if isinstance(cell, Stay):
        return cell
    remaining = capacity(view, CellPhase.ROLLOUT) - cell.capacity
    if view.water_level > remaining:
        return Stay(f"w = {view.water_level} > {remaining} = the capacity that would remain", remaining)
    return Move(cell.name, CellPhase.TRAIN, f"w = {view.water_level} <= {remaining} = the capacity that remains")
