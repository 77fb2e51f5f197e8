"""Choose what is trained of a prefix graph: trainable nodes, leaf classes, up to J_max trajectories.

Invariants
- A sampled node bears loss in at most one trajectory. Only complete calls bear loss; side calls and aborted ones never.
- Of several calls with the same prompt (identical retries) one is trained: the one whose reply the harness went on with, else the last.
- The draw depends on the graph and the seed alone.

A *leaf* here is a trainable node below which nothing is trainable: a path that ends in an aborted call, or whose targets all lie on another path,
is no candidate, since it could only waste a trajectory. Leaf classes are a first rule (`classify`): what belongs to sub-agents or to a compaction is
told apart by prompt and tools alone. Whether a compaction's text was adopted is not judged yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Final, NamedTuple

from gyre.types import CallRecord, CallStatus, GraphNode, LeafClass, TrajectoryMeta

PRIORITY: Final = (LeafClass.MAIN, LeafClass.MAIN_SUMMARY, LeafClass.SUB_AGENT, LeafClass.SUB_AGENT_SUMMARY)
"""Classes that are trained, best first."""


class Origin(NamedTuple):
    """What a call was asked with: a digest of its system prompt and tools, whether it had tools, tokens it sampled."""

    family: bytes
    has_tools: bool
    n_sampled: int


def classify(origins: Mapping[str, Origin]) -> dict[str, LeafClass]:
    """A class for each call (in order of arrival) from what it was asked with.

    `main` is the family (system prompt and tools) with the most calls; among equals with the most sampled tokens, then the earliest. A family of one
    call without tools, where the main one has tools, is a side call (a title, a summary). All others are sub-agents.
    """
    calls: Counter[bytes] = Counter()
    tokens: Counter[bytes] = Counter()
    with_tools: set[bytes] = set()
    for origin in origins.values():
        calls[origin.family] += 1
        tokens[origin.family] += origin.n_sampled
        if origin.has_tools:
            with_tools.add(origin.family)
    if not calls:
        return {}
    main = max(calls, key=lambda f: (calls[f], tokens[f]))  # the first of equals: dictionaries keep the order of arrival
    classes: dict[str, LeafClass] = {}
    for call_id, origin in origins.items():
        family = origin.family
        if family == main:
            classes[call_id] = LeafClass.MAIN
        elif calls[family] == 1 and family not in with_tools and main in with_tools:
            classes[call_id] = LeafClass.SIDE
        else:
            classes[call_id] = LeafClass.SUB_AGENT
    return classes


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


def select(nodes: Sequence[GraphNode], calls: Sequence[CallRecord], adopted: Collection[str], j_max: int, random: Random) -> list[TrajectoryMeta]:
    """Up to `j_max` trajectories: in the best class with unmasked trainable tokens draw a leaf in proportion to them, mask its path, repeat."""
    classes = {c.call_id: c.leaf_class for c in calls}
    trained = trainable_calls(calls, adopted)
    open_nodes = {i for i, node in enumerate(nodes) if node.call_id in trained}
    inner: set[int] = set()  # nodes with something trainable below them
    for i in range(len(nodes) - 1, -1, -1):  # children come after their parents
        if (i in open_nodes or i in inner) and nodes[i].parent >= 0:
            inner.add(nodes[i].parent)
    leaves = [i for i in sorted(open_nodes) if i not in inner]
    trajectories: list[TrajectoryMeta] = []
    while len(trajectories) < j_max:
        weights = _unmasked(nodes, open_nodes)
        for wanted in PRIORITY:
            candidates = [leaf for leaf in leaves if weights[leaf] and classes[nodes[leaf].call_id or ""] is wanted]
            if candidates:
                break
        else:
            break
        leaf = random.choices(candidates, [weights[c] for c in candidates])[0]
        path = _path(nodes, leaf)
        here = [i for i in path if i in open_nodes]
        open_nodes.difference_update(here)
        trajectories.append(
            TrajectoryMeta(
                index=len(trajectories),
                leaf_class=wanted,
                nodes=path,
                trainable=here,
                n_tokens=sum(nodes[i].n_tokens for i in path),
                n_trainable=sum(nodes[i].n_tokens for i in here),
            )
        )
    return trajectories


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
