"""From the buffer's counters to what a scheduling rule is shown. Pure."""

from __future__ import annotations

from gyre.config import System
from gyre.coord.cells import Level
from gyre.rules import admission
from gyre.wire.messages import Counters


def level(c: Counters, system: System) -> Level:
    """`steps_left` is 0 from a burst's last commit to its publication, and while a core that took over has not published yet."""
    ends_at = min(c.published.step + system.steps_per_burst, c.total_steps)
    left = max(0, ends_at - c.step) if c.publications and c.published.term == c.term else 0
    return Level(
        water_level=c.water_level, burst=c.publications, steps_left=left, ready=c.ready_groups + c.taken_groups, admitting=_admitting(c, system)
    )  # fmt: skip


def _admitting(c: Counters, system: System) -> int:
    """Executions that the next publication will admit; continuous dispatch admits all the time, and the water level shows it."""
    if system.dispatch != "boundary":
        return 0
    quota = admission.quota(system.dispatch, system.target_staleness, system.groups_per_step, system.steps_per_burst).groups
    inside = c.groups_open + c.taken_groups
    needed = (c.total_steps - c.step) * system.groups_per_step - inside
    return max(0, min(quota - inside, needed)) * system.rollouts_per_group
