"""Choose what is trained of a prefix graph: trainable nodes, up to J_max trajectories.

Invariants
- A sampled node bears loss in at most one trajectory. Only complete calls bear loss; side calls and aborted ones never.
- Of several calls with the same prompt (identical retries) one is trained: the one whose reply the harness went on with, else the last.
- The draw depends on the graph and the seed alone.

A *leaf* here is a trainable node below which nothing is trainable: a path that ends in an aborted call, or whose targets all lie on another path,
is no candidate, since it could only waste a trajectory. Leaf classes are given (`classes`): a compaction has one that is trained only if its text was
adopted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Final, NamedTuple

from gyre.types import CallRecord, CallStatus, GraphNode, LeafClass, TrajectoryMeta

PRIORITY: Final = (LeafClass.MAIN, LeafClass.MAIN_SUMMARY, LeafClass.SUB_AGENT, LeafClass.SUB_AGENT_SUMMARY)
"""Classes that are trained, best first."""


class LeftOut(NamedTuple):
    """Trainable tokens on no chosen trajectory, and the leaves that they are above of."""

    tokens: int
    leaves: int


def trainable_calls(calls: Sequence[CallRecord], adopted: Collection[str]) -> set[str]:
    """Calls whose tokens may bear loss. `adopted` are those whose reply reappeared in a later request."""
    chosen: dict[int, CallRecord] = {}  # by the node that the prompt ends at: equal exactly for equal prompts
    trained: set[str] = set()
    for call in calls:
        if call.status is not CallStatus.COMPLETE or call.node < 0 or call.leaf_class is LeafClass.SIDE:
            continue
        before = chosen.get(call.prompt_node)
        if before is None or call.call_id in adopted or before.call_id not in adopted:
            chosen[call.prompt_node] = call
        if call.call_id in adopted:
            trained.add(call.call_id)
    return trained | {c.call_id for c in chosen.values()}


def select(
    nodes: Sequence[GraphNode], calls: Sequence[CallRecord], adopted: Collection[str], j_max: int, random: Random, *, greedy: bool = False
) -> list[TrajectoryMeta]:
    """Up to `j_max` trajectories: in the best class with unmasked trainable tokens draw a leaf in proportion to them, mask its path, repeat.

    `greedy` covers as much as it can instead: each time the leaf with the most unmasked tokens, whatever its class; among equals the first.
    """
    classes = {c.call_id: c.leaf_class for c in calls}
    open_nodes = _trainable_nodes(nodes, trainable_calls(calls, adopted))
    leaves = _leaves(nodes, open_nodes)
    trajectories: list[TrajectoryMeta] = []
    while len(trajectories) < j_max:
        weights = _unmasked(nodes, open_nodes)
        left = [leaf for leaf in leaves if weights[leaf]]
        if not left:
            break
        if greedy:
            leaf = max(left, key=lambda i: weights[i])
        else:
            best = min(PRIORITY.index(classes[nodes[i].call_id or ""]) for i in left)
            candidates = [i for i in left if classes[nodes[i].call_id or ""] is PRIORITY[best]]
            leaf = random.choices(candidates, [weights[i] for i in candidates])[0]
        path = _path(nodes, leaf)
        here = [i for i in path if i in open_nodes]
        open_nodes.difference_update(here)
        trajectories.append(
            TrajectoryMeta(
                index=len(trajectories),
                leaf_class=classes[nodes[leaf].call_id or ""],
                nodes=path,
                trainable=here,
                n_tokens=sum(nodes[i].n_tokens for i in path),
                n_trainable=sum(nodes[i].n_tokens for i in here),
            )
        )
    return trajectories


def left_out(nodes: Sequence[GraphNode], calls: Sequence[CallRecord], adopted: Collection[str], chosen: Sequence[TrajectoryMeta]) -> LeftOut:
    """What the chosen trajectories do not train."""
    trainable = _trainable_nodes(nodes, trainable_calls(calls, adopted))
    leaves = _leaves(nodes, trainable)
    trainable.difference_update(i for t in chosen for i in t.trainable)
    weights = _unmasked(nodes, trainable)
    return LeftOut(sum(nodes[i].n_tokens for i in trainable), sum(weights[leaf] > 0 for leaf in leaves))


def _trainable_nodes(nodes: Sequence[GraphNode], calls: Collection[str]) -> set[int]:
    return {i for i, node in enumerate(nodes) if node.call_id in calls}


def _leaves(nodes: Sequence[GraphNode], trainable: Collection[int]) -> list[int]:
    """Trainable nodes below which nothing is trainable."""
    inner: set[int] = set()
    for i in range(len(nodes) - 1, -1, -1):  # children come after their parents
        if (i in trainable or i in inner) and nodes[i].parent >= 0:
            inner.add(nodes[i].parent)
    return [i for i in sorted(trainable) if i not in inner]


def _unmasked(nodes: Sequence[GraphNode], open_nodes: Collection[int]) -> list[int]:
    """For each node: the unmasked trainable tokens on the path from the root to it."""
    totals: list[int] = []
    for i, node in enumerate(nodes):
        above = totals[node.parent] if node.parent >= 0 else 0
        totals.append(above + (node.n_tokens if i in open_nodes else 0))
    return totals


def _path(nodes: Sequence[GraphNode], leaf: int) -> list[int]:
    path = [leaf]
    while nodes[path[-1]].parent >= 0:
        path.append(nodes[path[-1]].parent)
    return path[::-1]
