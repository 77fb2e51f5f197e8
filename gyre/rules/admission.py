"""Admission quotas from a target mean staleness, and how many groups to admit now. Pure functions.

Formulas (docs/architecture.md, "Admission"; Little's law, so they hold whatever the distribution of durations):

    boundary:    Q_b = (phi + mu)·B,   E[d] = phi + (mu - 1)/2,   phi >= 0
    continuous:  E[d] = Q_c/B + (mu - 1)/2,   Q_c >= 1

with B groups per step and mu steps between publications; a slot is free when a step takes the group. Quotas are whole groups: the rounding changes
the mean, and `Quota` says by how much.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from gyre.errors import UsageError

Dispatch = Literal["boundary", "continuous"]

_EPSILON: Final = 1e-9


class Quota(msgspec.Struct, frozen=True):
    """Groups that may be in the system, and the mean staleness that follows from that whole number."""

    groups: int
    target: float
    predicted: float

    @property
    def rounding(self) -> float:
        """predicted - target, in optimizer steps."""
        return self.predicted - self.target


def smallest_target(dispatch: Dispatch, groups_per_step: int, steps_per_burst: int) -> float:
    """The smallest mean staleness, in optimizer steps, that any quota can give."""
    within_burst = (steps_per_burst - 1) / 2
    if dispatch == "boundary":
        return within_burst
    return 1 / groups_per_step + within_burst


def predicted_staleness(dispatch: Dispatch, groups: int, groups_per_step: int, steps_per_burst: int) -> float:
    """E[d], in optimizer steps, under a quota of `groups`."""
    within_burst = (steps_per_burst - 1) / 2
    if dispatch == "boundary":
        return groups / groups_per_step - steps_per_burst + within_burst
    return groups / groups_per_step + within_burst


def quota(dispatch: Dispatch, target: float, groups_per_step: int, steps_per_burst: int) -> Quota:
    """The whole quota nearest to `target` mean staleness. Raises `UsageError` naming the smallest feasible target."""
    smallest = smallest_target(dispatch, groups_per_step, steps_per_burst)
    if target < smallest - _EPSILON:
        raise UsageError(
            "configuration",
            f"a mean staleness of {target:g} cannot be had with {dispatch} dispatch, B = {groups_per_step}, mu = {steps_per_burst}",
            f"the smallest is {smallest:.12g}",
            "system.target_staleness",
        )
    zero = predicted_staleness(dispatch, 0, groups_per_step, steps_per_burst)
    least = steps_per_burst * groups_per_step if dispatch == "boundary" else 1
    groups = max(least, math.floor((target - zero) * groups_per_step + 0.5 + _EPSILON))
    return Quota(groups, target, predicted_staleness(dispatch, groups, groups_per_step, steps_per_burst))


def admit(quota_groups: int, in_system: int, needed: int, queries_left: int | None) -> int:
    """How many groups to admit now: up to the quota, never more than the run still needs, never more than there are queries."""
    room = min(quota_groups - in_system, needed)
    if queries_left is not None:
        room = min(room, queries_left)
    return max(0, room)
