"""Staleness of groups, in optimizer steps. Pure functions.

    discrete:      d = v_t - v_d
    interpolated:  d = v_t - (v_d + fraction·(v_next - v_d))

v_t is the number of steps applied when the group is consumed (the step that consumes it comes after), v_d the policy version at its
dispatch, v_next the version published next, fraction the part of the interval between those two publications that had passed at its
admission. Halfway between publications 0 and 1, consumed at v_t = 3: 3 discrete, 2.5 interpolated.

After a core's restart from an older checkpoint v_d may name a step that the surviving lineage has not reached; such a group counts as 0, not less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


def discrete(v_t: int, v_d: int) -> int:
    """v_t - v_d, never negative."""
    return max(0, v_t - v_d)


def interpolated(v_t: int, v_d: int, v_next: int, fraction: float) -> float:
    """v_t minus the dispatch version as moved by `fraction` (0 at the publication of v_d, 1 at the next); never negative."""
    return max(0.0, v_t - (v_d + min(1.0, max(0.0, fraction)) * (v_next - v_d)))


def fraction_of_interval(admitted: float, published: float, published_next: float) -> float:
    """Where in the interval between two publications a group was admitted, in [0, 1]. All times on one clock."""
    if published_next <= published:
        return 0.0
    return min(1.0, max(0.0, (admitted - published) / (published_next - published)))


class Summary(msgspec.Struct, frozen=True):
    """Mean, 95th percentile (nearest rank) and maximum; null when there was nothing to measure."""

    n: int
    mean: float | None
    p95: float | None
    max: float | None


def summarize(values: Sequence[float]) -> Summary:
    """Summary of per-group staleness. Heavy tails leave the mean but not the maximum, hence all three."""
    if not values:
        return Summary(0, None, None, None)
    ordered = sorted(values)
    rank = math.ceil(0.95 * len(ordered))
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), float(ordered[rank - 1]), float(ordered[-1]))
