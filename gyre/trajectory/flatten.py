"""From a prefix graph on the wire and one trajectory of it to flat arrays: what the trainer packs and what dumps print.

Invariants
- The four arrays have the same length, the trajectory's `n_tokens`.
- The mask is 1 exactly on the trajectory's `trainable` nodes, whose log-probs and versions are the engine's, untouched.
- Elsewhere the log-prob is NaN and the version -1, unless the token was sampled and is only masked (trained elsewhere, or aborted).

Work is done by slices: no loop runs over tokens. Choosing trajectories is `select`'s task, not ours.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gyre.types import GraphNode, TrajectoryMeta

Array = Any  # array.array | memoryview: `len()` and slicing in elements


class CallSpan(NamedTuple):
    """Tokens [start, end) of a flat trajectory were sampled by this call."""

    call_id: str
    start: int
    end: int


class Flat(NamedTuple):
    """One trajectory as arrays of equal length: i32, i8 (0 or 1), f32 (NaN unless sampled), i32 (-1 unless sampled)."""

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    calls: list[CallSpan]


def offsets(nodes: Sequence[GraphNode]) -> list[int]:
    """Where each node's tokens start in the graph's arrays; one more entry, their length, at the end."""
    starts = [0]
    for node in nodes:
        starts.append(starts[-1] + node.n_tokens)
    return starts


def flatten(nodes: Sequence[GraphNode], trajectory: TrajectoryMeta, arrays: Mapping[str, Array], starts: Sequence[int] | None = None) -> Flat:
    """Lay out one trajectory. `arrays` holds the graph's `token_ids` (i32), `logprobs` (f32) and `versions` (i32).

    `starts`, if given, is `offsets(nodes)`. Raises ValueError if graph, trajectory and arrays do not fit each other.
    """
    starts = offsets(nodes) if starts is None else starts
    for name in ("token_ids", "logprobs", "versions"):
        if len(arrays[name]) != starts[-1]:
            raise ValueError(f"array {name} has {len(arrays[name])} elements, the graph {starts[-1]} tokens")
    ids, logprobs, versions = (memoryview(arrays[name]).cast("B") for name in ("token_ids", "logprobs", "versions"))
    calls: list[CallSpan] = []
    trainable = set(trajectory.trainable)
    runs: list[list[int]] = []  # of bytes: what follows one another in the graph is copied at once
    parent, length, masked = -1, 0, []
    for index in trajectory.nodes:
        node = nodes[index]
        if node.parent != parent:
            raise ValueError(f"trajectory {trajectory.index}: node {index} hangs below {node.parent}, not below {parent}")
        parent = index
        at, end = 4 * starts[index], 4 * starts[index + 1]
        if node.call_id is not None:
            at_token = length
            if calls and (calls[-1].call_id, calls[-1].end) == (node.call_id, at_token):
                at_token = calls.pop().start  # a completion that was split at a branch is one span
            calls.append(CallSpan(node.call_id, at_token, length + node.n_tokens))
        if runs and runs[-1][1] == at:
            runs[-1][1] = end
        else:
            runs.append([at, end])
        length += node.n_tokens
        masked.append((b"\1" if index in trainable else b"\0") * node.n_tokens)
    mask = b"".join(masked)
    if length != trajectory.n_tokens or mask.count(1) != trajectory.n_trainable:
        raise ValueError(f"trajectory {trajectory.index}: its nodes do not add up to n_tokens and n_trainable")
    return Flat(_joined(ids, runs, "i"), memoryview(mask).cast("b"), _joined(logprobs, runs, "f"), _joined(versions, runs, "i"), calls)


def _joined(source: memoryview, runs: list[list[int]], typecode: Literal["i", "f"]) -> Array:
    """Pieces of `source`, of bytes, as one array; a single piece is not copied."""
    if len(runs) == 1:
        return source[runs[0][0] : runs[0][1]].cast(typecode)
    whole: array[Any] = array(typecode)
    for at, end in runs:
        whole.frombytes(source[at:end])
    return whole
