"""Streaming packing of trajectories into micro-steps of a token budget.

Next-fit in arrival order: deterministic, and a pack is final as soon as what comes next does not fit, so packing never waits for more than one
trajectory beyond a full pack. What is above the budget gets a micro-step of its own.

With `whole`, all trajectories of an execution go into one micro-step, where the tokens that they share are computed once and so counted once. They
arrive together, one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gyre.wire.rows import Item


def cost(item: Item) -> int:
    """Tokens that an item adds to a micro-step which has the execution's trajectories before it."""
    return item.n_tokens if item.n_own < 0 else item.n_own


def pack(pending: Sequence[Item], budget: int, flush: bool, *, whole: bool = False) -> tuple[list[list[Item]], list[Item]]:
    """Full packs, and what stays pending. With `flush` nothing stays: the step has all its groups."""
    packs: list[list[Item]] = []
    current: list[Item] = []
    tokens = 0
    for _, items in groupby(pending, key=lambda i: i.rollout_id if whole else (i.rollout_id, i.index)):
        unit = list(items)
        size = sum(map(cost, unit)) if whole else unit[0].n_tokens
        if current and tokens + size > budget:
            packs.append(current)
            current, tokens = [], 0
        current += unit
        tokens += size
    if current and (flush or tokens >= budget):
        packs.append(current)
        current = []
    return packs, current
