"""Streaming packing of trajectories into micro-steps of a token budget.

Next-fit in arrival order: deterministic, and a pack is final as soon as the next trajectory does not fit, so packing never waits for more than one
trajectory beyond a full pack. A trajectory above the budget gets a micro-step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.wire.rows import Item


def pack(pending: Sequence[Item], budget: int, flush: bool) -> tuple[list[list[Item]], list[Item]]:
    """Full packs, and what stays pending. With `flush` nothing stays: the step has all its groups."""
    packs: list[list[Item]] = []
    current: list[Item] = []
    tokens = 0
    for item in pending:
        if current and tokens + item.n_tokens > budget:
            packs.append(current)
            current, tokens = [], 0
        current.append(item)
        tokens += item.n_tokens
    if current and (flush or tokens >= budget):
        packs.append(current)
        current = []
    return packs, current
