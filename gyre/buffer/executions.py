"""What an execution's message carries beside what the machine decides on: do its graph and arrays agree, which versions sampled it, and its
trajectories laid out as a micro-step. Pure but for reading payloads.
"""

from __future__ import annotations

from typing import Any

from gyre.buffer.effects import Deliver
from gyre.trajectory.flatten import Flat, flatten, offsets
from gyre.wire import payload
from gyre.wire.arrays import raw, view
from gyre.wire.codec import Arrays
from gyre.wire.messages import MicroStepClaimed, RolloutEnded
from gyre.wire.segments import Place, SegmentReader


def malformed(m: RolloutEnded, arrays: Arrays) -> str:
    """Why an execution's graph cannot be what it says; "" if it can."""
    total = sum(n.n_tokens for n in m.nodes)
    for name, values in arrays.items():
        if len(values) != total:
            return f"{name} has {len(values)} elements, the nodes {total} tokens"
    if any(n.n_tokens < 0 or not -1 <= n.parent < i for i, n in enumerate(m.nodes)):
        return "a node has a parent that does not come before it"
    if len({t.index for t in m.trajectories}) < len(m.trajectories):
        return "two trajectories have one index"
    for t in m.trajectories:
        if any(not 0 <= i < len(m.nodes) for i in t.nodes) or not set(t.trainable) <= set(t.nodes):
            return f"trajectory {t.index} names nodes that are not there"
        if [m.nodes[i].parent for i in t.nodes] != [-1, *t.nodes][: len(t.nodes)] or len(set(t.trainable)) < len(t.trainable):
            return f"trajectory {t.index} is no path of the graph, or has a node twice"
        sizes = sum(m.nodes[i].n_tokens for i in t.nodes), sum(m.nodes[i].n_tokens for i in t.trainable)
        if sizes != (t.n_tokens, t.n_trainable):
            return f"trajectory {t.index} has {sizes[0]} tokens and {sizes[1]} trainable ones, not {t.n_tokens} and {t.n_trainable}"
    return ""


def span(m: RolloutEnded, versions: memoryview) -> tuple[int, int] | None:
    """The lowest and the highest version of sampled tokens (i32, elsewhere -1). A node mostly has one: then no loop runs over its tokens."""
    data, at, seen = versions.tobytes(), 0, set[int]()
    for node in m.nodes:
        end = at + 4 * node.n_tokens
        if node.call_id is not None:
            piece = data[at:end]
            one = piece[:4]
            seen.update(memoryview(one if piece == one * node.n_tokens else piece).cast("i"))
        at = end
    seen.discard(-1)
    return (min(seen), max(seen)) if seen else None


def assemble(payloads: SegmentReader, wanted: Deliver) -> dict[str, Any]:
    """The arrays of a micro-step, from the payloads. Called in a thread."""
    parsed: dict[str, tuple[RolloutEnded, Arrays, list[int], dict[int, int]]] = {}
    flats: list[Flat] = []
    for item in wanted.items:
        if item.rollout_id not in parsed:
            row = wanted.rollouts[item.rollout_id]
            assert row.segment is not None, f"{row.rollout_id} has trajectories and no payload"
            message, arrays = payload.parse(payloads.read(Place(row.segment, row.offset, row.length)))
            at = {t.index: k for k, t in enumerate(message.trajectories)}
            parsed[item.rollout_id] = (message, arrays, offsets(message.nodes), at)
        message, arrays, starts, at = parsed[item.rollout_id]
        flats.append(flatten(message.nodes, message.trajectories[at[item.index]], arrays, starts))
    whole: dict[str, Any] = {}
    for name, dtype in MicroStepClaimed.ARRAYS.items():
        parts = [getattr(flat, name) for flat in flats]
        whole[name] = parts[0] if len(parts) == 1 else view(b"".join(raw(part, dtype) for part in parts), dtype)
    return whole
